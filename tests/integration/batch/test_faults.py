"""Batches of locks when the server refuses, the connection breaks, or Ctrl-C comes: nothing held that nobody knows of.

Rules: as in test_batch; a test runs on both kinds of Locker unless it is about signals. Faults are real, but for the
interrupts at every line, which a trace function raises.
"""

from __future__ import annotations

import linecache
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

import redislock_fast
from redislock_fast._protocol.pipeline import AcquirePipeline
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.batch.test_batch import LOCKERS, MakeLocker, make_lockers
from tests.support.helpers import EXTEND_COMMANDS, PATIENCE_S, RELEASE_COMMANDS, start, wait_until
from tests.support.proxy import Proxy

_MANY = [f"name:{number}" for number in range(1100)]
"""More than one window of requests."""


@pytest.fixture(params=LOCKERS)
def make_locker(request: pytest.FixtureRequest, connect: Connect) -> Iterator[MakeLocker]:
    """Makes Lockers for threads and for asyncio, in turn."""
    yield from make_lockers(request.param, connect)


def nothing_left(client: redis.Redis, *but: bytes) -> None:
    """Wait until the server has no keys but these."""
    wait_until(lambda: set(client.keys()) == set(but), "everything is undone")


# The server refuses


@pytest.mark.parametrize("at", [0, 1099])
def test_wrong_type_of_one_name_raises_and_nothing_is_held(
    make_locker: MakeLocker, server: Server, client: redis.Redis, at: int
) -> None:
    client.lpush(_MANY[at], "x")
    locker = make_locker(server.port)
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        locker.acquire_many(_MANY, 60)
    nothing_left(client, _MANY[at].encode())


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
    # What had its verdict has left the batch: it is not called lost.
    assert {"yours": True} == batch.release()
    nothing_left(client)


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
    names = _MANY[:count]
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
            locker.acquire_many(_MANY, all_or_nothing=all_or_nothing)
        proxy.accept()
        nothing_left(client)


def test_release_without_a_connection_raises_and_can_be_repeated(
    make_locker: MakeLocker, server: Server, client: redis.Redis
) -> None:
    with Proxy(server.port) as proxy:
        batch = make_locker(proxy.port).acquire_many(_MANY, 60)
        proxy.refuse()
        proxy.drop_reply(*RELEASE_COMMANDS, nth=1050)
        with pytest.raises(redis.ConnectionError):
            batch.release()
        proxy.accept()
        released = batch.release()
        # The first window has its verdict already.
        assert dict.fromkeys(released, True) == released
        assert _MANY[-1] in released
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
    make_locker: MakeLocker, spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    locker = make_locker(server.port, socket_timeout=None)
    locker.acquire_many(["warm-up"]).release()
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(redis.TimeoutError):
            start(lambda: locker.acquire_many(["a", "b"], 60, 0.1)).result(PATIENCE_S)
    finally:
        server.signal(signal.SIGCONT)
    nothing_left(connect(server.port))


@pytest.mark.slow
@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_a_server_that_freezes_while_leases_are_prolonged_is_not_waited_for_beyond_the_limit(
    make_locker: MakeLocker, spare_server: Callable[..., Server], connect: Connect, all_or_nothing: bool
) -> None:
    server = spare_server()
    admin = connect(server.port)
    admin.set("b", "other")
    with Proxy(server.port) as proxy:
        locker = make_locker(proxy.port, socket_timeout=None)
        waiting = start(lambda: locker.acquire_many(["a", "b"], 0.4, 1.5, sleep=0.15, all_or_nothing=all_or_nothing))
        wait_until(lambda: admin.exists("a"), "the waiter holds one")
        server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(redis.TimeoutError):
                waiting.result(PATIENCE_S)
        finally:
            server.signal(signal.SIGCONT)
    nothing_left(admin, b"b")


# Undoing


def test_what_an_earlier_round_left_to_undo_spares_what_a_later_round_took(valkey: Server, connect: Connect) -> None:
    channel = transport_of(connect(valkey.port))
    assert isinstance(channel, ThreadServerTransport)
    channel._start_cleanup = lambda: None  # type: ignore[method-assign]  # the server cannot be asked just now
    channel.clean_up([(b"a", b"token"), (b"b", b"other")])  # of a first round, whose reply was lost and which missed a
    channel.execute(AcquirePipeline([b"a"], b"token", None))  # the batch's next round
    assert channel.clean_up_some()
    with redis.Redis(port=valkey.port) as admin:
        assert b"token" == admin.get("a")


def test_an_undoer_that_comes_second_finds_nothing_and_sends_nothing(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port, socket_timeout=None)
    channel = transport_of(client)
    assert isinstance(channel, ThreadServerTransport)
    redislock_fast.Locker(client).acquire_many(["a"])
    channel.clean_up_some()  # as one of two threads does, when the other has undone everything meanwhile
    assert {"b": True} == start(redislock_fast.Locker(client).acquire_many(["b"]).release).result(PATIENCE_S)


# Interrupts


def interrupt_when(condition: Callable[[], object]) -> None:
    """Press Ctrl-C in the main thread once the condition has returned."""

    def press() -> None:
        condition()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_interrupted_acquire_leaves_nothing(
    spare_server: Callable[..., Server], connect: Connect, all_or_nothing: bool
) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        client = connect(proxy.port, socket_timeout=60)
        locker = redislock_fast.Locker(client)
        locker.acquire_many(["warm-up"]).release()
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("SET", 1001))
        with pytest.raises(KeyboardInterrupt):
            locker.acquire_many(_MANY, all_or_nothing=all_or_nothing)
        server.signal(signal.SIGCONT)
        nothing_left(client)
        assert locker.acquire_many(_MANY).missed == []


def test_interrupted_wait_leaves_nothing(valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    admin.set("b", "other")
    locker = redislock_fast.Locker(connect(valkey.port))
    interrupt_when(lambda: wait_until(lambda: admin.exists("a", "c") == 2, "the waiter holds what is free"))
    with pytest.raises(KeyboardInterrupt):
        locker.acquire_many(["a", "b", "c"], None, None, sleep=60)
    nothing_left(admin, b"b")


def test_interrupted_release_goes_on(spare_server: Callable[..., Server], connect: Connect) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        batch = redislock_fast.Locker(connect(proxy.port, socket_timeout=60)).acquire_many(_MANY, 60)
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("DELIFEQ", 1000))
        with pytest.raises(KeyboardInterrupt):
            batch.release()
        server.signal(signal.SIGCONT)
        nothing_left(connect(server.port))


def test_interrupted_release_that_is_repeated_is_a_success(
    spare_server: Callable[..., Server], connect: Connect
) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        batch = redislock_fast.Locker(connect(proxy.port, socket_timeout=60)).acquire_many(_MANY, 60)
        server.signal(signal.SIGSTOP)
        interrupt_when(lambda: proxy.wait_for_request("DELIFEQ", 1000))
        with pytest.raises(KeyboardInterrupt):
            batch.release()
        server.signal(signal.SIGCONT)
        assert dict.fromkeys(_MANY, True) == batch.release()


PACKAGE = Path(redislock_fast.__file__).parent
_TRACED = ("locker.py", "_procedures/batch.py", "_procedures/batch.py", "_protocol/pipeline.py")


def interrupted_at(number: int, work: Callable[[], object], *files: str) -> str:
    """Interrupt the work before the n-th line of a batch's own files, or of these as well.

    Not where a `with` is left, which is a line of its own to a tracer: no signal strikes before `__exit__` is called,
    since Python looks for one in calls and loops alone; and an interrupt there would leave a mutex taken for ever.
    Nor before a `try`, which is no instruction, and belongs to no handler.

    Returns which line that is; "" when there are fewer.
    """
    traced = {str(PACKAGE / name) for name in (*_TRACED, *files)}
    count, place = 0, ""

    def on_call(frame: Any, event: str, argument: object) -> Any:
        reached = 0

        def on_line(frame: Any, event: str, argument: object) -> Any:
            nonlocal count, place, reached
            if event != "line":
                return on_line
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            leaves = frame.f_lineno < reached and line.lstrip().startswith("with ")
            is_safe = leaves or line.strip() == "try:"
            reached = frame.f_lineno
            count += not is_safe
            if count == number and not is_safe:
                file = Path(frame.f_code.co_filename).relative_to(PACKAGE)
                place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                sys.settrace(None)
                frame.f_trace = None
                raise KeyboardInterrupt
            return on_line

        return on_line if frame.f_code.co_filename in traced else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        place += f" raises {error!r}"
    finally:
        sys.settrace(before)
    return place


def line_of(place: str) -> str:
    """The text of the line that `interrupted_at` has returned."""
    name, _, number = place.partition(" ")[0].partition(":")
    return linecache.getline(str(PACKAGE / name), int(number or 0)).strip()


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("all_or_nothing", [False, True])
def test_acquireinterrupted_at_any_line_leaves_nothing(valkey: Server, connect: Connect, all_or_nothing: bool) -> None:
    client, admin = connect(valkey.port), connect(valkey.port)
    locker = redislock_fast.Locker(client)
    channel: Any = transport_of(client)
    locker.acquire_many(["warm-up"]).release()
    leaks: list[str] = []
    number = 0
    while True:
        number += 1
        admin.set("b", "other", px=3)
        place = interrupted_at(
            number, lambda: locker.acquire_many(list("abc"), 60, None, sleep=0.005, all_or_nothing=all_or_nothing)
        )
        if not place:
            break
        wait_until(lambda: channel.idle, "what is known of is undone")
        left = [name for name in "abc" if admin.get(name) not in (None, b"other")]
        if left or " raises " in place:
            leaks.append(f"{place}: {left}")
        admin.flushall()
    assert number > 50
    assert leaks == []
