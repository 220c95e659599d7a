"""The plan of a batch, which are its checked parameters, and its lease: the held locks, in groups for each server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from redislock_fast._lease.logs import CALL_LOG, knows_whether, logs_calls
from redislock_fast._lease.metrics import report_call
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._queue.waiting import Waiting
from redislock_fast._util import fork
from redislock_fast._util.times import clock, poll_seconds, ttl_ms_of, wait_seconds

Name: TypeAlias = "str | bytes"

Indexes: TypeAlias = "list[int] | range"
"""The places of locks among a batch's names. A range means all of them, and saves looking each of them up."""


Verdicts: TypeAlias = "list[tuple[Indexes, list[bool]]]"
"""Whether locks were held until a call: for each group of one server, the locks and the verdict for each."""


class Plan:
    """The checked parameters of an acquire.

    Args:
        names: the names of the locks.
        keys_of: gives the names' keys, and whether different names certainly have different keys.
        timeout: the ttl in seconds; None or 0: the locks do not expire.
        blocking_timeout: how long to wait at most, in seconds; None: forever; 0 or less: one round.
        sleep: how long to sleep between two rounds, in seconds.
        all_or_nothing: whether to acquire all locks or none.

    Attributes:
        logs_calls: whether the batch's calls are logged.
        observers: of its waits.

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
        self.logs_calls = knows_whether() is not False and logs_calls()
        self.observers = (CALL_LOG,) if self.logs_calls else ()

    def report_call(
        self, what: str, names: Sequence[Name], seconds: float, token: bytes | None, more: str = ""
    ) -> None:
        """Report a call about these locks for the log of calls, where that is on; see `CallLog`."""
        if self.logs_calls:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            report_call(self, what.format("{}" + others), names[0], seconds, token, more)


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

    Args:
        plan: what to acquire.
        new_token: draws a token for the requests about one lock, or about all.

    Attributes:
        waiting: in the queue of a lock of the batch, by a ticket; None where the batch does not wait.
        untold: the locks that a call has found lost which has then raised, so that its caller does not know.
        watch: a `BatchWatch`: the leases of the locks; None where the batch is held without options.
    """

    def __init__(self, plan: Plan, new_token: Callable[..., bytes]) -> None:
        self._generation = fork.generation()  # before a token is drawn
        self.plan = plan
        self.new_token = new_token
        self.token = new_token()
        self.groups: list[Group] = []
        self.acquired_at = 0.0  # when it was acquired, by the clock: for the log of calls
        self.waiting: Waiting | None = None
        self.untold: Verdicts = []
        self.watch: Any = None

    def live_groups(self) -> list[Group]:
        """The groups; none in a forked child, which holds nothing of its parent's locks."""
        if self._generation != fork.generation():
            self.groups, self.waiting, self.untold, self.watch = [], None, [], None
        if self.watch is not None:
            self.watch.note_renewals(self.groups)
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
        return held if waiting is None else [(waiting.key, waiting.token), *held]

    def given_up(self) -> list[tuple[bytes, bytes]]:
        """`entries` of a batch that its caller does not get, or gives up. Nothing is renewed any more."""
        if self.watch is not None:
            self.watch.end(self.groups)
        return self.entries()

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
        parts = yield Do("split", [self.plan.keys[group.indexes[0]] for group in groups])
        return [[groups[at] for at in round_ if at is not None] for round_ in zip_longest(*parts)]
