"""The acquire of a batch: rounds of requests, windows, waiting.

- Windows: a fixed number of requests at most is under way to each server at once, whatever the number of names.
- Leases are extended while other locks are waited for, so that the batch is returned with fresh leases.
- All or nothing: locks are waited for in the order of their keys, and only the locks before the one that is waited for
  are held. So there is no deadlock: of all waiting batches, the one that waits for the last key waits for none of the
  others. Servers are asked one after the other: so of two batches that want the same locks at once, one gets all of
  them as a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from redislock_fast._procedures.batch import Group, Hold, Indexes
from redislock_fast._procedures.steps import Sleep, Split, Steps, all_of
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.pipeline import AcquireMany, Many, ReleaseMany
from redislock_fast._util.times import clock

__all__ = ["acquiring"]

_WINDOW = 1024
"""How many requests may be under way to one server at once: with more, nothing is gained."""

_FRESH = 0.75
"""The part of a lease that must be left when it is returned."""


def acquiring(hold: Hold) -> Steps:
    """Acquire the locks of the plan. Returns the indexes of the locks that were missed.

    If it raises, `hold` has all locks that may be held, for the driver to clean up.
    """
    acquisition = _Acquisition(hold)
    return acquisition.all_or_nothing() if hold.plan.all_or_nothing else acquisition.what_is_free()


class _Acquisition:
    """The rounds of one acquire; `hold` is what is held so far."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._plan = hold.plan
        wait_s = self._plan.blocking_timeout
        self._deadline = None if wait_s is None else clock() + wait_s
        self._bounded = wait_s is not None and wait_s > 0

    # ---- the two ways ----

    def what_is_free(self) -> Steps:
        """Take the locks that are free, in rounds."""
        missed = yield from self._round(range(len(self._plan.keys)))
        missed += yield from self._refresh()
        waited = False
        while missed and not self._time_is_up():
            waited = True
            yield self._pause()
            missed = yield from self._round(sorted(missed))
            missed += yield from self._refresh()
        if waited:
            yield from self._regroup()
        return missed

    def all_or_nothing(self) -> Steps:
        """Take all locks, in the order of their keys: while one is waited for, only those before it are held."""
        keys = self._plan.keys
        order = sorted(range(len(keys)), key=keys.__getitem__)
        place = {index: at for at, index in enumerate(order)}
        held = 0  # how many of `order` are held
        while True:
            missed = yield from self._round(order[held:])
            missed += yield from self._refresh()
            if not missed:
                break
            while missed:
                held = min(place[index] for index in missed)
                yield from self._give_back(set(order[held + 1 :]))
                if self._time_is_up():
                    yield from self._give_back(set(order))
                    return missed
                yield self._pause()
                missed = yield from self._refresh()
                if not missed:
                    missed = yield from self._round([order[held]])
            held += 1
        yield from self._regroup()
        return []

    # ---- their steps ----

    def _time_is_up(self) -> bool:
        return self._deadline is not None and clock() + self._plan.sleep > self._deadline

    def _pause(self) -> Sleep:
        """The pause before the next round, short enough that no held lock expires meanwhile."""
        ttl_ms = self._plan.ttl_ms
        if ttl_ms is None or not self._hold.groups:
            return Sleep(self._plan.sleep)
        return Sleep(min(self._plan.sleep, ttl_ms / 4000))

    def _limit_s(self) -> float | None:
        """How many seconds an operation may take; None for no limit."""
        return max(self._deadline - clock(), 0.0) if self._bounded and self._deadline is not None else None

    def _round(self, indexes: Indexes) -> Steps:
        """Ask once for each of these locks. Returns the indexes of the locks that others hold."""
        missed: list[int] = []
        ttl_ms = self._plan.ttl_ms
        for windows in (yield from self._rounds(indexes)):
            groups = [Group(window, None) for window in windows]
            operations = [AcquireMany(self._hold.keys_of(window), self._hold.token, ttl_ms) for window in windows]
            self._hold.groups += groups  # before it is asked: so every error cleans it up
            yield all_of(operations, self._limit_s())
            for group, operation in zip(groups, operations, strict=True):
                if ttl_ms is not None:
                    group.expires_at = operation.sent_at + ttl_ms / 1000
                if operation.results.count(True) < len(operation):
                    missed += [i for i, ours in zip(group.indexes, operation.results, strict=True) if not ours]
                    self._hold.forget(group, operation.results)
        return missed

    def _refresh(self) -> Steps:
        """Extend leases of which less than three quarters are left. Returns the indexes of locks that were lost."""
        ttl_ms = self._plan.ttl_ms
        lost: list[int] = []
        if ttl_ms is None:
            return lost
        if not self._aged(self._hold.groups, ttl_ms):
            return lost
        for round_ in (yield from self._hold.rounds(self._hold.groups)):
            aged = self._aged(round_, ttl_ms)
            if not aged:
                continue
            machines = [
                [Reacquire(key, self._hold.token, ttl_ms) for key in self._hold.keys_of(group.indexes)]
                for group in aged
            ]
            operations = [Many(of_group) for of_group in machines]
            yield all_of(operations, self._limit_s())
            for group, of_group, operation in zip(aged, machines, operations, strict=True):
                lost += [i for i, held in zip(group.indexes, operation.results, strict=True) if not held]
                group.expires_at = min(one.sent_at for one in of_group) + ttl_ms / 1000
                self._hold.forget(group, operation.results)
        return lost

    def _aged(self, groups: list[Group], ttl_ms: int) -> list[Group]:
        least = clock() + _FRESH * ttl_ms / 1000
        return [group for group in groups if group.expires_at is None or group.expires_at <= least]

    def _give_back(self, indexes: set[int]) -> Steps:
        """Release those of these locks that are held."""
        given = [
            Group(held, group.expires_at)
            for group in self._hold.groups
            if (held := [index for index in group.indexes if index in indexes])
        ]
        for round_ in (yield from self._hold.rounds(given)):
            releases = [
                ReleaseMany(self._hold.keys_of(group.indexes), self._hold.token, group.expires_at) for group in round_
            ]
            yield all_of(releases, self._limit_s())
        for group in list(self._hold.groups):
            self._hold.forget(group, [index not in indexes for index in group.indexes])

    def _regroup(self) -> Steps:
        """Merge groups from many small rounds into few large ones."""
        groups = self._hold.groups
        if groups:
            ends = [group.expires_at for group in groups if group.expires_at is not None]
            held = sorted(index for group in groups for index in group.indexes)
            rounds = yield from self._rounds(held)
            end = min(ends) if ends else None
            self._hold.groups = [Group(window, end) for windows in rounds for window in windows]

    def _rounds(self, indexes: Indexes) -> Steps:
        """Cut into rounds of windows. A window has locks of one server; a round, at most one window of each server."""
        if not indexes:
            return []
        parts: Sequence[Sequence[int]] = yield Split(self._hold.keys_of(indexes))
        if len(parts) == 1 and len(indexes) <= _WINDOW:
            return [[indexes]]
        windows = [
            [[indexes[i] for i in part[at : at + _WINDOW]] for at in range(0, len(part), _WINDOW)] for part in parts
        ]
        if self._plan.all_or_nothing:
            return [[window] for of_server in windows for window in of_server]
        return [[window for window in round_ if window] for round_ in zip_longest(*windows)]
