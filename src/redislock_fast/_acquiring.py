"""How a batch is acquired: rounds of requests, windows, waiting.

- Windows: at most so many requests are under way at once, whatever the number of names.
- Leases are prolonged while others are waited for, so that what is returned is fresh.
- All or nothing: locks are waited for in the order of their keys, and while one is waited for only those before it are
  held. So of any number of batches that wait, the one that waits for the last key waits for nobody who waits.

Must not know: sockets, threads, event loops.
"""

from __future__ import annotations

from redislock_fast._batch import Group, Hold
from redislock_fast._many import AcquireMany, Many, ReleaseMany
from redislock_fast._protocol import Reacquire
from redislock_fast._steps import Execute, Sleep, Split, Steps
from redislock_fast._times import clock

__all__ = ["acquiring"]

_WINDOW = 1024
"""Requests under way at once: about 100 kB, after which a longer window gains nothing."""

_FRESH = 0.75
"""What must be left of a lease that is returned."""


def acquiring(hold: Hold) -> Steps:
    """Acquire what the plan says. Returns the indexes of what was missed.

    If it raises, `hold` has all that may be held: whoever drives it undoes that.
    """
    acquisition = _Acquisition(hold)
    return acquisition.all_or_nothing() if hold.plan.all_or_nothing else acquisition.what_is_free()


class _Acquisition:
    """The rounds of one acquiring; `hold` is what is held so far."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._plan = hold.plan
        wait_s = self._plan.blocking_timeout
        self._deadline = None if wait_s is None else clock() + wait_s
        self._bounded = wait_s is not None and wait_s > 0

    # ---- the two ways ----

    def what_is_free(self) -> Steps:
        """Take what is free, in rounds."""
        missed = yield from self._round(list(range(len(self._plan.keys))))
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
        """Take all, in the order of their keys: while one is waited for, only those before it are held."""
        keys = self._plan.keys
        order = sorted(range(len(keys)), key=keys.__getitem__)
        place = {index: at for at, index in enumerate(order)}
        held = 0  # of the order, how many are held
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
        """Until the next round, but not so long that what is held meanwhile expires."""
        ttl_ms = self._plan.ttl_ms
        if ttl_ms is None or not self._hold.groups:
            return Sleep(self._plan.sleep)
        return Sleep(min(self._plan.sleep, ttl_ms / 4000))

    def _limit_s(self) -> float | None:
        """How long an operation may take."""
        return max(self._deadline - clock(), 0.0) if self._bounded and self._deadline is not None else None

    def _round(self, indexes: list[int]) -> Steps:
        """Ask once for each of these locks. Returns the indexes of those that others hold."""
        missed: list[int] = []
        ttl_ms = self._plan.ttl_ms
        for window in (yield from self._windows(indexes)):
            group = Group(window, None)
            operation = AcquireMany(self._hold.keys_of(group.indexes), self._hold.token, ttl_ms)
            self._hold.groups.append(group)  # before: whatever happens then, it is undone
            yield Execute(operation, self._limit_s())
            if ttl_ms is not None:
                group.expires_at = operation.sent_at + ttl_ms / 1000
            if not all(operation.results):
                missed += [i for i, ours in zip(window, operation.results, strict=True) if not ours]
                self._hold.forget(group, operation.results)
        return missed

    def _refresh(self) -> Steps:
        """Prolong leases of which less than three quarters are left. Returns the indexes of locks that were lost."""
        ttl_ms = self._plan.ttl_ms
        lost: list[int] = []
        if ttl_ms is None:
            return lost
        for group in list(self._hold.groups):
            if group.expires_at is not None and group.expires_at - clock() > _FRESH * ttl_ms / 1000:
                continue
            operations = [Reacquire(key, self._hold.token, ttl_ms) for key in self._hold.keys_of(group.indexes)]
            operation = Many(operations)
            yield Execute(operation, self._limit_s())
            lost += [i for i, held in zip(group.indexes, operation.results, strict=True) if not held]
            group.expires_at = min(one.sent_at for one in operations) + ttl_ms / 1000
            self._hold.forget(group, operation.results)
        return lost

    def _give_back(self, indexes: set[int]) -> Steps:
        """Release those of these locks that are held."""
        for group in list(self._hold.groups):
            given = Group([i for i in group.indexes if i in indexes], group.expires_at)
            if given.indexes:
                keys = self._hold.keys_of(given.indexes)
                yield Execute(ReleaseMany(keys, self._hold.token, given.expires_at), self._limit_s())
                self._hold.forget(group, [i not in indexes for i in group.indexes])

    def _regroup(self) -> Steps:
        """What came in many small rounds is kept and given back in few large ones."""
        groups = self._hold.groups
        if groups:
            ends = [group.expires_at for group in groups if group.expires_at is not None]
            held = sorted(index for group in groups for index in group.indexes)
            windows = yield from self._windows(held)
            self._hold.groups = [Group(window, min(ends) if ends else None) for window in windows]

    def _windows(self, indexes: list[int]) -> Steps:
        """Cut into lists that one server has and that are not too long."""
        if not indexes:
            return []
        parts: list[list[int]] = yield Split(list(map(self._plan.keys.__getitem__, indexes)))
        lists = [indexes] if len(parts) == 1 else [[indexes[i] for i in part] for part in parts]
        return [part[at : at + _WINDOW] for part in lists for at in range(0, len(part), _WINDOW)]
