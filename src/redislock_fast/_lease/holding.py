"""`Holding`: what an owner holds on options, and its lease once something needs that.

Most locks are released before their first renewal, and a `Lease` with its place in the renewer's schedule costs as much
as a sixth of the pair. So an owner has one holding, which it uses for each acquire: even the smallest object for each
would take 1,700 instructions of a pair's 46,000.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.metrics import Counted, report_end_later
from redislock_fast._lease.prolonging import mutex

if TYPE_CHECKING:
    from redislock_fast._lease.options import Options

Held: TypeAlias = "tuple[bytes, bytes, int | None, float | None, Options, float]"
"""The arguments of a `Lease` but its lock: key, token, ttl_ms, expires_at, options and acquired_at."""


LOCALS_WAIT = sys.version_info >= (3, 14) and "t" in getattr(sys, "abiflags", "")
"""Whether a `threading.local`, and so the owners of threads, ends no sooner than the garbage collector runs.

CPython 3.14 without the GIL defers the count of references to it: https://github.com/python/cpython/issues/128691
"""


class _Renewer(Protocol):
    """The renewer, as far as a holding needs it."""

    def drop(self, key: bytes, token: bytes, entry: Any) -> None:
        """Clean up a lock whose object was dropped without a release, and warn."""


class Holding:
    """What an owner holds on options.

    The owner alone refers to it, so it ends with the lock object or the thread: then the lock is released. Where the
    owner may outlive the lock object, a reference to that ends it.

    An acquire that is complete with its reply sets `held`, and the lease is made of that when something needs it. An
    acquire that takes more steps has made its lease already, and sets that alone (`set`), as all callers do that share
    an owner.

    Thread safety: the owner assigns `held` and `over`, each as a whole, without a mutex. Any thread may make the lease,
    as the renewer does while the lock is held. The renewer first assigns `lease` and then reads `held` and `over`; a
    release first sets `over` and then reads `lease`. So one of them notices the other: the renewer takes its lease
    back, or the release goes by the lease. `lease` is assigned under `mutex`, as an owner that has seen the lease must
    not go on before the renewer has decided. In the same way, an acquire first sets `held` and then reads `listed_ms`,
    and the renewer first sets `listed_ms` to 0 and then reads `held`.

    Args:
        lock: a weak reference to the lock object.

    Attributes:
        held: of what a lease can be made; None where nothing is held, or its lease was made before.
        over: whether the release of `held` has begun.
        lease: the lease; None where nothing is held, or nothing has needed it.
        listed_ms: the ttl for which the renewer will look at this in time, in milliseconds; 0: it will not look.
        lock: a weak reference to the lock object; it changes only while nothing is held.
        renewer: the renewer that will look; None before the first acquire that is watched.
        counted: what counts the lock as held, or has counted it last; None: nothing has.
    """

    __slots__ = ("__weakref__", "_pid", "_watch", "counted", "held", "lease", "listed_ms", "lock", "over", "renewer")

    def __init__(self, lock: weakref.ref[Any]) -> None:
        self.held: Held | None = None
        self.over = False
        self.lease: Lease | None = None
        self.listed_ms = 0
        self.renewer: _Renewer | None = None
        self.counted: Counted | None = None
        self._pid = os.getpid()
        self.belong_to(lock)

    def belong_to(self, lock: weakref.ref[Any]) -> None:
        """Be what this lock object holds, from now on."""
        self.lock = lock
        target = lock() if LOCALS_WAIT else None
        if target is not None:
            mine = weakref.ref(self)

            def end(_: object) -> None:
                holding = mine()
                if holding is not None and not sys.is_finalizing():
                    holding._end()  # noqa: SLF001  # of this very class

            self._watch = weakref.ref(target, end)

    def lease_for_owner(self) -> Lease | None:
        """The lease of what is held, for its owner; None where nothing is held."""
        held = self.held
        if held is None:
            return self.lease
        fresh = self._new_lease(held)
        with mutex.lock:
            if self.lease is None:
                fresh.over = self.over
                self.lease = fresh
            lease = self.lease
        if lease is not fresh:  # the renewer was faster
            fresh.counted = None
        return lease

    def lease_to_renew(self) -> Lease | None:
        """The lease of what is held, for the renewer; None where nothing is held, or its release has begun."""
        self.listed_ms = 0
        held = self.held
        if held is None:
            return None
        fresh = self._new_lease(held)
        with mutex.lock:
            if self.lease is None:
                self.lease = fresh
                if self.over or self.held is not held:
                    self.lease = None
            lease = self.lease
        if lease is not fresh:
            fresh.counted = None
        return lease

    def _new_lease(self, held: Held) -> Lease:
        """The lease of what is held. Observers count the lock as held already."""
        lease = Lease(self.lock, *held)
        if lease.options.observers:
            lease.counted = self.counted
        return lease

    def begin_release(self, token: bytes) -> bool:
        """Begin a release. Returns False where it must go by the lease, or another token is held."""
        held = self.held
        if held is None or held[1] is not token:
            return False
        self.over = True
        return self.lease is None

    def set(self, lease: Lease | None) -> None:
        """Hold by this lease from now on; None: nothing is held any more."""
        with mutex.lock:
            self.held = None
            self.lease = lease
            self.listed_ms = 0

    def _end(self) -> None:
        """Release what is held: the lock object, or its thread, has ended. A forked child drops what its parent holds.

        It takes no `mutex`, which the thread that a finalizer interrupts may have. So the renewer may drop the lock at
        the same time; then it is warned of twice.
        """
        if self._pid != os.getpid():
            return
        held, counted, was_over = self.held, self.counted, self.over
        self.over = True
        lease = self.lease
        self.held = self.lease = self.counted = None
        if counted is not None:
            report_end_later(counted)
        # Where the renewer has a record of the lease, that ends with the lease.
        is_known = lease is not None and (lease.record is not None or lease.over or lease.loss is not None)
        if held is not None and self.renewer is not None and not (was_over or is_known):
            self.renewer.drop(held[0], held[1], held[:2])

    def __del__(self, is_finalizing: Any = sys.is_finalizing) -> None:
        # An interrupted `__init__` may not have set all. At the end of the interpreter, globals are None.
        if hasattr(self, "lock") and not is_finalizing():
            self._end()
