"""`Metrics`: the calls by which a lock reports its acquisitions, failures, losses and releases.

An object that is installed here gets the reports of all locks of the process that are made from then on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from redislock_fast._lease.logs import CALL_LOG
from redislock_fast._util import fork
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._util.errors import LossReason

logger = logging.getLogger(__name__)

_FAILED = "metrics failed."

WaitMode: TypeAlias = Literal["queue", "tracking", "polling", "client", "local"]
"""How an acquire waits: in the lock's queue; until the server tells of a change of the key; by attempts; by attempts of
the client's own; for another caller of this process that has the lock with `linger`.
"""

installed: list[Any] = []
"""What gets the reports of all locks beside their own `metrics`. Each may have any of the methods of `Observer`.

A lock takes them when it is made: locks that exist already are not affected.
"""


def install(observer: Any) -> None:
    """Have an object get the reports of all locks that are made from now on, once."""
    if observer not in installed:
        installed.append(observer)


def uninstall(observer: Any) -> None:
    """Have an object get no reports of locks that are made from now on."""
    if observer in installed:
        installed.remove(observer)


class Metrics(Protocol):
    """Gets each acquisition and each release of a lock.

    Called after the server's reply, by the thread or in the event loop that acquires or releases, and by many threads
    at once. An implementation must be quick, and must neither block nor raise.
    """

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """A lock was acquired.

        Args:
            name: the lock's name, as it was given to the lock.
            seconds: from the call until the lock was acquired, waiting included.
            attempts: the number of attempts; 1 where the lock was free.
        """

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """A lock was released.

        Args:
            name: the lock's name, as it was given to the lock.
            hold_s: from the acquire to the release, in seconds.
            success: False where the lock was lost before: it expired, was deleted, or has another owner.
        """


class FailureMetrics(Metrics, Protocol):
    """Gets failures and losses, too. A lock calls these methods where its `metrics` has them."""

    def record_failure(self, name: str | bytes, seconds: float, attempts: int, error: BaseException | None) -> None:
        """A lock was not acquired.

        Args:
            name: the lock's name, as it was given to the lock.
            seconds: from the call until it was given up, waiting included.
            attempts: the number of attempts.
            error: what `acquire` raised, also KeyboardInterrupt or CancelledError; None where it returned False, since
                another owner had the lock.
        """

    def record_loss(self, name: str | bytes, hold_s: float, reason: LossReason) -> None:
        """A lock was found to be lost: by the clock, by a renewal, or by a release or extend.

        A release of a lost lock is recorded by `record_release`, too.

        Args:
            name: the lock's name, as it was given to the lock.
            hold_s: from the acquire until the loss was found out, in seconds.
            reason: why.
        """


class Observer(FailureMetrics, Protocol):
    """Gets all reports of a lock: what an object may have that observes the locks of the process."""

    def record_holding(self, name: str | bytes, serial: int, held: bool) -> None:
        """A lock is held from now on, or not any more. After an interrupt, the end may be reported twice, or alone.

        A holding begins with an acquisition or an `attach`. It ends with a release, a loss or a `detach`, and where the
        lock object is dropped.

        Args:
            name: the lock's name, as it was given to the lock.
            serial: names this holding.
            held: whether it begins.
        """

    def record_skip(self, name: str | bytes, seconds: float) -> None:
        """A run of `once` was skipped, since another owner has its lock. It is not reported as a failure.

        Args:
            name: the lock's name, as it was given to the lock.
            seconds: from the call until that was known.
        """

    def record_wait_started(self, name: str | bytes, serial: int) -> None:
        """An acquire begins to wait: another owner has the lock.

        Args:
            name: the lock's name, as it was given to the lock.
            serial: names this wait.
        """

    def record_wait_ended(self, name: str | bytes, serial: int, mode: WaitMode, handed_over: bool) -> None:
        """An acquire does not wait any more. After an interrupt, that may be reported twice, or alone.

        Args:
            name: the lock's name, as it was given to the lock.
            serial: names this wait.
            mode: how it has waited at last.
            handed_over: whether it was given the lock by the one that had it.
        """

    def record_renewal_failure(self, name: str | bytes) -> None:
        """A renewal has got no reply. It is tried again until the lease ends."""


class Holdings(Protocol):
    """What an observer does with the holdings of locks of one name, found once: a lock is held again and again."""

    @property
    def begin(self) -> Callable[[int], object]:
        """Counts the holding of this serial; see `Observer.record_holding`."""

    @property
    def end(self) -> Callable[[int], object]:
        """Counts the holding of this serial no more."""

    @property
    def acquired(self) -> Callable[[float], object]:
        """Records the seconds from the call of `acquire` until the lock was acquired."""

    @property
    def released(self) -> Callable[[float], object]:
        """Records the seconds for which the lock was held."""


class ObserverByKind:
    """An object to install that has another one get the reports of semaphores.

    Attributes:
        of_semaphores: that object.
    """

    of_semaphores: Any

    def holdings_of(self, name: str | bytes) -> Holdings | None:  # noqa: ARG002
        """What gets the reports of the holdings of a lock of this name; None: this object, by `Observer`'s methods."""
        return None


def of_semaphore(observers: tuple[Any, ...]) -> tuple[Any, ...]:
    """What gets the reports of a semaphore's permits where these objects get those of a lock."""
    return tuple(one.of_semaphores if isinstance(one, ObserverByKind) else one for one in observers)


next_serial = itertools.count(1).__next__
"""Returns a new name for a holding or a wait. A forked child goes on from its parent's."""

_later: deque[tuple[Iterable[Any], str, tuple[Any, ...]]] = deque()
fork.on_fork(_later.clear)


def report_later(observers: Iterable[Any], method: str, *args: Any) -> None:
    """Report along with the next report. For finalizers, which may interrupt an observer that holds its own lock."""
    _later.append((observers, method, args))


def report(observers: Iterable[Any], method: str, *args: Any) -> None:
    """Call a method of each object that has it. An error is logged: it must not cost the lock."""
    if _later:
        report_waiting()
    _call(observers, method, args)


def report_waiting() -> None:
    """Make the reports that were left to the next one."""
    while _later:
        with contextlib.suppress(IndexError):  # another thread was faster
            _call(*_later.popleft())


def report_end_later(counted: Counted) -> None:
    """`report_later` of the end of a holding."""
    reports, serial = counted
    _later.append(((reports,), "end", (serial,)))


def _call(observers: Iterable[Any], method: str, args: tuple[Any, ...]) -> None:
    for observer in observers:
        call = getattr(observer, method, None)
        if call is not None:
            try:
                call(*args)
            except Exception:
                logger.exception(_FAILED)


class Reports:
    """The reports of the holdings of one lock. `Options.reports_of` makes them.

    Args:
        observers: what gets them.
        name: of the lock, as it was given to it.

    Attributes:
        is_whole: whether all observers have given what they do with the holdings: one may have failed.
    """

    __slots__ = ("_holdings", "_others", "is_whole", "name")

    def __init__(self, observers: Iterable[Any], name: str | bytes) -> None:
        self.name = name
        self.is_whole = True
        self._holdings: list[Holdings] = []
        self._others: list[Any] = []
        for observer in observers:
            try:
                holdings = observer.holdings_of(name) if isinstance(observer, ObserverByKind) else None
            except Exception:
                logger.exception(_FAILED)
                self.is_whole = False
            else:
                if holdings is None:
                    self._others.append(observer)
                else:
                    self._holdings.append(holdings)

    def begin(self, counting: _Counting, waited_s: float | None, attempts: int) -> None:
        """Have observers count the lock as held, and report its acquisition.

        Args:
            counting: what is held.
            waited_s: from the call of `acquire` until the lock was acquired, in seconds; None: it was attached.
            attempts: the number of attempts.
        """
        if counting.counted is not None:  # an interrupt came before its end was reported
            report_end_later(counting.counted)
        serial = next_serial()
        counting.counted = (self, serial)
        if _later:
            report_waiting()
        for holdings in self._holdings:
            try:
                holdings.begin(serial)
                if waited_s is not None:
                    holdings.acquired(waited_s)
            except Exception:
                logger.exception(_FAILED)
        if self._others:
            _call(self._others, "record_holding", (self.name, serial, True))
            if waited_s is not None:
                _call(self._others, "record_acquisition", (self.name, waited_s, attempts))

    def end(self, serial: int) -> None:
        """Report that the lock is not held any more."""
        for holdings in self._holdings:
            try:
                holdings.end(serial)
            except Exception:
                logger.exception(_FAILED)
        if self._others:
            _call(self._others, "record_holding", (self.name, serial, False))

    def released(self, counting: _Counting, hold_s: float, success: bool) -> None:
        """Report a release, and have observers count the lock as held no more; see `Metrics.record_release`."""
        if _later:
            report_waiting()
        counted = counting.counted
        serial = None if counted is None else counted[1]
        for holdings in self._holdings:
            try:
                if serial is not None:
                    holdings.end(serial)
                holdings.released(hold_s)
            except Exception:
                logger.exception(_FAILED)
        if self._others:
            _call(self._others, "record_release", (self.name, hold_s, success))
            if serial is not None:
                _call(self._others, "record_holding", (self.name, serial, False))
        counting.counted = None  # last: after an interrupt before, the end is reported again


Counted: TypeAlias = tuple[Reports, int]
"""What counts a holding: the reports, and the serial that they were given."""


class _Counting(Protocol):
    """A holding or a lease.

    Attributes:
        counted: what counts the lock as held; None: nothing does.
    """

    counted: Counted | None


def end_count(counting: _Counting) -> None:
    """Have observers count a lock as held no more. Any thread may call it, and more than once."""
    counted = counting.counted
    if counted is not None:
        reports, serial = counted
        reports.end(serial)
        counting.counted = None  # last: after an interrupt before, it is reported again


class Wait:
    """A context in which an acquire waits. It reports its start and its end.

    Args:
        observers: what gets the reports.
        name: of the lock.
        mode: how it waits.

    Attributes:
        mode: how it waits by now.
        handed_over: whether the lock was given to it.
    """

    def __init__(self, observers: tuple[Any, ...], name: str | bytes, mode: WaitMode) -> None:
        self._observers = observers
        self._name = name
        self._serial = 0
        self.mode = mode
        self.handed_over = False

    def __enter__(self) -> Wait:
        self._serial = serial = next_serial()
        report(self._observers, "record_wait_started", self._name, serial)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(report_later if kind is GeneratorExit else report)  # the garbage collector drops the task

    def _end(self, send: Callable[..., None]) -> None:
        send(self._observers, "record_wait_ended", self._name, self._serial, self.mode, self.handed_over)
        self._serial = 0

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        if self._serial and not is_finalizing():  # an interrupt came as it began or ended
            self._end(report_later)


def report_call(options: Any, what: str, name: Any, seconds: float, token: bytes | None = None, more: str = "") -> None:
    """Report a call for the log of calls, if the options ask for that; see `CallLog`."""
    if options.logs_calls:
        report((CALL_LOG,), "record_call", what, name, seconds, token, more)


class _LoggedWait(Wait):
    """A wait that is logged, too.

    Args:
        options: the lock's `Options`.
        name: of the lock.
        mode: how it waits.
        token: with which it waits.
    """

    def __init__(self, options: Any, name: str | bytes, mode: WaitMode, token: bytes | None) -> None:
        super().__init__(options.observers, name, mode)
        self._logged = options, name, token
        self._since = clock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        super().__exit__(kind, *_)
        if kind is not GeneratorExit:  # the garbage collector drops the task
            options, name, token = self._logged
            more = f"by {self.mode}, handed over" if self.handed_over else f"by {self.mode}"
            report_call(options, "waited for {} for", name, clock() - self._since, token, more)


_UNSEEN = nullcontext()


def waiting_of(
    options: Any, name: Any, mode: WaitMode, token: bytes | None = None
) -> AbstractContextManager[Wait | None]:
    """A context in which an acquire waits. It gives its `Wait`; None where nothing observes the lock.

    Args:
        options: the lock's `Options`, or None.
        name: of the lock.
        mode: how it waits.
        token: with which it waits; None where another one may get the lock for it.
    """
    if options is None or not options.observers:
        return _UNSEEN
    return _LoggedWait(options, name, mode, token) if options.logs_calls else Wait(options.observers, name, mode)
