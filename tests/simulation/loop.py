"""A simulated event loop and transport, on which `asyncio.Lock` itself runs in a simulated process.

All that the loop runs is an event of the world: a process that is stopped or dead runs nothing, and time is simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

from redislock_fast._pipe.base import Args, OnReply
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.operation import Operation
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import LeaveQueue, Subscribe
from redislock_fast._queue.waiters import Waiter
from redislock_fast._util.tokens import PLAIN
from tests.simulation.process import Execution, Process
from tests.simulation.threads import Beside
from tests.simulation.world import Mailbox


class Loop:
    """The event loop of a process, with the methods that asyncio's tasks, futures and our locks use.

    Args:
        process: whose.
        on_error: called with each error that no task or callback has caught.
    """

    def __init__(self, process: Process, on_error: Callable[[dict[str, Any]], None]) -> None:
        self._process = process
        self._world = process.world
        self._on_error = on_error
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._itself: Any = self  # where an AbstractEventLoop is asked for

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def time(self) -> float:
        return self._world.now_us / 1e6  # which does not leap, as CLOCK_MONOTONIC stops in a suspend

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._itself)

    def create_task(self, coro: Any, **_: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self._itself)
        self._tasks.add(task)
        return task

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self._itself, context)
        self._world.after(0, self._process, self._run, handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = self.call_soon(callback, *args, context=context)
        if self._world.turn is not None:
            self._world.turn.preempt()
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self._itself, context)
        # A loop is never on time to the microsecond.
        self._world.at(math.ceil(when * 1e6) + 1, self._process, self._run, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the event stays, and has no effect."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._on_error(context)

    def run(self, call: Callable[[], Any]) -> Any:
        """Call something as the loop does."""
        asyncio._set_running_loop(self._itself)
        try:
            return call()
        finally:
            asyncio._set_running_loop(None)
            del call  # see `World.step`

    def close(self) -> None:
        """End all tasks where they are: else the garbage collector would, in the middle of another story."""
        for task in list(self._tasks):
            unfinished: Any = task
            if not task.done():
                unfinished._log_destroy_pending = False
                with contextlib.suppress(Exception):  # they are in the middle of something
                    self.run(unfinished.get_coro().close)

    def _run(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self._world.changed = True
            self.run(handle._run)
            del handle  # see `World.step`


class _Caller:
    """A task that waits for a simulated process to do something."""

    def __init__(self, process: Process, loop: Loop) -> None:
        self.process = process
        self.name = process.name
        self.epoch = 0
        self._future: asyncio.Future[Any] | None = loop.create_future()

    def go_on(self, epoch: int, answer: object) -> None:
        if self._future is not None and not self._future.done() and epoch == self.epoch:
            self._future.set_result(answer)

    def throw(self, error: BaseException) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)

    async def wait(self) -> Any:
        """Wait. Afterwards nothing is kept: an error would keep its frames alive, and the lock with them."""
        assert self._future is not None
        try:
            return await self._future
        finally:
            self._future = None


class Transport:
    """A transport, with the methods that locks use.

    Args:
        process: whose connection it uses.
        loop: of that process.
        executes: called before an operation is driven.
        beside: the server for the renewing thread; None: the loop renews.
    """

    def __init__(
        self, process: Process, loop: Loop, executes: Callable[[Operation], None], beside: Beside | None
    ) -> None:
        self._process = process
        self._loop = loop
        self._executes = executes
        self._beside = beside

    def new_beside(self) -> Beside | None:
        """The server for the renewing thread."""
        return self._beside

    def at_end(self, server: Beside) -> None:
        """Do nothing: no loop ends."""

    async def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation to its end, as `LoopServerTransport.execute` does."""
        self._executes(operation)
        returning = self._process.take_back(operation) if self._process.pending_cleanup else []
        if returning:
            try:
                await self._run(Pipeline([LeaveQueue(key, token) for key, token in returning]), limit_s, tidies=False)
            except BaseException:
                self._process.clean_up(returning)
                raise
        await self._run(operation, limit_s, tidies=True)

    async def _run(self, operation: Any, limit_s: float | None, tidies: bool) -> None:
        caller = _Caller(self._process, self._loop)
        execution = Execution(caller, operation, limit_s, tidies)
        execution.begin()
        try:
            await caller.wait()
        except BaseException:
            if not execution.over:
                execution.cancel()
            raise

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Clean up in the background."""
        self._process.clean_up(entries)

    def begin(self, call: object) -> None:
        """Nothing is sent before the steps, as where there is no connection yet."""

    def of_running_loop(self) -> Transport:
        """The running loop's server transport."""
        return self

    def clean_up_dropped(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Clean up for a task that was dropped."""
        self._process.clean_up(entries)

    async def split(self, keys: list[bytes], _: float | None = None) -> list[list[int]]:
        """One group: one server has them all."""
        return [list(range(len(keys)))]

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt would probably fail."""
        return self._process.is_contended(key, is_patient)

    def new_token(self, key: bytes | None = None, kind: bytes = PLAIN) -> bytes:
        """A new token."""
        return self._process.new_token(key, kind)

    @property
    def tokens(self) -> Process:
        """What makes the tokens of its connection."""
        return self._process

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """Note the release of a lock here: a waiter has it now, or no waiter was in the queue."""
        self._process.note_hand_over(key, handed_over)

    def is_current(self, waiter: Waiter) -> bool:
        """Whether requests still leave on the waiter's connection."""
        return self._process.is_current(waiter)

    def post(self, connection: Any, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request, without waiting for the reply."""
        self._process.post(connection, args, on_reply)

    def waiter(self, key: bytes, token: bytes) -> Waiter | None:
        """A waiter, where none of its steps needs a request."""
        connection = self._process.connection
        registry = None if connection is None else connection.registry
        if connection is None or registry is None:
            return None
        return registry.take(key, token, Mailbox(self._process, connection), connection, self)

    async def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Waiter | None:
        """A waiter; see `LoopServerTransport.enter`."""
        while True:
            connection = self._process.connection
            if connection is None:
                await self._run(ReadHolder(key), limit_s, tidies=False)
                continue
            registry = connection.registry
            if registry is None:
                return None
            waiter = self.waiter(key, token)
            if waiter is not None:
                return waiter
            channel = registry.channel_for(key)
            subscribing = Subscribe(key, registry.subscribe, channel)
            await self._run(subscribing, limit_s, tidies=False)
            if self._process.connection is connection:
                registry.note_subscription(channel, subscribing.result)

    def next_message(self, waiter: Waiter, timeout_s: float) -> Coroutine[Any, Any, object]:
        """The next message for a waiter."""
        return self._listen(waiter, timeout_s)

    async def _listen(self, waiter: Waiter, timeout_s: float) -> object:
        caller = _Caller(self._process, self._loop)
        mailbox: Any = waiter.mailbox
        mailbox.listen(caller, timeout_s)
        return await caller.wait()

    @property
    def encoding(self) -> Any:
        """What makes bytes of names and tokens."""
        return self

    @staticmethod
    def encode(value: object) -> bytes:
        """A name or token as bytes."""
        assert isinstance(value, bytes)
        return value

    key_of = encode
