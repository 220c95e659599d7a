"""Holding a lock while something fails: the server, the connection, the user's rights, the process itself.

Rules: as in test_holding. What a lock believes is compared with what the server says: while `valid` is true, the key
holds its token.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from redislock_fast import Lock, LockLostError, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, wait_until
from tests.support.holding import (
    KEPT_S,
    LONG_S,
    RENEWED,
    SLOW_S,
    Holders,
    Losses,
    assert_believes_no_more_than_is_true,
    assert_lost,
    passing,
    until_passed,
)
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    """A fault proxy before Valkey."""
    with Proxy(valkey.port) as running:
        yield running


def set_rules(admin: Any, username: str, *rules: str) -> None:
    """Change what a user may do."""
    admin.execute_command("ACL", "SETUSER", username, *rules)


def until_refused(admin: redis.Redis, code: str, count: int) -> None:
    """Return once the server has answered with so many errors of this kind."""

    def refused() -> int:
        errors: Any = admin.info("errorstats").get(f"errorstat_{code}", {"count": 0})
        return int(errors["count"])

    wait_until(lambda: refused() >= count, f"{count} times {code}")


# The server


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_server_that_is_gone_until_the_lease_ends(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect, comes_back: bool
) -> None:
    server = spare_server()
    holder = holders.hold(server.port, on_lost=losses, **RENEWED)
    server.kill()
    wait_until(lambda: not holder.lock.valid, "the lease ends")
    assert_lost(holder, losses, LossReason.SERVER_GONE)
    if comes_back:
        server.start()
        until_passed(connect(server.port), KEPT_S)
        assert connect(server.port).keys("name") == []


@pytest.mark.slow
def test_server_that_comes_back_in_time_without_its_data(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server()
    holder = holders.hold(server.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    server.kill()
    server.start()
    assert_lost(holder, losses, LossReason.DELETED)
    assert connect(server.port).keys("name") == []


@pytest.mark.slow
def test_server_that_comes_back_in_time_with_its_data(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server(options={"appendonly": "yes", "appendfsync": "always"})
    holder = holders.hold(server.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    server.kill()
    server.start()
    until_passed(connect(server.port), 1.25 * SLOW_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


@pytest.mark.slow
def test_server_frozen_until_the_lease_ends(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server()
    admin = connect(server.port)
    holder = holders.hold(server.port, on_lost=losses, **RENEWED)
    server.signal(signal.SIGSTOP)
    wait_until(lambda: not holder.lock.valid, "the lease ends")
    assert losses.until() == [LossReason.SERVER_GONE]
    server.signal(signal.SIGCONT)
    # Renewals that the server reads only now may be executed, but are undone.
    wait_until(lambda: not admin.exists("name"), "the key goes")
    until_passed(admin, KEPT_S)
    assert not admin.exists("name")
    assert_lost(holder, losses, LossReason.SERVER_GONE)


@pytest.mark.slow
def test_server_frozen_for_less_than_the_lease(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy:
        holder = holders.hold(proxy.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
        sets = proxy.requests["SET"]
        server.signal(signal.SIGSTOP)
        proxy.wait_for_request("SET", sets + 1)
        server.signal(signal.SIGCONT)
        until_passed(connect(server.port), 1.25 * SLOW_S)
        assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)
        holder.release()


@pytest.mark.slow
def test_one_frozen_server_holds_up_no_other(
    spare_server: Callable[..., Server], holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    frozen = spare_server()
    lost = Losses()
    holders.hold(frozen.port, on_lost=lost, **RENEWED)
    losses = Losses()
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    frozen.signal(signal.SIGSTOP)
    until_passed(valkey_client, LONG_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)
    assert lost.until() == [LossReason.SERVER_GONE]
    frozen.signal(signal.SIGCONT)


@pytest.mark.slow
def test_primary_that_is_a_replica_for_a_while(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server()
    admin = connect(server.port)
    holder = holders.hold(server.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    admin.replicaof("127.0.0.1", "1")
    until_refused(admin, "READONLY", 1)
    admin.replicaof("NO", "ONE")
    until_passed(admin, 1.25 * SLOW_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


@pytest.mark.slow
def test_primary_that_has_become_a_replica(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server()
    admin = connect(server.port)
    holder = holders.hold(server.port, on_lost=losses, **RENEWED)
    admin.replicaof("127.0.0.1", "1")
    assert_lost(holder, losses, LossReason.SERVER_GONE)


@pytest.mark.slow
def test_scripts_that_are_flushed_all_the_time(
    holders: Holders, server: Server, losses: Losses, connect: Connect
) -> None:
    admin = connect(server.port)
    holder = holders.hold(server.port, on_lost=losses, **RENEWED)
    has_passed = passing(admin, LONG_S)
    wait_until(lambda: admin.script_flush() and has_passed(), "the ttl passes")
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


@pytest.mark.slow
def test_server_without_memory_renews_and_releases(
    spare_server: Callable[..., Server], scripts_only: Server, holders: Holders, losses: Losses, connect: Connect
) -> None:
    server = spare_server(scripts_only.kind)
    admin = connect(server.port)
    holder = holders.hold(server.port, on_lost=losses, **RENEWED)
    admin.config_set("maxmemory", "1")
    until_passed_by = passing_without_memory(admin)
    wait_until(until_passed_by, "the ttl passes")
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)
    holder.release()
    assert not admin.exists("name")


def passing_without_memory(admin: redis.Redis) -> Callable[[], bool]:
    """`passing`, where no key can be set."""
    began = admin.time()[0]
    return lambda: admin.time()[0] > began + 1 + LONG_S


# The user's rights


@pytest.mark.slow
def test_renewal_that_is_forbidden_for_a_while(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser, callers: Any, losses: Losses
) -> None:
    user = acl_user(valkey)
    client = callers.client(valkey.port, **user.options())
    holder = holders.on(client, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    holder.call("acquire")
    valkey_client.config_resetstat()
    set_rules(valkey_client, user.username, "-set", "-eval", "-evalsha")
    until_refused(valkey_client, "NOPERM", 2)
    assert holder.lock.valid
    set_rules(valkey_client, user.username, "+@all")
    until_passed(valkey_client, 1.25 * SLOW_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


@pytest.mark.slow
def test_renewal_that_is_forbidden_until_the_lease_ends(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser, callers: Any, losses: Losses
) -> None:
    user = acl_user(valkey)
    holder = holders.on(callers.client(valkey.port, **user.options()), on_lost=losses, **RENEWED)
    holder.call("acquire")
    set_rules(valkey_client, user.username, "-set", "-eval", "-evalsha")
    assert_lost(holder, losses, LossReason.SERVER_GONE)


# The connection


@pytest.mark.slow
@pytest.mark.parametrize("loses", ["drop_reply", "drop_request"])
def test_renewal_that_is_lost_is_sent_again(
    proxy: Proxy, holders: Holders, valkey_client: redis.Redis, losses: Losses, loses: str
) -> None:
    holder = holders.hold(proxy.port, on_lost=losses, timeout=SLOW_S, auto_renew=True)
    for _ in range(3):
        getattr(proxy, loses)("SET")
        assert proxy.dropped.wait(PATIENCE_S)
    until_passed(valkey_client, 1.25 * SLOW_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


@pytest.mark.slow
def test_renewal_without_an_answer_is_not_believed(
    proxy: Proxy, holders: Holders, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(proxy.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    proxy.hold()
    assert losses.until() == [LossReason.SERVER_GONE]
    proxy.resume()
    has_passed = passing(valkey_client, SLOW_S / 2)
    wait_until(lambda: not valkey_client.exists("name"), "what was renewed all the same is undone")
    assert not has_passed()
    assert_lost(holder, losses, LossReason.SERVER_GONE)


@pytest.mark.slow
def test_connection_that_is_killed_again_and_again(
    holders: Holders, callers: Any, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    client = callers.client(valkey.port, client_name="holder")
    holder = holders.on(client, on_lost=losses, **RENEWED)
    holder.call("acquire")
    has_passed = passing(valkey_client, LONG_S)

    def kill() -> bool:
        for row in valkey_client.client_list():
            if row["name"] == "holder":
                valkey_client.client_kill_filter(_id=row["id"])
        return has_passed()

    wait_until(kill, "the ttl passes")
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


# Faults at the same time


@pytest.mark.parametrize("verb", ["release", "extend", "reacquire", "acquire_or_extend"])
def test_call_that_meets_a_renewal_under_way(
    proxy: Proxy, holders: Holders, valkey_client: redis.Redis, losses: Losses, verb: str
) -> None:
    holder = holders.hold(proxy.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    proxy.hold()
    proxy.wait_for_request("SET", proxy.requests["SET"] + 1)
    sent = proxy.requests.total()
    answer = holder.ask(verb, *([FAR_S] if verb == "extend" else []))
    wait_until(lambda: proxy.requests.total() > sent, "the call is sent")
    proxy.resume()
    assert answer.result(PATIENCE_S) is (None if verb == "release" else True)
    assert losses.reasons == []
    if verb == "release":
        assert (holder.lock.local.token, valkey_client.exists("name")) == (None, 0)
    else:
        assert_believes_no_more_than_is_true(holder.lock, valkey_client)


@pytest.mark.slow
def test_loss_that_is_found_twice_at_once_is_told_once(
    proxy: Proxy, holders: Holders, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(proxy.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    valkey_client.delete("name")
    proxy.hold()
    proxy.wait_for_request("SET", proxy.requests["SET"] + 1)
    sent = proxy.requests.total()
    answer = holder.ask("reacquire")
    wait_until(lambda: proxy.requests.total() > sent, "the call is sent")
    proxy.resume()
    with pytest.raises(LockLostError):
        answer.result(PATIENCE_S)
    until_passed(valkey_client, KEPT_S)
    assert losses.reasons == [LossReason.DELETED]


@pytest.mark.slow
def test_lock_that_is_prolonged_all_the_time_is_never_believed_to_be_held_longer_than_it_is(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    has_passed = passing(valkey_client, 2 * LONG_S)
    while not has_passed():
        for verb, arguments in (("extend", (0.1,)), ("extend", (KEPT_S, True)), ("reacquire", ()), ("extend", (0,))):
            assert holder.call(verb, *arguments)
            assert_believes_no_more_than_is_true(holder.lock, valkey_client)
    assert losses.reasons == []


@pytest.mark.parametrize("reason", [LossReason.DELETED, LossReason.TAKEN])
def test_lock_that_is_lost_while_its_release_is_under_way(
    proxy: Proxy, holders: Holders, valkey_client: redis.Redis, losses: Losses, reason: LossReason
) -> None:
    holder = holders.hold(proxy.port, timeout=FAR_S, auto_renew=True, on_lost=losses)
    valkey_client.delete("name")
    if reason == LossReason.TAKEN:
        valkey_client.set("name", "another's")
    proxy.hold()
    answer = holder.ask("release")
    wait_until(lambda: any(proxy.requests[name] for name in RELEASE_COMMANDS), "the release is sent")
    assert not holder.lock.valid
    proxy.resume()
    with pytest.raises(LockLostError) as caught:
        answer.result(PATIENCE_S)
    assert (caught.value.reason, losses.reasons, holder.lock.local.token) == (reason, [reason], None)


@pytest.mark.slow
def test_release_that_failed_leaves_nothing_to_be_sure_of(proxy: Proxy, holders: Holders, callers: Any) -> None:
    holder = holders.on(callers.client(proxy.port, socket_timeout=0.1), timeout=FAR_S, auto_renew=True)
    holder.call("acquire")
    proxy.refuse()
    proxy.cut()
    with pytest.raises(RedisError):
        holder.release()
    assert (holder.lock.valid, holder.lock.lost, holder.lock.remaining()) == (False, False, 0.0)
    proxy.accept()
    holder.release()
    assert holder.lock.local.token is None


# on_lost


@pytest.mark.slow
def test_callback_may_acquire_the_lock_again(
    holders: Holders, callers: Any, valkey: Server, valkey_client: redis.Redis
) -> None:
    """Released, which says that it is lost, and acquired: it is held on the same terms."""
    answers: list[Any] = []

    def again(lock: Any) -> Any:
        if isinstance(lock, Lock):
            with pytest.raises(LockLostError):
                lock.release()
            answers.append(lock.acquire())
            return None

        async def work() -> None:
            with pytest.raises(LockLostError):
                await lock.release()
            answers.append(await lock.acquire())

        return work()

    losses = Losses(again)
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    valkey_client.delete("name")
    wait_until(lambda: answers, "the callback has acquired")
    until_passed(valkey_client, LONG_S)
    assert (answers, losses.reasons) == ([True], [LossReason.DELETED])
    assert (holder.lock.valid, holder.call("owned")) == (True, True)
