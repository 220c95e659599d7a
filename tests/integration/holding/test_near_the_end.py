"""Locks whose lease nears its end, or has ended: what their holder can know, and is told in time.

Rules: those of test_holding.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from redislock_fast import LockLostError, LossReason
from redislock_fast.server import Server
from tests.support.helpers import wait_until
from tests.support.holding import BRIEF_S, RENEWED, SLOW_S, Holders, Losses, hold_the_gil
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
