"""All that one event loop sends to one server, over one connection that all tasks of the loop share.

A `LoopChannel` does for a loop what `_transport.threads.server.ThreadChannel` does for threads.

- Cancelling a caller detaches it: its request stays under way. A cancelled acquire is undone behind itself.
- Connecting is a task of its own that all callers wait for, each as long as it likes.
- Its tasks end with their loop, and so does its connection: see `_transport/loop/end.py`.

Who may touch what: a channel, its link and its tasks belong to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    TimeoutError,  # noqa: A004
)

from redislock_fast._pipe.base import NOT_ASKED, Args, Lost, NoReply, Reply
from redislock_fast._pipe.loop_py import Pipe
from redislock_fast._procedures.waiters import Seat
from redislock_fast._protocol.claims import Claim, Heard
from redislock_fast._protocol.commands import Look, NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Many
from redislock_fast._protocol.queue import Leave, Subscribe
from redislock_fast._transport.base import FOREVER_S, UNDO_FIRST_S, UNDO_LAST_S, UNDO_LIMIT_S, Channel
from redislock_fast._transport.loop.connect import AsyncLink, open_link
from redislock_fast._transport.loop.end import LoopEnd
from redislock_fast._util.redis_py import own_copy, redis_error
from redislock_fast._util.times import GRACE_S, clock

__all__ = ["LoopChannel"]

_NEVER = math.inf
_LONG_S = 2.0
_ALARMS_PER_S = 200

_Result = TypeVar("_Result")


class Alarms:
    """Timers of waiting tasks, all that ring within the same 5 ms by one timer of the loop.

    Nearly all of them are for nothing, since a grant comes first: setting one costs 0.2 us, and ending it nothing. Who
    would only learn that another looks for him sleeps on: 3,000 tasks on one key get it 1.2 times as often so.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._seats: dict[int, list[Seat]] = {}  # by the time at which they ring

    def ring(self, seat: Seat, timeout_s: float) -> None:
        """Tell the seat's mailbox None when the time has come, if it still waits for that."""
        mailbox: Any = seat.mailbox
        mailbox.rings_at = self.loop.time() + timeout_s
        at = int(mailbox.rings_at * _ALARMS_PER_S) + 1
        seats = self._seats.get(at)
        if seats is None:
            self._seats[at] = [seat]
            self.loop.call_at(at / _ALARMS_PER_S, self._ring, at)
        else:
            seats.append(seat)

    def _ring(self, at: int) -> None:
        for seat in self._seats.pop(at):
            mailbox: Any = seat.mailbox
            if mailbox.rings_at * _ALARMS_PER_S < at:
                rest_s = seat.rest_s()
                if not rest_s:
                    mailbox.tell(None)
                elif rest_s < _NEVER:
                    self.ring(seat, min(rest_s, _LONG_S))  # or it would keep the seat for as long


class Mailbox:
    """How one waiting task is told. It belongs to the loop's thread.

    Args:
        pipe: steps the task.
        alarms: the loop's.

    Attributes:
        rings_at: until when it waits, by the loop's clock.
    """

    __slots__ = ("_alarms", "_listener", "_messages", "_pipe", "rings_at")

    def __init__(self, pipe: Pipe, alarms: Alarms) -> None:
        self._pipe = pipe
        self._alarms = alarms
        self._messages: list[object] = []
        self._listener: Awaitable[object] | None = None
        self.rings_at = _NEVER

    def tell(self, message: object) -> None:
        """Leave a message. From elsewhere (a collector of garbage may run anywhere) it comes by way of the loop."""
        loop = self._alarms.loop
        if asyncio._get_running_loop() is not loop:  # noqa: SLF001  # documented, for those who drive loops
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.tell, message)
            return
        listener, self._listener = self._listener, None
        self.rings_at = _NEVER
        if listener is None:
            self._messages.append(message)
        else:
            self._pipe.tell(listener, message)

    def wait(self, seat: Seat, timeout_s: float) -> Awaitable[object]:
        """The oldest message; None when none has come within so many seconds. Who is cancelled waits no more.

        Args:
            seat: whose mailbox it is.
            timeout_s: for how long, unless the seat may rest for longer.
        """
        if self._messages or timeout_s <= 0:
            return self._look()
        self._listener = listener = self._pipe.listener()
        if timeout_s < _LONG_S:
            self._alarms.ring(seat, timeout_s)
            return listener
        return self._wait_long(listener, timeout_s)

    async def _look(self) -> object:
        return self._messages.pop(0) if self._messages else None

    async def _wait_long(self, listener: Awaitable[object], timeout_s: float) -> object:
        timer = None
        if timeout_s < FOREVER_S:  # a timer that can be cancelled: the alarms would keep the mailbox for as long
            timer = self._alarms.loop.call_later(timeout_s, self.tell, None)
        try:
            return await listener
        finally:
            if timer is not None:
                timer.cancel()


class LoopChannel(Channel[AsyncLink]):
    """All that one event loop sends to one server.

    Args:
        owner: the connection pool whose server it is.
        end: what closes its connections; a new one where it shares it with no other channel.
    """

    def __init__(self, owner: Any, end: LoopEnd | None = None) -> None:
        super().__init__(owner)
        self._loop = asyncio.get_running_loop()
        self._alarms = Alarms(self._loop)
        self._opening: asyncio.Task[None] | None = None
        self._undoer: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beside: weakref.WeakSet[LoopChannel] = weakref.WeakSet()
        self._spares: list[LoopChannel] = []  # those of them that nobody uses
        self._end = end or LoopEnd()
        self._end.attend(self)

    async def execute(  # noqa: PLR0912, PLR0915  # one coroutine, where ThreadChannel has two methods: 0.3 us each
        self,
        operation: Operation,
        limit_s: float | None = None,
        loose: list[AsyncLink] | None = None,
    ) -> None:
        """Drive an operation until it is finished.

        Args:
            operation: a fresh state machine, or one that has `begun`.
            limit_s: as for `ThreadChannel.execute`.
            loose: given by who undoes and translates errors himself; every link on which a request left without an
                answer is added to it.

        Raises:
            redis.exceptions.ConnectionError: no connection, after all retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: or the class that redis-py has for the server's error.
            asyncio.CancelledError: the caller was cancelled. An acquire is undone.
        """
        tidies = loose is None
        if tidies and isinstance(operation, AcquireOwn):
            self.claims.begin(operation)
        now = clock()
        deadline = None if limit_s is None or limit_s > FOREVER_S else now + limit_s
        failures = 0
        try:
            if self._undone:
                await self._undo_before(operation, limit_s)
                now = clock()
            while True:
                link = self.link
                try:
                    if operation.begun is not None:
                        (link, reply, interruption), operation.begun = operation.begun, None
                        if interruption is not None:
                            try:
                                raise interruption
                            finally:
                                del interruption  # as `error` below
                        if reply is not NOT_ASKED and operation.feed(reply, link.dialect):
                            break
                        now = clock()
                    if link is None:
                        link = await self._connect(deadline)
                        now = clock()
                    timeout_s = self.timeout_s if deadline is None else self._bounded_s(deadline - now)
                    dialect = link.dialect
                    call: Any = link.pipe.call_many if operation.many else link.pipe.call
                    if operation.claim is not None:
                        call = partial(self._call_heard, link, operation.claim)
                    while not operation.feed(await call(operation.request(dialect, now), timeout_s), dialect):
                        now = clock()
                        if deadline is not None:
                            timeout_s = self._bounded_s(deadline - now)
                    break
                except (AuthenticationError, AuthorizationError, Refused, Redirected):
                    raise
                except (Lost, NoReply, NotExecuted, ConnectionError, TimeoutError) as trouble:
                    if loose is None:
                        loose = []
                    error = self._trouble(link, operation, trouble, loose)
                    failures += 1
                    now = clock()
                    pause_s = self._pause_s(trouble, failures, now, deadline)
                except BaseException:  # cancelled: the request may be under way
                    if loose is None:
                        loose = []
                    if link is not None:
                        operation.lost(True)
                        loose.append(link)
                    raise
                if pause_s is None:
                    try:
                        raise error
                    finally:
                        del error  # or this frame and the error would keep each other, and the connection, alive
                del error
                await asyncio.sleep(pause_s)
                now = clock()
        except GeneratorExit:  # the task was dropped, and whoever collects garbage runs this, in any thread
            if tidies and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.tidy, operation, loose or [], True)
            raise
        except BaseException as error:
            if tidies:
                self.tidy(operation, loose or [], failed=True)
                if isinstance(error, Redirected | Refused):
                    raise redis_error(str(error)) from None
            # Errors keep this frame, often in a cycle: it must not keep a connection that was left to be closed.
            link = loose = call = None
            raise
        if tidies and (operation.unsettled or operation.claim is not None):
            self.tidy(operation, loose or [], failed=False)

    async def _call_heard(self, link: AsyncLink, claim: Claim, request: Args, timeout_s: float) -> Reply:
        """`Pipe.call` for an attempt by a caller's own token, whose reply is heard however late it comes."""
        callers, listener = link.callers, link.pipe.listener()
        tell = partial(link.pipe.tell, listener)
        heard = Heard(claim, request, tell)
        link.pipe.post(request, heard)
        del link  # an error keeps this frame
        callers.add(tell)
        timer = None if timeout_s < 0 else self._loop.call_later(timeout_s, tell, None)
        try:
            told = await listener
        finally:
            heard.tell = None
            callers.discard(tell)
            if timer is not None:
                timer.cancel()
            del tell, listener, timer
        if told is heard:
            return heard.reply
        raise NoReply("no reply in time") if told is None else Lost(True, "the connection broke")

    async def execute_all(self, operations: Sequence[Many], limit_s: float | None = None) -> None:
        """Drive operations, each on locks of another server, to their ends; here, there is one server."""
        for operation in operations:
            await self.execute(operation, limit_s)

    async def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a connection that nobody else uses meanwhile; see `ThreadChannel.execute_beside`."""
        try:
            await self.run_beside(operation, limit_s, slow_s)
        except (Redirected, Refused) as error:
            raise redis_error(str(error)) from None

    async def run_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """`execute_beside` without its translation of errors."""
        if self._spares:
            spare = self._spares.pop()
        else:
            spare = type(self)(self._live_owner(), self._end)
            self._beside.add(spare)
        spare.timeout_s = self.timeout_s if self.timeout_s < 0 else self.timeout_s + slow_s
        loose: list[AsyncLink] = []
        try:
            await spare.execute(operation, limit_s, loose)
        except GeneratorExit:  # in whatever thread
            raise
        except BaseException:
            for link in (spare.link, *loose):
                spare._drop(link)  # noqa: SLF001  # likewise
            raise
        self._spares.append(spare)

    def channel(self) -> LoopChannel:
        """The running loop's, as `AsyncTransport` has it for whatever drives steps."""
        return self

    def undo_dropped(self, entries: list[tuple[bytes, bytes]]) -> None:
        """`undo` for a task that was dropped. Whatever collects garbage runs this, in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.undo, entries)

    @property
    def has_ended(self) -> bool:
        """Whether the loop is being closed: what breaks now is not to be mended."""
        return self._end.has_come

    def seat(self, key: bytes, token: bytes) -> Seat | None:
        """A seat for a waiter, where it can be had at once; else see `enter`."""
        link = self.link
        room = None if link is None else link.room
        if link is None or room is None:
            return None
        return room.take(key, token, Mailbox(link.pipe, self._alarms), link, self)

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """Listen for messages about a lock; see `ThreadChannel.enter`."""
        deadline = None if limit_s is None or limit_s > FOREVER_S else clock() + limit_s
        while True:
            link = self.link
            if link is None:
                left_s = None if deadline is None else deadline - clock()
                with contextlib.suppress(Redirected):
                    await self.execute(Look(key), left_s, [])  # connects, within the retry policy
                continue
            room = link.room
            if room is None:
                return None
            seat = self.seat(key, token)
            if seat is not None:
                return seat
            channel = room.channel_for(key)
            subscribing = Subscribe(key, room.subscribe, channel)
            await self.execute(subscribing, None if deadline is None else deadline - clock(), [])
            if self.link is link:
                room.note_subscription(channel, subscribing.result)

    async def split(self, keys: list[bytes]) -> Sequence[Sequence[int]]:
        """The keys' indexes, those together that one server has: here, all."""
        return [range(len(keys))]

    def is_current(self, seat: Seat) -> bool:
        """Whether requests still leave on the seat's connection."""
        link = self.link
        return link is not None and link.room is seat.room and not link.pipe.broken

    def listen(self, seat: Seat, timeout_s: float) -> Awaitable[object]:
        """The next message for a seat; see `ThreadChannel.listen`."""
        mailbox: Any = seat.mailbox
        told: Awaitable[object] = mailbox.wait(seat, timeout_s)
        return told

    async def _connect(self, deadline: float | None) -> AsyncLink:
        """Wait for the one task that connects. It goes on without who stops waiting."""
        opening = self.opening()
        limit_s = None if deadline is None else max(deadline + GRACE_S - clock(), 0.0)
        await asyncio.wait([opening], timeout=limit_s)
        if not opening.done():
            raise TimeoutError("no connection in time")
        if opening.cancelled():  # the loop ends
            raise ConnectionError("connecting was cancelled")
        error = opening.exception()
        if isinstance(error, Exception):  # an interrupt has been raised by the task, and is nobody else's
            # Each who waits gets an error of his own: a shared one would keep the frames of all alive, and their links.
            raise own_copy(error)
        if self.link is None:
            raise ConnectionError("the connection was lost at once")
        return self.link

    def opening(self) -> asyncio.Task[None]:
        """The task that connects."""
        opening = self._opening
        if opening is None or opening.done():
            opening = self._opening = self._start(self._open())
            opening.add_done_callback(self._opened)
        return opening

    async def _open(self) -> None:
        # redis-py's errors and timeouts keep the task and its frames alive in cycles: no link may stand in either.
        self.link = await open_link(self._live_owner(), self._end)
        self._post_first(self.link)
        self._spares.clear()  # which may lead to a server that was the primary once

    def _opened(self, opening: asyncio.Task[None]) -> None:
        if self._opening is opening:
            self._opening = None
        if not opening.cancelled():
            opening.exception()  # counts as noticed, even where nobody waits any more

    def _start_undoing(self) -> None:
        if self._undoer is None or self._undoer.done():
            # The task keeps no channel alive, but for its first attempt.
            self._end.kept[self] = self._owner()
            self._undoer = undoer = self._start(_undo_in_background(weakref.ref(self)))
            undoer.add_done_callback(partial(_undo_again, weakref.ref(self)))

    def _start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _undo_before(self, operation: Operation, limit_s: float | None) -> None:
        returning = self._returning(operation)
        if not returning:
            return
        if self._undoer is not None:  # which would try again what it has begun
            self._undoer.cancel()
            self._undoer = None
        gone = set(returning)
        self._undone[:] = [entry for entry in self._undone if entry not in gone]
        try:
            await self.execute(Many([Leave(key, token) for key, token in returning]), limit_s, [])
        except GeneratorExit:  # as in `execute`
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.undo, returning)
            raise
        except BaseException:
            self.undo(returning)
            raise
        if self._undone:
            self._start_undoing()
        else:
            self._end.kept.pop(self, None)

    def authenticate(self, request: Args) -> None:
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001  # as in Mailbox.tell
            super().authenticate(request)
        elif not self.has_ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(super().authenticate, request)

    async def undo_some(self) -> bool:
        """Undo the oldest attempts that wait for it. Returns False when the server could not be asked."""
        undoing = self._next_undoing()
        entries = self._undone[: len(undoing)]
        unanswered: list[int] = []
        try:
            await self.execute(undoing, UNDO_LIMIT_S, [])
        except Redirected:
            pass  # no retry mends that: the lock's own ttl must do
        except Exception:  # whatever it is: connecting runs users' code, too, as for credentials
            unanswered = undoing.unfinished
        # As in ThreadChannel, behind the others.
        postponed = [*undoing.to_undo(failed=False), *map(entries.__getitem__, unanswered)]
        gone = set(entries)
        self._undone[:] = [*(entry for entry in self._undone if entry not in gone), *postponed]
        if postponed or not self._undone:
            self._end.kept.pop(self, None)
        return not postponed

    def undoing(self) -> asyncio.Task[None] | None:
        """The task that undoes what waits for it; None where nothing waits, or where nothing can be undone."""
        if self.idle:
            return None
        self._start_undoing()  # the end of a loop cancels all tasks, and then closes the connections
        return self._undoer

    def stop(self) -> set[asyncio.Task[Any]]:
        """Cancel the channel's own tasks, and return them."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def abandon(self) -> None:
        """In a forked child: close our copy of the socket, and nothing else of the parent's."""
        self._end.has_come = True  # so that `authenticate` leaves the parent's loop alone
        for channel in (self, *self._beside):
            if channel.link is not None:
                channel.link.pipe.abandon()


async def _undo_in_background(channel_ref: weakref.ref[LoopChannel]) -> None:
    delay_s = UNDO_FIRST_S
    while delay_s < UNDO_LAST_S:
        channel = channel_ref()
        if channel is None or channel.idle:
            return
        if await channel.undo_some():
            delay_s = UNDO_FIRST_S
        else:
            del channel
            await asyncio.sleep(delay_s)
            delay_s *= 2


def _undo_again(channel_ref: weakref.ref[LoopChannel], undoer: asyncio.Task[None]) -> None:
    """The task was cancelled, perhaps with all others of the loop, or interrupted: what is left needs another."""
    failed = undoer.cancelled() or undoer.exception() is not None
    channel = channel_ref()
    if failed and channel is not None and channel._undoer is undoer and not channel.has_ended:  # noqa: SLF001  # its own
        channel.undoing()
