"""Simulated processes: each drives procedures of steps over one connection at a time, as the transports do.

It connects, sends again what got no reply, cleans up what failed, and gives each waiter its messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from redislock_fast._pipe.base import Args, OnReply
from redislock_fast._protocol.claims import Claims
from redislock_fast._protocol.commands import Acquire, ReadHolder
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.queue import LeaveQueue, Subscribe, cleanup_requests
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._queue.waiters import Waiter
from redislock_fast._util.tokens import PLAIN
from tests.simulation.world import Call, ClientConnection, Mailbox, World

_GRACE_S = 0.1
_CLEANUP_FIRST_S, _CLEANUP_LAST_S, _CLEANUP_LIMIT_S = 0.05, 30.0, 1.0


class Trouble(Exception):
    """In place of redis-py's ConnectionError, TimeoutError or ResponseError: no attempt succeeded."""


class Cancelled(BaseException):
    """A cancel or an interrupt, thrown in at a step."""


class Caller(Protocol):
    """Waits for something to be done."""

    process: Process
    name: str
    epoch: int

    def go_on(self, epoch: int, answer: object) -> None:
        """Take the result; `epoch` is that in which it was begun."""

    def throw(self, error: BaseException) -> None:
        """Take the error."""


class Execution:
    """One operation, driven to its end as `ThreadServerTransport.execute` and `LoopServerTransport.execute` do."""

    def __init__(self, task: Caller, operation: Any, limit_s: float | None, tidies: bool) -> None:
        self._task = task
        self._process = task.process
        self._world = task.process.world
        self._operation = operation
        self._deadline_us = None if limit_s is None else self._world.now_us + int(limit_s * 1e6)
        self._tidies = tidies
        self._failures = 0
        self._call: Call | None = None
        self._unanswered: list[ClientConnection] = []
        self.over = False
        if tidies and isinstance(operation, AcquireOwn):
            self._process.claims.begin(operation)

    @property
    def token(self) -> bytes:
        """Of an operation on one token."""
        token: bytes = self._operation.token
        return token

    def begin(self) -> None:
        """Make an attempt."""
        if self.over:
            return
        connection = self._process.connection
        if connection is None:
            self._process.connect(self)
            if self._deadline_us is not None:
                left_us = max(self._deadline_us - self._world.now_us, 0) + int(_GRACE_S * 1e6)
                self._world.after(left_us, self._process, self._not_connected, self._failures)
            return
        self._ask(connection)

    def _not_connected(self, failures: int) -> None:
        if not self.over and self._call is None and self._failures == failures:
            self._end(Trouble("no connection in time"))

    def _ask(self, connection: ClientConnection) -> None:
        world = self._world
        request = self._operation.request(connection.capabilities, world.clock())
        requests = request if self._operation.is_pipeline else [request]
        if self._operation.claim is not None:
            self._operation.claim.leave_if_held(self._operation)
        self._call = call = Call(self, connection, requests, self._operation.claim)
        if connection.broken or self._process.loses_unsent(connection):
            connection.break_()
            call.open = False
            self._note_broken(connection, sent=False)
            return
        if world.tells:
            world.tell(self._task.name, "sends", *requests)
        pause_us = world.pause_us() if self._process.blocking else 0
        if pause_us:  # preempted between reading the clock and sending
            world.after(pause_us, self._process, self._send, connection, requests, call)
        else:
            self._send(connection, requests, call)

    def _send(self, connection: ClientConnection, requests: list[Args], call: Call) -> None:
        world = self._world
        if self.over or self._call is not call:
            return
        if connection.broken:
            call.open = False
            self._note_broken(connection, sent=False)
            return
        connection.send(requests, call)
        patience_s, limit_s = self._process.patience_s, math.inf
        if self._deadline_us is not None:
            limit_s = max(self._deadline_us - world.now_us, 0) / 1e6 + _GRACE_S
        if patience_s is not None and patience_s <= limit_s:
            world.after(int(patience_s * 1e6), self._process, self._no_reply, call, True)
        elif limit_s < math.inf:
            world.after(int(limit_s * 1e6), self._process, self._no_reply, call, False)

    def answered(self, call: Call) -> None:
        """Note that the replies have come; the caller takes them some time later."""
        pause_us = self._world.pause_us()
        if pause_us:
            self._world.after(pause_us, self._process, self._feed, call)
        else:
            self._feed(call)

    def _feed(self, call: Call) -> None:
        if self.over or self._call is not call:
            return
        operation = self._operation
        try:
            if operation.feed(call.replies if operation.is_pipeline else call.replies[0], call.connection.capabilities):
                self._end(None)
            else:
                self._ask(call.connection)
        except NotExecuted as trouble:
            self._again(trouble)
        except (Refused, Redirected) as refusal:
            self._end(Trouble(str(refusal)))

    def note_unanswered(self, call: Call) -> None:
        """Note that the connection broke."""
        self._world.after(self._world.pause_us(), self._process, self._note_broken, call.connection, True, call)

    def _note_broken(self, connection: ClientConnection, sent: bool, call: Call | None = None) -> None:
        if self.over or (call is not None and self._call is not call):
            return
        self._operation.note_unanswered(sent)
        self._process.drop(connection)
        self._again(Trouble("connection broken"))

    def _no_reply(self, call: Call, is_silence: bool) -> None:
        if self.over or not call.open or self._call is not call:
            return
        call.open = False
        self._operation.note_unanswered(True)
        self._unanswered.append(call.connection)
        if is_silence and self._process.connection is call.connection:
            self._process.give_up(call.connection)  # left, not closed
            if not self._world.late_us:
                call.connection.vanish()
        self._again(Trouble("no reply"))

    def no_connection(self, why: str) -> None:
        """Note that connecting has failed."""
        if not self.over:
            self._again(Trouble(why))

    def _again(self, trouble: Exception) -> None:
        self._call = None
        self._failures += 1
        delay_us = 0 if self._failures == 1 else min(1000 << self._failures, 100_000)
        patient = self._deadline_us is not None and isinstance(trouble, NotExecuted)
        out_of_time = self._deadline_us is not None and self._world.now_us + delay_us >= self._deadline_us
        if out_of_time or (not patient and self._failures > self._process.retries):
            self._end(Trouble(str(trouble)))
        else:
            self._world.after(delay_us, self._process, self.begin)

    def cancel(self) -> None:
        """The caller is cancelled or interrupted."""
        if self._call is not None:
            self._call.open = False
            self._operation.note_unanswered(True)
            self._unanswered.append(self._call.connection)
        self.over = True
        if self._tidies:
            self._process.tidy(self._operation, self._unanswered, True)

    def _end(self, error: Exception | None) -> None:
        self.over = True
        operation = self._operation
        doubts = isinstance(operation, Acquire) and operation.unsettled and operation.result
        if doubts and "CLIENT" in self._process.denied:
            self._world.doubtful.add(operation.token)
        if self._tidies and (error is not None or operation.unsettled or operation.claim is not None):
            self._process.tidy(self._operation, self._unanswered, error is not None)
        if error is None:
            self._task.go_on(self._task.epoch, None)
        else:
            self._task.throw(error)


class CleanupBefore(Execution):
    """The cleanup under a token that is about to be set again, before the execution that sets it."""

    def __init__(
        self, task: Task, returning: list[tuple[bytes, bytes]], limit_s: float | None, execution: Execution
    ) -> None:
        super().__init__(task, Pipeline([LeaveQueue(key, token) for key, token in returning]), limit_s, tidies=False)
        self._waiting = task
        self._returning = returning
        self._execution = execution

    def cancel(self) -> None:
        """The caller is cancelled or interrupted."""
        super().cancel()
        self._process.clean_up(self._returning)

    def _end(self, error: Exception | None) -> None:
        if error is None:
            self.over = True
            self._waiting.go_on_with(self._execution)
        else:
            self._process.clean_up(self._returning)
            super()._end(error)


class Task:
    """Drives one procedure."""

    def __init__(self, process: Process, name: str, steps: Steps, tidies: bool = True) -> None:
        self.process = process
        self.name = name
        self.epoch = 0
        self.done = False
        self.owner: object = None
        self._steps = steps
        self._tidies = tidies
        self._step: Any = None
        self._execution: Execution | None = None

    def go_on(self, epoch: int, answer: object) -> None:
        """Send an answer, unless the task has gone on meanwhile."""
        if epoch != self.epoch or self.done:
            return
        if self._step.method == "enter":
            answer = self._waiter()
            if answer is Ellipsis:
                return
        self._run(self._steps.send, answer)

    def throw(self, error: BaseException) -> None:
        """Throw an error in."""
        self._run(self._steps.throw, error)

    def cancel(self) -> None:
        """Throw a cancel in, wherever it is."""
        if self.done or self._step is None:
            return
        self.process.world.tell(self.name, "is cancelled")
        if self._execution is not None and not self._execution.over:
            self._execution.cancel()
        self.throw(Cancelled())

    def _run(self, resume: Callable[[Any], Any], value: object) -> None:
        self.epoch += 1
        self._execution = None
        self.process.world.changed = True
        self.process.world.running = self
        try:
            step = self._step = resume(value)
        except (StopIteration, Cancelled):
            self.done = True
            return
        do = getattr(self, f"_{step.method}", None)
        if do is None:
            self.go_on(self.epoch, None)
        else:
            do(*step.args)

    def _next_message(self, waiter: Waiter, timeout_s: float) -> None:
        waiter.mailbox.listen(self, timeout_s)

    def _call(self, wait: Any, timeout_s: float | None) -> None:
        wait.__self__.listen(self, timeout_s)

    def _sleep(self, seconds: float) -> None:
        self.process.world.after(int(seconds * 1e6), self.process, self.go_on, self.epoch, None)

    def _execute(self, operation: Any, limit_s: float | None = None, tidies: bool | None = None) -> None:
        tidies = self._tidies if tidies is None else tidies
        self._execution = execution = Execution(self, operation, limit_s, tidies)
        if self.process.pending_cleanup:
            returning = self.process.take_back(operation)
            if returning:
                self._execution = CleanupBefore(self, returning, limit_s, execution)
        self._execution.begin()

    def go_on_with(self, execution: Execution) -> None:
        """Begin what had to wait for another execution."""
        self._execution = execution
        execution.begin()

    def _waiter(self) -> Any:
        """A waiter, None, or `...` where that takes a request first."""
        key, token, limit_s = self._step.args
        connection = self.process.connection
        if connection is None:
            self._execute(ReadHolder(key), limit_s, False)
            return ...
        registry = connection.registry
        if registry is None:
            return None
        channel = registry.channel_for(key)
        if self._execution is not None:
            subscribing: Any = self._execution._operation
            if isinstance(subscribing, Subscribe) and subscribing._words[1] == channel:
                registry.note_subscription(channel, subscribing.result)
        waiter = registry.take(key, token, Mailbox(self.process, connection), connection, self.process)
        if waiter is not None:
            return waiter
        self._execute(Subscribe(key, registry.subscribe, channel), limit_s, False)
        return ...


class Process:
    """One process: one connection at a time, with one waiter registry, and any number of tasks.

    Attributes:
        blocking: whether it has threads or an event loop.
        patience_s: its `socket_timeout`.
        retries: of its retry policy.
        denied: what its user may not do.
        was_barred: whether its user was ever forbidden to run scripts: then waiters cannot leave the queue.
        deaf: whether its next connections get no pushes.
        requests_held_us: until when the network keeps what it sends.
        replies_held_us: until when the network keeps what is sent to it.
        leapt_us: by how much its clock has leapt forward.
        frozen_until_us: until when it is stopped.
        busy_until_us: until when its loop runs nothing more, as something blocks that; its renewing thread runs.
        longest_stop_us: how long at most its loop has not run, or will not have.
        preempted_us: how long at most it is preempted between two steps: only its renewing thread is.
        parts: itself, and its renewing thread where it has one: each has a connection of its own.
        pending_cleanup: the keys and tokens that are to be cleaned up.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.blocking = False
        self.patience_s: float | None = None
        self.retries = 3
        self.denied: frozenset[str] = frozenset()
        self.was_barred = False
        self.deaf = False
        self.requests_held_us = 0
        self.replies_held_us = 0
        self.leapt_us = 0
        self.dead = False
        self.frozen_until_us = 0
        self.busy_until_us = 0
        self.preempted_us = 0
        self.longest_stop_us = 0
        self._stopped_since_us = 0
        self.parts: list[Process] = [self]
        self.connection: ClientConnection | None = None
        self.connections: list[ClientConnection] = []
        self.pending_cleanup: list[tuple[bytes, bytes]] = []
        self.claims = Claims(self.clean_up)
        self._endings: dict[Args, None] = {}
        self._cleaner: Task | None = None
        self._connecting: list[Execution] = []
        self.loses_next = False
        world.processes.append(self)

    def draw_settings(self, calm: bool) -> None:
        """Let chance decide its kind and, unless the world is calm, what its client does about faults."""
        rng = self.world.rng
        self.blocking = rng.random() < 0.5
        if not calm:
            self.retries = rng.choice((1, 3, 10))
            self.patience_s = rng.choice((None, None, 0.1, 1.0))

    def stop(self, until_us: int, is_busy: bool) -> None:
        """Run nothing more until then; `is_busy`: the loop alone."""
        if max(self.frozen_until_us, self.busy_until_us) < self.world.now_us:
            self._stopped_since_us = self.world.now_us
        if is_busy:
            self.busy_until_us = max(self.busy_until_us, until_us)
        else:
            self.frozen_until_us = max(self.frozen_until_us, until_us)
        self.longest_stop_us = max(self.longest_stop_us, until_us - self._stopped_since_us)

    def busy_for_us(self) -> int:
        """How long its loop has been blocked."""
        is_busy = self.busy_until_us > self.world.now_us
        return self.world.now_us - self._stopped_since_us if is_busy else 0

    def start(self, name: str, steps: Steps, tidies: bool = True) -> Task:
        """Begin a procedure."""
        task = Task(self, name, steps, tidies)
        self.world.after(0, self, task._run, steps.send, None)
        return task

    def loses_unsent(self, connection: ClientConnection) -> bool:
        """Whether the connection turns out to be broken before the next request has left."""
        loses, self.loses_next = self.loses_next, False
        if loses:
            connection.vanish()
        return loses

    def connect(self, execution: Execution) -> None:
        """Connect, for all callers that wait for it."""
        self._connecting.append(execution)
        if len(self._connecting) == 1:
            held_us = max(self.requests_held_us, self.replies_held_us) - self.world.now_us
            self.world.after(max(2 * self.world.delay_us(), held_us), self, self._connected)

    def _connected(self) -> None:
        waiting, self._connecting = self._connecting, []
        if self.world.server_is_down:
            for execution in waiting:
                execution.no_connection("connection refused")
            return
        connection = ClientConnection(self)
        self.world.tell(self.name, "has connected")
        self.connections.append(connection)
        for ending in list(self._endings):
            connection.send([ending], partial(self._note_ended, ending))
        connection.clean_up(cleanup_requests(connection.capabilities, self.pending_cleanup))
        self.connection = connection
        for execution in waiting:
            self.world.after(self.world.pause_us(), self, execution.begin)

    def drop(self, connection: ClientConnection) -> None:
        """Close a connection that is not used any more."""
        self.give_up(connection)
        connection.break_()
        connection.vanish_sometime()

    def give_up(self, connection: ClientConnection) -> None:
        """Send nothing more on a connection, and have the next one end it."""
        if self.connection is connection:
            self.connection = None
            if connection.ending is not None:
                self._endings[connection.ending] = None

    def post(self, connection: ClientConnection, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request, without waiting for the reply."""
        connection.post(args, on_reply)

    def is_current(self, waiter: Waiter) -> bool:
        """Whether requests still leave on the waiter's connection."""
        return (
            self.connection is not None and self.connection.registry is waiter.registry and not self.connection.broken
        )

    def new_token(self, key: bytes | None = None, kind: bytes = PLAIN) -> bytes:  # of one kind
        """A new token, of a holder that does not listen."""
        return self.world.new_token()

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt would probably fail."""
        return (
            self.connection is not None
            and self.connection.registry is not None
            and self.connection.registry.is_contended(key, is_patient)
        )

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """Note the release of a lock here: a waiter has it now, or no waiter was in the queue."""
        if self.connection is not None and self.connection.registry is not None:
            self.connection.registry.note_hand_over(key, handed_over)

    def tidy(self, operation: Any, unanswered: list[ClientConnection], failed: bool) -> None:
        """Clean up what may have been executed: behind it, and in the background."""
        claim, operation.claim = operation.claim, None
        if claim is not None:
            claim.end(operation.result)
        entries = operation.to_clean_up(failed)
        if entries:
            for connection in unanswered:
                if not connection.broken:
                    connection.clean_up(cleanup_requests(connection.capabilities, entries))
            self.clean_up(entries)

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Clean up in the background."""
        self.pending_cleanup += entries
        if self._cleaner is None or self._cleaner.done:
            self._cleaner = self.start(f"{self.name} cleaning up", self._cleaning_up(), tidies=False)

    def is_cleaning_up(self, key: bytes, token: bytes) -> bool:
        """Whether the cleanup of this token is under way, or waits for the reply that says whether it is needed."""
        return (key, token) in self.pending_cleanup or any(
            token in request for connection in self.connections for request in connection.will_clean_up()
        )

    def _cleaning_up(self) -> Steps:
        delay_s = _CLEANUP_FIRST_S
        while self.pending_cleanup:
            entries = list(self.pending_cleanup)
            many = Pipeline([LeaveQueue(key, token) for key, token in entries])
            try:
                yield Do("execute", many, _CLEANUP_LIMIT_S)
            except Trouble as trouble:
                if not str(trouble).startswith(("NOPERM", "ERR")):
                    yield Do("sleep", delay_s)
                    delay_s = min(2 * delay_s, _CLEANUP_LAST_S)
                    continue
            gone = set(entries)
            self.pending_cleanup[:] = [entry for entry in self.pending_cleanup if entry not in gone]

    def _note_ended(self, ending: Args, _: object) -> None:
        self._endings.pop(ending, None)

    def take_back(self, operation: Any) -> list[tuple[bytes, bytes]]:
        """Take the entries that the operation is about to set again out of `pending_cleanup`."""
        taken = set(operation.takes())
        returning = [entry for entry in self.pending_cleanup if entry in taken]
        if returning:
            if self._cleaner is not None:
                self._cleaner.cancel()
                self._cleaner = None
            left = [entry for entry in self.pending_cleanup if entry not in taken]
            self.pending_cleanup[:] = []
            if left:
                self.clean_up(left)
        return returning
