"""The thread that renews locks off the event loop, in the simulated world.

It is a real thread, which runs the library's own `OffLoopRenewer` as it is. It and the world run in turn: an event of
the world lets the thread go on and waits until that waits, sleeps or ends. So a seed is always the same story. The
thread may be preempted for a while after each look at the clock and each hand-over to the loop: so the loop comes
between its steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from redislock_fast._protocol.operation import Operation
from redislock_fast._renewal import threads
from tests.simulation.process import Execution, Process
from tests.simulation.world import World

_MOST_LOOKS = 1000
"""After how many looks at the clock it has certainly moved."""

_LONGEST_SLEEP_S = 1000.0


class _Ended(BaseException):
    """The story has ended."""


def _of_process(name: str) -> Any:
    def set_(part: ThreadPart, value: object) -> None:
        setattr(part.host, name, value)

    return property(lambda part: getattr(part.host, name), set_)


class ThreadPart(Process):
    """The renewing thread's part of a process: a connection of its own. All that happens to the process, happens to it.

    Args:
        host: the process.

    Attributes:
        is_barred: whether it can never connect, though the loop can.
        is_full: whether no thread can be started.
        preempted: how often the thread is preempted, between two steps.
    """

    dead: Any = _of_process("dead")
    deaf: Any = _of_process("deaf")
    denied: Any = _of_process("denied")
    frozen_until_us: Any = _of_process("frozen_until_us")
    leapt_us: Any = _of_process("leapt_us")
    patience_s: Any = _of_process("patience_s")
    replies_held_us: Any = _of_process("replies_held_us")
    requests_held_us: Any = _of_process("requests_held_us")
    retries: Any = _of_process("retries")

    def __init__(self, host: Process) -> None:
        self.host = host
        self.is_barred = self.is_full = False
        self.preempted = 0.0
        super().__init__(host.world, f"{host.name} thread")
        self.preempted_us = 1000
        self.blocking = True
        host.parts.append(self)
        self.parts = host.parts

    def _connected(self) -> None:
        if self.is_barred:
            waiting, self._connecting = self._connecting, []
            for execution in waiting:
                execution.no_connection("connection refused")
        else:
            super()._connected()


class Turn(threading.Thread):
    """The renewing thread.

    Args:
        part: whose thread it is.
        work: what it does.
        on_error: called with what it has raised.
    """

    def __init__(
        self, part: ThreadPart, work: Callable[[], object], on_error: Callable[[dict[str, Any]], None]
    ) -> None:
        super().__init__(daemon=True)
        self.part = part
        self._world = part.world
        self._work = work
        self._on_error = on_error
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._answer: object = None
        self._is_closed = self._has_ended = False
        self._looked_us = self._looks = 0

    def go_on(self, answer: object = None) -> None:
        """In the world: let the thread go on until it waits again, or ends."""
        self._answer = answer
        before, self._world.turn = self._world.turn, self
        self._world.changed = True
        if self.ident is None:
            self.start()
        else:
            self._go.release()
        self._back.acquire()
        self._world.turn = before

    def wait(self) -> object:
        """In the thread: let the world go on until an event of it lets the thread go on. Returns its answer."""
        if not self._is_closed:
            self._back.release()
            self._go.acquire()
        if self._is_closed:
            raise _Ended
        return self._answer

    def sleep(self, us: int) -> None:
        """In the thread: wait so many microseconds."""
        self._world.after(us, self.part, self.go_on)
        self.wait()

    def preempt(self) -> None:
        """In the thread: perhaps let others run."""
        rng, now_us = self._world.rng, self._world.now_us
        self._looks = self._looks + 1 if self._looked_us == now_us else 0
        self._looked_us = now_us
        if self._is_closed:
            return
        if self.part.preempted and rng.random() < self.part.preempted:
            self.sleep(int(self.part.preempted_us * rng.random()))
        elif self._looks > _MOST_LOOKS:
            self.sleep(1)

    def run(self) -> None:
        try:
            self._work()
        except _Ended:
            pass
        except BaseException as error:
            self._on_error({"message": "the renewing thread has failed", "exception": error})
        finally:
            self._has_ended = True
            self._back.release()

    def close(self) -> None:
        """In the world: end the thread where it is."""
        if self.ident is not None and not self._has_ended:  # it is alive for a while after its end
            self._is_closed = True
            self.go_on()
            self.join()


class _Lock:
    """In place of `threading.Lock`, for the sleep of a renewer's thread."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_taken = False
        self._sleeper: Turn | None = None
        self._sleeps = 0

    def acquire(self, timeout: float = -1) -> bool:
        """Take the lock, in the thread after it was released or so many seconds have passed."""
        if not self._is_taken:
            self._is_taken = True
            return True
        turn = self._sleeper = self._world.turn
        assert turn is not None
        self._sleeps += 1
        sleep_us = math.ceil(min(timeout, _LONGEST_SLEEP_S) * 1e6) + 1  # no thread is on time to the microsecond
        self._world.after(sleep_us, turn.part, self._wake, self._sleeps, False)
        return bool(turn.wait())

    def release(self) -> None:
        """Release the lock, and wake the thread."""
        if not self._is_taken:
            raise RuntimeError("release unlocked lock")
        if self._sleeper is None:
            self._is_taken = False
        else:
            self._world.after(self._world.pause_us(), self._sleeper.part, self._wake, self._sleeps, True)

    def _wake(self, sleeps: int, is_released: bool) -> None:
        turn = self._sleeper
        if turn is not None and self._sleeps == sleeps:
            self._sleeper = None
            turn.go_on(is_released)


class _Caller:
    """The thread, as it waits for an operation."""

    def __init__(self, turn: Turn) -> None:
        self.process: Process = turn.part
        self.name = turn.part.name
        self.epoch = 0
        self._turn = turn
        self._outcome: list[BaseException | None] = []
        self._is_waiting = False

    def go_on(self, epoch: int, answer: object) -> None:
        """Note the end."""
        self._end(None)

    def throw(self, error: BaseException) -> None:
        """Note the error."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._outcome.append(error)
        if self._is_waiting:
            self._turn.go_on()

    def wait(self) -> None:
        """Wait for the end."""
        if not self._outcome:
            self._is_waiting = True
            self._turn.wait()
            self._is_waiting = False
        (error,) = self._outcome
        if error is not None:
            raise error


class Beside:
    """The server, for the renewing thread: in place of `_transport.beside.Beside`.

    Args:
        part: whose connection it uses.
        executes: called before an operation is driven.
        on_error: called with what the thread has raised.

    Attributes:
        turn: the thread; None before its first start.
    """

    lingering = None
    has_connected = False

    def __init__(
        self, part: ThreadPart, executes: Callable[[Operation], None], on_error: Callable[[dict[str, Any]], None]
    ) -> None:
        self.part = part
        self._on_error = on_error
        self.turn: Turn | None = None
        self._executes = executes

    def start(self, work: Callable[[], object]) -> None:
        """Have the thread do this work. It begins some time later.

        Raises:
            RuntimeError: no thread can be started.
        """
        if self.part.is_full:
            raise RuntimeError("can't start new thread")
        self.turn = Turn(self.part, work, self._on_error)
        self.part.world.after(self.part.world.pause_us(), self.part, self.turn.go_on)

    def close(self) -> None:
        """End the thread where it is."""
        if self.turn is not None:
            self.turn.close()

    def split(self, keys: list[bytes], _: float | None = None) -> Sequence[Sequence[int]]:
        """One group: one server has them all."""
        return [range(len(keys))]

    def execute(self, operation: Operation, limit_s: float | None = None) -> None:
        """Drive an operation to its end."""
        turn = self.part.world.turn
        assert turn is not None
        self._executes(operation)
        caller = _Caller(turn)
        Execution(caller, operation, limit_s, tidies=True).begin()
        caller.wait()
        self.has_connected = True

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Clean up in the background. Where nothing was sent, nothing is left."""
        if self.has_connected or self.part.connection is not None:
            self.part.clean_up(entries)

    def rest(self) -> None:
        """Keep the connection."""


def _start_thread(_name: str, work: Any) -> None:
    work.__self__._transport().start(work)


def places_of(world: World) -> list[tuple[Any, str, Any]]:
    """What to replace in the library: how a renewer's thread is started, and sleeps."""
    sleeping = SimpleNamespace(Lock=lambda: _Lock(world), TIMEOUT_MAX=threading.TIMEOUT_MAX)
    return [(threads, "start_thread", _start_thread), (threads, "threading", sleeping)]
