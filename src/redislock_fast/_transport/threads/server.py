"""The transport of one server for threads: one connection per server and process, shared by all its threads.

A `ThreadServerTransport` drives operations over its connection. It connects where there is no connection, sends again
what got no reply, gives up when the pool's retry policy or the caller's time is used up, and then cleans up.

Thread safety: any thread reads `ThreadServerTransport.connection`; it is made under `_connecting`, and taken away, with
its `tokens`, under `_giving_up`. A stale connection is broken and says so. `inside` is used by atomic methods of set
alone.

A signal handler or a finalizer may run at any point and use a lock of the same client. Its thread is then inside of the
transport already, perhaps as the reader for all threads. So its operation gets a dedicated connection, as does an
operation whose reply the server delays. A dedicated connection is kept for the next use until the main one is replaced:
`_dedicated` is used by atomic methods of list alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from redis.exceptions import TimeoutError

from redislock_fast._pipe.base import NOT_ASKED, Args, ConnectionBroken, Forked, NoReply, OnReply, Reply
from redislock_fast._protocol.claims import ReplyTaker
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.operation import Exchange, FirstRequest, Operation, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import Subscribe, cleanup_requests
from redislock_fast._queue.waiters import BROKEN, Waiter
from redislock_fast._transport.base import MOST_LOSSES, BlockingEncoding, Encoding, ServerTransport, is_settled_by
from redislock_fast._transport.pool_events import notice_closing
from redislock_fast._transport.threads.cleanup import ThreadCleanup, finish_at_exit
from redislock_fast._transport.threads.connect import Connection, GreetingBroken, open_connection
from redislock_fast._transport.threads.sentinels import Search
from redislock_fast._util import fork, patching
from redislock_fast._util.redis_py import redis_error
from redislock_fast._util.times import FOREVER_S, clock, reply_within_s


class ThreadServerTransport(ServerTransport[Connection]):
    """All that this process sends to one server.

    Args:
        owner: the connection pool of the server.

    Attributes:
        inside: identifies the threads that drive an operation.
    """

    cleanup: ThreadCleanup

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.inside: set[int] = set()
        self._child = 0  # the forked child in which `inside` was made
        self.cleanup = ThreadCleanup(self)
        self._connecting = threading.RLock()
        self._giving_up = threading.RLock()
        self._search: Search | None = None  # by the thread that connects
        self._dedicated: list[ThreadServerTransport] = []
        finish_at_exit(self)
        fork.forget_in_child(self)
        patching.adapt_later(self)

    @staticmethod
    def encoding_of(owner: Any) -> Encoding:
        return BlockingEncoding(owner.get_encoder())

    def split(self, keys: list[bytes], _: float | None = None) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by server: here, one group. Nothing is waited for."""
        return [range(len(keys))]

    def begin(self, call: FirstRequest) -> object:
        """Send the first request of an acquire or a release, and wait for its reply.

        A caller that finds the reply to be the usual one is done: by steps and a state machine, an uncontended pair
        takes 7 us of CPU more, of 30 in all. Otherwise the steps go on from it. No pending cleanup concerns a new
        token.

        Returns:
            The reply; NOT_ASKED where nothing was sent: there is no connection, this runs in a signal handler, or the
            call did not make a request.

        Raises:
            BaseException: whatever the pipe's `call` raises.
        """
        connection = self.connection
        if connection is None:
            return NOT_ASKED
        request = call.request_on(connection, self.tokens)
        if request is None:
            return NOT_ASKED
        timeout_s = self.timeout_s if call.wait_s is None else reply_within_s(call.wait_s, self.timeout_s)
        call.sent_at = clock()
        return connection.pipe.ask(request, timeout_s, self.inside)

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation until it is finished.

        Args:
            operation: a fresh state machine, or one that has `first_outcome`.
            limit_s: give up after so many seconds, plus `GRACE_S` for a request under way; below 0: the time ended so
                long ago; None: the pool's `socket_timeout` and retry policy alone decide, as for any command of
                redis-py.

        Raises:
            redis.exceptions.ConnectionError: no connection, after all retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: or the class that redis-py has for the server's error.
            RuntimeError: a signal handler has forked meanwhile, and this is the child.
        """
        unanswered: list[Connection] = []
        if isinstance(operation, AcquireOwn):
            self.cleanup.claims.begin(operation)
        try:
            self.run(operation, limit_s, unanswered)
        except BaseException as error:
            self.cleanup.tidy(operation, unanswered, failed=True)
            if isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        if operation.unsettled or operation.claim is not None:  # an earlier attempt may still be under way
            self.cleanup.tidy(operation, unanswered, failed=False)

    def execute_all(self, operations: Sequence[Pipeline], limit_s: float | None = None) -> None:
        """Drive operations, each on the locks of one server, until all are finished; here, there is one server."""
        for operation in operations:
            self.execute(operation, limit_s)

    def run(self, operation: Exchange, limit_s: float | None, unanswered: list[Connection]) -> None:
        """`execute` without its cleanup and without its translation of errors.

        Every connection on which a request left without an answer is added to `unanswered`.
        """
        thread = threading.get_ident()
        # An operation whose first request has left did that before the thread was inside.
        if operation.first_outcome is None and thread in self.inside:
            self.run_dedicated(operation, limit_s, unanswered)
            return
        attempts = self._attempts(limit_s)
        if self.cleanup.pending:
            self.cleanup.before(operation, attempts)
        while True:
            connection = self.connection
            finished = False
            try:
                self.inside.add(thread)
                if operation.first_outcome is not None:
                    (connection, *came), operation.first_outcome = operation.first_outcome, None
                    finished = is_settled_by(operation, connection.capabilities, came)
                if connection is None:
                    connection = self.connect(attempts.ends_at)
                call: Any = connection.pipe.call_many if operation.is_pipeline else connection.pipe.call
                call = call if operation.claim is None else partial(self.call_for_claim, connection, operation)
                while not finished:
                    now = clock()
                    reply = call(operation.request(connection.capabilities, now), attempts.timeout_s(now))
                    finished = operation.feed(reply, connection.capabilities)
            except BaseException as trouble:
                if not self._note_trouble(attempts, connection, operation, trouble, unanswered):
                    raise
            else:
                return
            finally:
                self.inside.discard(thread)
            pause_s = attempts.next_pause_s()
            if pause_s:
                time.sleep(pause_s)

    def call_for_claim(self, connection: Connection, operation: Exchange, request: Args, timeout_s: float) -> Reply:
        """`Pipe.call` for an acquire with a caller's own token, whose reply counts however late it comes."""
        mailbox = connection.pipe.mailbox()
        taker = ReplyTaker(operation, request, mailbox.put)
        connection.pipe.post(request, taker)
        try:
            mailbox.wait(timeout_s, soon=True)
        except ConnectionBroken as error:
            raise ConnectionBroken(True, str(error)) from None
        except Forked:
            raise
        except BaseException:
            self.cleanup.expect_reply_on(connection)
            raise
        finally:
            taker.wake = None
        return taker.reply

    def waiter(self, key: bytes, token: bytes) -> Waiter | None:
        """A waiter, where none of its steps needs a request; None where `enter` must be called."""
        connection = self.connection
        registry = None if connection is None else connection.registry
        if connection is None or registry is None or threading.get_ident() in self.inside:
            return None
        return registry.take(key, token, connection.pipe.mailbox(), connection, self)

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Waiter | None:
        """Listen for messages about a lock. Sends `SUBSCRIBE` or `SSUBSCRIBE`, once per connection or slot.

        Returns:
            The waiter; None where the connection takes no messages.

        Raises:
            redis.exceptions.ConnectionError: and whatever `execute` raises.
        """
        waiter = self.waiter(key, token)
        if waiter is not None:  # as in most cases
            return waiter
        attempts = self._attempts(limit_s)
        while True:
            connection = self.connection
            if connection is None:
                with contextlib.suppress(Redirected, Refused):
                    self.run(ReadHolder(key), attempts.left_s(), [])  # connects, within the retry policy
                continue
            registry = connection.registry
            if registry is None or threading.get_ident() in self.inside:
                return None
            waiter = self.waiter(key, token)
            if waiter is not None:
                return waiter
            channel = registry.channel_for(key)
            subscribing = Subscribe(key, registry.subscribe, channel)
            try:
                self.run(subscribing, attempts.left_s(), [])
            except Redirected as error:
                raise (error if self.is_routed else redis_error(str(error))) from None
            if self.connection is not connection:
                continue
            if subscribing.result and not subscribing.is_pushed:
                self._refuse_silent(connection)
            else:
                registry.note_subscription(channel, subscribing.result)

    def post(self, connection: Connection, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply the caller does not wait; see `_pipe.base.Pipe.post`."""
        thread = threading.get_ident()
        was_inside = thread in self.inside
        try:
            self.inside.add(thread)
            connection.pipe.post(args, on_reply)
        finally:
            if not was_inside:
                self.inside.discard(thread)

    def post_cleanup(self, entries: list[tuple[bytes, bytes]]) -> None:
        connection = self.connection
        if connection is not None:
            with contextlib.suppress(ConnectionBroken):
                for request in cleanup_requests(connection.capabilities, entries):
                    self.post(connection, request)

    def wait_for_message(self, mailbox: Any, timeout_s: float) -> object:
        """Wait for the next message in a mailbox of the connection, as any caller waits for a reply.

        Returns:
            The message; None when none has come within `timeout_s` seconds; BROKEN when none can come any more.
        """
        thread = threading.get_ident()
        was_inside = thread in self.inside
        try:
            self.inside.add(thread)
            return mailbox.wait(min(timeout_s, FOREVER_S))
        except NoReply:
            return None
        except ConnectionBroken:
            return BROKEN
        finally:
            if not was_inside:
                self.inside.discard(thread)

    def next_message(self, waiter: Waiter, timeout_s: float) -> object:
        """Wait for the next message for a waiter; see `wait_for_message`."""
        return self.wait_for_message(waiter.mailbox, timeout_s)

    @property
    def is_entered(self) -> bool:
        """Whether the calling thread is inside already: then this runs in a signal handler or a finalizer."""
        return threading.get_ident() in self.inside

    def separate(self) -> ThreadServerTransport:
        """A transport with a connection of its own, for a thread that is inside of this one already."""
        return type(self)(self._live_owner())

    def close(self) -> None:
        """Close the connection."""
        self._drop(self.connection)

    def _close_idle(self, connection: Connection) -> bool:
        return connection.pipe.close_idle()

    def execute_dedicated(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation that sets no key until it is finished, on a dedicated connection.

        Args:
            operation: a fresh state machine.
            limit_s: as for `execute`.
            slow_s: for how long the server may delay its reply, in seconds, beyond the pool's `socket_timeout`.

        Raises:
            redis.exceptions.ConnectionError: and whatever else `execute` raises.
        """
        unanswered: list[Connection] = []
        try:
            self.run_dedicated(operation, limit_s, unanswered, slow_s)
        except (Redirected, Refused) as error:
            raise redis_error(str(error)) from None

    def run_dedicated(
        self, operation: Exchange, limit_s: float | None, unanswered: list[Connection], slow_s: float = 0.0
    ) -> None:
        """`run` on a dedicated connection, which is kept for the next use unless something went wrong on it."""
        try:
            dedicated = self._dedicated.pop()
        except IndexError:
            dedicated = self.separate()
        dedicated.timeout_s = self.timeout_s if self.timeout_s < 0 else self.timeout_s + slow_s
        try:
            dedicated.run(operation, limit_s, unanswered)
        except BaseException:
            if not unanswered:
                dedicated.close()
            raise
        self._dedicated.append(dedicated)

    def connect(self, ends_at: float | None) -> Connection:
        """The connection, made now where there is none, in one try.

        Args:
            ends_at: when to give up, in the clock's seconds; None: the pool's own limits alone count. It limits waiting
                for another thread that connects and connecting together.

        Raises:
            redis.exceptions.ConnectionError: and whatever `open_connection` raises.
        """
        limit_s = -1.0 if ends_at is None else max(ends_at - clock(), 0.0)
        if sys.is_finalizing():  # a thread that connects has ended with the interpreter
            limit_s = 0.0
        try:
            if not self._connecting.acquire(timeout=limit_s):
                raise TimeoutError("no connection in time")
            connection = self.connection
            if connection is None:
                connection = self._open(ends_at)
                self.cleanup.post_first(connection)
                self._dedicated.clear()  # which may lead to a server that is no primary any more
                self.connection = connection
                notice_closing(self._live_owner(), self)
            return connection  # which another thread may have given up
        finally:
            try:  # noqa: SIM105  # an interrupt inside of `suppress` would leave the lock taken
                self._connecting.release()
            except RuntimeError:  # an interrupt may come before the lock is taken
                pass

    def _open(self, ends_at: float | None) -> Connection:
        if ends_at is not None:
            self._find_primary(ends_at)
        tokens = self.tokens  # they change when a connection is given up, and there is none
        for _ in range(MOST_LOSSES if self.greets else 0):
            with contextlib.suppress(GreetingBroken):
                return open_connection(self._live_owner(), tokens, ends_at, greets=True)
        connection = open_connection(self._live_owner(), tokens, ends_at, greets=False)
        self._note_plain()
        return connection

    def _find_primary(self, ends_at: float) -> None:
        """Where sentinels name the primary, wait until one has answered."""
        pool = self._live_owner()
        if not getattr(pool, "is_master", False):
            return
        if self._search is None:
            with contextlib.suppress(RuntimeError):  # no thread can be started: this one asks, and waits as long
                self._search = Search(pool)
        search = self._search
        if search is not None:
            try:
                search.wait(ends_at - clock())
            finally:
                if search.is_over:
                    self._search = None

    def forget(self) -> None:
        """In a forked child: leave the parent's connection and cleanup to the parent."""
        connection, self.connection = self.connection, None
        self._search = None
        self._connecting = threading.RLock()
        self._giving_up = threading.RLock()
        self.cleanup.forget()
        if self.lingering is not None:
            self.lingering.forget()
        self.forget_inside()
        self._dedicated = []  # each of them has a `forget` of its own
        self._lost = set()
        self.kept_by_wings = {}
        if connection is not None:
            connection.forget()

    def forget_inside(self) -> None:
        """In a forked child, once: no thread is inside."""
        process = os.getpid()
        if self._child != process:
            self._child, self.inside = process, set()

    def wake(self) -> None:
        if self.lingering is not None:
            self.lingering.wake()

    def adapt(self) -> None:
        """After a patch: go on as after the loss of the connection, on which a wait would stop all greenlets."""
        self._connecting = threading.RLock()
        self._giving_up = threading.RLock()
        self.cleanup.adapt()
        self._dedicated.clear()
        self._drop(self.connection)

    def resume(self) -> None:
        if self.lingering is not None:
            self.lingering.resume()
        if not self.cleanup.idle:
            self.cleanup.start()
