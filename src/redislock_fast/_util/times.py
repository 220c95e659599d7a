"""Seconds of the API as milliseconds of the wire, and the clock that leases are measured with.

Rules: a ttl is rounded up, so that a lock never lives shorter than asked; a value that cannot be a ttl is refused
before anything is sent. The clock goes on while the machine is suspended, where `CLOCK_MONOTONIC` stops.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, ClassVar

clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""Seconds from an arbitrary start that never go back and include suspends."""

FOREVER_S = 1e9
"""A longer time counts as no limit: clocks and locks overflow beyond."""

GRACE_S = 0.1
"""How many seconds a request may still take after its caller's time: else no reply of a far server counts."""

MOST_FAILURES = 1000
"""The most failures in a row that are counted: a pause that doubles with each, as redis-py's, overflows at 1,024."""

_MAX_MS = 1 << 53  # exact in Lua's numbers, and 285,000 years


def _number(seconds: Any, what: str) -> float:
    """The number itself where it is an int or float; else the float: arithmetic with floats refuses some others."""
    if type(seconds) in (int, float):
        checked: float = seconds
        return checked
    if type(seconds) is bool:  # linger=True is no second, and acquire(False) no sleep of 0
        hint = ": did you mean blocking?" if what == "sleep" else ""
        raise TypeError(f"{what} is a number of seconds, not bool{hint}")
    if isinstance(seconds, (str, bytes, bytearray)) or not hasattr(seconds, "__float__"):
        raise TypeError(f"{what} is a number of seconds, not {type(seconds).__name__}")
    return float(seconds)


def positive_ms(seconds: float, what: str) -> int:
    """Seconds as whole milliseconds, rounded up.

    Args:
        seconds: any real number above 0.
        what: the parameter's name, for the error.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a number that is not above 0, not finite or beyond 2**53 ms.
    """
    if type(seconds) is int and 0 < seconds <= _MAX_MS // 1000:
        return seconds * 1000
    exact_ms = _number(seconds, what) * 1000
    if not 0 < exact_ms <= _MAX_MS:  # False for NaN too
        raise ValueError(f"{what} must be a positive, finite number of seconds, not {seconds!r}")
    nearest_ms = round(exact_ms)
    # 1.1 * 1000 is 1100.0000000000002: a difference that is only the float's own error is not rounded up.
    return nearest_ms if nearest_ms and abs(exact_ms - nearest_ms) < 1e-6 * exact_ms else math.ceil(exact_ms)


def wait_seconds(seconds: float, what: str) -> float:
    """A time to wait: any number except NaN.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for NaN.
    """
    number = _number(seconds, what)
    if math.isnan(number):
        raise ValueError(f"{what} must be a number of seconds, not NaN")
    return number


class Limit:
    """The one deadline of an acquire, for all its steps. It belongs to the thread or task that acquires.

    Args:
        wait_s: how long to wait at most, in seconds; 0 or less for one attempt; None: forever.
        since: when the acquire has begun, in the clock's seconds; 0: now.

    Attributes:
        deadline: when the time is up, in the clock's seconds; None: never.
        refused: whether the server has said, since the acquire began, that the lock is another's.
        wakes_at: until when to listen at most, in the clock's seconds; None: forever.
    """

    __slots__ = ("_long_at", "_waits_since", "deadline", "refused", "wait_s", "wakes_at")

    long_s: ClassVar[float | None] = 5.0
    """After how many seconds a wait is long; None: never."""

    def __init__(self, wait_s: float | None, since: float = 0.0) -> None:
        self.wait_s = wait_s
        self.deadline = None if wait_s is None else (since or clock()) + max(wait_s, 0.0)
        self.refused = False
        self.wakes_at = self.deadline
        self._waits_since: float | None = None
        self._long_at = math.inf

    def go_on(self, wait_s: float | None) -> None:
        """Wait for another lock of the same acquire, for so many seconds at most from now on."""
        self.wait_s = wait_s
        self.deadline = None if wait_s is None else clock() + max(wait_s, 0.0)
        self.refused = False
        self._set_wakes_at()

    def _set_wakes_at(self) -> None:
        until = self._long_at if self.deadline is None else min(self._long_at, self.deadline)
        self.wakes_at = None if until == math.inf else until

    def begin_wait(self) -> None:
        """Note that the acquire begins to wait, unless it did so before."""
        if self._waits_since is None:
            self._waits_since = clock()
            if self.long_s is not None:
                self._long_at = self._waits_since + self.long_s
                self._set_wakes_at()

    def long_wait_s(self) -> float | None:
        """For how many seconds the acquire has waited, once, when that has become long; else None."""
        if self._waits_since is None or clock() < self._long_at:
            return None
        self._long_at = math.inf
        self.wakes_at = self.deadline
        return clock() - self._waits_since

    def listen_s(self) -> float | None:
        """How long to listen at most from now on, in seconds; None: forever."""
        return None if self.wakes_at is None else max(self.wakes_at - clock(), 0.0)

    @property
    def waits(self) -> bool:
        """Whether there is time for more than one attempt."""
        return self.wait_s is None or self.wait_s > 0

    def left_s(self) -> float | None:
        """The seconds that are left; below 0 when the time is up, None forever."""
        return None if self.deadline is None else self.deadline - clock()

    def allows(self, pause_s: float) -> bool:
        """Whether a pause that begins now ends in time."""
        return self.deadline is None or clock() + pause_s <= self.deadline

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.deadline is not None and clock() >= self.deadline

    @property
    def is_settled(self) -> bool:
        """Whether the acquire has failed although the last request got no reply: time is up, and the lock another's."""
        return self.refused and self.is_over


def ttl_ms_of(timeout: float | None) -> int | None:
    """The ttl of a lock in milliseconds, rounded up. None for None and for 0, which redis-py also takes for "forever".

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a number that cannot be a ttl.
    """
    return None if timeout is None or timeout == 0 else positive_ms(timeout, "timeout")


def added_ms(additional_time: float, replace_ttl: bool = False) -> int:
    """The milliseconds that an extend adds. 0 may be added; a new ttl of 0 would delete the lock.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a number that cannot be a ttl.
    """
    return positive_ms(additional_time, "additional_time") if additional_time != 0 or replace_ttl else 0


def poll_seconds(sleep: Any) -> float:
    """How long to sleep between two attempts.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a negative number and NaN.
    """
    seconds = _number(sleep, "sleep")
    if not seconds >= 0:  # true for NaN, too
        raise ValueError(f"sleep must be a number of seconds from 0, not {sleep!r}")
    return seconds


def blocks(blocking: Any) -> bool:
    """Whether an acquire waits, by what `blocking` is.

    Raises:
        TypeError: for text, all of which is true, even "no".
    """
    if isinstance(blocking, str):
        raise TypeError(f"blocking is a bool, not {blocking!r}")
    return bool(blocking)


def drift_s(lease_s: float) -> float:
    """By how many seconds sooner a lease is believed to end than the server says.

    1 % for clocks that run at different rates and 2 ms for the server's own granularity, as Redis's page on distributed
    locks has it.
    """
    return 0.01 * lease_s + 0.002


def reply_within_s(limit_s: float, reply_s: float) -> float:
    """How long to wait for the reply to a request that leaves now, in seconds.

    Args:
        limit_s: how long the caller waits, in seconds from 0; a request under way may take `GRACE_S` more.
        reply_s: how long the server may take for a reply, in seconds; below 0: forever.
    """
    bounded_s = limit_s + GRACE_S
    return bounded_s if reply_s < 0 else min(reply_s, bounded_s)
