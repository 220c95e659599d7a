"""Batches of locks when the server refuses or the connection breaks: nothing stays held that no caller knows of.

Rules: as in test_batch. Faults are real.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError

from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.batch.conftest import MakeLocker
from tests.support.helpers import EXTEND_COMMANDS, PATIENCE_S, RELEASE_COMMANDS, wait_until
from tests.support.proxy import Proxy
from tests.support.worlds import World

pytestmark = pytest.mark.usefixtures("world")

MANY = [f"name:{number}" for number in range(1100)]
"""More than one window of requests."""


def nothing_left(client: redis.Redis, *but: bytes) -> None:
    """Wait until the server has no keys but these."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: set(client.keys()) == set(but), "everything is undone")
    assert set(but) == set(client.keys())


# The server refuses


@pytest.mark.parametrize("at", [0, 1099])
def test_wrong_type_of_one_name_raises_and_nothing_is_held(
    make_locker: MakeLocker, server: Server, client: redis.Redis, at: int
) -> None:
    client.lpush(MANY[at], "x")
    locker = make_locker(server.port)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE") as caught:
        locker.acquire_many(MANY, 60)
    note = f"of the lock {MANY[at]!r}"
    assert getattr(caught.value, "__notes__", [note]) == [note]
    nothing_left(client, MANY[at].encode())


@pytest.mark.parametrize("use", ["release", "extend", "reacquire"])
def test_a_name_that_became_no_string_is_lost_and_the_others_are_not(
    make_locker: MakeLocker, server: Server, client: redis.Redis, use: str
) -> None:
    batch = make_locker(server.port).acquire_many(["a", "b", "c"], 60)
    client.delete("b")
    client.lpush("b", "x")
    assert {"a": True, "b": False, "c": True} == getattr(batch, use)(*([10] if use == "extend" else []))


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_a_forbidden_name_raises_and_nothing_is_held(
    make_locker: MakeLocker, server: Server, client: redis.Redis, acl_user: MakeUser, all_or_nothing: bool
) -> None:
    user = acl_user(server, "resetkeys", "~mine:*")
    locker = make_locker(server.port, **user.options())
    with pytest.raises(NoPermissionError):
        locker.acquire_many(["mine:a", "yours", "mine:b"], 60, all_or_nothing=all_or_nothing)
    nothing_left(client)
    with locker.acquire_many(["mine:a", "mine:b"], 60) as batch:
        assert ["mine:a", "mine:b"] == batch.acquired


def test_out_of_memory_raises_and_what_is_held_can_be_released(
    make_locker: MakeLocker, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    admin = connect(server.port)
    locker = make_locker(server.port)
    held = locker.acquire_many(["a", "b"], 60)
    admin.config_set("maxmemory", 1)
    with pytest.raises(redis.OutOfMemoryError):
        locker.acquire_many(["c", "d"], 60)
    assert {"a": True, "b": True} == held.release()
    nothing_left(admin)


def test_a_release_refused_for_one_name_releases_the_others_and_can_be_repeated(
    make_locker: MakeLocker, server: Server, client: redis.Redis, acl_user: MakeUser
) -> None:
    user = acl_user(server)
    batch = make_locker(server.port, **user.options()).acquire_many(["mine:a", "yours", "mine:b"], 60)
    client.script_flush()
    admin: Any = client
    admin.execute_command("ACL", "SETUSER", user.username, "resetkeys", "~mine:*")
    with pytest.raises(NoPermissionError):
        batch.release()
    assert [b"yours"] == client.keys()
    admin.execute_command("ACL", "SETUSER", user.username, "~*")
    # Locks with a verdict have left the batch: they are not reported as lost.
    assert {"yours": True} == batch.release()
    nothing_left(client)


@pytest.mark.parametrize("use", ["release", "extend", "reacquire"])
def test_a_loss_that_was_found_by_a_call_that_raises_is_told_by_the_next(
    make_locker: MakeLocker, server: Server, client: redis.Redis, acl_user: MakeUser, use: str
) -> None:
    user, admin, arguments = acl_user(server), cast("Any", client), [10] if use == "extend" else []
    batch = make_locker(server.port, **user.options()).acquire_many([*MANY, "yours"], 60)
    client.delete(MANY[5])
    admin.execute_command("ACL", "SETUSER", user.username, "resetkeys", "~name:*")
    with pytest.raises(NoPermissionError):
        getattr(batch, use)(*arguments)
    admin.execute_command("ACL", "SETUSER", user.username, "~*")
    told = getattr(batch, use)(*arguments)
    assert {name: held for name, held in told.items() if name in (MANY[5], "yours")} == {MANY[5]: False, "yours": True}
    assert list(batch.release().values()).count(False) == 0


def test_scripts_and_commands_that_are_gone_do_not_matter(
    make_locker: MakeLocker, server: Server, client: redis.Redis
) -> None:
    locker = make_locker(server.port)
    for _ in range(2):
        batch = locker.acquire_many(["a", "b", "c"], 60)
        for use in (lambda: batch.extend(1), batch.reacquire, batch.release):  # noqa: B023 - called at once
            client.script_flush()
            assert dict.fromkeys("abc", True) == use()


@pytest.mark.parametrize("rules", [("-delifeq",), ("-command",), ("-eval", "-evalsha")], ids=str)
def test_a_batch_does_without_a_command(
    make_locker: MakeLocker, valkey: Server, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    locker = make_locker(valkey.port, **acl_user(valkey, *rules).options())
    for _ in range(2):
        batch = locker.acquire_many(["a", "b"], 60)
        assert ([], ["b"]) == (locker.acquire_many(["b"]).acquired, locker.acquire_many(["b"]).missed)
        for use in (lambda: batch.extend(1), batch.reacquire, batch.release):  # noqa: B023 - called at once
            assert {"a": True, "b": True} == use()


# The connection breaks


@pytest.mark.parametrize(("count", "nth"), [(3, 1), (3, 2), (3, 3), (1100, 700), (1100, 1100)])
@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
def test_acquire_survives_a_lost_message(
    make_locker: MakeLocker, server: Server, client: redis.Redis, fault: str, count: int, nth: int
) -> None:
    names = MANY[:count]
    client.set(names[1], "other")
    with Proxy(server.port) as proxy:
        locker = make_locker(proxy.port)
        getattr(proxy, fault)("SET", nth=nth)
        batch = locker.acquire_many(names, 60)
        assert proxy.dropped.is_set()
        assert ([names[1]], [names[0], *names[2:]]) == (batch.missed, batch.acquired)
        assert dict.fromkeys(batch.acquired, True) == batch.release()
        nothing_left(client, names[1].encode())


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
@pytest.mark.parametrize("use", ["release", "extend", "reacquire"])
def test_other_operations_survive_a_lost_message(
    make_locker: MakeLocker, server: Server, client: redis.Redis, use: str, fault: str, nth: int
) -> None:
    with Proxy(server.port) as proxy:
        batch = make_locker(proxy.port).acquire_many(["a", "b", "c"], 20)
        commands = RELEASE_COMMANDS if use == "release" else EXTEND_COMMANDS
        getattr(proxy, fault)(*commands, nth=nth)
        assert dict.fromkeys("abc", True) == (batch.extend(20) if use == "extend" else getattr(batch, use)())
        assert proxy.dropped.is_set()
    low_ms, high_ms = {"extend": (30_000, 40_000), "reacquire": (10_000, 20_000), "release": (-3, -2)}[use]
    assert all(low_ms < client.pttl(name) <= high_ms for name in "abc")


@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_acquire_without_a_connection_raises_and_nothing_is_held(
    make_locker: MakeLocker, server: Server, client: redis.Redis, fault: str, all_or_nothing: bool
) -> None:
    with Proxy(server.port) as proxy:
        locker = make_locker(proxy.port)
        locker.acquire_many(["warm-up"]).release()
        proxy.refuse()
        getattr(proxy, fault)("SET", nth=1050)
        with pytest.raises(redis.ConnectionError):
            locker.acquire_many(MANY, all_or_nothing=all_or_nothing)
        proxy.accept()
        nothing_left(client)


def test_release_without_a_connection_raises_and_can_be_repeated(
    make_locker: MakeLocker, server: Server, client: redis.Redis
) -> None:
    with Proxy(server.port) as proxy:
        batch = make_locker(proxy.port).acquire_many(MANY, 60)
        proxy.refuse()
        proxy.drop_reply(*RELEASE_COMMANDS, nth=1050)
        with pytest.raises(redis.ConnectionError):
            batch.release()
        proxy.accept()
        released = batch.release()
        # The first window has its verdict already.
        assert dict.fromkeys(released, True) == released
        assert MANY[-1] in released
        assert {} == batch.release()
    nothing_left(client)


@pytest.mark.parametrize("use", ["extend", "reacquire"])
def test_prolonging_without_a_connection_raises_and_the_locks_stay_held(
    make_locker: MakeLocker, valkey: Server, use: str
) -> None:
    with Proxy(valkey.port) as proxy:
        batch = make_locker(proxy.port).acquire_many(["a", "b"], 60)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            _ = batch.extend(1) if use == "extend" else batch.reacquire()
        proxy.accept()
        assert {"a": True, "b": True} == batch.release()


def test_leaving_with_without_a_connection(
    make_locker: MakeLocker, valkey: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(valkey.port) as proxy:
        locker = make_locker(proxy.port)
        with pytest.raises(redis.ConnectionError), locker.acquire_many(["a"]):
            _disconnect(proxy)
        proxy.accept()
        with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError), locker.acquire_many(["b"]):
            _ = _disconnect(proxy) / 0
        assert "could not be released" in caplog.text
        proxy.accept()


def _disconnect(proxy: Proxy) -> int:
    """Cut all connections and let no new ones come. Returns how many there are now."""
    proxy.refuse()
    proxy.cut()
    return 0


def test_a_frozen_server_is_not_waited_for_beyond_the_limit(
    world: World, make_locker: MakeLocker, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    locker = make_locker(server.port, socket_timeout=None)
    locker.acquire_many(["warm-up"]).release()
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(redis.TimeoutError):
            world.beside(lambda: locker.acquire_many(["a", "b"], 60, 0.1))
    finally:
        server.signal(signal.SIGCONT)
    nothing_left(connect(server.port))


@pytest.mark.slow
@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_a_server_that_freezes_while_leases_are_prolonged_is_not_waited_for_beyond_the_limit(
    world: World, make_locker: MakeLocker, spare_server: Callable[..., Server], connect: Connect, all_or_nothing: bool
) -> None:
    server = spare_server()
    admin = connect(server.port)
    admin.set("b", "other")
    with Proxy(server.port) as proxy:
        locker = make_locker(proxy.port, socket_timeout=None)
        waiting = world.start(
            lambda: locker.acquire_many(["a", "b"], 0.4, 1.5, sleep=0.15, all_or_nothing=all_or_nothing)
        )
        wait_until(lambda: admin.exists("a"), "the waiter holds one")
        server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(redis.TimeoutError):
                waiting.result(PATIENCE_S)
        finally:
            server.signal(signal.SIGCONT)
        nothing_left(admin, b"b")  # through the proxy: a cleanup that finds no way is tried again for minutes
