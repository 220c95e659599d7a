"""Finds out that gevent or eventlet has patched the standard library after the package was imported, and adapts to it.

gunicorn does so in each worker where the application is imported in its parent process (`--preload -k gevent`). A patch
replaces names of `threading`, `time`, `socket` and `select`. So each module of the package looks such a name up when it
uses it. What was made before the patch is still native: a lock knows one thread where there are many greenlets now, and
a wait on a connection stops all of them. An object that has such things and may outlive a patch is an `Adaptable`.

`in_force` is `threading.local` as it was when all of them were adapted. Whatever takes a transport or an owner compares
the two, and calls `adapt` where they differ.

Thread safety: `adapt` runs in the thread that has found the patch, before any other greenlet of it runs. Programs patch
while they have one thread; what another thread has under way on a native connection fails, and is tried again. The
package's own threads end first. `_adaptables` and `_own_threads` are changed under the GIL or, in a free-threaded
build, under the set's own lock.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol

from redislock_fast._util import fork
from redislock_fast._util.fork import members

_END_LIMIT_S = 1.0
"""How long `adapt` waits for the package's own threads. Most end within 0.1 s."""


class _Adapting(Protocol):
    def wake(self) -> None: ...

    def adapt(self) -> None: ...

    def resume(self) -> None: ...


class Adaptable:
    """An object with locks, threads or connections that may be older than a patch.

    One that has all three methods need not derive from this class.
    """

    def wake(self) -> None:
        """Wake the object's own threads. They end: something else is `in_force` now."""

    def adapt(self) -> None:
        """Replace locks and connections from before the patch. May do nothing in which another greenlet could run."""

    def resume(self) -> None:
        """Start the object's own threads again, where it needs them."""


_Args = ParamSpec("_Args")

in_force: Any = threading.local
_native_sleep = time.sleep
_adaptables: weakref.WeakSet[_Adapting] = weakref.WeakSet()
_callbacks: list[Callable[[], None]] = []
_own_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_own = threading.local()  # has `is_here` in the package's own threads
fork.on_fork(_own_threads.clear)


def adapt_later(holder: _Adapting) -> None:
    """Have the object adapted after a patch, as long as it lives."""
    _adaptables.add(holder)


def on_patch(callback: Callable[[], None]) -> None:
    """Have a module's function called after a patch, as `Adaptable.adapt` is."""
    _callbacks.append(callback)


def is_patched() -> bool:
    """Whether `threading` is patched now, by whatever library and whenever it was."""
    return str(threading.local.__module__) != "_thread"


def own_thread(work: Callable[_Args, None]) -> Callable[_Args, None]:
    """Make a function the work of a thread of the package. It never adapts, and must end after a patch."""

    @wraps(work)
    def run(*args: _Args.args, **named: _Args.kwargs) -> None:
        if in_force is threading.local:  # else it may be a greenlet of the thread that is to find the patch
            _own.is_here = True
            _own_threads.add(threading.current_thread())
        try:
            work(*args, **named)
        finally:
            threading.current_thread()  # after a patch, the end of a thread expects it among the greenlets

    return run


def adapt() -> None:
    """Adapt all that was made before the patch, once."""
    global in_force  # noqa: PLW0603  # the only place that changes it
    before = in_force
    if before is threading.local or hasattr(_own, "is_here"):
        return
    in_force = threading.local
    try:
        adaptables = members(_adaptables)
        for holder in adaptables:
            holder.wake()
        _wait_for_own_threads()
        for callback in _callbacks:
            callback()
        for holder in adaptables:
            holder.adapt()
        for holder in adaptables:
            holder.resume()
    except BaseException:  # an interrupt: the next caller begins anew, which does no harm
        in_force = before
        raise


def _wait_for_own_threads() -> None:
    give_up = time.monotonic() + _END_LIMIT_S
    while any(thread.is_alive() for thread in members(_own_threads)) and time.monotonic() < give_up:
        _native_sleep(0.001)  # greenlets must not run meanwhile
