"""The transport of one server for threads: one connection per server and process, shared by all its threads.

A `ThreadChannel` drives operations over its connection. It connects when there is no connection, sends again what was
lost, gives up when the pool's retry policy or the caller's time is used up, and then cleans up.

Who may touch what: any thread reads `ThreadChannel.link`; it is replaced under `_connecting`, and a stale connection is
broken and says so. `inside` is used by atomic methods of set alone.

A signal handler or a finalizer may run at any point and use a lock of the same client. Its thread is then inside of the
transport already, perhaps as the one that reads for all threads. So that operation gets a dedicated connection, as does
an operation whose reply the server delays. A dedicated connection is kept for the next use until the main one is
replaced: `_spares` is used by atomic methods of list alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

from redis.exceptions import TimeoutError  # noqa: A004  # redis-py's, as everywhere in its users' code

from redislock_fast._pipe.base import Args, Lost, NoReply, OnReply
from redislock_fast._procedures.waiters import BROKEN, Seat
from redislock_fast._protocol.commands import Look
from redislock_fast._protocol.operation import Exchange, Operation, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Many
from redislock_fast._protocol.queue import Subscribe
from redislock_fast._transport.base import Encoding
from redislock_fast._transport.health import Standing
from redislock_fast._transport.retries import FOREVER_S, is_settled_by
from redislock_fast._transport.threads.cleanup import ThreadCleanup
from redislock_fast._transport.threads.connect import Link, open_link
from redislock_fast._util import fork
from redislock_fast._util.redis_py import redis_error
from redislock_fast._util.times import clock

__all__ = ["BlockingEncoding", "ThreadChannel"]


class BlockingEncoding(Encoding):
    """The encoder of a blocking client."""

    def key_of(self, name: object) -> bytes:
        """As UTF-8 whatever the client's encoding is: hiredis packs redis-py's own commands so."""
        return name.encode() if isinstance(name, str) else self.encode(name)


class ThreadChannel(BlockingEncoding, ThreadCleanup):
    """All that this process sends to one server.

    Args:
        owner: the connection pool of the server.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._connecting = threading.RLock()
        self._spares: list[ThreadChannel] = []
        fork.forget_in_child(self)

    def split(self, keys: list[bytes]) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by server: here, one group."""
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
        """Drive operations, each on the locks of one server, until all are finished; here, there is one server."""
        for operation in operations:
            self.execute(operation, limit_s)

    def run(self, operation: Exchange, limit_s: float | None, loose: list[Link]) -> None:
        """`execute` without its cleanup and without its translation of errors.

        Every connection on which a request left without an answer is added to `loose`.
        """
        thread = get_ident()
        if operation.begun is None and thread in self.inside:  # otherwise it was not when the request left
            self.run_beside(operation, limit_s, loose)
            return
        attempts = self._attempts(limit_s)
        if self._undone:
            self._undo_before(operation, attempts)
        while True:
            link = self.link
            finished = False
            try:
                self.inside.add(thread)
                if operation.begun is not None:
                    (link, *came), operation.begun = operation.begun, None
                    finished = is_settled_by(operation, link.dialect, came)
                if link is None:
                    link = self.connect(attempts.ends_at)
                call: Any = link.pipe.call_many if operation.many else link.pipe.call
                call = call if operation.claim is None else partial(self.call_heard, link, operation.claim)
                while not finished:
                    now = clock()
                    reply = call(operation.request(link.dialect, now), attempts.timeout_s(now))
                    finished = operation.feed(reply, link.dialect)
            except BaseException as trouble:
                if not self._note_trouble(attempts, link, operation, trouble, loose):
                    raise
            else:
                return
            finally:
                self.inside.discard(thread)
            pause_s = attempts.next_pause_s()
            if pause_s:
                time.sleep(pause_s)

    def seat(self, key: bytes, token: bytes) -> Seat | None:
        """A waiter, where none of its steps needs a request; None where `enter` must be called."""
        link = self.link
        room = None if link is None else link.room
        if link is None or room is None or get_ident() in self.inside:
            return None
        return room.take(key, token, link.pipe.mailbox(), link, self)

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """Listen for messages about a lock. Sends `SUBSCRIBE` or `SSUBSCRIBE`, once per connection or slot.

        Returns:
            The waiter; None where the connection takes no messages.

        Raises:
            redis.exceptions.ConnectionError: and whatever `execute` raises.
        """
        seat = self.seat(key, token)
        if seat is not None:
            return seat
        attempts = self._attempts(limit_s)
        while True:
            link = self.link
            if link is None:
                with contextlib.suppress(Redirected):
                    self.run(Look(key), attempts.left_s(), [])  # connects, within the retry policy
                continue
            room = link.room
            if room is None or get_ident() in self.inside:
                return None
            seat = self.seat(key, token)
            if seat is not None:
                return seat
            channel = room.channel_for(key)
            subscribing = Subscribe(key, room.subscribe, channel)
            self.run(subscribing, attempts.left_s(), [])
            if self.link is link:
                room.note_subscription(channel, subscribing.result)

    def post(self, link: Link, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply the caller does not wait; see `_pipe.base.Pipe.post`."""
        thread = get_ident()
        was_inside = thread in self.inside
        try:
            self.inside.add(thread)
            link.pipe.post(args, on_reply)
        finally:
            if not was_inside:
                self.inside.discard(thread)

    def hear(self, mailbox: Any, timeout_s: float) -> object:
        """Wait for the next message in a mailbox of the connection, as any caller waits for a reply.

        Returns:
            The message; None when none has come within `timeout_s` seconds; BROKEN when none can come any more.
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
        """Whether the calling thread is inside already: then this runs in a signal handler or a finalizer."""
        return get_ident() in self.inside

    def apart(self) -> ThreadChannel:
        """A transport with a connection of its own, for a thread that is inside of this one already."""
        return type(self)(self._live_owner())

    def close(self) -> None:
        """Close the connection."""
        self._drop(self.link)

    def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation that sets no key until it is finished, on a dedicated connection.

        Args:
            operation: a fresh state machine.
            limit_s: as for `execute`.
            slow_s: for how long the server may delay its reply, in seconds, beyond the pool's `socket_timeout`.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises.
        """
        loose: list[Link] = []
        try:
            self.run_beside(operation, limit_s, loose, slow_s)
        except (Redirected, Refused) as error:
            raise redis_error(str(error)) from None

    def run_beside(self, operation: Exchange, limit_s: float | None, loose: list[Link], slow_s: float = 0.0) -> None:
        """`run` on a dedicated connection, which is kept for the next use unless something went wrong on it."""
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

    def connect(self, ends_at: float | None) -> Link:
        """The connection, made now where there is none, in one try.

        Args:
            ends_at: when to give up, in the clock's seconds; None: the pool's own limits alone count. It limits waiting
                for another thread that connects and connecting together.

        Raises:
            redis.exceptions.ConnectionError: and whatever `open_link` raises.
        """
        try:
            if not self._connecting.acquire(timeout=-1 if ends_at is None else max(ends_at - clock(), 0.0)):
                raise TimeoutError("no connection in time")
            if self.link is None:
                link = open_link(self._live_owner(), ends_at)
                self._post_first(link)
                self._spares.clear()  # which may lead to a server that is no primary any more
                self.link = link
            return self.link
        finally:
            with contextlib.suppress(RuntimeError):  # not taken: an interrupt may come at the very moment
                self._connecting.release()

    def forget(self) -> None:
        """In a forked child: leave the parent's connection and unfinished business to the parent."""
        link, self.link = self.link, None
        self._connecting = threading.RLock()
        self._forget_cleanup()
        self.inside.clear()
        self._spares.clear()  # each of them has a `forget` of its own
        self.standing = Standing()
        if link is not None:
            link.forget()
