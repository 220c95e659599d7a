"""Locks whose lease nears its end, or has ended: what their holder can know, and is told in time.

Rules: those of test_holding.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import LockLostError, LossReason
from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.holding import BRIEF_S, RENEWED, SLOW_S, Holders, Losses, hold_the_gil, until_passed
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, Callers

# ensure_held


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}, {"linger": FAR_S}], ids=["plain", "renewed", "linger"])
def test_held_lock_is_ensured_to_be_held_without_a_request(
    holders: Holders, valkey: Server, settings: dict[str, Any]
) -> None:
    with Proxy(valkey.port) as proxy:
        holder = holders.hold(proxy.port, timeout=FAR_S, **settings)
        sent = proxy.requests.copy()
        assert holder.call("ensure_held") is None
        assert proxy.requests == sent
        holder.release()
    with pytest.raises(LockError, match="Cannot use a lock that's not owned or is already unlocked") as caught:
        holder.call("ensure_held")
    assert (type(caught.value), caught.value.lock_name) == (LockError, "name")


@pytest.mark.parametrize("settings", [{}, {"max_hold": BRIEF_S, "auto_renew": True}], ids=["plain", "max_hold"])
def test_lock_whose_lease_has_ended_is_not_ensured(holders: Holders, valkey: Server, settings: dict[str, Any]) -> None:
    holder = holders.hold(valkey.port, timeout=BRIEF_S, **settings)
    wait_until(lambda: not holder.lock.valid, "the lease ends")
    with pytest.raises(LockLostError, match="Cannot use the lock 'name', which was lost: expired") as caught:
        holder.call("ensure_held")
    assert caught.value.reason == LossReason.EXPIRED


@pytest.mark.slow
def test_lock_that_is_found_to_be_lost_is_not_ensured(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    valkey_client.delete("name")
    losses.until()
    with pytest.raises(LockLostError, match="which was lost: deleted"):
        holder.call("ensure_held")


# Renewals that come late


@pytest.mark.slow
def test_renewal_that_comes_late_is_logged(holders: Holders, valkey: Server, caplog: pytest.LogCaptureFixture) -> None:
    holder = holders.hold(valkey.port, timeout=SLOW_S, auto_renew=True)
    hold_the_gil(holder.lock.remaining() - SLOW_S / 7)
    late = "1 locks, such as 'name', are renewed late by more than half of their ttl: something blocks the renewer."
    wait_until(lambda: caplog.messages, "something is logged")
    assert (caplog.messages, caplog.records[0].levelname) == ([late], "WARNING")
    assert caplog.records[0].name == "redislock_fast.renewal"
    wait_until(lambda: holder.lock.remaining() > SLOW_S / 2, "it is renewed")


# on_danger


class Dangers:
    """An `on_danger` that notes for how long each lock was still held, and whether it was lost."""

    def __init__(self) -> None:
        self.told: list[tuple[float, bool]] = []

    def __call__(self, lock: Any) -> None:
        self.told.append((lock.remaining(), lock.lost))

    def until(self, count: int) -> None:
        wait_until(lambda: len(self.told) >= count, f"{count} dangers are told")


@pytest.mark.slow
def test_danger_is_told_once_while_the_lock_is_still_held(
    spare_server: Callable[..., Server], holders: Holders, losses: Losses
) -> None:
    server, dangers = spare_server(), Dangers()
    holder = holders.hold(server.port, timeout=SLOW_S, auto_renew=True, on_danger=dangers, on_lost=losses)
    server.signal(signal.SIGSTOP)
    dangers.until(1)
    assert losses.reasons == []
    assert losses.until() == [LossReason.SERVER_GONE]
    server.signal(signal.SIGCONT)
    ((left_s, was_lost),) = dangers.told
    assert (0 < left_s <= SLOW_S / 3, was_lost, holder.lock.lost) == (True, False, True)


@pytest.mark.slow
def test_danger_is_told_again_only_after_a_renewal(
    valkey: Server, holders: Holders, losses: Losses, valkey_client: redis.Redis
) -> None:
    dangers = Dangers()
    with Proxy(valkey.port) as proxy:
        holder = holders.hold(proxy.port, timeout=SLOW_S, auto_renew=True, on_danger=dangers, on_lost=losses)
        for count in (1, 2):
            until_passed(valkey_client, 0.5 * SLOW_S)  # a renewal that succeeds is no danger
            assert len(dangers.told) == count - 1
            proxy.refuse()
            proxy.cut()
            dangers.until(count)
            proxy.accept()
            wait_until(lambda: holder.lock.remaining() > SLOW_S / 2, "it is renewed again")
        assert (len(dangers.told), losses.reasons) == (2, [])
        holder.release()


@pytest.mark.slow
def test_permit_in_danger_is_told(spare_server: Callable[..., Server], callers: Callers) -> None:
    server, dangers = spare_server(), Dangers()
    semaphore = callers.package.Semaphore(callers.client(server.port), "name", 1, timeout=SLOW_S, on_danger=dangers)
    permit = callers.run(semaphore.acquire)
    server.signal(signal.SIGSTOP)
    dangers.until(1)
    server.signal(signal.SIGCONT)
    assert [was_lost for _, was_lost in dangers.told] == [False]
    callers.run(permit.release)


@pytest.mark.slow
def test_callback_for_a_danger_that_fails_is_logged(
    spare_server: Callable[..., Server], callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_lock: Any) -> None:
        raise OSError

    async def fail_later(_lock: Any) -> None:
        raise OSError

    server = spare_server()
    client = callers.client(server.port)
    callbacks = {"name": fail, "other": fail if callers.kind == "threads" else fail_later}
    held = [
        callers.contender(client, name, timeout=SLOW_S, auto_renew=True, on_danger=on_danger)
        for name, on_danger in callbacks.items()
    ]
    assert all(lock.call("acquire") for lock in held)
    server.signal(signal.SIGSTOP)
    texts = {f"on_danger failed for the lock {name!r}." for name in callbacks}
    wait_until(lambda: texts <= set(caplog.messages), "both are logged")
    server.signal(signal.SIGCONT)
    for lock in held:
        with contextlib.suppress(LockError):
            lock.release()


def test_danger_is_of_renewals_alone(callers: Callers, valkey: Server) -> None:
    client = callers.client(valkey.port)
    with pytest.raises(ValueError, match="it needs auto_renew=True"):
        callers.contender(client, timeout=SLOW_S, on_danger=print)
    with pytest.raises(TypeError, match="on_danger is not callable: 3"):
        callers.contender(client, timeout=SLOW_S, auto_renew=True, on_danger=3)


# Permits


def test_permit_is_ensured_as_its_lock_is(callers: Callers, valkey: Server) -> None:
    semaphore = callers.package.Semaphore(
        callers.client(valkey.port), "name", 1, timeout=BRIEF_S, auto_renew=False, blocking=False
    )
    permit = callers.run(semaphore.acquire)
    assert permit.ensure_held() is None
    wait_until(lambda: not permit.valid, "its lease ends")
    with pytest.raises(LockLostError, match="which was lost: expired"):
        permit.ensure_held()
    with contextlib.suppress(LockError):
        callers.run(permit.release)
    with pytest.raises(LockError, match="that was released"):
        permit.ensure_held()
