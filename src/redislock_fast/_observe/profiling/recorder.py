"""What a profile records: it is told of each acquire and release, finds the call site, and keeps what is held.

Thread safety: threads and event loops call it at once. `_mutex` guards all that is recorded; a reentrant one, since a
signal handler or the garbage collector may release a lock in the midst. A forked child begins anew.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from redislock_fast._lease.metrics import ObserverByKind
from redislock_fast._lease.owner import current_task
from redislock_fast._observe.profiling.orders import Orders, cycles_of
from redislock_fast._observe.profiling.records import Holding, LockRecord, Records
from redislock_fast._util import fork, patching
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from types import FrameType

    from redislock_fast._util.errors import LossReason

MOST_HELD = 64

NO_SITE = "(a thread or task of its own)"

_Caller: TypeAlias = "threading.Thread | asyncio.Task[Any]"

_PASSED_OVER = (str(Path(__file__).parents[2]) + os.sep, contextlib.__file__)
_RUNNERS = (
    str(Path(asyncio.__file__).parent) + os.sep,
    str(Path(concurrent.futures.__file__).parent) + os.sep,
    threading.__file__,
)


class _CallerRecord:
    """The activity of one thread or task.

    Attributes:
        held: the 64 holdings that began last: a lock's by its name, a permit's by its serial.
        waits_for: the name of the lock that it waits for; None where it does not wait.
    """

    __slots__ = ("held", "waits_for")

    def __init__(self) -> None:
        self.held: dict[str | int, Holding] = {}
        self.waits_for: str | None = None

    def hold(self, key: str | int, holding: Holding) -> None:
        """Note what it holds from now on."""
        self.held[key] = holding
        if len(self.held) > MOST_HELD:
            del self.held[next(iter(self.held))]


class Recorder(ObserverByKind, patching.Adaptable):
    """Gets the reports of locks, with methods of `Observer`, and by `of_semaphores` those of permits.

    Attributes:
        ended: whether the profile is over; what is reported later does not count.
    """

    def __init__(self) -> None:
        self.ended = False
        self._lasted_s = 0.0
        # A caller may hold several permits of one semaphore, so each is known by its serial.
        self.of_semaphores = SimpleNamespace(
            record_wait_started=self.record_wait_started,
            record_acquisition=self.record_permit,
            record_failure=self.record_failure,
            record_holding=self.record_permit_holding,
            record_loss=self.record_loss,
        )
        self.forget()
        fork.forget_in_child(self)
        patching.adapt_later(self)

    def adapt(self) -> None:
        self._mutex = threading.RLock()

    def forget(self) -> None:
        """Begin anew."""
        self._mutex = threading.RLock()
        self._began_at = clock()
        self._records = Records()
        self._orders = Orders()
        self._callers: weakref.WeakKeyDictionary[_Caller, _CallerRecord] = weakref.WeakKeyDictionary()

    def end(self) -> None:
        """End the profile."""
        fork.generation()  # has the parent's forgotten in a child
        with self._mutex:
            self._lasted_s = clock() - self._began_at
            self.ended = True

    def record_wait_started(self, name: Any, serial: int) -> None:  # noqa: ARG002  # its call is recorded
        """The caller begins to wait for a lock. In a deadlock, that is the last that is heard of it."""
        if self.ended:
            return
        text, site = _text(name), _call_site()
        with self._mutex:
            caller = self._caller()
            caller.waits_for = text
            self._note_orders(caller, text, site)

    def record_acquisition(self, name: Any, seconds: float, attempts: int) -> None:  # noqa: ARG002
        """A lock was acquired by the caller."""
        if self.ended:
            return
        text, site = _text(name), _call_site()
        with self._mutex:
            now = clock()
            caller, record = self._note_acquisition(text, site, seconds, now)
            caller.hold(text, record.begin(text, site, now))

    def record_permit(self, name: Any, seconds: float, attempts: int) -> None:  # noqa: ARG002
        """A permit was acquired by the caller. Its holding is reported with its serial."""
        if self.ended:
            return
        text, site = _text(name), _call_site()
        with self._mutex:
            _, record = self._note_acquisition(text, site, seconds, clock())
            record.count(site)

    def _note_acquisition(self, text: str, site: str, seconds: float, now: float) -> tuple[_CallerRecord, LockRecord]:
        caller, record = self._caller(), self._records.of(text)
        record.note_wait(seconds, now)
        if caller.waits_for != text:
            self._note_orders(caller, text, site)
        caller.waits_for = None
        return caller, record

    def record_failure(self, name: Any, seconds: float, attempts: int, error: BaseException | None) -> None:  # noqa: ARG002
        """A lock was not acquired by the caller. Had it not waited, it could not have been in a deadlock."""
        if self.ended:
            return
        text = _text(name)
        with self._mutex:
            record = self._records.of(text)
            record.failures += 1
            record.note_wait(seconds, clock())
            self._caller().waits_for = None

    def record_release(self, name: Any, hold_s: float, success: bool) -> None:
        """A lock was released by the caller, who may be another one than has acquired it."""
        if self.ended:
            return
        text = _text(name)
        with self._mutex:
            record = self._records.of(text)
            holding = self._caller().held.pop(text, None)
            if holding is None and success:  # a lost lock may be another's by now
                holding = record.held()
            record.end(holding, hold_s, clock())

    def record_holding(self, name: Any, serial: int, held: bool) -> None:  # noqa: ARG002  # as above
        """A lock is held by the caller no more, where `held` is false: it may have been detached or dropped."""
        if self.ended or held:
            return
        with self._mutex:
            holding = self._caller().held.get(_text(name))
            if holding is not None:
                holding.ended = holding.ended or clock()

    def record_permit_holding(self, name: Any, serial: int, held: bool) -> None:
        """A permit is held by the caller, or by whoever has held it no more."""
        if self.ended:
            return
        text, site = _text(name), _call_site()
        with self._mutex:
            now, caller, record = clock(), self._caller(), self._records.of(text)
            if held:
                caller.hold(serial, record.begin_beside(text, site, now, serial))
                return
            holding = caller.held.pop(serial, None) or record.held_as(serial)
            if holding is not None:
                record.end(holding, now - holding.began_at, now)

    def record_loss(self, name: Any, hold_s: float, reason: LossReason) -> None:  # noqa: ARG002
        """A lock was found to be lost. Its holding ends when it is released, or acquired by another caller."""
        if self.ended:
            return
        with self._mutex:
            self._records.of(_text(name)).losses += 1

    def as_dict(self) -> dict[str, Any]:
        """What was recorded, as `Profile.as_dict` says."""
        fork.generation()  # has the parent's forgotten in a child
        with self._mutex:
            seconds = self._lasted_s if self.ended else clock() - self._began_at
            locks = [{"name": name, **record.as_dict()} for name, record in self._records.all().items()]
            orders = self._orders.copy()
        deadlocks = [
            [{"held": held, "acquired": name, **orders[held, name].as_dict()} for held, name in cycle]
            for cycle in cycles_of(orders)
        ]
        return {"pid": os.getpid(), "seconds": seconds, "locks": locks, "deadlocks": deadlocks}

    def _caller(self) -> _CallerRecord:
        caller = current_task() or threading.current_thread()
        record = self._callers.get(caller)
        if record is None:
            record = self._callers[caller] = _CallerRecord()
        return record

    def _note_orders(self, caller: _CallerRecord, name: str, site: str) -> None:
        """Note what the caller holds while it acquires this lock. What has ended elsewhere is held no more."""
        sites: dict[str, str] = {}
        for key, holding in list(caller.held.items()):
            if holding.ended is not None:
                caller.held.pop(key, None)
            elif holding.name != name:
                sites.setdefault(holding.name, holding.site)
        for held, held_site in sites.items():
            self._orders.note(held, held_site, name, site)


def _text(name: Any) -> str:
    """A lock's name as text."""
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else str(name)


def _call_site() -> str:
    """Where the caller is, outside of this package and `contextlib`: "file:line function"."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    # `asyncio.wait_for` before Python 3.12, `gather` and executors call `acquire` in a task or thread that has no other
    # frame.
    if frame is None or frame.f_code.co_filename.startswith(_RUNNERS):
        return NO_SITE
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
