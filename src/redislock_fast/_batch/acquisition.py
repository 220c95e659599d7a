"""How a batch of locks is acquired, under one token for all.

- Windows: a fixed number of requests at most is under way to each server at once, whatever the number of names.
- While other locks are waited for, the leases of held locks are extended, so that the batch is returned with fresh
  leases.
- All or nothing: locks are waited for in the order of their keys, and only the locks before the one that is waited for
  are held. So there is no deadlock: of all waiting batches, the one that waits for the last key waits for none of the
  others. Servers are asked one after the other, so that mostly one of two batches with the same locks gets all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from redislock_fast._batch.plan import BatchLease, Group, Indexes
from redislock_fast._lease.metrics import waiting_of
from redislock_fast._protocol.commands import Acquire, Reacquire
from redislock_fast._protocol.pipeline import InBulk, Pipeline, ReleasePipeline
from redislock_fast._protocol.steps import Do, Steps, all_of
from redislock_fast._queue.waiters import Grant
from redislock_fast._queue.waiting import POLL, Waiting, log_wait_if_long
from redislock_fast._util.times import Limit, clock

_WINDOW = 1024
"""How many requests may be under way to one server at once: more would not be faster."""

_FRESH = 0.75
"""The part of each lease that must be left when the batch is returned."""


class AcquirePipeline(InBulk):
    """Take the locks that are free, all under one token.

    `results` says which are ours. `sent_at` is the time of the first request: all leases count from there.
    """

    def __init__(self, keys: list[bytes], token: bytes, ttl_ms: int | None) -> None:
        super().__init__(keys, token)
        self._ttl_ms = ttl_ms

    @property
    def sent_at(self) -> float:
        """The time of the first request."""
        return self._template.sent_at if isinstance(self._template, Acquire) else 0.0

    def _new_machine(self, key: bytes) -> Acquire:
        return Acquire(key, self._token, self._ttl_ms)

    def takes(self) -> list[tuple[bytes, bytes]]:
        return [(key, self._token) for key in self._keys]

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:
        # The locks that are ours, if the caller gets an error, and those that an attempt of unknown outcome may make
        # ours.
        return [
            (key, self._token)
            for key, ours in zip(self._keys, self.results, strict=True)
            if (failed if ours else self.unsettled)
        ]


def acquire_locks(lease: BatchLease) -> Steps:
    """Acquire the locks of the plan. Returns the indexes of the locks that were missed.

    If it raises, `lease` has all locks that may be held, for the caller to clean up.
    """
    acquisition = _Acquisition(lease)
    steps = acquisition.all_or_nothing() if lease.plan.all_or_nothing else acquisition.what_is_free()
    return _logged(lease, steps) if lease.plan.logs_calls and lease.plan.names else steps


def _logged(lease: BatchLease, steps: Steps) -> Steps:
    """Have the log of calls tell how the steps end."""
    plan, since = lease.plan, clock()
    try:
        missed: list[int] = yield from steps
    except Exception as error:
        plan.report_call("did not acquire {} for", plan.names, clock() - since, None, type(error).__name__)
        raise
    lease.acquired_at = clock()
    others = set(range(len(plan.names)) if missed and plan.all_or_nothing else missed)
    acquired = [name for index, name in enumerate(plan.names) if index not in others]
    if acquired:
        more = f"{len(others)} missed" if others else ""
        plan.report_call("acquired {} after", acquired, lease.acquired_at - since, lease.token, more)
    else:
        plan.report_call("did not acquire {} for", plan.names, lease.acquired_at - since, None)
    return missed


class _Acquisition:
    """The rounds of one acquire; `lease` is what is held so far."""

    def __init__(self, lease: BatchLease) -> None:
        self._lease = lease
        self._plan = lease.plan
        wait_s = self._plan.blocking_timeout
        self._deadline = None if wait_s is None else clock() + wait_s
        self._bounded = wait_s is not None and wait_s > 0
        self._limit = Limit(None)  # of the lock that is waited for now
        self._round_s = 0.0  # how long the last round took: the next one is to end by the deadline

    # ---- the two ways ----

    def what_is_free(self) -> Steps:
        """Acquire the locks that are free, in rounds. Returns the indexes of the locks that were missed."""
        missed = yield from self._round(range(len(self._plan.keys)))
        missed += yield from self._refresh()
        if not missed or self._time_is_up():
            return missed
        with waiting_of(self._plan, self._plan.names[missed[0]], "polling", self._lease.token):
            while missed and not self._time_is_up():
                yield from self._pause(missed[0])
                missed = yield from self._round(sorted(missed))
                missed += yield from self._refresh()
        yield from self._regroup()
        return missed

    def all_or_nothing(self) -> Steps:
        """Acquire all locks, in the order of their keys: while one is waited for, only those before it are held.

        Returns the indexes of the locks that were missed; where there are any, no lock is held.
        """
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
                granted, missed = yield from self._wait_in_queue(order[held])
                missed += yield from self._refresh()
                if not missed and not granted:
                    missed = yield from self._round([order[held]])
            held += 1
        yield from self._regroup()
        return []

    # ---- their steps ----

    def _left_s(self) -> float | None:
        """How many seconds are left until the last round must begin; None: there is no deadline."""
        return None if self._deadline is None else max(self._deadline - self._round_s - clock(), 0.0)

    def _time_is_up(self) -> bool:
        return self._left_s() == 0.0

    def _wait_in_queue(self, index: int) -> Steps:
        """Wait for a lock in its queue, by a ticket. Returns whether it is held then, and the indexes of lost locks.

        The leases of the other locks are extended meanwhile. Where one of those is lost, it waits no longer.
        """
        lease, key, ttl_ms = self._lease, self._plan.keys[index], self._plan.ttl_ms
        lost: list[int] = []

        def refresh() -> Steps:
            lost.extend((yield from self._refresh(group)))
            return bool(lost)

        self._limit.go_on(self._left_s())
        token, interval_s = lease.new_token(key), self._pause_s()
        waiting = Waiting(key, token, ttl_ms, interval_s, self._limit, lease.token, refresh=refresh)
        lease.groups.append(group := Group([index], None))  # from here on, every error cleans both up
        lease.waiting = waiting
        with waiting_of(self._plan, self._plan.names[index], "queue", lease.token) as wait:
            outcome = yield from waiting.steps()
            lease.waiting = None
            if wait is not None:
                wait.mode = "polling" if outcome is POLL else "tracking" if waiting.tracks else "queue"
                wait.handed_over = type(outcome) is Grant and not waiting.tracks
            if type(outcome) is Grant:
                group.expires_at = None if ttl_ms is None else outcome.since + ttl_ms / 1000
                return True, lost
            lease.groups.remove(group)
            if outcome is POLL:
                yield from self._pause(index)
        return False, lost

    def _pause_s(self) -> float:
        """The pause before the next round: no held lock expires meanwhile, and the last round ends by the deadline."""
        pause_s, left_s = self._plan.sleep, self._left_s()
        if self._plan.ttl_ms is not None and self._lease.groups:
            pause_s = min(pause_s, self._plan.ttl_ms / 4000)
        return pause_s if left_s is None else min(pause_s, left_s)

    def _pause(self, index: int) -> Steps:
        """Pause before the next round, since this lock, at least, is another owner's."""
        self._limit.begin_wait()
        yield from log_wait_if_long(self._plan.keys[index], self._limit)
        yield Do("sleep", self._pause_s())

    def _limit_s(self) -> float | None:
        """How many seconds an operation may take; None for no limit."""
        return max(self._deadline - clock(), 0.0) if self._bounded and self._deadline is not None else None

    def _round(self, indexes: Indexes) -> Steps:
        """Ask once for each of these locks. Returns the indexes of the locks that others hold."""
        missed: list[int] = []
        ttl_ms = self._plan.ttl_ms
        begun_at = clock()
        for windows in (yield from self._rounds(indexes)):
            groups = [Group(window, None) for window in windows]
            operations = [AcquirePipeline(self._lease.keys_of(window), self._lease.token, ttl_ms) for window in windows]
            self._lease.groups += groups  # before the servers are asked, so that every error cleans them up
            yield all_of(operations, self._limit_s())
            for group, operation in zip(groups, operations, strict=True):
                if ttl_ms is not None:
                    group.expires_at = operation.sent_at + ttl_ms / 1000
                if operation.results.count(True) < len(operation):
                    missed += [i for i, ours in zip(group.indexes, operation.results, strict=True) if not ours]
                    self._lease.forget(group, operation.results)
        self._round_s = clock() - begun_at
        return missed

    def _refresh(self, but: Group | None = None) -> Steps:
        """Extend leases of which less than three quarters are left. Returns the indexes of locks that were lost.

        Args:
            but: a lock that is waited for, and not held yet.
        """
        ttl_ms = self._plan.ttl_ms
        lost: list[int] = []
        if ttl_ms is None:
            return lost
        held = [group for group in self._lease.groups if group is not but]
        if not self._aged(held, ttl_ms):
            return lost
        for round_ in (yield from self._lease.rounds(held)):
            aged = self._aged(round_, ttl_ms)
            if not aged:
                continue
            parts = [
                [Reacquire(key, self._lease.token, ttl_ms) for key in self._lease.keys_of(group.indexes)]
                for group in aged
            ]
            operations = [Pipeline(of_group) for of_group in parts]
            yield all_of(operations, self._limit_s())
            for group, of_group, operation in zip(aged, parts, operations, strict=True):
                lost += [i for i, held in zip(group.indexes, operation.results, strict=True) if not held]
                group.expires_at = min(one.sent_at for one in of_group) + ttl_ms / 1000
                self._lease.forget(group, operation.results)
        return lost

    def _aged(self, groups: list[Group], ttl_ms: int) -> list[Group]:
        least = clock() + _FRESH * ttl_ms / 1000
        return [group for group in groups if group.expires_at is None or group.expires_at <= least]

    def _give_back(self, indexes: set[int]) -> Steps:
        """Release the locks with these indexes that are held."""
        given = [
            Group(held, group.expires_at)
            for group in self._lease.groups
            if (held := [index for index in group.indexes if index in indexes])
        ]
        for round_ in (yield from self._lease.rounds(given)):
            releases = [
                ReleasePipeline(self._lease.keys_of(group.indexes), self._lease.token, group.expires_at)
                for group in round_
            ]
            yield all_of(releases, self._limit_s())
        for group in list(self._lease.groups):
            self._lease.forget(group, [index not in indexes for index in group.indexes])

    def _regroup(self) -> Steps:
        """Merge groups from many small rounds into few large ones."""
        groups = self._lease.groups
        if groups:
            ends = [group.expires_at for group in groups if group.expires_at is not None]
            held = sorted(index for group in groups for index in group.indexes)
            rounds = yield from self._rounds(held)
            end = min(ends) if ends else None
            self._lease.groups = [Group(window, end) for windows in rounds for window in windows]

    def _rounds(self, indexes: Indexes) -> Steps:
        """Returns rounds of windows. A window has locks of one server; a round, at most one window of each server."""
        if not indexes:
            return []
        parts: Sequence[Sequence[int]] = yield Do("split", self._lease.keys_of(indexes))
        if len(parts) == 1 and len(indexes) <= _WINDOW:
            return [[indexes]]
        windows = [
            [[indexes[i] for i in part[at : at + _WINDOW]] for at in range(0, len(part), _WINDOW)] for part in parts
        ]
        if self._plan.all_or_nothing:
            return [[window] for of_server in windows for window in of_server]
        return [[window for window in round_ if window] for round_ in zip_longest(*windows)]
