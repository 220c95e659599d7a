"""Many locks held, extended and released together: the base of `Batch`, for threads and for asyncio.

Each operation is a generator of steps (`steps.py`). `acquiring.py` acquires the locks.

A batch has one token of its own, by which its locks' values tell that it holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._procedures.steps import Split, Steps, all_of
from redislock_fast._protocol.commands import Extend, Reacquire
from redislock_fast._protocol.pipeline import Many, ReleaseMany
from redislock_fast._util import fork
from redislock_fast._util.times import added_ms, clock, poll_seconds, ttl_ms_of, wait_seconds
from redislock_fast._util.tokens import new_token

__all__ = ["BatchBase", "Group", "Hold", "Indexes", "Name", "Plan"]

Name: TypeAlias = "str | bytes"

Indexes: TypeAlias = "list[int] | range"
"""The places of locks among a batch's names. A range means all of them, and saves looking each of them up."""


class Plan:
    """The checked parameters of an acquire.

    Args:
        names: of the locks.
        keys_of: gives the names' keys, and whether names that differ have different keys for certain.
        timeout: the ttl in seconds; None or 0: they do not expire.
        blocking_timeout: how long to wait at most, in seconds; None: for ever; 0 or less: one round.
        sleep: how long to sleep between two rounds, in seconds.
        all_or_nothing: whether to take all locks or none.

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
        # Shows whether a name comes twice, and is the result of every operation that succeeds for all: made once, this
        # takes half of the time of a set here and a dict there.
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
    """Held locks of one server, at most a window of them.

    Attributes:
        indexes: their places among the batch's names.
        expires_at: until when all their leases are certainly valid, in the clock's seconds; None: they do not expire.
        doubtful: whether a release of unknown outcome left while they were valid.
    """

    def __init__(self, indexes: Indexes, expires_at: float | None) -> None:
        self.indexes = indexes
        self.expires_at = expires_at
        self.doubtful = False


class Hold:
    """The locks that a batch holds: its token, and groups of locks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.token = new_token()
        self.groups: list[Group] = []
        self._generation = fork.generation

    def live_groups(self) -> list[Group]:
        """The groups; none in a forked child, which holds nothing of its parent's locks."""
        if self._generation != fork.generation:
            self.groups = []
        return self.groups

    def keys_of(self, indexes: Indexes) -> list[bytes]:
        """The locks' keys."""
        keys = self.plan.keys
        return keys if type(indexes) is range else list(map(keys.__getitem__, indexes))

    def entries(self) -> list[tuple[bytes, bytes]]:
        """The keys and the token of all held locks, for a cleanup."""
        keys = self.plan.keys
        return [(keys[index], self.token) for group in self.live_groups() for index in group.indexes]

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
        """Returns the groups in rounds: lists of groups of different servers, which are asked at once."""
        if len(groups) < 2:
            return [[*groups]] if groups else []
        parts = yield Split([self.plan.keys[group.indexes[0]] for group in groups])
        return [[groups[at] for at in round_ if at is not None] for round_ in zip_longest(*parts)]


class BatchBase:
    """The base of both `Batch` classes, which describe its attributes."""

    def __init__(self, hold: Hold, missed: list[int]) -> None:
        self._hold = hold
        names = hold.plan.names
        self.missed: list[Name] = []
        self.acquired: list[Name] = names[:] if hold.groups else []
        if missed:
            gone = set(missed)
            self.missed = [names[index] for index in sorted(gone)]
            if hold.groups:
                self.acquired = [name for index, name in enumerate(names) if index not in gone]

    def _result(self, verdicts: list[tuple[Indexes, list[bool]]]) -> dict[Name, bool]:
        """The verdicts by name, in the order given."""
        names = self._hold.plan.names
        if len(verdicts) == 1:
            indexes, results = verdicts[0]
            if type(indexes) is range and results.count(True) == len(results):
                return self._hold.plan.all_held.copy()
            of_these = names if type(indexes) is range else map(names.__getitem__, indexes)
            return dict(zip(of_these, results, strict=True))
        pairs = [pair for indexes, results in verdicts for pair in zip(indexes, results, strict=True)]
        return {names[index]: result for index, result in sorted(pairs)}

    def _check_entry(self) -> None:
        if self._hold.plan.all_or_nothing and self.missed:
            first: Any = self.missed[0]  # may be bytes, as in the errors of a lock with such a name
            raise LockError("Unable to acquire all locks within the time specified", lock_name=first)

    def _check_exit(self, results: dict[Name, bool]) -> None:
        lost: list[Any] = [name for name, released in results.items() if not released]
        if lost:
            message = f"Cannot release {len(lost)} locks that are no longer owned, {lost[0]!r} among them"
            raise LockNotOwnedError(message, lock_name=lost[0])

    # ---- steps ----

    def _releasing(self) -> Steps:
        verdicts: list[tuple[Indexes, list[bool]]] = []
        for groups in (yield from self._hold.rounds(self._hold.live_groups())):
            operations = [
                ReleaseMany(self._hold.keys_of(group.indexes), self._hold.token, group.expires_at, group.doubtful)
                for group in groups
            ]
            try:
                yield all_of(operations)
            finally:
                for group, operation in zip(groups, operations, strict=True):
                    verdicts.append((group.indexes, operation.results))
                    group.doubtful = operation.unsettled and operation.valid
                    self._hold.keep(group, operation.unfinished)
        return self._result(verdicts)

    def _prolonging(self, verb: str, operation_of: Callable[[bytes, Group], Extend | Reacquire]) -> Steps:
        if self._hold.plan.ttl_ms is None:
            raise LockError(f"Cannot {verb} a batch of locks with no timeout")
        verdicts: list[tuple[Indexes, list[bool]]] = []
        for groups in (yield from self._hold.rounds(self._hold.live_groups())):
            machines = [[operation_of(key, group) for key in self._hold.keys_of(group.indexes)] for group in groups]
            operations = [Many(of_group) for of_group in machines]
            try:
                yield all_of(operations)
            finally:
                for group, of_group, operation in zip(groups, machines, operations, strict=True):
                    verdicts.append((group.indexes, operation.results))
                    self._note_leases(group, of_group, operation)
        return self._result(verdicts)

    def _note_leases(self, group: Group, machines: Sequence[Extend | Reacquire], operation: Many) -> None:
        ttl_s = (self._hold.plan.ttl_ms or 0) / 1000
        if operation.unfinished:
            if operation.unsettled and isinstance(machines[0], Reacquire) and group.expires_at is not None:
                group.expires_at = min(group.expires_at, machines[0].sent_at + ttl_s)
            return
        ends = [
            one.expires_at if isinstance(one, Extend) else one.sent_at + ttl_s
            for one, held in zip(machines, operation.results, strict=True)
            if held
        ]
        group.expires_at = min((end for end in ends if end is not None), default=None)
        self._hold.forget(group, operation.results)

    def _extending(self, additional_time: float) -> Steps:
        add_ms = added_ms(additional_time)
        return self._prolonging(
            "extend", lambda key, group: Extend(key, self._hold.token, add_ms, False, group.expires_at)
        )

    def _reacquiring(self) -> Steps:
        ttl_ms = self._hold.plan.ttl_ms or 0
        return self._prolonging("reacquire", lambda key, _: Reacquire(key, self._hold.token, ttl_ms))
