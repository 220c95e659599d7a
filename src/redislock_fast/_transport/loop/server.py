"""The transport of one server for one event loop: one connection that all tasks of the loop share.

A `LoopServerTransport` does for a loop what `_transport.threads.server.ThreadServerTransport` does for threads.

- A caller that is cancelled leaves its request under way. The cleanup of a cancelled acquire is sent after its request.
- Connecting is a task of its own, for which each caller waits within its own time limit.
- Its tasks end with their loop, and so does its connection: see `_transport/loop/end.py`.

Thread safety: a `LoopServerTransport`, its connection and its tasks belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, TimeoutError

from redislock_fast._pipe.base import Args, ConnectionBroken, NoReply, Reply
from redislock_fast._pipe.loop_py import Pipe
from redislock_fast._protocol.claims import ReplyTaker
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.operation import Exchange, FirstRequest, Operation, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import Subscribe
from redislock_fast._queue.waiters import Waiter
from redislock_fast._transport.base import MOST_LOSSES, Attempts, ServerTransport, is_settled_by
from redislock_fast._transport.loop.cleanup import LoopCleanup
from redislock_fast._transport.loop.connect import AsyncConnection, open_connection
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._transport.pool_events import notice_closing
from redislock_fast._transport.threads.connect import GreetingBroken
from redislock_fast._util.fork import members
from redislock_fast._util.redis_py import own_copy, redis_error
from redislock_fast._util.times import FOREVER_S, clock, reply_within_s

_Result = TypeVar("_Result")

_NEVER = math.inf
_LONG_S = 2.0
_ALARMS_PER_S = 200


class Alarms:
    """Timers of waiting tasks: one timer of the loop serves all that end within the same 5 ms.

    A grant usually comes first, so setting an alarm must be cheap, and no alarm is ever cancelled. A waiter that is not
    the poller of its key queue continues to wait when its alarm rings.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiters: dict[int, list[Waiter]] = {}  # by the time at which they ring

    def ring(self, waiter: Waiter, timeout_s: float) -> None:
        """Put None into the waiter's mailbox when the time is up, if the waiter still listens then."""
        mailbox: Any = waiter.mailbox
        mailbox.rings_at = self.loop.time() + timeout_s
        at = int(mailbox.rings_at * _ALARMS_PER_S) + 1
        waiters = self._waiters.get(at)
        if waiters is None:
            self._waiters[at] = [waiter]
            self.loop.call_at(at / _ALARMS_PER_S, self._ring, at)
        else:
            waiters.append(waiter)

    def _ring(self, at: int) -> None:
        for waiter in self._waiters.pop(at):
            mailbox: Any = waiter.mailbox
            if mailbox.rings_at * _ALARMS_PER_S < at:
                rest_s = waiter.rest_s()
                if not rest_s:
                    mailbox.put(None)
                elif rest_s < _NEVER:
                    self.ring(waiter, min(rest_s, _LONG_S))  # a longer alarm would keep the waiter alive for as long


class Mailbox:
    """The messages for one waiting task. It belongs to the loop's thread.

    Args:
        pipe: steps the task.
        alarms: the loop's.

    Attributes:
        rings_at: until when the task listens, by the loop's clock.
    """

    __slots__ = ("_alarms", "_listener", "_messages", "_pipe", "rings_at")

    def __init__(self, pipe: Pipe, alarms: Alarms) -> None:
        self._pipe = pipe
        self._alarms = alarms
        self._messages: list[object] = []
        self._listener: Awaitable[object] | None = None
        self.rings_at = _NEVER

    def put(self, message: object) -> None:
        """Put a message in. From another thread, where the garbage collector may run, the loop delivers it."""
        loop = self._alarms.loop
        if asyncio._get_running_loop() is not loop:  # noqa: SLF001  # documented, for authors of event loops
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.put, message)
            return
        listener, self._listener = self._listener, None
        self.rings_at = _NEVER
        if listener is None:
            self._messages.append(message)
        else:
            self._pipe.put(listener, message)

    def wait(self, waiter: Waiter, timeout_s: float) -> Awaitable[object]:
        """The oldest message; None when none has come in time. Cancelling the task ends the wait.

        Args:
            waiter: the waiter that the mailbox belongs to.
            timeout_s: how long to wait, in seconds, unless the waiter may rest for longer.
        """
        if self._messages or timeout_s <= 0:
            return self._oldest()
        self._listener = listener = self._pipe.listener()
        if timeout_s < _LONG_S:
            self._alarms.ring(waiter, timeout_s)
            return listener
        return self._wait_long(listener, timeout_s)

    async def _oldest(self) -> object:
        return self._messages.pop(0) if self._messages else None

    async def _wait_long(self, listener: Awaitable[object], timeout_s: float) -> object:
        timer = None
        if timeout_s < FOREVER_S:  # a timer that can be cancelled: the alarms would keep the mailbox for as long
            timer = self._alarms.loop.call_later(timeout_s, self.put, None)
        try:
            return await listener
        finally:
            if timer is not None:
                timer.cancel()


class LoopServerTransport(ServerTransport[AsyncConnection]):
    """All that one event loop sends to one server.

    Args:
        owner: the connection pool of the server.
        end: closes its connections when the loop ends; None for a new one, which no other transport shares.

    Attributes:
        loop: the event loop.
        end: as above.
    """

    cleanup: LoopCleanup

    def __init__(self, owner: Any, end: LoopEnd | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        super().__init__(owner)
        self.end = end or LoopEnd()
        self.cleanup = LoopCleanup(self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._alarms = Alarms(self.loop)
        self._opening: asyncio.Task[None] | None = None
        self._all_dedicated: weakref.WeakSet[LoopServerTransport] = weakref.WeakSet()
        self._dedicated: list[LoopServerTransport] = []  # those of them that are not in use
        self.end.attend(self)

    def begin(self, call: FirstRequest) -> Awaitable[Reply] | None:
        """Send the first request of an acquire or a release; see `ThreadServerTransport.begin`.

        By steps and a state machine, an acquire and a release take more than twice the CPU.

        Returns:
            An awaitable of the reply, which raises what the pipe's `call` raises; None where nothing was sent.
        """
        connection = self.connection
        if connection is None:
            return None
        request = call.request_on(connection, self.tokens)
        if request is None:
            return None
        timeout_s = connection.timeout_s
        if call.wait_s is not None:
            timeout_s = reply_within_s(call.wait_s, timeout_s)
        call.sent_at = clock()
        return connection.pipe.call(request, timeout_s)

    async def execute(
        self, operation: Operation, limit_s: float | None = None, unanswered: list[AsyncConnection] | None = None
    ) -> None:
        """Drive an operation until it is finished. One coroutine does all, for speed.

        Args:
            operation: a fresh state machine, or one that has `first_outcome`.
            limit_s: as for `ThreadServerTransport.execute`.
            unanswered: given by a caller that cleans up and translates errors by itself: every connection on which a
                request left without an answer is added to it.

        Raises:
            redis.exceptions.RedisError: as there.
            asyncio.CancelledError: the caller was cancelled. An acquire is cleaned up.
        """
        tidies = unanswered is None
        unanswered = [] if unanswered is None else unanswered
        if tidies and isinstance(operation, AcquireOwn):
            self.cleanup.claims.begin(operation)
        attempts = self._attempts(limit_s)
        try:
            if self.cleanup.pending:
                await self.cleanup.before(operation, attempts)
            while True:
                connection = self.connection
                finished = False
                try:
                    if operation.first_outcome is not None:
                        (connection, *came), operation.first_outcome = operation.first_outcome, None
                        finished = is_settled_by(operation, connection.capabilities, came)
                    if connection is None:
                        connection = await self._connect(attempts)
                    call: Any = connection.pipe.call_many if operation.is_pipeline else connection.pipe.call
                    call = call if operation.claim is None else partial(self._call_for_claim, connection, operation)
                    while not finished:
                        now = clock()
                        reply = await call(operation.request(connection.capabilities, now), attempts.timeout_s(now))
                        finished = operation.feed(reply, connection.capabilities)
                    break
                except BaseException as trouble:
                    if not self._note_trouble(attempts, connection, operation, trouble, unanswered):
                        raise
                await asyncio.sleep(attempts.next_pause_s())
        except BaseException as error:
            if tidies:
                self.cleanup.tidy_failed(operation, unanswered, error)
            # Errors keep this frame, often in a cycle: it must not keep a connection that is to be closed.
            connection = unanswered = call = None
            if tidies and isinstance(error, Redirected | Refused):
                raise redis_error(str(error)) from None
            raise
        if tidies and (operation.unsettled or operation.claim is not None):
            self.cleanup.tidy(operation, unanswered, failed=False)

    async def _call_for_claim(
        self, connection: AsyncConnection, operation: Exchange, request: Args, timeout_s: float
    ) -> Reply:
        """`Pipe.call` for an acquire with a caller's own token, whose reply counts however late it comes."""
        callers, listener = connection.callers, connection.pipe.listener()
        put = partial(connection.pipe.put, listener)
        taker = ReplyTaker(operation, request, put)
        connection.pipe.post(request, taker)
        del connection  # an error keeps this frame
        callers.add(put)
        timer = None if timeout_s < 0 else self.loop.call_later(timeout_s, put, None)
        try:
            message = await listener
        finally:
            taker.wake = None
            callers.discard(put)
            if timer is not None:
                timer.cancel()
            del put, listener, timer
        if message is taker:
            return taker.reply
        raise NoReply("no reply in time") if message is None else ConnectionBroken(True, "the connection broke")

    async def execute_all(self, operations: Sequence[Pipeline], limit_s: float | None = None) -> None:
        """Drive operations, each on the locks of one server, until all are finished; here, there is one server."""
        for operation in operations:
            await self.execute(operation, limit_s)

    async def execute_dedicated(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a dedicated connection; see `ThreadServerTransport.execute_dedicated`."""
        try:
            await self.run_dedicated(operation, limit_s, slow_s)
        except (Redirected, Refused) as error:
            raise redis_error(str(error)) from None

    async def run_dedicated(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """`execute_dedicated` without its translation of errors."""
        if self._dedicated:
            dedicated = self._dedicated.pop()
        else:
            dedicated = type(self)(self._live_owner(), self.end)
            self._all_dedicated.add(dedicated)
        dedicated.timeout_s = self.timeout_s if self.timeout_s < 0 else self.timeout_s + slow_s
        unanswered: list[AsyncConnection] = []
        try:
            await dedicated.execute(operation, limit_s, unanswered)
        except GeneratorExit:  # in any thread, so nothing of the loop may be touched
            raise
        except BaseException:
            for connection in (dedicated.connection, *unanswered):
                dedicated._drop(connection)  # noqa: SLF001  # of its own class
            raise
        self._dedicated.append(dedicated)

    def at_end(self, server: Any) -> None:
        """At the end of the loop, stop another transport, too; see `LoopEnd.attend`."""
        self.end.attend(server)

    def of_running_loop(self) -> LoopServerTransport:
        """The running loop's transport, as for `AsyncTransport`."""
        return self

    def clean_up_dropped(self, entries: list[tuple[bytes, bytes]]) -> None:
        """`clean_up` for a task that was dropped: the garbage collector runs this, in any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.clean_up, entries)

    def waiter(self, key: bytes, token: bytes) -> Waiter | None:
        """A waiter, where none of its steps needs a request; None where `enter` must be called."""
        connection = self.connection
        registry = None if connection is None else connection.registry
        if connection is None or registry is None:
            return None
        return registry.take(key, token, Mailbox(connection.pipe, self._alarms), connection, self)

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Waiter | None:
        """Listen for messages about a lock; see `ThreadServerTransport.enter`."""
        waiter = self.waiter(key, token)
        if waiter is not None:  # as in most cases
            return waiter
        attempts = self._attempts(limit_s)
        while True:
            connection = self.connection
            if connection is None:
                with contextlib.suppress(Redirected, Refused):
                    await self.execute(ReadHolder(key), attempts.left_s(), [])  # connects, within the retry policy
                continue
            registry = connection.registry
            if registry is None:
                return None
            waiter = self.waiter(key, token)
            if waiter is not None:
                return waiter
            channel = registry.channel_for(key)
            subscribing = Subscribe(key, registry.subscribe, channel)
            try:
                await self.execute(subscribing, attempts.left_s(), [])
            except Redirected as error:
                raise (error if self.is_routed else redis_error(str(error))) from None
            if self.connection is not connection:
                continue
            if subscribing.result and not subscribing.is_pushed:
                self._refuse_silent(connection)
            else:
                registry.note_subscription(channel, subscribing.result)

    async def split(self, keys: list[bytes], _: float | None = None) -> Sequence[Sequence[int]]:
        """The keys' indexes, grouped by server: here, one group. Nothing is waited for."""
        return [range(len(keys))]

    def next_message(self, waiter: Waiter, timeout_s: float) -> Awaitable[object]:
        """The next message for a waiter; None when none has come within `timeout_s` seconds."""
        mailbox: Any = waiter.mailbox
        message: Awaitable[object] = mailbox.wait(waiter, timeout_s)
        return message

    async def _connect(self, attempts: Attempts) -> AsyncConnection:
        await self._opened_within(attempts.bounded_s())
        if self.connection is None:
            raise ConnectionError("the connection broke at once")
        return self.connection

    async def _opened_within(self, limit_s: float | None) -> None:
        """Wait for the one task that connects. It goes on when the caller stops waiting."""
        opening = self.opening()
        await asyncio.wait([opening], timeout=limit_s)
        if not opening.done():
            raise TimeoutError("no connection in time")
        if opening.cancelled():  # the loop ends
            raise ConnectionError("connecting was cancelled")
        error = opening.exception()
        if isinstance(error, Exception):  # an interrupt was raised by the task already, for one caller alone
            # Each caller gets an error of its own: a shared one would keep the frames and connections of all alive.
            raise own_copy(error)

    def opening(self) -> asyncio.Task[None]:
        """The task that connects."""
        opening = self._opening
        if opening is None or opening.done():
            opening = self._opening = self.start(self._open())
            opening.add_done_callback(self._opened)
        return opening

    async def _open(self) -> None:
        # redis-py's errors and timeouts keep the task and its frames alive in cycles: no frame may keep a connection.
        for _ in range(MOST_LOSSES if self.greets else 0):
            with contextlib.suppress(GreetingBroken):
                self.connection = await open_connection(self._live_owner(), self.tokens, self.end, greets=True)
                break
        else:
            self.connection = await open_connection(self._live_owner(), self.tokens, self.end, greets=False)
            self._note_plain()
        self.cleanup.post_first(self.connection)
        self._dedicated.clear()  # which may lead to a server that is no primary any more
        notice_closing(self._live_owner(), self)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        if self._opening is opening:
            self._opening = None
        if not opening.cancelled():
            opening.exception()  # marks it as retrieved, even where no caller waits any more

    def note_closing(self) -> None:
        self.in_loop(super().note_closing)

    def _close_idle(self, connection: AsyncConnection) -> bool:
        idle = connection.pipe.is_idle and not connection.pipe.broken
        if idle:
            connection.close()
        return idle

    def authenticate(self, request: Args) -> None:
        if asyncio._get_running_loop() is self.loop:  # noqa: SLF001  # as in Mailbox.put
            super().authenticate(request)
        elif not self.has_ended and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(super().authenticate, request)

    def in_loop(self, call: Callable[..., object], *args: Any) -> None:
        """Call this in the loop: at once in its own thread, soon from another thread, never on a closed loop."""
        if asyncio._get_running_loop() is self.loop:  # noqa: SLF001  # as in `Mailbox.put`
            call(*args)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.call, call, *args)

    def call(self, call: Callable[..., object], *args: Any) -> None:
        """Call a method of a part: as a callback of the loop, it would not keep the transport alive by itself."""
        call(*args)

    # ---- the tasks, which end with the loop ----

    def start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Run a coroutine in a task that ends with the loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> set[asyncio.Task[Any]]:
        """Cancel the tasks, and return them."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    @property
    def has_ended(self) -> bool:
        """Whether the loop is being closed: a connection that breaks now is not replaced."""
        return self.end.has_come

    def abandon(self) -> None:
        """In a forked child: close our copy of the socket, and nothing else of the parent's."""
        self.end.has_come = True  # so that `authenticate` does not touch the parent's loop
        for server in (self, *members(self._all_dedicated)):
            if server.connection is not None:
                server.connection.pipe.abandon()
            if server.lingering is not None:
                server.lingering.forget()
