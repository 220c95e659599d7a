"""The note of an acquire: what an owner holds on options, as long as nothing needs its `Lease`.

Most locks are released before their first renewal, and a lease with its place in the renewer's schedule costs several
times as much as a note. An owner has one note, which it uses for each acquire that needs no more than its reply.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.metrics import Counted, Reports, next_serial, report_end_later
from redislock_fast._lease.prolonging import mutex

if TYPE_CHECKING:
    from redislock_fast._lease.options import Options

__all__ = ["Held", "Note"]

Held: TypeAlias = "tuple[bytes, bytes, int | None, float | None, Options, float]"
"""The arguments of a `Lease` but its lock: key, token, ttl_ms, expires_at, options and begun."""


class _NoteKeeper(Protocol):
    """The renewer, as far as a note needs it."""

    def drop(self, key: bytes, token: bytes, entry: Any) -> None:
        """Clean up a lock whose object was dropped without a release, and warn."""


class Note:
    """What an owner holds on options.

    The owner alone refers to it, so it ends with the lock object or the thread: then the lock is released.

    Thread safety: the owner assigns `held` and `over`, each as a whole, without a mutex. Any thread may make the lease,
    as the renewer does while the lock is held. The renewer first assigns `lease` and then reads `held` and `over`; a
    release first sets `over` and then reads `lease`. So one of them notices the other: the renewer takes its lease
    back, or the release goes by the lease. `lease` is assigned under `mutex`, as an owner that has seen the lease must
    not go on before the renewer has decided. In the same way, an acquire first sets `held` and then reads `listed_ms`,
    and the renewer first sets `listed_ms` to 0 and then reads `held`.

    Attributes:
        held: what is held; None where nothing is.
        over: whether its release has begun.
        lease: its lease; None as long as nothing has needed it.
        listed_ms: the ttl for which the renewer will look at this note in time, in milliseconds; 0: it will not look.
        lock: a weak reference to the lock object; it changes only while nothing is held.
        renewer: the renewer that will look; None before the first acquire that is watched.
        counted: what counts the lock as held, or has counted it last; None: nothing has.
    """

    __slots__ = ("__weakref__", "_pid", "counted", "held", "lease", "listed_ms", "lock", "over", "renewer")

    def __init__(self, lock: Any) -> None:
        self.lock = weakref.ref(lock)
        self.held: Held | None = None
        self.over = False
        self.lease: Lease | None = None
        self.listed_ms = 0
        self.renewer: _NoteKeeper | None = None
        self.counted: Counted | None = None
        self._pid = os.getpid()

    def make(self) -> Lease | None:
        """The lease of what is held, for its owner; None where nothing is held."""
        held = self.held
        fresh = None if held is None else self._new_lease(held)
        with mutex.lock:
            if self.lease is None and fresh is not None:
                fresh.over = self.over
                self.lease, fresh = fresh, None
            lease = self.lease
        if fresh is not None:  # the renewer was faster
            fresh.counted = None
        return lease

    def look(self) -> Lease | None:
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

    def count(self, reports: Reports) -> None:
        """Have observers count the lock as held."""
        if self.counted is not None:  # an interrupt came before its end was reported
            report_end_later(self.counted)
        serial = next_serial()
        self.counted = (reports, serial)
        reports.begin(serial)

    def end_count(self) -> None:
        """Have observers count the lock as held no more."""
        counted = self.counted
        if counted is not None:
            reports, serial = counted
            reports.end(serial)
            self.counted = None  # last: after an interrupt before, it is reported again

    def begin_release(self, token: bytes) -> bool:
        """Note that a release begins. Returns False where it must go by the lease, or another token is held."""
        held = self.held
        if held is None or held[1] is not token:
            return False
        self.over = True
        return self.lease is None

    def clear(self) -> None:
        """Forget what is held: its lease has ended, or the owner has another one."""
        with mutex.lock:
            self.held = None
            self.lease = None
            self.listed_ms = 0

    def __del__(self, getpid: Any = os.getpid, is_finalizing: Any = sys.is_finalizing) -> None:
        # Where the renewer has a record of the lease, that ends with the lease. A forked child drops its parent's
        # notes. At the end of the interpreter, globals are None.
        if getattr(self, "_pid", None) != getpid() or is_finalizing():  # an interrupted `__init__` may not have set it
            return
        held, lease, renewer = self.held, self.lease, self.renewer
        if self.counted is not None:
            report_end_later(self.counted)
        if held is None or renewer is None or self.over:
            return
        if lease is None or not (lease.record is not None or lease.over or lease.loss is not None):
            renewer.drop(held[0], held[1], held[:2])
