"""The records of each lock in a profile: waits, holdings, and the call sites of the holders.

Everything is bounded. `Records` folds the names of the least time into one, so the names that matter stay whatever the
number of names is.

Thread safety: none of its own; the recorder's mutex guards all of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

MOST_NAMES = 1_000
MOST_SITES = 32  # of one name
MOST_RECENT = 32  # holdings of one name, which a wait is compared with

OTHER = "(other)"

_LEAST_S = 1e-6
_BUCKETS_PER_DOUBLING = 4


class Waits:
    """How long acquires have taken: total, longest, and quantiles from buckets, each 19 % wider than the one before."""

    __slots__ = ("_buckets", "longest_s", "total_s")

    def __init__(self) -> None:
        self.total_s = 0.0
        self.longest_s = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count one wait."""
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)
        self._buckets[math.ceil(_BUCKETS_PER_DOUBLING * math.log2(max(seconds, _LEAST_S) / _LEAST_S))] += 1

    def absorb(self, other: Waits) -> None:
        """Count all waits of another one, too."""
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)
        self._buckets.update(other._buckets)

    def quantile_s(self, part: float) -> float:
        """The time within which this part of the waits has ended, at most 19 % too high; 0.0 where there was none."""
        left = math.ceil(part * self._buckets.total())
        for bucket, count in sorted(self._buckets.items()):
            left -= count
            if left <= 0:
                return min(_LEAST_S * 2 ** (bucket / _BUCKETS_PER_DOUBLING), self.longest_s)
        return 0.0


class Holding:
    """One holding of a lock, from its acquire.

    Attributes:
        name: of the lock.
        site: where it was acquired.
        began_at: when, in the clock's seconds.
        serial: of a permit's holding; 0 for a lock.
        ended: when it was over, as far as is known by now; None before.
    """

    __slots__ = ("began_at", "ended", "name", "serial", "site")

    def __init__(self, name: str, site: str, began_at: float, serial: int) -> None:
        self.serial = serial
        self.name = name
        self.site = site
        self.began_at = began_at
        self.ended: float | None = None


class SiteRecord:
    """The holdings of one lock by one call site.

    Attributes:
        acquisitions: how often it has acquired the lock.
        held_s: for how long it has held it, in seconds.
        blocked_s: for how long callers of this process have waited meanwhile, in seconds; several at once count each.
    """

    __slots__ = ("acquisitions", "blocked_s", "held_s")

    def __init__(self) -> None:
        self.acquisitions = 0
        self.held_s = 0.0
        self.blocked_s = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The attributes."""
        return {"acquisitions": self.acquisitions, "held_s": self.held_s, "blocked_s": self.blocked_s}


class LockRecord:
    """The record of one lock.

    Attributes:
        waits: of its acquisitions and failures.
        sites: by where the holders have acquired it.
        held_s: for how long it was held in all, in seconds; a holding counts when it is released.
        longest_held_s: the longest holding, in seconds.
    """

    __slots__ = ("_recent", "acquisitions", "failures", "held_s", "longest_held_s", "losses", "sites", "waits")

    def __init__(self) -> None:
        self.acquisitions = 0
        self.failures = 0
        self.losses = 0
        self.waits = Waits()
        self.held_s = 0.0
        self.longest_held_s = 0.0
        self.sites: dict[str, SiteRecord] = {}
        self._recent: deque[Holding] = deque(maxlen=MOST_RECENT)

    def note_wait(self, seconds: float, now: float) -> None:
        """Count a wait that ends now, also for the sites that have held the lock meanwhile."""
        self.waits.add(seconds)
        since = now - seconds
        for holding in tuple(self._recent):  # not in the order of their ends where permits are held
            until = now if holding.ended is None else holding.ended
            if until > since:
                self._site(holding.site).blocked_s += until - max(holding.began_at, since)

    def count(self, site: str) -> None:
        """Count an acquisition."""
        self.acquisitions += 1
        self._site(site).acquisitions += 1

    def begin(self, name: str, site: str, now: float) -> Holding:
        """Count a holding of a lock that begins now. The one before it is over: its release may be recorded later."""
        self.count(site)
        before = self.held()
        if before is not None:
            before.ended = now
        return self.begin_beside(name, site, now)

    def begin_beside(self, name: str, site: str, now: float, serial: int = 0) -> Holding:
        """Begin a holding beside others."""
        holding = Holding(name, site, now, serial)
        self._recent.append(holding)
        return holding

    def held(self) -> Holding | None:
        """The present holding; None where there is none, as far as is known."""
        last = self._recent[-1] if self._recent else None
        return last if last is not None and last.ended is None else None

    def held_as(self, serial: int) -> Holding | None:
        """The present holding with this serial; None where there is none, as far as is known."""
        recent = tuple(self._recent)  # a signal handler may add to it meanwhile
        return next((one for one in recent if one.serial == serial and one.ended is None), None)

    def end(self, holding: Holding | None, held_s: float, now: float) -> None:
        """Count a release; `holding` is None where its acquire was not recorded."""
        self.held_s += held_s
        self.longest_held_s = max(self.longest_held_s, held_s)
        if holding is not None:
            holding.ended = holding.ended or now
            self._site(holding.site).held_s += held_s

    def absorb(self, other: LockRecord) -> None:
        """Count all of another record, too."""
        self.acquisitions += other.acquisitions
        self.failures += other.failures
        self.losses += other.losses
        self.waits.absorb(other.waits)
        self.held_s += other.held_s
        self.longest_held_s = max(self.longest_held_s, other.longest_held_s)
        for name, site in other.sites.items():
            mine = self._site(name)
            mine.acquisitions += site.acquisitions
            mine.held_s += site.held_s
            mine.blocked_s += site.blocked_s

    def as_dict(self) -> dict[str, Any]:
        """The attributes, the site first that has blocked others for the longest time."""
        sites = sorted(self.sites.items(), key=lambda item: (item[1].blocked_s, item[1].held_s), reverse=True)
        return {
            "acquisitions": self.acquisitions,
            "failures": self.failures,
            "losses": self.losses,
            "waited_s": self.waits.total_s,
            "waited_p99_s": self.waits.quantile_s(0.99),
            "waited_max_s": self.waits.longest_s,
            "held_s": self.held_s,
            "held_max_s": self.longest_held_s,
            "sites": [{"site": name, **site.as_dict()} for name, site in sites],
        }

    def _site(self, name: str) -> SiteRecord:
        site = self.sites.get(name)
        if site is None:
            name = name if len(self.sites) < MOST_SITES else OTHER
            site = self.sites.setdefault(name, SiteRecord())
        return site


class Records:
    """The records of all locks, by name.

    Between 1,000 and 2,000 names have records of their own. Where one more comes, the 1,000 of the least time, waited
    and held, become part of the record "(other)"; a name that comes back begins again.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, LockRecord] = {}
        self._other: LockRecord | None = None

    def of(self, name: str) -> LockRecord:
        """The record of this lock."""
        record = self._by_name.get(name)
        if record is None:
            if len(self._by_name) >= 2 * MOST_NAMES:
                self._fold()
            record = self._by_name[name] = LockRecord()
        return record

    def all(self) -> dict[str, LockRecord]:
        """The records by name, the one of the longest time waited first."""
        other = {} if self._other is None else {OTHER: self._other}
        return dict(sorted((self._by_name | other).items(), key=lambda item: -item[1].waits.total_s))

    def _fold(self) -> None:
        other = self._other = self._other or LockRecord()
        kept = sorted(self._by_name.items(), key=lambda item: item[1].waits.total_s + item[1].held_s)
        for _, record in kept[:-MOST_NAMES]:
            other.absorb(record)
        self._by_name = dict(kept[-MOST_NAMES:])
