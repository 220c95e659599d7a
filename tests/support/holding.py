"""Helpers of the tests of leases: holders, reported losses, time by the server's clock, a GIL that is held.

Nothing here asserts what a lock should do, but for two functions whose names say so.
"""

from __future__ import annotations

import contextlib
import ctypes
import sysconfig
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from redislock_fast import Handle, LockLostError, LossReason
from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.times import clock
from tests.support.transports import let_first_requests_settle
from tests.support.waiting import FAR_S, Callers, Contender

BRIEF_S = 0.3
"""The ttl of a lock that is to be lost."""

KEPT_S = 1.5
"""The ttl of a lock that is to be kept: its renewals may come late by a third of it."""

LONG_S = 1.2 * KEPT_S
"""Longer than the ttl of a lock without renewal."""

SLOW_S = 3.0
"""The ttl of a lock that is to be kept through a fault."""

RENEWED: dict[str, Any] = {"timeout": KEPT_S, "auto_renew": True}
"""Settings of a lock that is to be kept."""


class Holders:
    """Makes locks of one kind, and releases those that are still held at the end.

    Args:
        callers: threads or tasks.
        connected: whether each client is connected before, so that an acquire may need no more than its reply.
    """

    def __init__(self, callers: Callers, connected: bool = False) -> None:
        self._callers = callers
        self._connected = connected
        self._made: list[Contender] = []

    def make(self, port: int, name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock on a client of its own of the server on this port."""
        return self.on(self._callers.client(port), name, **settings)

    def on(self, client: Any, name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock on this client."""
        self._made.append(self._callers.contender(client, name, **settings))
        if self._connected:
            with contextlib.suppress(RedisError):  # else the acquire will raise it, too
                self._made[-1].call("locked")
            let_first_requests_settle(self._made[-1].lock)
        return self._made[-1]

    def clients(self, servers: Iterable[Server]) -> list[Any]:
        """A client of each of these servers."""
        return [self._callers.client(server.port) for server in servers]

    def hold_redlock(self, clients: list[Any], name: str | bytes = "name", **settings: Any) -> Contender:
        """A Redlock on these clients that is held."""
        self._made.append(self._callers.redlock(clients, name, **settings))
        if not self._made[-1].call("acquire"):
            raise AssertionError(f"{name!r} was not free")
        return self._made[-1]

    def hold(self, port: int, name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock that is held."""
        holder = self.make(port, name, **settings)
        if not holder.call("acquire"):
            raise AssertionError(f"{name!r} was not free")
        return holder

    def attach(self, port: int, handle: Handle, **settings: Any) -> Contender:
        """A lock that was detached, on a client of its own."""
        self._made.append(self._callers.attached(self._callers.client(port), handle, **settings))
        return self._made[-1]

    def drop(self) -> None:
        """Drop all references to the locks."""
        self._made.clear()

    def close(self) -> None:
        """Release what is held."""
        for holder in self._made:
            with contextlib.suppress(RedisError):
                holder.release()
        self.drop()


class Losses:
    """An `on_lost` that notes the losses.

    Args:
        then: also called with the lock.

    Attributes:
        reasons: of all losses, in order.
    """

    def __init__(self, then: Callable[[Any], object] = lambda _: None) -> None:
        self.reasons: list[LossReason] = []
        self._then = then

    def __call__(self, lock: Any, reason: LossReason) -> object:
        """Note a loss."""
        self.reasons.append(reason)
        return self._then(lock)

    def until(self, count: int = 1) -> list[LossReason]:
        """The reasons, once there are so many."""
        wait_until(lambda: len(self.reasons) >= count, f"{count} losses are told")
        return self.reasons


def assert_lost(holder: Contender, losses: Losses, reason: LossReason) -> None:
    """Assert that its loss was reported once, and that each later call raises it."""
    assert losses.until() == [reason]
    assert (holder.lock.valid, holder.lock.lost) == (False, True)
    for verb, arguments in (("extend", (FAR_S,)), ("reacquire", ()), ("release", ())):
        with pytest.raises(LockLostError) as caught:
            holder.call(verb, *arguments)
        assert caught.value.reason == reason
    assert losses.reasons == [reason]


def assert_believes_no_more_than_is_true(lock: Any, admin: redis.Redis) -> None:
    """Assert that the lock is held, and that the lease that it believes in is not longer than the server's."""
    asked_at = clock()
    believed_s = lock.remaining()
    left_s = admin.pttl(lock.name) / 1000
    assert 0 < believed_s <= left_s + 0.001 + clock() - asked_at


def passing(admin: redis.Redis, seconds: float) -> Callable[[], bool]:
    """Says whether so much time has passed since, by the server's clock."""
    name = f"passing-{admin.incr('passing')}"
    admin.set(name, "", px=round(1000 * seconds))
    return lambda: not admin.exists(name)


def until_passed(admin: redis.Redis, seconds: float) -> None:
    """Return once so much time has passed, by the server's clock."""
    wait_until(passing(admin, seconds), f"{seconds} s pass")


with_gil = pytest.mark.skipif(sysconfig.get_config_var("Py_GIL_DISABLED") == 1, reason="no GIL stops others there")
"""For tests that use `hold_the_gil`."""


def hold_the_gil(seconds: float) -> None:
    """Let nothing else run in this process for so long, as an extension that does not release the GIL may."""
    ctypes.PyDLL(None).usleep(round(1e6 * seconds))


def until_in_busy_loop(condition: Callable[[], object], what: str) -> None:
    """Return once the condition is true. The running loop does nothing else meanwhile."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"did not happen: {what}")
        time.sleep(0.005)


def renewed(read_ms: Callable[[], int]) -> Callable[[], bool]:
    """Says whether what reads the rest of a ttl has ever shown it longer than before."""
    rests = [read_ms()]

    def is_renewed() -> bool:
        rests.append(read_ms())
        return rests[-1] > rests[-2]

    return is_renewed


async def renewed_in_busy_loop(client: Any, admin: Any, name: str = "name") -> None:
    """Hold a lock until it is renewed in spite of a busy loop."""
    async with Lock(client, name, **RENEWED):
        until_in_busy_loop(renewed(lambda: int(admin.pttl(name))), "it is renewed")
