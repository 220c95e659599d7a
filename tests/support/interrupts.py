"""Interrupts of the main thread: by a signal when something has happened, or before a given line.

Rules: nothing here asserts what a lock should do.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest

import redislock_fast
from redislock_fast._lease.owner import SharedOwner
from tests.support.helpers import start


class TimeIsUp(Exception):
    """An interrupt as Celery's `SoftTimeLimitExceeded` is one: an `Exception`, as all errors are."""


INTERRUPTS = (KeyboardInterrupt, TimeIsUp)


class _Kind:
    present: type[BaseException] = KeyboardInterrupt


@pytest.fixture(params=INTERRUPTS)
def interrupt_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have `interrupted_at` raise each kind of interrupt in turn."""
    _Kind.present = request.param
    yield
    _Kind.present = KeyboardInterrupt


def skip_what_a_loop_takes() -> None:
    """Skip an interrupt that is an error: one that strikes a callback of an event loop is raised nowhere."""
    if _Kind.present is TimeIsUp:
        pytest.skip("an event loop takes it")


def interrupt_when(condition: Callable[[], object]) -> None:
    """Send the main thread a real SIGINT once the condition has returned."""
    main = threading.main_thread().ident
    assert main is not None

    def wait_and_send() -> None:
        condition()
        signal.pthread_kill(main, signal.SIGINT)

    start(wait_and_send)


PACKAGE = Path(redislock_fast.__file__).parent
_FINALIZERS = ("_dropped", "dropped", "__del__")  # of leases and notes: Python ignores what they raise
_BATCH = ("acquisition.py", "held.py", "plan.py", "watching.py")
_TRACED = ("locker.py", *(f"_batch/{name}" for name in _BATCH), "_protocol/pipeline.py")


@functools.cache
def _paths(names: tuple[str, ...]) -> set[str]:
    """The paths of these files. Each must be there: no test would notice that it traces a file that has moved."""
    paths = {PACKAGE / name for name in names}
    assert [path for path in paths if not path.is_file()] == []
    return set(map(str, paths))


def _is_finalizing(frame: Any) -> bool:
    """Whether a finalizer runs this: of an object of the package, or of a client that the garbage collector has met."""
    while frame is not None and frame.f_code.co_name not in _FINALIZERS:
        frame = frame.f_back
    return frame is not None


def interrupted_at(number: int, work: Callable[[], object], *files: str, spared: Container[str] = ()) -> str:
    """Interrupt the work before the n-th line of a batch's own files, or of these as well.

    A file of the standard library is named by its path. Functions with the names `spared` are not interrupted.

    Not where a `with` is left, which is a line of its own to a tracer: no signal strikes before `__exit__` is called,
    since Python looks for one in calls and loops alone; and an interrupt there would leave a mutex taken forever.
    Nor before a `try`, which is no instruction, and belongs to no handler. Nor in a finalizer.

    Returns which line that is, and what the work raises instead of the interrupt; "" when there are fewer lines.
    """
    traced = _paths((*_TRACED, *files))
    count, place = 0, ""

    def on_call(frame: Any, event: str, argument: object) -> Any:
        reached = 0

        def on_line(frame: Any, event: str, argument: object) -> Any:
            nonlocal count, place, reached
            if event != "line":
                return on_line
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            leaves = frame.f_lineno < reached and line.lstrip().startswith("with ")
            is_safe = leaves or line.strip() == "try:"
            reached = frame.f_lineno
            count += not is_safe
            if count == number and not is_safe:
                path = Path(frame.f_code.co_filename)
                file = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path
                place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                sys.settrace(None)
                frame.f_trace = None
                raise _Kind.present
            return on_line

        is_traced = frame.f_code.co_filename in traced and frame.f_code.co_name not in spared
        return on_line if is_traced and not _is_finalizing(frame) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
        place += " raises nothing" if place else ""
    except _Kind.present:
        pass
    except Exception as error:
        place += f" raises {error!r}"
    finally:
        sys.settrace(before)
    return place


def interrupt() -> None:
    """What a signal handler does by default."""
    raise KeyboardInterrupt


def handled_at(number: int, work: Callable[[], object], handle: Callable[[], object], *files: str) -> str:
    """Run a signal handler at the n-th place in these files at which Python looks for signals.

    These are the beginning of a function and the end of a call of C, as in CPython 3.11 and later; loops and finalizers
    are left out. A coroutine that goes on after an `await` does not look, in 3.10 as well, though profilers see a call.
    A file of the standard library is named by its path. The handler's KeyboardInterrupt ends the work.

    Returns which place that is; "" when there are fewer.
    """
    traced = _paths(files)
    count, place = 0, ""

    def on_event(frame: Any, event: str, argument: object) -> None:
        nonlocal count, place
        if event not in ("call", "c_return") or frame.f_code.co_filename not in traced or place:
            return
        is_resumed = event == "call" and sys.version_info < (3, 11) and frame.f_lasti >= 0
        if is_resumed or _is_finalizing(frame):
            return
        count += 1
        if count == number:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name} at a {event}"
            handle()

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
    return place


def handled(number: int, work: Callable[[], object], *files: str) -> str:
    """Run `interrupt` as a signal handler, as `handled_at` does."""
    return handled_at(number, work, interrupt, *files)


def each_line(least: int, at: Callable[..., str] = interrupted_at) -> Iterator[Callable[..., str]]:
    """For each line of a work in turn: what interrupts it there. That takes and returns what `at` does.

    Ends with the number of a line that the work does not have. Asserts that there were more than so many at least.
    """
    place = ""

    def strike(*arguments: Any) -> str:
        nonlocal place
        place = at(number, *arguments)
        return place

    for number in itertools.count(1):  # `strike` reads it
        yield strike
        if not place:
            assert number > least
            return


def line_of(place: str) -> str:
    """The text of the line that `interrupted_at` has returned."""
    name, _, number = place.partition(" ")[0].partition(":")
    return linecache.getline(str(PACKAGE / name), int(number or 0)).strip()


class _Interrupting(SharedOwner):
    """Interrupts an owner that has just noted its token."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "token" and value is not None:
            raise KeyboardInterrupt


def interrupt_noting(lock: Any) -> None:
    """Interrupt the owner of the lock, which all threads or tasks share, when it has just noted its token."""
    lock.local = _Interrupting()


class _Preceded(SharedOwner):
    """Has something called once, just before it notes a token."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._calls = [call]

    def hold(self, token: bytes | None) -> None:
        while self._calls:
            self._calls.pop()()
        super().hold(token)


def call_before_noting(lock: Any, call: Callable[[], object]) -> None:
    """Have this called just before an acquire notes its token in the owner of the lock, which all callers share."""
    lock.local = _Preceded(call)
