"""A held batch: the base of `Batch`, for threads and for asyncio. It is released, extended and reacquired as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._batch.plan import BatchLease, Group, Name, Verdicts
from redislock_fast._protocol.commands import Extend, Reacquire
from redislock_fast._protocol.pipeline import Pipeline, ReleasePipeline
from redislock_fast._protocol.steps import Steps, all_of
from redislock_fast._util.errors import noted, shown
from redislock_fast._util.times import added_ms, clock

_MOST_NAMES = 10
"""How many names an error lists at most."""


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

    def _result(self, verdicts: Verdicts) -> dict[Name, bool]:
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
            error = LockError("Unable to acquire all locks within the time specified", lock_name=first)
            raise noted(error, f"of these locks: {_listed(self._in_the_way)}")

    def _check_exit(self, results: dict[Name, bool]) -> None:
        lost: list[Any] = [name for name, released in results.items() if not released]
        if lost:
            message = f"Cannot release {len(lost)} locks that are no longer owned, such as {shown(lost[0])}"
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

    def _release(self) -> Steps:
        verdicts = yield from self._untold_losses()
        held = self._lease.live_groups()
        watch = self._lease.watch
        if watch is not None:
            watch.end(held)
        for groups in (yield from self._lease.rounds(held)):
            operations = [
                ReleasePipeline(self._lease.keys_of(group.indexes), self._lease.token, group.expires_at, group.doubtful)
                for group in groups
            ]
            try:
                yield all_of(operations)
            finally:
                for group, operation in zip(groups, operations, strict=True):
                    self._note_verdicts(verdicts, group, operation)
                    group.doubtful = operation.unsettled and operation.valid
                    self._lease.keep(group, operation.unfinished)
            yield from self._report_losses(verdicts[-len(groups) :])
        results = self._result(verdicts)
        self._lease.untold = []
        if results:
            lost = list(results.values()).count(False)
            held_s = clock() - self._lease.acquired_at
            more = f"{lost} lost before" if lost else ""
            self._lease.plan.report_call("released {}, held for", [*results], held_s, self._lease.token, more)
        return results

    def _untold_losses(self) -> Steps:
        """Report the losses that a call has found which has raised. Returns their verdicts, to be told by this call."""
        self._lease.live_groups()  # a forked child has none
        untold = self._lease.untold[:]
        yield from self._report_losses(untold)
        return untold

    def _note_verdicts(self, verdicts: Verdicts, group: Group, operation: Pipeline) -> None:
        """Add the verdicts for a group, in which a lost lock stays lost. A later call tells it if this one raises."""
        watch, results = self._lease.watch, operation.results
        if watch is not None:
            results = list(map(watch.held, group.indexes, results))
        verdicts.append((group.indexes, results))
        if results.count(True) < len(results):
            still_open = set(operation.unfinished)
            lost = [index for at, index in enumerate(group.indexes) if not (results[at] or at in still_open)]
            self._lease.untold.append((lost, [False] * len(lost)))

    def _report_losses(self, verdicts: Verdicts) -> Steps:
        """Report the locks of each group that were found to be lost."""
        watch = self._lease.watch
        if watch is not None:
            for indexes, results in verdicts:
                yield from watch.report_losses(
                    [index for index, held in zip(indexes, results, strict=True) if not held]
                )

    def _prolong(
        self, verb: str, new_ttl_ms: int | None, operation_of: Callable[[bytes, Group], Extend | Reacquire]
    ) -> Steps:
        if self._lease.plan.ttl_ms is None:
            raise LockError(f"Cannot {verb} a batch of locks with no timeout: {self!r}")
        verdicts = yield from self._untold_losses()
        watch = self._lease.watch
        for groups in (yield from self._lease.rounds(self._lease.live_groups())):
            with contextlib.nullcontext() if watch is None else watch.prolonged(groups, new_ttl_ms):
                parts = [[operation_of(key, group) for key in self._lease.keys_of(group.indexes)] for group in groups]
                operations = [Pipeline(of_group) for of_group in parts]
                try:
                    yield all_of(operations)
                finally:
                    for group, of_group, operation in zip(groups, parts, operations, strict=True):
                        self._note_verdicts(verdicts, group, operation)
                        self._note_leases(group, of_group, operation)
                        if watch is not None:
                            watch.note_request(group)
            yield from self._report_losses(verdicts[-len(groups) :])
        results = self._result(verdicts)
        self._lease.untold = []
        return results

    def _note_leases(self, group: Group, parts: Sequence[Extend | Reacquire], operation: Pipeline) -> None:
        ttl_s = (self._lease.plan.ttl_ms or 0) / 1000
        if operation.unfinished:  # the server has executed it for some of the locks, or may have
            if isinstance(parts[0], Reacquire) and parts[0].sent_at and group.expires_at is not None:
                group.expires_at = min(group.expires_at, parts[0].sent_at + ttl_s)
            return
        ends = [
            one.expires_at if isinstance(one, Extend) else one.sent_at + ttl_s
            for one, held in zip(parts, operation.results, strict=True)
            if held
        ]
        group.expires_at = min((end for end in ends if end is not None), default=None)
        self._lease.forget(group, operation.results)

    def _extend(self, additional_time: float) -> Steps:
        add_ms = added_ms(additional_time)
        return self._prolong(
            "extend", None, lambda key, group: Extend(key, self._lease.token, add_ms, False, group.expires_at)
        )

    def _reacquire(self) -> Steps:
        ttl_ms = self._lease.plan.ttl_ms or 0
        return self._prolong("reacquire", ttl_ms, lambda key, _: Reacquire(key, self._lease.token, ttl_ms))


def _listed(names: list[Name]) -> str:
    """The first of these names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(map(shown, names[:_MOST_NAMES])) + (f" and {more} more" if more > 0 else "")
