"""A simulated world: a clock, a network and the model server, in one order of events.

Everything takes a random time; messages on one connection stay in order. All events come from the heap and all chance
from the seed's rng, so a seed is always the same story.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from redislock_fast._pipe.base import Args, ConnectionBroken, OnReply, Reply
from redislock_fast._protocol.capabilities import CLIENT_INFO, HELLO, PROBE, Capabilities, ending
from redislock_fast._protocol.claims import has_taken
from redislock_fast._protocol.scripts import (
    ACQUIRE_FENCED,
    ACQUIRE_PERMIT,
    EXTEND,
    FOR_PERMITS,
    LEAD,
    LEAVE,
    PASS_ON,
    REACQUIRE,
    REDEEM,
    RELEASE,
    RESIZE,
    WAIT,
)
from redislock_fast._queue.waiters import BROKEN, WaiterRegistry
from redislock_fast._util.times import clock as real_clock
from redislock_fast._util.tokens import TokenSource
from tests.simulation.keyspace import Connection
from tests.simulation.model import Model

if TYPE_CHECKING:
    from redislock_fast._protocol.claims import Claim
    from tests.simulation.process import Caller, Execution, Process, Task
    from tests.simulation.threads import Turn

SERVER_STARTED_US = 1_700_000_000_000_000

_NAMES: dict[object, str] = {
    word: name
    for name, script in (
        ("acquire fenced", ACQUIRE_FENCED),
        ("release", RELEASE),
        ("extend", EXTEND),
        ("reacquire", REACQUIRE),
        ("redeem", REDEEM),
        ("wait", WAIT),
        ("lead", LEAD),
        ("pass on", PASS_ON),
        ("leave", LEAVE),
        ("acquire permit", ACQUIRE_PERMIT),
        ("release permit", FOR_PERMITS[RELEASE.sha]),
        ("renew permit", FOR_PERMITS[REACQUIRE.sha]),
        ("wait for a permit", FOR_PERMITS[WAIT.sha]),
        ("leave", FOR_PERMITS[LEAVE.sha]),
        ("resize", RESIZE),
    )
    for word in script
}


@contextlib.contextmanager
def long_waits_unlogged() -> Iterator[None]:
    """A context in which no long wait is logged: the model does not answer who holds the lock."""
    waits = logging.getLogger("redislock_fast.waiting")
    waits.setLevel(logging.ERROR)
    try:
        yield
    finally:
        waits.setLevel(logging.NOTSET)


def in_words(value: object) -> str:
    """A request or reply, to be read."""
    if isinstance(value, (list, tuple)):
        return "(" + " ".join(map(in_words, value)) + ")"
    if isinstance(value, bytes):
        text = _NAMES.get(value) or value.decode()
        text = text.replace("rlf:" + "0" * 11 + "2" + "0" * 12, "rlf:2:")
        return text.replace("rlf:" + "0" * 24, "rlf:").replace("0" * 24, "").replace("rlf:" + "0" * 8, "rlf:")
    return str(value)


class World:
    """The clock, the events to come, and the server.

    Args:
        rng: all chance.
        model: the server.
        tells: whether to record the story.

    Attributes:
        now_us: the time.
        processes: those that may get pushes.
        latency_us: how long things usually take; `slow` says how often much longer.
        served: called after each request that the server has executed.
        story: what happened.
        doubtful: tokens of waiters that got the lock by the second of two requests, and may not end the connection of
            the first: that may be executed after the release, too late for a cleanup. And callers' own tokens whose
            connection broke before the reply: another owner may have the same one, so nothing is cleaned up.
        acting: the process to which something happens now.
        server_leapt_us: by how much the server's clock has leapt forward.
        changed: whether a process has gone on since the last check.
        turn: the renewing thread that runs now; None: none does.
        new_token: draws a token, in place of `TokenSource.new_token`.
    """

    def __init__(self, rng: random.Random, model: Model, tells: bool) -> None:
        self._thread = threading.get_ident()
        self.rng = rng
        self.model = model
        self.now_us = 1000
        self.latency_us = 300
        self.slow = 0.0
        self.slow_us = 20_000
        self.lazy = 0.0  # how often a caller goes on only some time after it could
        self.served: Callable[[Process, Args, Reply], None] = lambda *_: None
        self.tells = tells
        self.story: list[str] = []
        self.acting: Process | None = None
        self.server_leapt_us = 0
        self.changed = True
        self.running: Task | None = None
        self.turn: Turn | None = None
        self.doubtful: set[bytes] = set()
        self.numbers = 0
        self.new_token: Callable[[], bytes] = TokenSource().new_token
        self.processes: list[Process] = []
        self.server_is_down = False
        self.late_us = 0  # how long the server may still read from a connection that its client has given up
        self._events: list[tuple[int, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def draw_delays(self, late_us: int) -> None:
        """Let chance decide how often callers and requests are late.

        Args:
            late_us: for how long at most the server reads on from a connection that its client has given up.
        """
        self.lazy = self.rng.choice((0.0, 0.0, 0.05, 0.3))
        self.slow = self.rng.choice((0.0, 0.01, 0.1))
        self.slow_us = self.rng.choice((5000, 50_000, 300_000))
        self.late_us = late_us

    def clock(self) -> float:
        """In place of `_util.times.clock`: that of the process to which something happens.

        A thread of a renewer that an earlier test has left may still run: it goes on by the real clock.
        """
        turn, thread = self.turn, threading.get_ident()
        if thread not in (self._thread, turn and turn.ident):
            return real_clock()
        now_s = (self.now_us if self.acting is None else self.now_us + self.acting.leapt_us) / 1e6
        if turn is not None:
            turn.preempt()
        return now_s

    def tell(self, *words: object) -> None:
        """Add to the story."""
        if self.tells:
            self.story.append(f"{self.now_us / 1000:10.3f} " + " ".join(map(in_words, words)))

    def at(self, at_us: int, process: Process | None, do: Callable[..., None], *args: Any) -> None:
        """Let something happen to a process, or to the server."""
        self._count += 1
        heapq.heappush(self._events, (at_us, self._count, process, do, args))

    def after(self, delay_us: int, process: Process | None, do: Callable[..., None], *args: Any) -> None:
        """The same, some time from now."""
        self._count += 1
        heapq.heappush(self._events, (self.now_us + delay_us, self._count, process, do, args))

    def step(self) -> bool:
        """Let the next event happen. Returns False when there is none."""
        if not self._events:
            return False
        at_us, _, process, do, args = heapq.heappop(self._events)
        if process is not None:
            if process.dead:
                return True
            until_us = max(process.frozen_until_us, process.busy_until_us)
            if until_us > at_us:
                self.at(until_us, process, do, *args)
                return True
        self.now_us = max(self.now_us, at_us)
        self.acting = process
        do(*args)
        del do, args  # as asyncio does: an error keeps this frame, which must not keep the error
        return True

    def delay_us(self) -> int:
        """How long a message takes on its way."""
        random_ = self.rng.random
        delay_us = 20 + int(self.latency_us * random_())
        return delay_us + int(self.slow_us * random_()) if random_() < self.slow else delay_us

    def pause_us(self) -> int:
        """How long a caller that could go on does not."""
        random_ = self.rng.random
        return int(self.slow_us * random_()) if self.lazy and random_() < self.lazy else 0

    def serve(self, process: Process, args: Args, connection: Connection | None) -> Reply:
        """Let the server execute a request, at a microsecond of its own."""
        self.changed = True
        self.set_server_clock()
        reply = self.model.execute(args, connection)
        if self.tells:
            self.tell("   server:", process.name, args, "->", reply)
        self.served(process, args, reply)
        return reply

    def set_server_clock(self) -> None:
        """Set the server's clock to the time."""
        self.model.now_us = max(self.model.now_us + 1, SERVER_STARTED_US + self.now_us + self.server_leapt_us)


class Call:
    """One or more requests under way together."""

    __slots__ = ("claim", "connection", "execution", "open", "replies", "requests")

    def __init__(
        self, execution: Execution, connection: ClientConnection, requests: list[Args], claim: Claim | None
    ) -> None:
        self.execution = execution
        self.connection = connection
        self.requests = requests
        self.claim = claim
        self.replies: list[Reply] = []
        self.open = True

    def receive(self, reply: Reply) -> None:
        """Take the reply to the next request. A claim is told also after the caller has given up."""
        if self.claim is not None and has_taken(self.requests[0], reply):
            self.claim.take()
        if not self.open:
            return
        self.replies.append(reply)
        if len(self.replies) == len(self.requests):
            self.open = False
            self.execution.answered(self)


class ClientConnection:
    """A process's connection."""

    def __init__(self, process: Process) -> None:
        world = process.world
        self._process = process
        self._world = world
        self.broken = False
        self.gone = False  # the server has noticed
        self.session = world.model.connect(process.denied)
        self.session.deaf = process.deaf
        probed = world.serve(process, PROBE, self.session)
        self.capabilities = Capabilities(probed, world.serve(process, HELLO, self.session))
        self.ending = ending(world.serve(process, CLIENT_INFO, self.session))
        self.registry: WaiterRegistry | None = None
        if self.capabilities.push:
            world.numbers += 1
            tokens = TokenSource()
            tokens.identifier = b"%011x" % world.numbers
            self.registry = WaiterRegistry(self.capabilities, tokens)
        self.pipe: Any = None  # for processes that use it
        self.on_broken: list[Callable[[], None]] = []
        self.cleaning_up: list[Args] = []
        self._calls: deque[Call | OnReply | None] = deque()
        self._under_way: deque[tuple[bool, Any]] = deque()
        self._arrives_us = 0
        self._returns_us = 0

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        """Post as `Pipe.post` does."""
        if self.broken or self._process.loses_unsent(self):
            self.break_()
            raise ConnectionBroken(False, "broken")
        self._world.tell(self._process.name, "posts", args)
        if on_reply is None:
            self.clean_up([args])
        else:
            self.send([args], on_reply)

    def send(self, requests: list[Args], call: Call | OnReply | None) -> None:
        """Let requests leave together."""
        world = self._world
        self._arrives_us = max(self._arrives_us, world.now_us + world.delay_us(), self._process.requests_held_us)
        for request in requests:
            self._calls.append(call)
            world.at(self._arrives_us, None, self._serve, request)

    def clean_up(self, requests: list[Args]) -> None:
        """Send requests that clean up after those before; no caller waits for their replies."""
        self.cleaning_up += requests
        self.send(requests, None)

    def will_clean_up(self) -> list[Args]:
        """The requests that clean up, and those that are cleaned up if their reply says that they took the key."""
        return self.cleaning_up + [call.requests[0] for call in self._claimed()]

    def _claimed(self) -> list[Call]:
        return [call for call in self._calls if isinstance(call, Call) and call.claim is not None]

    def _serve(self, request: Args) -> None:
        if self.gone:
            return
        if request in self.cleaning_up:
            self.cleaning_up.remove(request)
        world = self._world
        reply = world.serve(self._process, request, self.session)
        if request[:2] == (b"CLIENT", b"KILL"):
            self._end_killed()
        own_pushes_first = world.rng.random() < 0.5
        if not own_pushes_first:
            self._return(False, reply)
        for process in world.processes:
            for connection in process.connections:
                if connection.session.inbox:
                    for push in connection.session.inbox:
                        connection._return(True, push)
                    connection.session.inbox.clear()
        if own_pushes_first:
            self._return(False, reply)

    def _end_killed(self) -> None:
        world = self._world
        for connection in list(self._process.connections):
            if connection.session not in world.model.connections:
                connection.vanish()
                world.after(world.delay_us(), self._process, connection.break_)

    def _return(self, is_push: bool, item: Any) -> None:
        world = self._world
        self._returns_us = max(self._returns_us, world.now_us + world.delay_us(), self._process.replies_held_us)
        self._under_way.append((is_push, item))
        world.at(self._returns_us, self._process, self._receive)

    def _receive(self) -> None:
        is_push, item = self._under_way.popleft()
        if self.broken:
            return
        if is_push:
            if self._world.tells:
                self._world.tell(self._process.name, "hears", item)
            if self.registry is not None:
                self.registry.take_push(item)
            return
        call = self._calls.popleft()
        if not isinstance(call, Call):
            if call is not None:
                call(item)
            return
        call.receive(item)

    def vanish(self) -> None:
        """Let the server notice that the connection is gone, and forget what it has not read."""
        if not self.gone:
            self.gone = True
            self._world.model.disconnect(self.session)
            self._process.connections.remove(self)
            self._world.doubtful.update(call.execution.token for call in self._claimed())

    def vanish_sometime(self) -> None:
        """Let the server notice at once, or read on to the end of what has been sent."""
        world = self._world
        if world.late_us:
            at_us = max(world.now_us + int(world.late_us * world.rng.random()), self._arrives_us + 1)
            world.at(at_us, None, self.vanish)
        else:
            self.vanish()

    def break_(self) -> None:
        """Let the process notice that the connection is broken."""
        if self.broken:
            return
        self.broken = True
        self._world.tell(self._process.name, "notices that its connection is broken")
        for note in self.on_broken:
            self._world.after(0, self._process, note)
        if self.registry is not None:
            if not self._process.blocking:
                self.registry.put_all(BROKEN)
            for line in self.registry.key_queues.values():
                for waiter in line.waiters.values():
                    waiter.mailbox.wake()
        self._world.doubtful.update(call.execution.token for call in self._claimed())
        calls, self._calls = self._calls, deque()
        for call in calls:
            if isinstance(call, Call) and call.open:
                call.open = False
                call.execution.note_unanswered(call)


class Mailbox:
    """The messages for one waiter."""

    def __init__(self, process: Process, connection: ClientConnection) -> None:
        self._process = process
        self._connection = connection
        self._messages: deque[object] = deque()
        self._listener: Caller | None = None
        self._epoch = 0

    def put(self, message: object) -> None:
        """Leave a message."""
        self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        """Let the listener look for a message."""
        if self._listener is not None:
            self._process.world.after(self._process.world.pause_us(), self._process, self._end, self._epoch)

    def listen(self, task: Caller, timeout_s: float) -> None:
        """Give the task the next message, None at the end of the time, BROKEN when none can come."""
        if self._messages or timeout_s <= 0 or (self._connection.broken and self._process.blocking):
            task.go_on(task.epoch, self._next())
            return
        self._listener = task
        self._epoch = task.epoch
        if timeout_s < math.inf:
            self._process.world.after(math.ceil(timeout_s * 1e6), self._process, self._end, task.epoch)

    def _end(self, epoch: int) -> None:
        task = self._listener
        if task is not None and self._epoch == epoch and task.epoch == epoch:
            self._listener = None
            task.go_on(epoch, self._next())

    def _next(self) -> object:
        if self._messages:
            return self._messages.popleft()
        return BROKEN if self._connection.broken and self._process.blocking else None
