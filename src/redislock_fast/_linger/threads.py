"""The option `linger` for threads: the acquire, and the thread that listens while any key lingers or is held.

An acquire is in memory, or by one request as any lock. Only its usual outcomes are handled here. Any other one is
handed to the steps of `procedures.py`.

While a key lingers, each thread of the program may be busy elsewhere for as long as it likes. So the thread that
listens waits for messages on the connection as a waiter does, and reads the socket where no caller does. The one that
reads hears that a key is wanted, and gives it up, before any caller goes on. The thread ends a second after the last.

An operator may take a key from its holder (`redislock break`): that is heard, too, so that no other caller takes it.

Where no thread can be started, nothing lingers: a caller that gives a key back waits for the replies itself.

While no key lingers or is held, the thread sleeps: a caller beside a thread that reads for it takes twice as long. The
next key wakes it. What was given back without a reply does not: the thread looks after that by itself.

Thread safety: any thread gives keys back. The thread that listens is the one entry of `_watcher`, a lock that wakes it.
`setdefault` adds it, for one thread alone: another one ends at once. So a caller may start one too many, as after an
interrupt. A caller wakes the thread and then looks whether it is still the entry; the thread that ends takes the entry
out and then looks whether it was woken. A caller first adds to `_unconfirmed` and then looks at `_watcher`; the thread
that ends looks in the other order. So no key and no reply is forgotten. For replies, an entry of `_confirming` counts
as such a thread: a caller that reads them itself, and takes its entry out before it looks at `_unconfirmed`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redislock_fast._linger.key_cache import Lingering, LocalWaiter
from redislock_fast._linger.procedures import (
    Linger,
    Turn,
    acquire_in_memory,
    cached_key,
    is_fetching,
    keep_first_grant,
    may_begin,
    own_cached_key,
    take_at_once,
    take_kept,
)
from redislock_fast._pipe.base import Args, ConnectionBroken, NoReply, Reply
from redislock_fast._procedures.acquire import clean_up_after, go_on
from redislock_fast._procedures.lock import LockBase
from redislock_fast._queue.waiters import BROKEN
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util import fork, patching
from redislock_fast._util.fork import at_child_exit, members
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.acquire import Call

logger = logging.getLogger(__name__)

_QUIET_S = 0.05
"""How long the thread goes on listening while nothing lingers or is held: the next key may come soon."""

_REST_S = 1.0
"""How long the thread then sleeps before it ends: longer than a thread takes to start."""

_LOOKS_EVERY_S = 0.1
"""How often the sleeping thread looks whether replies are missing: then keys may be held that nobody uses."""

_BUSY_S = 0.002
_LONGEST_PARK_S = 0.02
"""While callers use the connection, and read all that comes, the thread stays away from it; it looks so often whether
they do."""

_CONFIRM_LIMIT_S = 1.0
"""How long a caller waits for the replies to what it has given back where no thread can, in seconds."""

_EXIT_LIMIT_S = 1.0
"""How long a program waits at its end until what lingers is given back, in seconds."""

_LOOKS_AT_WATCHER_EVERY_S = 0.0005
"""How often it looks meanwhile whether the thread that listens has ended."""


class _ThreadWaiter(LocalWaiter):
    """A thread that waits for a local lock. A lock of the system wakes it, which each thread may release."""

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        super().__init__()
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            self._asleep.release()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is woken, for so many seconds at most."""
        self._asleep.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))


class ThreadLingering(Lingering["ThreadServerTransport"]):
    """The part of a `ThreadServerTransport` that keeps keys for locks with `linger`.

    Args:
        server: the transport.
    """

    def __init__(self, server: ThreadServerTransport) -> None:
        super().__init__(server, _ThreadWaiter)
        self._watcher: dict[int, threading.Lock] = {}
        self._confirming: set[object] = set()
        self._listening_on: Any = None
        self._mailbox: Any = None
        self._used_at = 0.0
        self._posted_at = 0.0
        self._sweeps_at = 0.0

    def _post_many(self, connection: Any, requests: list[Args], on_replies: Callable[[list[Reply]], object]) -> None:
        thread, server = threading.get_ident(), self.server
        was_inside = thread in server.inside
        try:
            server.inside.add(thread)
            connection.pipe.post_many(requests, on_replies)
        finally:
            if not was_inside:
                server.inside.discard(thread)

    def _watch_keys(self) -> None:
        self._used_at = clock()
        if patching.in_force is not threading.local:  # a release in memory does not look
            patching.adapt()
            if patching.in_force is threading.local:  # else this is a thread of the package
                return  # `resume` has begun it
        if _ended:
            self._do_without_watching()
        elif not self.wake():
            self._start_watching()

    def wake(self) -> bool:
        """Wake the thread that listens, should it sleep. Returns False where there is none, or it has just ended."""
        woken = self._watcher.get(0)
        if woken is None:
            return False
        with contextlib.suppress(RuntimeError):  # it is awake already
            woken.release()
        return self._watcher.get(0) is woken

    def _start_watching(self) -> None:
        server = self.server
        watcher = threading.Thread(target=_watch, args=(server,), name="redislock_fast-linger", daemon=True)
        _watched.add(server)
        at_child_exit(_give_back_at_exit)
        try:
            watcher.start()
        except RuntimeError:  # no thread can be started, perhaps as the interpreter ends: then nothing may linger
            self._do_without_watching()

    def _do_without_watching(self) -> None:
        """Give up what lingers, and wait for the replies."""
        self.key_cache.drop_all()
        self.key_cache.end_watching()
        self.key_cache.drop_all()  # what another caller has let linger meanwhile
        self._confirm_now()

    def _confirm_soon(self) -> None:
        self._posted_at = clock()
        if not (self.key_cache.is_watched or self._watcher or self._confirming):
            self.key_cache.watch()

    def _confirm_now(self) -> None:
        """Wait for the replies to posted releases, and clean up the keys where none come: no thread does."""
        me = object()
        try:
            self._confirming.add(me)
            self._wait_for_replies(_CONFIRM_LIMIT_S)
        finally:
            self._confirming.discard(me)
            self.clean_up_unconfirmed()

    def _wait_for_replies(self, limit_s: float) -> None:
        """Wait until each posted release has got its reply, for `limit_s` seconds at most; not in a signal handler."""
        give_up_at = clock() + limit_s
        connection, server, thread = self.server.connection, self.server, threading.get_ident()
        self.clean_up_unconfirmed(None if connection is None else connection.registry)
        if server.is_entered:
            return
        try:
            server.inside.add(thread)
            with contextlib.suppress(ConnectionBroken, NoReply):  # replies come in order, and may need another request
                while connection is not None and self.has_unconfirmed and (left_s := give_up_at - clock()) > 0:
                    connection.pipe.call((b"PING",), left_s)
        finally:
            server.inside.discard(thread)

    def watch_until_rest(self) -> None:
        """Listen while keys linger, unless another thread does."""
        woken = threading.Lock()
        woken.acquire()
        in_force = patching.in_force
        if self._watcher.setdefault(0, woken) is woken:
            while patching.in_force is in_force and not _ended and self._watch_on(woken):
                pass
            if _ended:
                self._watcher.pop(0, None)

    def _watch_on(self, woken: threading.Lock) -> bool:
        """`watch_keys`, which an error does not end: no other thread would begin, and each wait for a key be long."""
        try:
            return self.watch_keys(woken)
        except Exception:  # a bug of ours
            logger.exception("Keys that linger could not be watched.")
            time.sleep(self.tick_s)
            return True

    def watch_keys(self, woken: threading.Lock) -> bool:
        """Listen for a while, and give up what has lingered for long enough. Returns False where nothing lingers."""
        cache, now = self.key_cache, clock()
        if now >= self._sweeps_at:
            self._sweeps_at = now + self.tick_s
            is_owner_gone = self.server.owner() is None
            if is_owner_gone:
                cache.drop_all()
            if self.key_cache.sweep(now):
                self._used_at = now
            elif now >= self._used_at + _QUIET_S or is_owner_gone:
                return self._sleep(woken, 0.0 if is_owner_gone else _REST_S)
        self._listen(min(self.tick_s, _LONGEST_PARK_S))
        return True

    def _sleep(self, woken: threading.Lock, rest_s: float) -> bool:
        """Sleep until a key lingers. Returns False where none does in time."""
        if not self.key_cache.rests():
            return True
        while not woken.acquire(timeout=min(rest_s, _LOOKS_EVERY_S)):
            if self.has_unconfirmed:
                self._listen(_LONGEST_PARK_S)
            elif clock() >= max(self._used_at, self._posted_at) + rest_s:
                return not self._ends(woken)
        return True

    def _ends(self, woken: threading.Lock) -> bool:
        """Whether the sleeping thread ends: nothing needs it just now, or another thread listens."""
        self._watcher.pop(0, None)
        is_needed = woken.acquire(blocking=False) or self.has_unconfirmed
        return not is_needed or self._watcher.setdefault(0, woken) is not woken

    def _listen(self, limit_s: float) -> None:
        """Listen for messages, or wait while callers do, for `limit_s` seconds at most."""
        self._leave_if_unconfirmed()
        connection: Any = self.server.connection
        if connection is not self._listening_on:
            self._listening_on = connection
            self._mailbox = None if connection is None else connection.pipe.mailbox()
            self.drop(None if connection is None else connection.registry)
        if self._mailbox is not None and connection.pipe.silence_s < _BUSY_S:
            time.sleep(_BUSY_S)
        elif self._mailbox is None or self._read_keys(limit_s) is BROKEN:
            self._mailbox = None
            self.drop()
            time.sleep(limit_s)

    def _read_keys(self, limit_s: float) -> object:
        try:
            return self.server.wait_for_message(self._mailbox, limit_s)
        except Exception:  # a bug of ours must not end the watching
            logger.exception("The connection of keys that linger failed.")
            return BROKEN

    def forget(self) -> None:
        super().forget()
        self._watcher = {}
        self._confirming = set()

    def resume(self) -> None:
        """After a patch, where the former thread has ended: start another one if it listened."""
        self.drop()
        self._watcher = {}
        if self.key_cache.is_watched:
            self._start_watching()

    def end(self, limit_s: float) -> None:
        """Give up what lingers, and wait for the server's replies, for `limit_s` seconds at most."""
        give_up_at = clock() + limit_s
        self.give_up()
        self.wake()
        while self._watcher and clock() < give_up_at:  # what the watcher has just taken out is about to leave
            time.sleep(_LOOKS_AT_WATCHER_EVERY_S)
        self.key_cache.end_watching()
        self.give_up()  # what another caller has let linger meanwhile
        self._wait_for_replies(give_up_at - clock())


def _part_of(server: ThreadServerTransport) -> ThreadLingering:
    lingering = server.lingering
    assert isinstance(lingering, ThreadLingering)
    return lingering


_watched: weakref.WeakSet[ThreadServerTransport] = weakref.WeakSet()
fork.on_fork(_watched.clear)

_ended: list[bool] = []
"""Not empty: the program ends, and nothing may linger. Daemon threads and other exit handlers may still use locks."""
fork.on_fork(_ended.clear)


@atexit.register  # later than the cleanup does, which is imported: so it runs earlier, and leaves to it what remains
def _give_back_at_exit() -> None:
    fork.generation()  # has the parent's forgotten in a child
    _ended.append(True)
    deadline = clock() + _EXIT_LIMIT_S
    for server in members(_watched):
        _part_of(server).end(max(deadline - clock(), 0.0))


@patching.own_thread
def _watch(server: ThreadServerTransport) -> None:
    # It keeps the transport alive, but not the client: where that is gone, what lingers must still be given back.
    _part_of(server).watch_until_rest()
    server.close_if_idle()


LINGER = Linger(ThreadLingering)


def take_lingering(lock: LockBase, owner: Owner) -> bool:
    """Take a key that lingers in this process. Returns False where it does not, or another caller was faster."""
    cached = lock._cached or own_cached_key(lock)
    return cached is not None and not cached.waiters and take_at_once(lock, cached, owner)


def acquire_lingering(lock: LockBase, call: Call) -> bool:
    """Acquire a lock with `linger` and no other option, whose key does not linger or is in use."""
    owner, turn = call.owner, Turn()
    try:
        if call.begins:
            cached = lock._cached
            if cached is None or not cached.is_current:
                cached = cached_key(lock)
            if cached.locked_by and call.waits and call.wait_s is None:
                waiter = turn.begin(cached, cached.cache.new_waiter())
                turn.join()
                if cached.is_current:  # else nothing wakes the waiter: this was replaced before it joined
                    waiter.wait(None)
                if turn.leave() and take_kept(lock, turn, cached, owner):
                    return True
            elif may_begin(lock, call, turn, cached):
                _begin_lingering(lock, call, turn)
                if turn.expiry is not None:
                    return True
        call.left = []
        return bool(drive(lock._transport, acquire_in_memory(lock, call, turn), call.left, lock._redis))
    except BaseException as error:  # an interrupt may come before the steps begin
        turn.end(owner)
        clean_up_after(lock, error, owner, call)
        raise


def _begin_lingering(lock: LockBase, call: Call, turn: Turn) -> None:
    """Take the key by the call's first request, and note it in the turn, which has the local lock."""
    try:
        reply = lock._transport.begin(call)
        if reply == call.ours:
            keep_first_grant(lock, call, turn)
            return
    except BaseException as interruption:
        if not is_fetching(call, turn):
            raise
        go_on(lock, call, None, interruption)
    else:
        go_on(lock, call, reply)
