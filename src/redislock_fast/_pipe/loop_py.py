"""The pipe of an event loop: one connection that all tasks of the loop call. The readable twin of `loop.pyx`.

A caller's request leaves at once when nothing is under way, else with all others of this iteration of the loop. Replies
are matched to callers first in, first out, a whole buffer in one pass. A caller that is cancelled or whose time is up
abandons its slot, which still consumes its reply. There is one timer per connection, never one per request.

Thread safety: everything belongs to the loop's thread. In it, a finalizer or a signal handler may post in the middle of
any other call: so a request is added by one `append`, and one call at a time writes.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, Protocol, final

import hiredis

from redislock_fast._pipe.base import (
    NOT_ENOUGH,
    UNSENT_LIMIT_BYTES,
    UNSENT_SILENCE_S,
    Args,
    Bulk,
    ConnectionBroken,
    Forked,
    NoReply,
    OnPush,
    OnReply,
    Reply,
    is_answer,
    is_answer_to,
    new_reader,
)
from redislock_fast._pipe.impl import compiled, encode
from redislock_fast._pipe.resp_py import joined, next_reply
from redislock_fast._util import fork

_NEVER = math.inf
_INBOX_BYTES = 65536
_SUBSCRIBING = {(b"SUBSCRIBE",), (b"SSUBSCRIBE",)}


class Pipe(Protocol):
    """One connection that many tasks of one loop call.

    Attributes:
        on_push: called for every push that answers no request, in the order of the stream; None drops them. It must not
            raise: that breaks the pipe, and the error goes to the loop. As in `base.Pipe`, (S)SUBSCRIBE may be called,
            and (S)UNSUBSCRIBE must not be sent.
    """

    on_push: OnPush | None

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the connection is gone."""

    @property
    def broken(self) -> bool:
        """True once the connection is broken: every further call raises `ConnectionBroken(sent=False)`."""

    @property
    def closed_by_peer(self) -> bool:
        """Whether the server or the network ended a broken connection."""

    @property
    def is_idle(self) -> bool:
        """Whether no reply is to come."""

    @property
    def silence_s(self) -> float:
        """For how many seconds requests have been under way without a byte coming back."""

    def call(self, args: Args, timeout_s: float) -> Awaitable[Reply]:
        """Send one request. The result is awaited at once, and once; the contract is that of `base.Pipe.call`."""

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> Awaitable[list[Reply]]:
        """Send requests in one piece. The result is awaited at once, and once; see `base.Pipe.call_many`."""

    def listener(self) -> Awaitable[object]:
        """A future that a task awaits, at once and once, until `tell` gives it a message."""

    def put(self, listener: Awaitable[object], message: object) -> None:
        """Give a listener a message, unless it has one or was cancelled."""

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        """Send one request after all that were sent before; `base.Pipe.post` for a loop."""

    def close(self) -> None:
        """Break the pipe: callers that still wait get `ConnectionBroken`. Queued requests are sent first."""

    async def wait_closed(self, limit_s: float) -> None:
        """Wait until the closed connection is gone; abort it after `limit_s` seconds."""

    def abandon(self) -> None:
        """In a forked child: close the copy of the socket, without telling the server, the loop or its selector."""


def _raise(error: BaseException) -> None:
    raise error


@final
class Slot:
    """Takes replies that are not one reply for one caller: many, one for no caller, or a subscription's."""

    __slots__ = ("future", "on_reply", "replies", "subscription", "wanted")

    def __init__(
        self,
        future: asyncio.Future[Any] | None,
        wanted: int,
        on_reply: OnReply | None = None,
        subscription: Args | None = None,
    ) -> None:
        self.on_reply = on_reply
        self.subscription = subscription  # the request, where a push answers it
        self.future = future
        self.replies: list[Reply] = []
        self.wanted = wanted


_Request = tuple[asyncio.Future[Any] | Slot, float, bytes]
"""The taker of the reply, the deadline in the loop's time, and the bytes."""


class _Leaving:
    """The end of a connection, for both pipes."""

    transport: asyncio.Transport
    closed: asyncio.Future[None]

    async def wait_closed(self, limit_s: float) -> None:
        await asyncio.wait([self.closed], timeout=limit_s)
        if not self.closed.done():
            self.transport.abort()

    def abandon(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            # The transport is the parent's and must not change, so its descriptor must stay valid: it becomes
            # /dev/null's.
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, sock.fileno())
            os.close(null)


class LoopPipe(_Leaving, asyncio.BufferedProtocol):
    """One connection that many tasks call; see `Pipe` for the contract of each method.

    Args:
        transport: a connected stream transport of the running loop; the pipe becomes its protocol.
        owner: lives as long as the connection does.
        received: the bytes that were received on it already.
    """

    def __init__(self, transport: asyncio.Transport, owner: object, received: bytes = b"") -> None:
        self._generation = fork.generation()
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self.transport = transport
        self._parser = new_reader()
        # Those without a reply, oldest first: at any step, a finalizer or a signal handler may add one.
        self._requests: deque[_Request] = deque()
        self._queued_bytes = 0  # of those that leave with the next iteration of the loop
        self._writing = False
        self._sent = 0  # how many of them have left
        self._answerable = 0  # how many had left when bytes were received last: only these can have been answered
        self._paused = False  # the transport's buffer is full
        self._flushing = False  # a flush is scheduled
        self._timer: asyncio.Handle | None = None
        self._timer_at = _NEVER
        self._heard_s = self._loop.time()
        self.on_push: OnPush | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.broken = self.closed_by_peer = False
        transport.set_protocol(self)
        if not transport.is_reading():  # redis-py's reader has paused it
            transport.resume_reading()
        self._inbox = memoryview(bytearray(_INBOX_BYTES))  # of which asyncio's TLS takes slices, to fill them
        if received:
            self._parser.feed(received)
            self._deliver()

    @property
    def is_idle(self) -> bool:
        return not self._requests

    @property
    def silence_s(self) -> float:
        return self._loop.time() - self._heard_s

    # ---- callers ----

    def call(self, args: Args, timeout_s: float) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = self._loop.create_future()
        slot = Slot(future, 1, subscription=args) if args[:1] in _SUBSCRIBING else future
        self._send(encode(args), slot, timeout_s)
        return future

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> asyncio.Future[list[Reply]]:
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        data, count = joined(requests)
        self._send(data, Slot(future, count), timeout_s)
        return future

    def listener(self) -> asyncio.Future[object]:
        return self._loop.create_future()

    def put(self, listener: Awaitable[object], message: object) -> None:
        assert isinstance(listener, asyncio.Future)
        if not listener.done():
            listener.set_result(message)

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        self._send(encode(args), Slot(None, 1, on_reply), -1.0)
        if on_reply is None:
            self._flush()

    def close(self) -> None:
        if not self.broken and self._generation == fork.generation():
            self._paused = False  # the transport takes it all now, and sends what it can
            self._flush()
            self._fail("the connection was closed")
            self.transport.close()

    def _send(self, data: bytes, slot: asyncio.Future[Any] | Slot, timeout_s: float) -> None:
        if self._generation != fork.generation():
            raise Forked
        if self.broken:
            raise ConnectionBroken(False, "the connection is closed")
        now = self._loop.time()
        if self._queued_bytes > UNSENT_LIMIT_BYTES and now - self._heard_s > UNSENT_SILENCE_S:
            self._fail("the server is silent, and too much waits to be sent")
            self.transport.abort()
            raise ConnectionBroken(False, "the connection is closed")
        deadline = _NEVER
        if timeout_s >= 0:
            deadline = now + timeout_s
            if deadline < self._timer_at:
                self._watch(deadline)
                if self.broken:  # by what ran as the timer was set
                    raise ConnectionBroken(False, "the connection is closed")
        is_first = self.is_idle
        self._queued_bytes += len(data)
        self._requests.append((slot, deadline, data))
        if is_first:
            self._heard_s = now
            self._flush()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._writing:
            return
        self._writing = True
        try:
            while len(self._requests) > self._sent and not self._paused and not self.broken:
                unsent = [*islice(self._requests, self._sent, None)]  # a copy: another may be added at any step
                data = [request[2] for request in unsent]
                self._sent += len(data)
                self._queued_bytes -= sum(map(len, data))
                self.transport.write(b"".join(data))
        finally:
            self._writing = False

    # ---- time ----

    def _watch(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        """End the waits whose time is up, and set the timer for the next. The slots stay for their replies."""
        self._timer = None
        self._timer_at = _NEVER
        now = self._loop.time()
        next_deadline = _NEVER
        for slot, deadline, _ in self._requests.copy():
            future = slot.future if type(slot) is Slot else slot
            if future is None or future.done():
                continue
            if deadline <= now:
                future.set_exception(NoReply("no reply in time"))
            elif deadline < next_deadline:
                next_deadline = deadline
        if next_deadline < _NEVER:
            self._watch(next_deadline)

    # ---- the transport's calls ----

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  # the same for any
        """The buffer to receive into."""
        return self._inbox

    def buffer_updated(self, received: int) -> None:
        """Complete the slots whose replies have come."""
        if not self.broken:
            self._heard_s = self._loop.time()
            self._answerable = self._sent
            self._parser.feed(self._inbox, 0, received)  # type: ignore[arg-type]  # any buffer will do
            self._deliver()

    def _deliver(self) -> None:
        try:
            while True:
                reply = next_reply(self._parser)
                if reply is NOT_ENOUGH:
                    return
                if type(reply) is not hiredis.PushNotification:
                    self._complete(reply)
                elif is_answer(reply):
                    oldest = self._requests[0][0] if self._requests else None
                    if type(oldest) is not Slot or not is_answer_to(reply, oldest.subscription):
                        raise hiredis.ProtocolError("a subscription that was not asked for")
                    self._complete(reply)
                elif self.on_push is not None:
                    self.on_push(reply)
        except hiredis.ProtocolError as error:
            self._fail(f"the server broke the protocol: {error}")
            self.transport.abort()
        except BaseException as error:
            self._fail("a push could not be delivered")
            self.transport.abort()
            self._loop.call_soon(_raise, error)  # from the loop itself, since uvloop lets a protocol raise nothing

    def _complete(self, reply: Any) -> None:
        """Give the oldest slot its reply, or one of its replies."""
        if self.broken:  # by a callback for an earlier reply
            return
        if not self._answerable:
            raise hiredis.ProtocolError("a reply without a request")
        slot = self._requests[0][0]
        future = slot.future if type(slot) is Slot else slot
        if type(slot) is Slot:
            slot.replies.append(reply)
            slot.wanted -= 1
            if slot.wanted:
                return
            if slot.subscription is None:
                reply = slot.replies
        del self._requests[0]  # no call: nothing can come between these three
        self._sent -= 1
        self._answerable -= 1
        if type(slot) is Slot and slot.on_reply is not None:
            slot.on_reply(slot.replies[0])
        elif future is not None and not future.done():
            future.set_result(reply)

    def pause_writing(self) -> None:
        """Keep what callers send until the transport has room again."""
        self._paused = True

    def resume_writing(self) -> None:
        """Send what was kept."""
        self._paused = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail every slot."""
        self.closed_by_peer = not self.broken
        self._fail("the connection broke" if error is None else str(error))
        self._owner = None
        if not self.closed.done():
            self.closed.set_result(None)

    def _fail(self, cause: str) -> None:
        """Fail every slot with what is known of it."""
        if self.broken:
            return
        self.broken = True
        if self._timer is not None:
            self._timer.cancel()
        for index, (slot, _, _) in enumerate(self._requests.copy()):
            future = slot.future if type(slot) is Slot else slot
            if future is not None and not future.done():
                future.set_exception(ConnectionBroken(index < self._sent, cause))
        self._requests.clear()


new_pipe: Callable[..., Pipe] = LoopPipe
running_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.get_running_loop
if compiled is not None:
    from redislock_fast._pipe import loop

    class CompiledLoopPipe(loop.LoopPipe, _Leaving, asyncio.BufferedProtocol):
        """The compiled pipe, as a class in Python: asyncio asks for its `BufferedProtocol` by type."""

    new_pipe = CompiledLoopPipe
    running_loop = loop.running_loop
    fork.on_fork(loop.forget_stepping)
