"""`AdaptiveTTL`: a ttl for each lock name, computed from how long locks of that name were held.

Thread safety: any thread, signal handler or finalizer may read and note at any time, with and without the GIL. All
that is known of a name is one value that is replaced as a whole, and the dict of these values is used by atomic methods
alone. There is no mutex, which a forked child could find locked, so a child keeps what was known. Where two threads
note hold times of one name at the same time, one of the two may be lost. That is harmless, and rare: owners of one name
come one after the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from redislock_fast._util.times import clock, positive_ms, wait_seconds

_WINDOW = 128  # hold times per name: only the longest one is above a quantile of 0.99

_KEPT_NAMES = 512
_MAX_NAMES = 2 * _KEPT_NAMES


class _Known(NamedTuple):
    """All that is known of a name. The lists are never changed: other threads may read them."""

    holds_s: list[float]  # the oldest first
    ranked_s: list[float]  # the same, the shortest first
    ttl_ms: int
    noted_at: float


_NOTHING = _Known([], [], 0, 0.0)


@dataclass(frozen=True, eq=False)
class AdaptiveTTL:
    """A ttl that follows the time for which locks are held.

    For each name, the ttl is `factor` times the `quantile` of its last 128 hold times, never below `floor` nor above
    `ceiling`, and not below `initial` before there are 128. The 512 names released last are kept, at most 1,024; a name
    that was dropped starts without hold times.

    One object may be shared by any number of locks, threads and event loops; a name means the same lock in all of them.
    A pickle or a copy has the settings without the hold times: another process has its own speed.

    Args:
        initial: the first ttl, and the lowest one until 128 hold times are known, in seconds.
        floor: the lowest ttl, in seconds. It must cover pauses and delays that have nothing to do with the work.
        ceiling: the highest ttl, in seconds: how long others wait after the owner's process has died.
        quantile: which hold time counts, above 0 and up to 1: this share of the hold times is not longer. 1 means the
            longest hold time.
        factor: by what number this hold time is multiplied, above 1.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a time that cannot be a ttl, for times that are not `floor <= initial <= ceiling`, and for a
            `quantile` or `factor` out of range.
    """

    initial: float
    _: KW_ONLY
    floor: float = 1.0
    ceiling: float = 3600.0
    quantile: float = 0.99
    factor: float = 3.0
    _known: dict[bytes, _Known] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        floor_ms = positive_ms(self.floor, "floor")
        ceiling_ms = positive_ms(self.ceiling, "ceiling")
        if not floor_ms <= positive_ms(self.initial, "initial") <= ceiling_ms:
            raise ValueError(
                f"initial must be from {self.floor} (floor) to {self.ceiling} (ceiling), not {self.initial}"
            )
        if not 0 < self.quantile <= 1:  # true for NaN, too
            raise ValueError(f"quantile must be above 0 and not above 1, not {self.quantile}")
        if not 1 < self.factor < math.inf:
            raise ValueError(f"factor must be a finite number above 1, not {self.factor}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def ttl_ms(self, name: str | bytes) -> int:
        """The ttl for the next acquire of a lock. Sends nothing.

        Args:
            name: the lock's name; a str counts as its UTF-8 bytes.

        Returns:
            Whole milliseconds, rounded up.
        """
        known = self._known.get(_key_of(name))
        return positive_ms(self.initial, "initial") if known is None else known.ttl_ms

    def observe(self, name: str | bytes, hold_s: float) -> None:
        """Note how long a lock was held, or was used although it was lost. Sends nothing.

        Args:
            name: the lock's name; a str counts as its UTF-8 bytes.
            hold_s: from the acquire to the release, in seconds.

        Raises:
            TypeError: for a value that is not a number.
            ValueError: for a time that is negative, NaN or infinite.
        """
        seconds = wait_seconds(hold_s, "hold_s")
        if not 0 <= seconds < math.inf:
            raise ValueError(f"hold_s must be a finite number of seconds from 0, not {hold_s!r}")
        key = _key_of(name)
        known = self._known.get(key, _NOTHING)
        holds_s = [*known.holds_s, seconds]
        ranked_s = known.ranked_s.copy()
        insort(ranked_s, seconds)
        if len(holds_s) > _WINDOW:
            del ranked_s[bisect_left(ranked_s, holds_s.pop(0))]
        self._known[key] = _Known(holds_s, ranked_s, self._reckon_ms(ranked_s), clock())
        if len(self._known) > _MAX_NAMES:
            self._forget()

    def _reckon_ms(self, ranked_s: list[float]) -> int:
        at_quantile_s = ranked_s[math.ceil(self.quantile * len(ranked_s)) - 1]
        at_least_s = self.floor if len(ranked_s) == _WINDOW else self.initial
        return positive_ms(min(max(float(self.factor) * at_quantile_s, at_least_s), self.ceiling), "ttl")

    def _forget(self) -> None:
        """Drop the names noted longest ago, many at once: dropping one would need a search for each new name."""
        known = self._known.copy()  # other threads may be changing it
        by_age = sorted(known, key=lambda key: known[key].noted_at)
        for key in by_age[:-_KEPT_NAMES]:
            self._known.pop(key, None)


def _key_of(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name
