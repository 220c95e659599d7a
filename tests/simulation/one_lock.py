"""A simulation of one lock: its operations against the model server, over a connection that loses requests and replies.

A schedule is a list of choices: which server, what is lost, how long each step takes, what a rival does meanwhile.
Choice 0 is always the harmless one, so a schedule shrinks towards one without faults. After every request and every
operation the invariants at `Simulation` are checked, and a `Violation` names the broken one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

import hiredis

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol import commands
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected, Refused
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.queue import LeaveQueue
from redislock_fast._protocol.scripts import EXTEND, LEAVE, PASS_ON, REACQUIRE, RELEASE
from redislock_fast._util.tokens import CONTENDED_FLAG, is_held_with, is_ours
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, Model

KEY = b"name"
TOKEN = b"ours"
OUR_TOKEN = b"rlf:" + b"7" * 32
"""A token as the library makes it: a waiter adds the contended flag to it."""

RIVAL = b"rival"

_TTLS_MS = (1000, 50, 10_000, None)
_PAUSES_MS = (0.0, 0.4, 1.0, 7.3, 30.0, 60.5, 400.0, 1200.0)
_DENIALS = (
    frozenset[str](),
    frozenset({"COMMAND"}),
    frozenset({"EVAL", "EVALSHA"}),
    frozenset({"EVAL"}),
    frozenset({"SET GET", "GET"}),
    frozenset({"SET GET"}),
    frozenset({"DELIFEQ", "DELEX", "SET IFEQ"}),
)
_ALL_FORMS_DENIED = frozenset({"EVAL", "EVALSHA", "GET"})
_ERRORS = (
    "LOADING Redis is loading the dataset in memory",
    "READONLY You can't write against a read only replica.",
    "BUSY Redis is busy running a script.",
    "CLUSTERDOWN The cluster is down",
    "MOVED 5798 127.0.0.1:7001",
    "ERR Error running script (call to f_0): @user_script:7: @user_script: 7: -READONLY You can't write.",
)
_FAULTS = ("", "", "", "", "", "", "never sent", "lost", "reply lost", "error")
_SCRIPT_NAMES: dict[object, str] = {
    word: name
    for name, script in (
        ("release", RELEASE),
        ("extend", EXTEND),
        ("reacquire", REACQUIRE),
        ("pass on", PASS_ON),
        ("leave", LEAVE),
    )
    for word in script
}


class Violation(AssertionError):
    """An invariant does not hold."""


class Choices(Protocol):
    """The choices of a schedule."""

    def below(self, count: int) -> int:
        """A number from 0 to below `count`; 0 is the harmless choice."""


class Seeded:
    """The schedule of a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, count: int) -> int:
        return int(self._random.random() * count)


class Listed:
    """A schedule in a list, with harmless choices after its end."""

    def __init__(self, numbers: bytes) -> None:
        self._numbers = iter(numbers)

    def below(self, count: int) -> int:
        return next(self._numbers, 0) % count


@dataclass(frozen=True)
class Machines:
    """The operations under test; a test plants a fault by putting a broken one here."""

    acquire: type[commands.Acquire] = commands.Acquire
    release: type[commands.Release] = commands.Release
    extend: type[commands.Extend] = commands.Extend
    reacquire: type[commands.Reacquire] = commands.Reacquire


@dataclass
class _Run:
    """The events while one operation was driven.

    Attributes:
        started_s: a time before any of its requests left.
        finished: it ended with a result, and was not given up or refused.
        before: the value at the key when the last request was executed.
        took: one of its requests set the key that was free.
        deleted_at_s: when the request left that deleted the key, if one did.
        latency_ms: the longest time that any of its requests took to the server.
    """

    started_s: float
    finished: bool = False
    before: Entry | None = None
    took: bool = False
    deleted_at_s: float | None = None
    latency_ms: float = 0.0


class Simulation:
    """One schedule: acquire, some extends and reacquires, release. Before an `AcquireOwn`, the key may hold our token.

    Invariants:
        - An acquire changes a free key only; every other request, and an `AcquireOwn`, changes a key only while it has
          our token, and leaves the contended flag.
        - An acquire ends True if and only if the key holds our token at the last reply. Where the server lets an
          `AcquireOwn` do nothing with what it finds, it may end False.
        - An acquire that was given up is `unsettled` wherever it has set the key, and the cleanup deletes it.
        - An extend or reacquire ends True if and only if the key holds our token (an extend: and has a ttl).
        - An additive extend, however often it was sent, adds at most once, but for the latency of its requests.
        - The lease that we believe in is never longer than the true one.
        - A release ends True where a request of its own that left within the lease deleted the key; it ends False
          where the key was not ours and nothing was lost; it never ends with our token at the key.

    Args:
        choices: the schedule.
        machines: the operations.
        neighbours: other callers share the connection, and lower its capabilities.

    Attributes:
        requests: what the server executed, in order.
    """

    def __init__(self, choices: Choices, machines: Machines, neighbours: bool = False) -> None:
        self._choices = choices
        self._machines = machines
        self._neighbours = neighbours
        self._now_ms = 1_000_000.0
        has = tuple(SERVERS.values())[choices.below(len(SERVERS))]
        self._model = Model(has, _DENIALS[choices.below(len(_DENIALS))])
        self._ttl_ms = _TTLS_MS[choices.below(len(_TTLS_MS))]
        self._token = (TOKEN, OUR_TOKEN)[choices.below(2)]
        self._attempts = 4 - choices.below(4)
        self._pass(self._pause())
        self._by_own_token = issubclass(machines.acquire, AcquireOwn)
        self._shared = (
            self._by_own_token and choices.below(2) == 1
        )  # another holder with our token may release the lock
        if self._shared:
            mark = CONTENDED_FLAG if is_ours(self._token) and choices.below(2) else b""
            self._model.put(KEY, self._token + mark, (None, 30, 300, 5000)[choices.below(4)])
        self._capabilities = Capabilities()
        self._reconnect()
        self._lines: list[tuple[object, ...]] = []
        self.requests: list[Args] = []

    def run(self) -> None:
        """Play the schedule.

        Raises:
            Violation: an invariant does not hold.
        """
        held, expires_at = self._acquire()
        self._shared = False
        if not held:
            return
        for _ in range(self._choices.below(4)):
            if self._ttl_ms is None or expires_at is None:
                break
            if self._choices.below(2):
                expires_at = self._reacquire(self._ttl_ms, expires_at)
            else:
                expires_at = self._extend(expires_at)
        self._release(expires_at)

    # ---- the world ----

    def _entry(self) -> Entry | None:
        return self._model.entry(KEY)

    def _ours(self) -> bool:
        entry = self._entry()
        return entry is not None and is_held_with(entry.value, self._token)

    def _pause(self) -> float:
        return _PAUSES_MS[self._choices.below(len(_PAUSES_MS))] if self._choices.below(4) == 3 else 0.0

    def _pass(self, pause_ms: float) -> None:
        self._now_ms += pause_ms
        self._model.now_ms = int(self._now_ms)

    def _meanwhile(self) -> None:
        """Time passes; rivals take the free lock, give it back or come to wait; an operator flushes the scripts."""
        event = self._choices.below(12)
        entry = self._entry()
        if event >= 9 and entry is None:
            self._model.put(KEY, RIVAL, (None, 30, 5000)[event - 9])
        elif event == 8 and entry is not None and entry.value == RIVAL:
            del self._model.entries[KEY]
        elif event == 7:
            self._model.flush_scripts()
        elif event == 5 and self._shared and self._ours():
            self._model.remove(KEY)
        elif event == 6 and entry is not None and entry.value == self._token and is_ours(self._token):
            self._model.entries[KEY] = Entry(self._token + CONTENDED_FLAG, entry.ends_at_ms)
        self._pass(self._pause())

    def _reconnect(self) -> None:
        self._capabilities = Capabilities(self._model.execute(PROBE))

    def _log(self, *words: object) -> None:
        self._lines.append(words)

    def _fail(self, what: str) -> None:
        lines = [" ".join(str(_SCRIPT_NAMES.get(word, word)) for word in words) for words in self._lines]
        raise Violation("\n".join([what, *lines, f"now {self._now_ms}: {self._entry()}"]))

    # ---- the connection ----

    def _drive(self, operation: Operation) -> _Run:
        run = _Run(self._now_ms / 1000)
        for _ in range(self._attempts):
            self._meanwhile()
            while True:
                left_at_s = self._now_ms / 1000
                request = operation.request(self._capabilities, left_at_s)
                latency_ms = self._pause()
                run.latency_ms = max(run.latency_ms, latency_ms)
                self._pass(latency_ms)
                fault = self._choices.below(10)
                self._log(left_at_s, *request, _FAULTS[fault])
                if fault in (6, 7):
                    operation.note_unanswered(sent=fault == 7)
                    self._reconnect()
                    break
                if fault == 9:
                    reply: Reply = hiredis.ReplyError(_ERRORS[self._choices.below(len(_ERRORS))])
                else:
                    reply = self._execute(operation, request, run, left_at_s)
                    if fault == 8:
                        operation.note_unanswered(sent=True)
                        self._reconnect()
                        break
                if self._neighbours and self._choices.below(8) == 7:
                    self._capabilities.set_get = self._capabilities.set_ifeq = False
                    self._capabilities.release = None
                try:
                    if operation.feed(reply, self._capabilities):
                        run.finished = True
                        return run
                except (NotExecuted, Redirected):
                    break
                except Refused as refusal:
                    if not self._model.denied & _ALL_FORMS_DENIED:
                        self._fail(f"refused: {refusal}")
                    return run
        return run

    def _execute(self, operation: Operation, request: Args, run: _Run, left_at_s: float) -> Reply:
        before = run.before = self._entry()
        self.requests.append(request)
        reply = self._model.execute(request)
        after = self._entry()
        self._log("    ", str(before), "->", str(after), repr(reply))
        if before != after:
            acquires = isinstance(operation, commands.Acquire)
            if acquires and before is None:
                run.took = True
            elif acquires and not self._by_own_token:
                self._fail("an acquire changed a key that was not free")
            elif before is None or not is_held_with(before.value, self._token):
                self._fail("a request changed a key that was not ours")
            elif after is not None and before.value != after.value:
                self._fail("a request removed the contended flag")
            if after is None:
                run.deleted_at_s = left_at_s
        return reply

    # ---- the operations ----

    def _acquire(self) -> tuple[bool, float | None]:
        operation = self._machines.acquire(KEY, self._token, self._ttl_ms)
        run = self._drive(operation)
        if run.finished:
            may_miss_its_own = self._by_own_token and self._model.denied & _ALL_FORMS_DENIED
            if operation.result is not self._ours() and (operation.result or not may_miss_its_own):
                self._fail(f"acquire ended {operation.result}")
            if operation.result:
                expires_at = None if self._ttl_ms is None else operation.sent_at + self._ttl_ms / 1000
                self._check_lease(expires_at)
                return True, expires_at
            return False, None
        if self._ours() and run.took and not operation.unsettled:
            self._fail("acquire was given up, holds the lock, and does not say so")
        if operation.unsettled:
            self._clean_up()
        return False, None

    def _clean_up(self) -> None:
        """Clean up, as the transports do in the background, as often as necessary."""
        before = self._entry()
        operation = LeaveQueue(KEY, self._token)
        finished = False
        while not finished:
            reply = self._model.execute(operation.request(self._capabilities, 0.0))
            finished = operation.feed(reply, self._capabilities)
        self._log("    cleaned up:", repr(reply))
        if before is not None and before.value == RIVAL and self._entry() != before:
            self._fail("the cleanup took another's lock")
        # A cleanup has no second try here: the tests of the transports cover a refused one.
        if self._ours() and not isinstance(reply, hiredis.ReplyError):
            self._fail("the cleanup left the lock behind")

    def _check_lease(self, expires_at: float | None) -> None:
        entry = self._entry()
        if entry is None or entry.ends_at_ms is None:
            return
        # The key is there up to the end of its last millisecond; an extend may round one away.
        if expires_at is None or expires_at * 1000 > entry.ends_at_ms + 2:
            self._fail(f"believed until {expires_at}, held until {entry.ends_at_ms}")

    def _extend(self, expires_at: float) -> float:
        add_ms = (500, 5, 5000)[self._choices.below(3)]
        replace = self._choices.below(3) == 2
        known = expires_at if self._choices.below(4) != 3 else None
        operation = self._machines.extend(KEY, self._token, add_ms, replace, known)
        start = self._entry()
        run = self._drive(operation)
        entry = self._entry()
        if run.finished:
            before = run.before
            held = before is not None and is_held_with(before.value, self._token) and before.ends_at_ms is not None
            if operation.result is not held:
                self._fail(f"extend ended {operation.result}")
        if entry is not None and is_held_with(entry.value, self._token) and entry.ends_at_ms is not None:
            assert start is not None
            assert start.ends_at_ms is not None
            if not replace and entry.ends_at_ms > start.ends_at_ms + add_ms + run.latency_ms + 1:
                self._fail(f"extend by {add_ms} raised the end from {start.ends_at_ms} to {entry.ends_at_ms}")
        if run.finished and operation.result:
            assert operation.expires_at is not None or replace
            self._check_lease(operation.expires_at)
            return expires_at if operation.expires_at is None else operation.expires_at
        # It may have been executed without our knowing, and where we did not know the lease, or replaced it, have made
        # it shorter.
        return min(expires_at, run.started_s + add_ms / 1000) if replace or known is None else expires_at

    def _reacquire(self, ttl_ms: int, expires_at: float) -> float:
        operation = self._machines.reacquire(KEY, self._token, ttl_ms)
        run = self._drive(operation)
        if run.finished:
            if operation.result is not self._ours():
                self._fail(f"reacquire ended {operation.result}")
            if operation.result:
                expires_at = operation.sent_at + ttl_ms / 1000
                self._check_lease(expires_at)
                return expires_at
        # It may have been executed without our knowing, and have made the lease shorter.
        return min(expires_at, run.started_s + ttl_ms / 1000)

    def _release(self, expires_at: float | None) -> None:
        unsettled = False
        deleted_at_s: float | None = None
        entry = self._entry()
        queued = entry is not None and entry.value == self._token + CONTENDED_FLAG and self._choices.below(3) == 2
        for _ in range(1 + self._choices.below(3)):
            operation = self._machines.release(KEY, self._token, expires_at, unsettled, queued)
            run = self._drive(operation)
            if run.deleted_at_s is not None:
                deleted_at_s = run.deleted_at_s
            unsettled = operation.unsettled
            if not run.finished:
                continue
            if self._ours():
                self._fail(f"release ended {operation.result} and left the lock")
            in_time = deleted_at_s is not None and (expires_at is None or deleted_at_s < expires_at)
            if in_time and not operation.result:
                self._fail("release ended False for a lock that it deleted itself")
            if operation.result and deleted_at_s is None and not unsettled:
                self._fail("release ended True for a lock that was not ours")
            return
