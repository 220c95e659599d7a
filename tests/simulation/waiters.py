"""The waiters of the simulation: each acquires, holds and releases, by the library's own machines."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.owner import SharedOwner
from redislock_fast._protocol.commands import Acquire, Reacquire, Release
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.steps import ENTERED, Do, Steps
from redislock_fast._queue.waiters import Grant
from redislock_fast._queue.waiting import TIME_UP, Waiting
from redislock_fast._util.times import Limit
from tests.simulation.process import Cancelled, Process, Task, Trouble

if TYPE_CHECKING:
    from tests.simulation.waiting import Simulation

KEY = b"name"


@dataclass(eq=False)
class BatchLease:
    """A lock that a waiter believes to hold.

    Attributes:
        ends_us: when its lease ends; None where it does not.
    """

    who: str
    token: bytes
    granted_us: int
    ends_us: int | None


class Waiter:
    """Acquires, holds and releases."""

    release_kind: Any = Release

    def __init__(self, simulation: Simulation, process: Process, number: int) -> None:
        rng = simulation.rng
        self.simulation = simulation
        self.process = process
        self.name = f"{process.name} waiter {number}"
        self._own_number = number
        self.token = b""
        self.waiting: Waiting | None = None
        self.state = "idle"
        self.ttl_ms: int | None = simulation.ttl_ms
        self.rounds = 1 + int(3 * rng.random())
        self.custom = not simulation.calm and rng.random() < (0.6 if simulation.shares else 0.12)
        self.patience_s = 0.2 * rng.random() if not simulation.calm and rng.random() < 0.3 else None
        self.task: Task = process.start(self.name, self.live())
        self.task.owner = self

    @property
    def attempt_kind(self) -> type[Acquire]:
        """The operation that takes what is wanted where it is not handed over."""
        return AcquireOwn if self.custom else Acquire

    def live(self) -> Steps:
        """All rounds."""
        simulation, rng = self.simulation, self.simulation.rng
        yield Do("sleep", simulation.think_s * rng.random())
        while self.rounds:
            self.rounds -= 1
            number = 0 if simulation.shares else self._own_number
            self.token = b"own:%032x" % (0xC000 + number) if self.custom else simulation.new_token()
            owners = simulation.owners.setdefault(self.token, [])
            if self not in owners:
                owners.append(self)
            self.state = "acquiring"
            try:
                yield from self._round()
            except (Trouble, Cancelled) as error:
                simulation.world.tell(self.name, "gave up:", type(error).__name__, str(error))
                self._own_number += 0x10  # a token is used again only after its cleanup
                simulation.let_go(self)
            self.state, self.waiting = "idle", None
            yield Do("sleep", simulation.think_s * rng.random())

    def wants(self, token: bytes) -> bool:
        """Whether the waiter uses a lock with this token."""
        return self.state != "idle" and (
            token == self.token or (self.waiting is not None and token == self.waiting.token)
        )

    def _round(self) -> Steps:
        simulation, world, ttl_ms = self.simulation, self.simulation.world, self.ttl_ms
        deadline = None if self.patience_s is None else world.clock() + self.patience_s
        since, queued = yield from self._acquire(self.token, ttl_ms, deadline)
        if since is None:
            return
        if self.waiting is not None:
            self.token, self.waiting = self.waiting.held_with, None
        hold = simulation.take(self, since, queued)
        if (yield from self._hold(hold, queued)):
            yield from self._release(hold, queued)

    def _hold(self, hold: BatchLease, queued: bool) -> Steps:
        """Hold for a while. Returns whether to release."""
        simulation, rng, ttl_ms = self.simulation, self.simulation.rng, self.ttl_ms
        if ttl_ms is not None and not simulation.calm and rng.random() < 0.1:
            yield Do("sleep", ttl_ms / 1000 * rng.random())
            reacquire = Reacquire(KEY, self.token, ttl_ms, queued)
            with contextlib.suppress(Trouble):
                yield Do("execute", reacquire)
                simulation.note_reacquire(hold, reacquire)
        yield Do("sleep", simulation.hold_s * rng.random() ** 3)
        if ttl_ms is not None and not simulation.calm and rng.random() < 0.05:
            self.state = "lost"  # never releases
            yield Do("sleep", ttl_ms / 1000 * 1.5)
            simulation.let_go(self)
            return False
        return True

    def _acquire(self, token: bytes, ttl_ms: int | None, deadline: float | None) -> Steps:
        """Acquire as `Lock.acquire` does. Returns when the lease began, or None, and whether the lock is contended."""
        simulation, world = self.simulation, self.simulation.world
        local = SharedOwner()
        kind = self.attempt_kind
        queues = not self.custom and self.process.is_contended(KEY, deadline is None)
        by_push = True
        while True:
            left_s = None if deadline is None else max(deadline - world.clock(), 0.0)
            if not queues:
                attempt = kind(KEY, token, ttl_ms)
                yield Do("execute", attempt, left_s)
                if attempt.result:
                    return attempt.sent_at, False
                if attempt.unsettled and not self.custom:
                    self.token = token = simulation.new_token()  # the old one is being cleaned up
            if by_push:
                self.state = "waiting"
                ticket, own = (simulation.new_token(), token) if self.custom else (token, None)
                self.waiting = Waiting(KEY, ticket, ttl_ms, simulation.interval_s, Limit(left_s), own, kind)
                try:
                    outcome = yield from self._wait(self.waiting)
                except BaseException:
                    self.process.clean_up([(KEY, self.waiting.token)])
                    raise
                world.tell(self.name, "waited:", outcome)
                if isinstance(outcome, Grant):
                    outcome.note(local, self.waiting.held_with, ttl_ms)
                    return outcome.since, local.contended is not None
                if not self.custom:
                    self.token = token = self.waiting.token
                self.waiting = None
                if outcome == TIME_UP:
                    return None, False
                by_push = queues = False
            if deadline is not None and world.clock() + simulation.interval_s > deadline:
                return None, False
            yield Do("sleep", simulation.interval_s)

    @staticmethod
    def _wait(waiting: Waiting) -> Steps:
        """Wait as the drivers do."""
        waiter = yield Do("enter", waiting.key, waiting.token, waiting.limit_s())
        heard: object = ENTERED
        try:
            if waiter is not None:
                timeout_s = waiting.join(waiter)
                if timeout_s is not None:
                    heard = yield Do("next_message", waiter, timeout_s)
                    grant = waiting.granted(waiter, heard)
                    if grant is not None:
                        waiter.registry.leave(waiter)
                        return grant
        except BaseException as error:
            heard = error
        return (yield from waiting.steps((waiter, heard)))

    def _release(self, hold: BatchLease, queued: bool) -> Steps:
        simulation = self.simulation
        self.state = "releasing"
        simulation.let_go(self)
        try:
            release = yield from self._released(hold, queued)
        except Cancelled:
            self.process.clean_up([(KEY, self.token)])
            raise
        simulation.note_release(hold, release)

    def _released(self, hold: BatchLease, queued: bool) -> Steps:
        """Release until there is a verdict. Returns the operation."""
        expires_at = None if hold.ends_us is None else hold.ends_us / 1e6
        releasing = False
        while True:
            release = self.release_kind(KEY, self.token, expires_at, releasing, queued)
            try:
                yield Do("execute", release)
            except Trouble as trouble:
                releasing = release.unsettled and release.valid
                if str(trouble).startswith(("NOPERM", "ERR")):
                    raise
                yield Do("sleep", 0.02)
            else:
                if release.handed_over is not None:
                    self.process.note_hand_over(KEY, release.handed_over)
                return release
