"""Renewal for threads: one thread for each server, while locks are held there whose options need it.

Thread safety: any thread uses the schedule and `_thread`, under `_turn`, which a finalizer of the same thread may
enter again.

Each `on_lost` callback runs in a thread of its own: it may block, so no renewal and no other callback may wait for it.
In a pool, blocked callbacks would use up the threads, and a thread would keep the locks that a callback has acquired.

A C extension that holds the GIL delays renewal, too: see docs/how-to/holding.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

from redislock_fast._lease.lease import DUE_AFTER, Lease
from redislock_fast._lease.note import Note
from redislock_fast._lease.telling import telling
from redislock_fast._procedures.renewal import (
    LeaseLoss,
    Record,
    RenewalBatch,
    Schedule,
    due_at,
    late_entries,
    record_of,
    renewing,
    warn_of_drop,
)
from redislock_fast._transport.base import Registry
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import clock

__all__ = ["Renewer", "renewer_of", "tell", "tell_in_background", "tell_wanted"]

logger = logging.getLogger(__name__)

_LINGER_S = 1.0  # how long the thread lives on with nothing to do: longer than a thread takes to start


def _renew_on_server(transport: ThreadServerTransport, due: list[Lease], losses: list[LeaseLoss]) -> None:
    drive(transport, renewing(due, losses))


class Renewer(patching.Adaptable):
    """Renews the leases on one server, and watches for their loss.

    Args:
        transport: of the server, or of several. It is referenced weakly, so that it goes with the last lock on it.
        burst: renews a batch of leases there.
    """

    def __init__(self, transport: Any, burst: RenewalBatch = _renew_on_server) -> None:
        self._transport = weakref.ref(transport)
        self._renewal_batch = burst
        self.forget()
        fork.forget_in_child(self)
        patching.adapt_later(self)

    def forget(self) -> None:
        """In a forked child: drop all leases, which the parent renews."""
        self._turn = threading.Condition()
        self._schedule = Schedule()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError), self._turn:  # eventlet gives a condition that it finds another lock
            self._turn.notify_all()

    def adapt(self) -> None:
        self._turn = threading.Condition()

    def resume(self) -> None:
        if self._thread is not None:
            self._thread = None
            self._change(self._look_by, 0.0)

    def keep(self, lease: Lease) -> None:
        """Renew a lease and watch it from now on, or from its new time on."""
        record_of(lease, self._dropped)
        self._change(self._add, lease)

    def note(self, note: Note, ttl_ms: int, sent_at: float) -> None:
        """Look at a note in time: the request that began its lease of `ttl_ms` milliseconds left at `sent_at`."""
        note.renewer, note.listed_ms = self, ttl_ms
        look_by = self._schedule.list_note(note, sent_at + DUE_AFTER * ttl_ms / 1000)
        if look_by is not None:
            self._change(self._look_by, look_by)

    def _change(self, change: Callable[..., None], *args: Any) -> None:
        """Change the schedule, and see to it that a thread works by it."""
        thread: threading.Thread | None = None
        try:
            with self._turn:
                change(*args)
                if self._thread is None:
                    thread = self._thread = threading.Thread(
                        target=self._work, name="redislock_fast-renewal", daemon=True
                    )
            if thread is not None:  # not under `_turn`: a finalizer in the new thread may wait for that
                thread.start()
        except BaseException:
            if thread is not None:
                self._thread = None  # the next call tries again
                self._schedule.looks_at = math.inf
            raise

    def _look_by(self, look_by: float) -> None:
        if look_by < self._schedule.looks_at:
            self._schedule.looks_at = look_by
            self._turn.notify()

    def _add(self, lease: Lease) -> None:
        record = lease.record
        if record.is_over:
            return
        if self._schedule.add(record, due_at(lease, clock()), (lease.ttl_ms or 0) / 3000):
            self._look_by(record.ticks / 1000)

    def let_go(self, lease: Lease) -> None:
        """Stop the renewal of a lease, for ever."""
        record = record_of(lease, self._dropped)
        record.is_over = True
        with self._turn:
            self._schedule.remove(record)

    def _dropped(self, record: Record) -> None:
        if sys.is_finalizing() or not record.was_dropped():
            return
        with self._turn:
            self._schedule.remove(record)  # it may be the last reference to other objects
        self.drop(record.key, record.entry)

    def drop(self, key: bytes, entry: Any) -> None:
        """Clean up a lock whose object was dropped without a release, and warn."""
        self._clean_up([entry])
        warn_of_drop(key)

    def _clean_up(self, entries: list[Any]) -> None:
        transport = self._transport()
        if transport is not None and entries:
            with contextlib.suppress(RedisError):  # a cluster without a node for the key: the lock ends with its ttl
                transport.clean_up(entries)

    @patching.own_thread
    def _work(self) -> None:
        in_force = patching.in_force
        schedule = self._schedule
        was_idle = False
        with self._turn:
            self._wait(None, in_force)
        while patching.in_force is in_force:
            schedule.looks_at = math.inf  # before it looks at the notes: a thread that lists one now tells when to look
            is_idle = not schedule.has_listed
            noted = list(schedule.noted())  # not under `_turn`, which a finalizer may want under `mutex`
            for lease in noted:
                record_of(lease, self._dropped)
            with self._turn:
                for lease in noted:
                    self._add(lease)
                lease = noted = None  # type: ignore[assignment]  # else they would live until another lease is due
                due = schedule.take(clock())
                if not due:
                    next_at = schedule.next_at()
                    is_idle = is_idle and next_at is None and not schedule.has_listed
                    if is_idle and was_idle:
                        self._thread = None
                        return
                    was_idle = is_idle
                    self._wait(next_at, in_force)
                    continue
            self._renew(due)
            del due  # as above

    def _wait(self, next_at: float | None, in_force: Any) -> None:
        """Wait until a lease is due at `next_at`, or an earlier look is asked for. None: linger."""
        schedule = self._schedule
        schedule.looks_at = min(clock() + _LINGER_S if next_at is None else next_at, schedule.looks_at)
        while (left_s := schedule.looks_at - clock()) > 0 and patching.in_force is in_force:
            self._turn.wait(min(left_s, threading.TIMEOUT_MAX))

    def _renew(self, due: list[Lease]) -> None:
        transport = self._transport()
        if transport is None:
            return
        losses: list[LeaseLoss] = []
        try:
            self._renewal_batch(transport, due, losses)
        except Exception:  # a bug of ours must not end all renewal
            logger.exception("Locks could not be renewed.")
        late = late_entries(losses)
        with self._turn:
            for lease in due:
                self._add(lease)
        self._clean_up(late)
        tell_in_background(losses)


def tell_in_background(losses: list[LeaseLoss]) -> None:
    """Call `on_lost` for each loss, in a thread of its own, without waiting for any of them.

    Where no thread can be started, the callback runs in the thread that would have started it.
    """
    losses = [loss for loss in losses if loss.lease.options.on_lost is not None]
    if losses and not _is_started(_tell_each, losses):
        _tell_each(losses)


def _tell_each(losses: list[LeaseLoss]) -> None:
    """Call `on_lost` for the last loss, after starting threads for the others: many take too long for the renewer."""
    waiting = [loss for loss in losses[:-1] if not _is_started(tell, *loss)]
    for loss in [*waiting, losses[-1]]:
        tell(*loss)


def _is_started(work: Callable[..., None], *args: Any) -> bool:
    """Start a thread for a callback; False where none can be started. As a daemon, it does not delay the exit."""
    try:
        threading.Thread(target=work, args=args, name="redislock_fast-lost", daemon=True).start()
    except RuntimeError:
        return False
    return True


def tell_wanted(lease: Lease) -> None:
    """Call `on_wanted` for a lock that another caller waits for, in a thread of its own."""
    if not _is_started(_call_on_wanted, lease):
        _call_on_wanted(lease)


def _call_on_wanted(lease: Lease) -> None:
    lock, on_wanted = lease.lock(), lease.options.on_wanted
    if on_wanted is None or lock is None:
        return
    try:
        on_wanted(lock)
    except Exception:
        logger.exception("on_wanted failed.")


def tell(lease: Lease, reason: LossReason) -> None:
    """Call `on_lost` for a loss. An exception of the callback is logged."""
    lock = lease.lock()
    on_lost = lease.options.on_lost
    if on_lost is None or lock is None:
        return
    try:
        with telling(lease):
            on_lost(lock, reason)
    except Exception:
        logger.exception("on_lost failed for a lock that was lost (%s).", reason)


_renewers: Registry[Renewer] = Registry()


def renewer_of(transport: Any, burst: RenewalBatch = _renew_on_server) -> Renewer:
    """The one renewer of a transport."""
    return _renewers.get(id(transport)) or _renewers.add(transport, lambda transport: Renewer(transport, burst))
