"""The synchronous channel to a server: one connection per server and process, shared by all its threads.

A `ThreadChannel` drives operations over its link: it connects when there is none, sends again what was lost, gives up
when the pool's retry policy or the caller's time is used up, and then undoes what may have been done.

Who may touch what: `ThreadChannel.link` is replaced under `_connecting` and read without it (a stale link is broken,
and says so); `_undone` is added to by anybody, by one `+=` on the list, and taken from under `_undoing`; `inside` is
used by atomic methods of set alone, and so is `_unheard`, the connections on which nobody waits any more for replies
that must be heard.

A signal handler or a finalizer may run in the middle of anything and use a lock of the same client. Its thread is then
inside already, perhaps as the one that reads for all, so it gets a connection of its own for that one operation, as
does an operation whose reply the server holds back. Such connections are kept as long as the main one, for the next
that needs one: `_spares` is used by atomic methods of list alone.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    TimeoutError,  # noqa: A004
)

from redislock_fast._pipe.base import NOT_ASKED, Args, Forked, Lost, NoReply, OnReply, Reply
from redislock_fast._procedures.waiters import BROKEN, Seat
from redislock_fast._protocol.claims import Claim, Claims, Heard
from redislock_fast._protocol.commands import Exchange, Look, NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Many
from redislock_fast._protocol.queue import Leave, Subscribe
from redislock_fast._transport.base import FOREVER_S, UNDO_FIRST_S, UNDO_LAST_S, UNDO_LIMIT_S, Channel, Encoding
from redislock_fast._transport.health import Standing
from redislock_fast._transport.threads.connect import Link, open_link
from redislock_fast._util import fork
from redislock_fast._util.redis_py import redis_error
from redislock_fast._util.times import GRACE_S, clock

__all__ = ["BlockingEncoding", "ThreadChannel"]

_EXIT_LIMIT_S = 1.0
"""How long a program that ends waits for what is being undone: its threads end with it."""


class BlockingEncoding(Encoding):
    """The encoder of a client that blocks."""

    def key_of(self, name: object) -> bytes:
        """As UTF-8 whatever the client's encoding is: hiredis packs redis-py's own commands so."""
        return name.encode() if isinstance(name, str) else self.encode(name)


class ThreadChannel(BlockingEncoding, Channel[Link]):
    """All that this process sends to one server.

    Args:
        owner: the connection pool whose server it is.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._connecting = threading.RLock()
        self._undoing = threading.RLock()
        self._undoer: threading.Thread | None = None
        self.inside: set[int] = set()  # idents of the threads that drive an operation
        self._spares: list[ThreadChannel] = []
        self._unheard: set[Link] = set()
        fork.forget_in_child(self)

    def split(self, keys: list[bytes]) -> Sequence[Sequence[int]]:
        """The keys' indexes, those together that one server has: here, all."""
        return [range(len(keys))]

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished.

        Args:
            operation: a fresh state machine, or one that has `begun`.
            limit_s: give up after so many seconds, plus `GRACE_S` for a request under way; below 0: the time ended so
                long ago; None: the pool's `socket_timeout` and retry policy alone decide, as for any command of
                redis-py.

        Raises:
            redis.exceptions.ConnectionError: no connection, after all retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: or the class that redis-py has for the server's error.
            RuntimeError: a signal handler has forked meanwhile, and this is the child.
        """
        loose: list[Link] = []
        if isinstance(operation, AcquireOwn):
            self.claims.begin(operation)
        try:
            self.run(operation, limit_s, loose)
        except BaseException as error:
            self.tidy(operation, loose, failed=True)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        if operation.unsettled or operation.claim is not None:
            self.tidy(operation, loose, failed=False)  # an earlier attempt of an acquire may still be under way

    def execute_all(self, operations: Sequence[Many], limit_s: float | None = None) -> None:
        """Drive operations, each on locks of another server, to their ends; here, there is one server."""
        for operation in operations:
            self.execute(operation, limit_s)

    def run(  # noqa: PLR0912, PLR0915  # the hot path: calls cost more than branches
        self, operation: Exchange, limit_s: float | None, loose: list[Link]
    ) -> None:
        """`execute` without its undoing and without its translation of errors.

        Every link on which a request left without an answer is added to `loose`.
        """
        thread = get_ident()
        if operation.begun is None and thread in self.inside:  # else it was not when the request left
            self.run_beside(operation, limit_s, loose)
            return
        now = clock()
        deadline = None if limit_s is None or limit_s > FOREVER_S else now + limit_s
        failures = 0
        if self._undone:
            self._undo_before(operation, limit_s)
            now = clock()
        while True:
            link = self.link
            try:
                self.inside.add(thread)
                if operation.begun is not None:
                    (link, reply, interruption), operation.begun = operation.begun, None
                    if interruption is not None:
                        try:
                            raise interruption
                        finally:
                            del interruption  # as `error` below
                    if reply is not NOT_ASKED and operation.feed(reply, link.dialect):
                        return
                    now = clock()
                if link is None:
                    link = self.connect(deadline)
                    now = clock()
                timeout_s = self.timeout_s if deadline is None else self._bounded_s(deadline - now)
                dialect = link.dialect
                call: Any = link.pipe.call_many if operation.many else link.pipe.call
                if operation.claim is not None:
                    call = partial(self._call_heard, link, operation.claim)
                while not operation.feed(call(operation.request(dialect, now), timeout_s), dialect):
                    now = clock()
                    if deadline is not None:
                        timeout_s = self._bounded_s(deadline - now)
            except (AuthenticationError, AuthorizationError, Refused, Redirected, Forked):
                raise
            except (Lost, NoReply, NotExecuted, ConnectionError, TimeoutError) as trouble:
                error = self._trouble(link, operation, trouble, loose)
                failures += 1
                now = clock()
                pause_s = self._pause_s(trouble, failures, now, deadline)
            except BaseException:  # an interrupt: the request may be under way
                if link is not None:
                    operation.lost(True)
                    loose.append(link)
                raise
            else:
                return
            finally:
                self.inside.discard(thread)
            if pause_s is None:
                try:
                    raise error
                finally:
                    del error  # or this frame and the error would keep each other, and the connection, alive
            del error
            if pause_s:
                time.sleep(pause_s)
                now = clock()

    def _call_heard(self, link: Link, claim: Claim, request: Args, timeout_s: float) -> Reply:
        """`Pipe.call` for an attempt by a caller's own token, whose reply is heard however late it comes."""
        mailbox = link.pipe.mailbox()
        heard = Heard(claim, request, mailbox.tell)
        link.pipe.post(request, heard)
        try:
            mailbox.wait(timeout_s, soon=True)
        except Lost as lost:
            raise Lost(True, str(lost)) from None
        except Forked:
            raise
        except BaseException:
            self._unheard.add(link)
            self._start_undoing()
            raise
        finally:
            heard.tell = None
        return heard.reply

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """Listen for messages about a lock. Sends `SUBSCRIBE` or `SSUBSCRIBE`, once per connection or slot.

        Returns:
            A seat; None where the connection takes no messages.

        Raises:
            redis.exceptions.ConnectionError: and whatever `execute` raises.
        """
        deadline = None if limit_s is None or limit_s > FOREVER_S else clock() + limit_s
        while True:
            link = self.link
            if link is None:
                left_s = None if deadline is None else deadline - clock()
                with contextlib.suppress(Redirected):
                    self.run(Look(key), left_s, [])  # connects, within the retry policy
                continue
            room = link.room
            if room is None or get_ident() in self.inside:
                return None
            seat = room.take(key, token, link.pipe.mailbox(), link, self)
            if seat is not None:
                return seat
            channel = room.channel_for(key)
            subscribing = Subscribe(key, room.subscribe, channel)
            self.run(subscribing, None if deadline is None else deadline - clock(), [])
            if self.link is link:
                room.note_subscription(channel, subscribing.result)

    def post(self, link: Link, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply nobody waits; see `_pipe.base.Pipe.post`."""
        thread = get_ident()
        was_inside = thread in self.inside
        try:
            self.inside.add(thread)
            link.pipe.post(args, on_reply)
        finally:
            if not was_inside:
                self.inside.discard(thread)

    def is_current(self, seat: Seat) -> bool:
        """Whether requests still leave on the seat's connection."""
        link = self.link
        return link is not None and link.room is seat.room and not link.pipe.broken

    def hear(self, mailbox: Any, timeout_s: float) -> object:
        """Wait for the next message in a mailbox of the channel's connection, as any caller waits for a reply.

        Returns:
            The message; None when none has come within so many seconds; BROKEN when none can come any more.
        """
        thread = get_ident()
        was_inside = thread in self.inside
        try:
            self.inside.add(thread)
            return mailbox.wait(min(timeout_s, FOREVER_S))
        except NoReply:
            return None
        except Lost:
            return BROKEN
        finally:
            if not was_inside:
                self.inside.discard(thread)

    @property
    def is_entered(self) -> bool:
        """Whether the calling thread is inside already, and this is a signal handler or a finalizer."""
        return get_ident() in self.inside

    def apart(self) -> ThreadChannel:
        """A channel with a connection of its own, for who finds himself inside of this one."""
        return type(self)(self._live_owner())

    def close(self) -> None:
        """Close the connection."""
        self._drop(self.link)

    def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation that sets no key to its end, on a connection that nobody else uses meanwhile.

        Args:
            operation: a fresh state machine.
            limit_s: as for `execute`.
            slow_s: for how long the server may hold its reply back, in seconds, beyond the pool's `socket_timeout`.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises.
        """
        loose: list[Link] = []
        try:
            self.run_beside(operation, limit_s, loose, slow_s)
        except (Redirected, Refused) as error:
            raise redis_error(str(error)) from None

    def run_beside(self, operation: Exchange, limit_s: float | None, loose: list[Link], slow_s: float = 0.0) -> None:
        """`run` on a connection that nobody else uses meanwhile. It is kept if it served well."""
        try:
            spare = self._spares.pop()
        except IndexError:
            spare = self.apart()
        spare.timeout_s = self.timeout_s if self.timeout_s < 0 else self.timeout_s + slow_s
        try:
            spare.run(operation, limit_s, loose)
        except BaseException:
            if not loose:
                spare.close()
            raise
        self._spares.append(spare)

    def connect(self, deadline: float | None) -> Link:
        """The connection, made now where there is none, in one try.

        Args:
            deadline: when the caller's time ends, by the clock; None: the pool's own limits alone count. Waiting for
                another thread that connects and connecting take no longer together.

        Raises:
            redis.exceptions.ConnectionError: and whatever `open_link` raises.
        """
        ends_at = None if deadline is None else deadline + GRACE_S
        try:
            if not self._connecting.acquire(timeout=-1 if ends_at is None else max(ends_at - clock(), 0.0)):
                raise TimeoutError("no connection in time")
            if self.link is None:
                link = open_link(self._live_owner(), ends_at)
                self._post_first(link)
                self._spares.clear()  # which may lead to a server that was the primary once
                self.link = link
            return self.link
        finally:
            with contextlib.suppress(RuntimeError):  # not taken: an interrupt may come at the very moment
                self._connecting.release()

    def _start_undoing(self) -> None:
        undoer = self._undoer
        if undoer is None or not undoer.is_alive():
            # Two at once, after a race, do no harm. The thread keeps no channel alive.
            undoer = threading.Thread(
                target=_undo_in_background, args=(weakref.ref(self),), name="redislock_fast-undo", daemon=True
            )
            self._undoer = undoer
            with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
                undoer.start()
                _undoers.add(undoer)

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be undone or to be heard, or nothing can be, because the owner is gone."""
        return super().idle and not (self._unheard and self._owner() is not None)

    def may_rest(self) -> bool:
        """Whether the undoing thread may end. Once it has been told so, whoever leaves something starts another."""
        if self.idle:
            self._undoer = None  # before the second look: who left something before this has relied on this thread
        return self.idle

    def undo_some(self) -> bool:
        """Undo the oldest attempts that wait for it. Returns False when the server could not be asked."""
        with self._undoing:
            all_heard = self._hear_late()
            if not self._undone:
                return all_heard
            undoing = self._next_undoing()
            unanswered: list[int] = []
            try:
                self.run(undoing, UNDO_LIMIT_S, [])
            except Redirected:
                pass  # no retry mends that: the lock's own ttl must do
            except Exception:  # whatever it is: connecting runs users' code, too, as for credentials
                unanswered = undoing.unfinished
            # Behind the others, which may be another node's: a dead one must not keep those waiting.
            postponed = [*undoing.to_undo(failed=False), *map(self._undone.__getitem__, unanswered)]
            del self._undone[: len(undoing)]
            self._undone += postponed
            return all_heard and not postponed

    def _hear_late(self) -> bool:
        """Read the connections on which replies are to be heard that nobody waits for. Returns False if some are left.

        Replies come in order, so each of them has been heard once the one to a later request is there.
        """
        silent: list[Link] = []
        thread = get_ident()
        self.inside.add(thread)
        try:
            while self._unheard:
                link = self._unheard.pop()
                try:
                    link.pipe.call((b"PING",), UNDO_LIMIT_S)
                except NoReply:
                    silent.append(link)
                except Lost:
                    pass  # a key that it took is left to its ttl
        finally:
            self.inside.discard(thread)
            self._unheard.update(silent)
        return not silent

    def _undo_before(self, operation: Exchange, limit_s: float | None) -> None:
        if not self._returning(operation):
            return
        deadline = None if limit_s is None or limit_s > FOREVER_S else clock() + limit_s
        try:
            # Only an acquire that brings such a token again waits for an undoing that is under way.
            if not self._undoing.acquire(timeout=-1 if deadline is None else max(deadline + GRACE_S - clock(), 0.0)):
                raise TimeoutError("an earlier acquire with this token could not be undone in time")
            returning = self._returning(operation)
            if returning:
                undoing = Many([Leave(key, token) for key, token in returning])
                self.run(undoing, None if deadline is None else deadline - clock(), [])
            for entry in returning:
                with contextlib.suppress(ValueError):  # a signal handler of this thread may have been faster
                    self._undone.remove(entry)
        finally:
            with contextlib.suppress(RuntimeError):  # as in `connect`
                self._undoing.release()

    def forget(self) -> None:
        """In a forked child: leave the parent's connection and unfinished business to the parent."""
        link, self.link = self.link, None
        self._connecting = threading.RLock()
        self._undoing = threading.RLock()
        self._undone.clear()
        self._endings.clear()
        self._unheard.clear()
        self.inside.clear()
        self._spares.clear()  # each forgets for itself
        self.claims = Claims(self.undo)  # another thread may have had its mutex
        self.standing = Standing()
        if link is not None:
            link.forget()


_undoers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish_undoing() -> None:
    """Else a program that is interrupted just when it is granted a lock might leave that behind."""
    deadline = clock() + _EXIT_LIMIT_S
    for undoer in list(_undoers):
        undoer.join(max(deadline - clock(), 0.0))


def _undo_in_background(channel_ref: weakref.ref[ThreadChannel]) -> None:
    delay_s = UNDO_FIRST_S
    while delay_s < UNDO_LAST_S:
        channel = channel_ref()
        if channel is None or channel.may_rest():
            return
        if channel.undo_some():
            delay_s = UNDO_FIRST_S
        else:
            del channel
            time.sleep(delay_s)
            delay_s *= 2
