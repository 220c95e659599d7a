"""Many locks acquired, extended and released together: the base of `Batch`, for threads and for asyncio.

A batch has one token for all its locks. Rules of its acquire:

- Windows: a fixed number of requests at most is under way to each server at once, whatever the number of names.
- While other locks are waited for, the leases of held locks are extended, so that the batch is returned with fresh
  leases.
- All or nothing: locks are waited for in the order of their keys, and only the locks before the one that is waited for
  are held. So there is no deadlock: of all waiting batches, the one that waits for the last key waits for none of the
  others. Servers are asked one after the other, so that mostly one of two batches with the same locks gets all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._procedures.steps import Sleep, Split, Steps, all_of
from redislock_fast._procedures.waiters import Grant
from redislock_fast._procedures.waiting import POLL, Waiting
from redislock_fast._protocol.commands import Extend, Reacquire
from redislock_fast._protocol.pipeline import AcquirePipeline, Pipeline, ReleasePipeline
from redislock_fast._util import fork
from redislock_fast._util.times import Limit, added_ms, clock, poll_seconds, ttl_ms_of, wait_seconds
from redislock_fast._util.tokens import new_token

__all__ = ["BatchBase", "BatchLease", "Group", "Indexes", "Name", "Plan", "acquiring"]

Name: TypeAlias = "str | bytes"

Indexes: TypeAlias = "list[int] | range"
"""The places of locks among a batch's names. A range means all of them, and saves looking each of them up."""


class Plan:
    """The checked parameters of an acquire.

    Args:
        names: the names of the locks.
        keys_of: gives the names' keys, and whether different names certainly have different keys.
        timeout: the ttl in seconds; None or 0: the locks do not expire.
        blocking_timeout: how long to wait at most, in seconds; None: for ever; 0 or less: one round.
        sleep: how long to sleep between two rounds, in seconds.
        all_or_nothing: whether to acquire all locks or none.

    Raises:
        TypeError: `names` is one str or bytes.
        ValueError: a name comes twice; or an impossible time.
    """

    def __init__(
        self,
        names: Iterable[Name],
        keys_of: Callable[[Sequence[Any]], tuple[list[bytes], bool]],
        timeout: float | None,
        blocking_timeout: float | None,
        sleep: float,
        all_or_nothing: bool,
    ) -> None:
        if isinstance(names, (str, bytes)):
            raise TypeError("names is an iterable of names, not a single one")
        self.names = list(names)
        self.keys, injective = keys_of(self.names)
        # Hot path: one dict finds names that come twice, and is the result of every operation that succeeds for all.
        self.all_held: dict[Name, bool] = dict.fromkeys(self.names, True)
        if len(self.all_held if injective else set(self.keys)) != len(self.keys):
            seen: set[bytes] = set()
            again = next(key for key in self.keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"{again!r} is among the names more than once")
        self.timeout = timeout
        self.ttl_ms = ttl_ms_of(timeout)
        self.sleep = poll_seconds(sleep)
        self.blocking_timeout = None if blocking_timeout is None else wait_seconds(blocking_timeout, "blocking_timeout")
        self.all_or_nothing = all_or_nothing


class Group:
    """The held locks of one server, at most a window of them.

    Attributes:
        indexes: their places among the batch's names.
        expires_at: until when all their leases are certainly valid, in the clock's seconds; None: they do not expire.
        doubtful: whether a release of unknown outcome was sent while they were valid.
    """

    def __init__(self, indexes: Indexes, expires_at: float | None) -> None:
        self.indexes = indexes
        self.expires_at = expires_at
        self.doubtful = False


class BatchLease:
    """The locks that a batch holds: its token, and groups of locks. To be used by one thread or task at a time.

    Attributes:
        waiting: in the queue of a lock of the batch, by a ticket; None where the batch does not wait.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.token = new_token()
        self.groups: list[Group] = []
        self.waiting: Waiting | None = None
        self._generation = fork.generation

    def live_groups(self) -> list[Group]:
        """The groups; none in a forked child, which holds nothing of its parent's locks."""
        if self._generation != fork.generation:
            self.groups, self.waiting = [], None
        return self.groups

    def keys_of(self, indexes: Indexes) -> list[bytes]:
        """The locks' keys."""
        keys = self.plan.keys
        return keys if type(indexes) is range else list(map(keys.__getitem__, indexes))

    def entries(self) -> list[tuple[bytes, bytes]]:
        """The keys and the token of all held locks, and a ticket, for a cleanup."""
        keys = self.plan.keys
        held = [(keys[index], self.token) for group in self.live_groups() for index in group.indexes]
        waiting = self.waiting
        return held if waiting is None or not waiting.queues else [(waiting.key, waiting.token), *held]

    def doubt(self) -> None:
        """Note that all held locks are being released with unknown outcome."""
        now = clock()
        for group in self.live_groups():
            group.doubtful = group.expires_at is None or now < group.expires_at

    def forget(self, group: Group, results: list[bool]) -> None:
        """Drop the locks of a group that were lost."""
        self.keep(group, [at for at, held in enumerate(results) if held])

    def keep(self, group: Group, places: list[int]) -> None:
        """Drop all locks of a group but those at these places."""
        if len(places) == len(group.indexes):
            return
        if places:
            group.indexes = [group.indexes[at] for at in places]
        else:
            self.groups.remove(group)

    def rounds(self, groups: list[Group]) -> Steps:
        """Returns the groups in rounds: lists of groups of different servers, which are asked at the same time."""
        if len(groups) < 2:
            return [[*groups]] if groups else []
        parts = yield Split([self.plan.keys[group.indexes[0]] for group in groups])
        return [[groups[at] for at in round_ if at is not None] for round_ in zip_longest(*parts)]


class BatchBase:
    """The base of both `Batch` classes, which describe its attributes."""

    def __init__(self, lease: BatchLease, missed: list[int]) -> None:
        self._lease = lease
        names = lease.plan.names
        self._in_the_way = [names[index] for index in sorted(set(missed))]
        self.missed: list[Name] = self._in_the_way[:]
        self.acquired: list[Name] = names[:]
        if missed and lease.plan.all_or_nothing:
            self.missed, self.acquired = names[:], []
        elif missed:
            others = set(missed)
            self.acquired = [name for index, name in enumerate(names) if index not in others]

    def _result(self, verdicts: list[tuple[Indexes, list[bool]]]) -> dict[Name, bool]:
        """The verdicts by name, in the order given."""
        names = self._lease.plan.names
        if len(verdicts) == 1:
            indexes, results = verdicts[0]
            if type(indexes) is range and results.count(True) == len(results):
                return self._lease.plan.all_held.copy()
            of_these = names if type(indexes) is range else map(names.__getitem__, indexes)
            return dict(zip(of_these, results, strict=True))
        pairs = [pair for indexes, results in verdicts for pair in zip(indexes, results, strict=True)]
        return {names[index]: result for index, result in sorted(pairs)}

    def _check_entry(self) -> None:
        if self._lease.plan.all_or_nothing and self._in_the_way:
            first: Any = self._in_the_way[0]  # may be bytes, as in the errors of a lock with such a name
            raise LockError("Unable to acquire all locks within the time specified", lock_name=first)

    def _check_exit(self, results: dict[Name, bool]) -> None:
        lost: list[Any] = [name for name, released in results.items() if not released]
        if lost:
            message = f"Cannot release {len(lost)} locks that are no longer owned, such as {lost[0]!r}"
            raise LockNotOwnedError(message, lock_name=lost[0])

    def __repr__(self) -> str:
        """The first name, how many locks are held and for how long. Never the token. Sends nothing."""
        names, groups = self._lease.plan.names, self._lease.live_groups()
        held = sum(len(group.indexes) for group in groups)
        of = f"{names[0]!r} and {len(names) - 1} more" if len(names) > 1 else ", ".join(map(repr, names))
        ends = [group.expires_at for group in groups if group.expires_at is not None]
        left = f", {max(min(ends) - clock(), 0.0):.3f} s left" if ends else ""
        return f"<{type(self).__name__} {of}: {held} of {len(names)} held{left}>"

    # ---- steps ----

    def _releasing(self) -> Steps:
        verdicts: list[tuple[Indexes, list[bool]]] = []
        for groups in (yield from self._lease.rounds(self._lease.live_groups())):
            operations = [
                ReleasePipeline(self._lease.keys_of(group.indexes), self._lease.token, group.expires_at, group.doubtful)
                for group in groups
            ]
            try:
                yield all_of(operations)
            finally:
                for group, operation in zip(groups, operations, strict=True):
                    verdicts.append((group.indexes, operation.results))
                    group.doubtful = operation.unsettled and operation.valid
                    self._lease.keep(group, operation.unfinished)
        return self._result(verdicts)

    def _prolonging(self, verb: str, operation_of: Callable[[bytes, Group], Extend | Reacquire]) -> Steps:
        if self._lease.plan.ttl_ms is None:
            raise LockError(f"Cannot {verb} a batch of locks with no timeout: {self!r}")
        verdicts: list[tuple[Indexes, list[bool]]] = []
        for groups in (yield from self._lease.rounds(self._lease.live_groups())):
            parts = [[operation_of(key, group) for key in self._lease.keys_of(group.indexes)] for group in groups]
            operations = [Pipeline(of_group) for of_group in parts]
            try:
                yield all_of(operations)
            finally:
                for group, of_group, operation in zip(groups, parts, operations, strict=True):
                    verdicts.append((group.indexes, operation.results))
                    self._note_leases(group, of_group, operation)
        return self._result(verdicts)

    def _note_leases(self, group: Group, parts: Sequence[Extend | Reacquire], operation: Pipeline) -> None:
        ttl_s = (self._lease.plan.ttl_ms or 0) / 1000
        if operation.unfinished:
            if operation.unsettled and isinstance(parts[0], Reacquire) and group.expires_at is not None:
                group.expires_at = min(group.expires_at, parts[0].sent_at + ttl_s)
            return
        ends = [
            one.expires_at if isinstance(one, Extend) else one.sent_at + ttl_s
            for one, held in zip(parts, operation.results, strict=True)
            if held
        ]
        group.expires_at = min((end for end in ends if end is not None), default=None)
        self._lease.forget(group, operation.results)

    def _extending(self, additional_time: float) -> Steps:
        add_ms = added_ms(additional_time)
        return self._prolonging(
            "extend", lambda key, group: Extend(key, self._lease.token, add_ms, False, group.expires_at)
        )

    def _reacquiring(self) -> Steps:
        ttl_ms = self._lease.plan.ttl_ms or 0
        return self._prolonging("reacquire", lambda key, _: Reacquire(key, self._lease.token, ttl_ms))


_WINDOW = 1024
"""How many requests may be under way to one server at once: more would not be faster."""

_FRESH = 0.75
"""The part of each lease that must be left when the batch is returned."""


def acquiring(lease: BatchLease) -> Steps:
    """Acquire the locks of the plan. Returns the indexes of the locks that were missed.

    If it raises, `lease` has all locks that may be held, for the caller to clean up.
    """
    acquisition = _Acquisition(lease)
    return acquisition.all_or_nothing() if lease.plan.all_or_nothing else acquisition.what_is_free()


class _Acquisition:
    """The rounds of one acquire; `lease` is what is held so far."""

    def __init__(self, lease: BatchLease) -> None:
        self._lease = lease
        self._plan = lease.plan
        wait_s = self._plan.blocking_timeout
        self._deadline = None if wait_s is None else clock() + wait_s
        self._bounded = wait_s is not None and wait_s > 0
        self._round_s = 0.0  # how long the last round took: the next one is to end by the deadline

    # ---- the two ways ----

    def what_is_free(self) -> Steps:
        """Acquire the locks that are free, in rounds. Returns the indexes of the locks that were missed."""
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
                granted, missed = yield from self._queueing(order[held])
                missed += yield from self._refresh()
                if not missed and not granted:
                    missed = yield from self._round([order[held]])
            held += 1
        yield from self._regroup()
        return []

    # ---- their steps ----

    def _time_is_up(self) -> bool:
        return self._deadline is not None and clock() + self._round_s >= self._deadline

    def _queueing(self, index: int) -> Steps:
        """Wait for a lock in its queue, by a ticket. Returns whether it is held then, and the indexes of lost locks.

        The leases of the other locks are extended meanwhile. Where one of those is lost, it waits no longer.
        """
        lease, key, ttl_ms = self._lease, self._plan.keys[index], self._plan.ttl_ms
        lost: list[int] = []

        def refresh() -> Steps:
            lost.extend((yield from self._refresh(group)))
            return bool(lost)

        limit = Limit(None if self._deadline is None else max(self._deadline - self._round_s - clock(), 0.0))
        waiting = Waiting(key, new_token(), ttl_ms, self._pause().seconds, limit, lease.token, refresh=refresh)
        lease.groups.append(group := Group([index], None))  # from here on, every error cleans both up
        lease.waiting = waiting
        outcome = yield from waiting.steps()
        lease.waiting = None
        if type(outcome) is Grant:
            group.expires_at = None if ttl_ms is None else outcome.since + ttl_ms / 1000
            return True, lost
        lease.groups.remove(group)
        if outcome is POLL:
            yield self._pause()
        return False, lost

    def _longest_pause_s(self) -> float | None:
        """How long a pause may be: no held lock expires meanwhile, and the last round ends by the deadline."""
        pause_s = math.inf
        if self._plan.ttl_ms is not None and self._lease.groups:
            pause_s = self._plan.ttl_ms / 4000
        if self._deadline is not None:
            pause_s = min(pause_s, max(self._deadline - self._round_s - clock(), 0.0))
        return None if pause_s == math.inf else pause_s

    def _pause(self) -> Sleep:
        """The pause before the next round of a batch that polls."""
        longest_s = self._longest_pause_s()
        return Sleep(self._plan.sleep if longest_s is None else min(self._plan.sleep, longest_s))

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
        parts: Sequence[Sequence[int]] = yield Split(self._lease.keys_of(indexes))
        if len(parts) == 1 and len(indexes) <= _WINDOW:
            return [[indexes]]
        windows = [
            [[indexes[i] for i in part[at : at + _WINDOW]] for at in range(0, len(part), _WINDOW)] for part in parts
        ]
        if self._plan.all_or_nothing:
            return [[window] for of_server in windows for window in of_server]
        return [[window for window in round_ if window] for round_ in zip_longest(*windows)]
