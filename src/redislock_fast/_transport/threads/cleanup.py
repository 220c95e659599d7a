"""The cleanup of one server transport for threads, in a thread of its own that ends when nothing is left.

It also reads the late replies to acquires with a caller's own token: they say whether there is something to clean up.

Thread safety: entries are removed from `pending` under `_cleaning_up`, which a signal handler or
finalizer of the same thread may enter again. `_unheard`, the connections with late replies, is used by atomic methods
of set alone. `has_cleaner` is set before a thread is started, and cleared by a thread that ends; two threads at once,
after a race or an interrupt, do no harm.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING

from redis.exceptions import TimeoutError

from redislock_fast._pipe.base import ConnectionBroken, NoReply
from redislock_fast._protocol.claims import Claims
from redislock_fast._protocol.operation import Exchange, Redirected
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import LeaveQueue
from redislock_fast._transport.base import Attempts
from redislock_fast._transport.cleanup import CLEANUP_FIRST_S, CLEANUP_LAST_S, CLEANUP_LIMIT_S, Cleanup
from redislock_fast._transport.threads.connect import Connection
from redislock_fast._transport.threads.starting import start_thread
from redislock_fast._util import fork, patching
from redislock_fast._util.fork import at_child_exit, members
from redislock_fast._util.times import clock

if TYPE_CHECKING:
    from redislock_fast._transport.threads.server import ThreadServerTransport

_EXIT_LIMIT_S = 1.0
"""How long a program waits for the cleanup at its end, in seconds."""


class ThreadCleanup(Cleanup["ThreadServerTransport"]):
    """The part of a `ThreadServerTransport` that cleans up.

    Args:
        server: the transport.

    Attributes:
        has_cleaner: whether a thread cleans up, or is being started for that.
    """

    def __init__(self, server: ThreadServerTransport) -> None:
        super().__init__(server)
        self._cleaning_up = threading.RLock()
        self.has_cleaner = False
        self._unheard: set[Connection] = set()

    def expect_reply_on(self, connection: Connection) -> None:
        """Read the reply to an acquire with a caller's own token on this connection: its caller has stopped waiting."""
        self._unheard.add(connection)
        self.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is to be cleaned up or read, or nothing can be, because the client is gone."""
        return super().idle and not (self._unheard and self.server.owner() is not None)

    def may_rest(self) -> bool:
        """Whether the cleanup thread may end. Once this has returned True, a later cleanup starts another thread."""
        if self.idle:
            self.has_cleaner = False  # before the second check: what was left before this has relied on this thread
        return self.idle

    def clean_up_some(self, limit_s: float = CLEANUP_LIMIT_S) -> bool:
        """Clean up the oldest entries, within `limit_s` seconds. Returns False when the server could not be asked."""
        deadline = clock() + limit_s
        if not self._cleaning_up.acquire(timeout=limit_s):
            return False
        try:
            all_read = self._read_late(deadline)
            if not self.pending:
                return all_read
            cleaning_up = self._next()
            unanswered: list[int] = []
            try:
                self.server.run(cleaning_up, max(deadline - clock(), 0.0), [])
            except Redirected:  # no retry mends that: those locks end with their ttl
                unanswered = sorted(set(cleaning_up.unfinished).difference(cleaning_up.redirected))
            except Exception:  # any: connecting runs users' code, too, for example for credentials
                unanswered = cleaning_up.unfinished
            # Behind the others, which may be on another node: they must not wait for a dead node.
            postponed = [*cleaning_up.to_clean_up(failed=False), *map(self.pending.__getitem__, unanswered)]
            del self.pending[: len(cleaning_up)]
            self.pending += postponed
            return all_read and not postponed
        finally:
            self._cleaning_up.release()

    def finish(self, deadline: float) -> None:
        """Clean up until nothing is left, in this thread too, or until this time of the clock."""
        while not self.idle and (left_s := deadline - clock()) > 0:
            if not self.clean_up_some(min(left_s, CLEANUP_LIMIT_S)):
                time.sleep(min(left_s, CLEANUP_FIRST_S))

    def start(self) -> bool:
        if self.has_cleaner:
            return True
        self.has_cleaner = True
        try:
            start_thread("cleanup", _clean_up_in_background, self._server)  # it keeps no server transport alive
        except BaseException as error:  # none can be started; or an interrupt, perhaps just after it was started
            self.has_cleaner = False
            if not isinstance(error, RuntimeError):
                raise
            return False
        at_child_exit(_finish_cleanup)
        return True

    def _read_late(self, deadline: float) -> bool:
        """Read the connections with replies that no caller waits for. Returns False if some replies are missing.

        Replies come in order, so all of them have been read once the reply to a later request is there.
        """
        silent: list[Connection] = []
        thread = threading.get_ident()
        self.server.inside.add(thread)
        try:
            while self._unheard:
                connection = self._unheard.pop()
                try:
                    connection.pipe.call((b"PING",), max(deadline - clock(), 0.0))
                except NoReply:
                    silent.append(connection)
                except ConnectionBroken:
                    pass  # a key that the request took is left to its ttl
        finally:
            self.server.inside.discard(thread)
            self._unheard.update(silent)
        return not silent

    def before(self, operation: Exchange, attempts: Attempts) -> None:
        """Clean up what an earlier operation left with a key and token that this one is about to set."""
        if not self._returning(operation):
            return
        bounded_s = attempts.bounded_s()
        try:
            # An acquire waits here only if its token is just being cleaned up.
            if not self._cleaning_up.acquire(timeout=-1 if bounded_s is None else bounded_s):
                raise TimeoutError("an earlier acquire with this token could not be cleaned up in time")
            returning = self._returning(operation)
            if returning:
                self.server.run(Pipeline([LeaveQueue(key, token) for key, token in returning]), attempts.left_s(), [])
            for entry in returning:
                with contextlib.suppress(ValueError):  # a signal handler of this thread may have been faster
                    self.pending.remove(entry)
        finally:
            try:  # noqa: SIM105  # as in `ThreadServerTransport.connect`
                self._cleaning_up.release()
            except RuntimeError:
                pass

    def forget(self) -> None:
        """In a forked child: leave to the parent what is to be cleaned up."""
        self.has_cleaner = False
        self._cleaning_up = threading.RLock()
        self.pending, self.endings, self._unheard = [], set(), set()
        self.claims = Claims(self.server.clean_up)  # another thread may have had its mutex

    def adapt(self) -> None:
        """After a patch: take locks of the kind that is in force now, and leave the former thread."""
        self._cleaning_up = threading.RLock()
        self.has_cleaner = False
        self.claims.adapt()


_cleaned_at_exit: weakref.WeakSet[ThreadServerTransport] = weakref.WeakSet()


def finish_at_exit(server: ThreadServerTransport) -> None:
    """Have the cleanup of this transport finished at the end of the program."""
    _cleaned_at_exit.add(server)


@atexit.register
def _finish_cleanup() -> None:
    """Finish the cleanup: a program may be interrupted at the very moment at which it is granted a lock."""
    fork.generation()  # has the parent's forgotten in a child
    deadline = clock() + _EXIT_LIMIT_S
    for server in members(_cleaned_at_exit):
        server.cleanup.finish(deadline)


@patching.own_thread
def _clean_up_in_background(server_ref: weakref.ref[ThreadServerTransport]) -> None:
    try:
        _clean_up_again_and_again(server_ref)
    finally:
        server = server_ref()
        if server is not None:
            server.cleanup.has_cleaner = False


def _clean_up_again_and_again(server_ref: weakref.ref[ThreadServerTransport]) -> None:
    in_force = patching.in_force
    delay_s = CLEANUP_FIRST_S
    while delay_s < CLEANUP_LAST_S and patching.in_force is in_force:
        server = server_ref()
        if server is None:
            return
        if server.cleanup.may_rest():
            server.close_if_idle()
            return
        if server.cleanup.clean_up_some():
            delay_s = CLEANUP_FIRST_S
        else:
            del server
            time.sleep(delay_s)
            delay_s *= 2
