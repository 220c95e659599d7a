"""A simulation of holding: a few holders in a few processes, a lossy world between them and the server.

Each takes a lock with `asyncio.Lock` itself, with options, holds it, prolongs it, and releases or drops it. Renewer,
leases and all procedures below are the library's own. After every event the invariants at `Simulation` are checked; a
`Violation` names the broken one and contains the story. Time is simulated.

    python -m tests.simulation.holding --seeds 100000 --jobs 2
    python -m tests.simulation.holding --seed 4711 -v
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from redislock_fast._lease import lease as lease_module
from redislock_fast._lease import owner
from redislock_fast._pipe.base import Args, Reply
from redislock_fast._procedures import lease as lease_procedure
from redislock_fast._procedures import lock, loss
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.keys import fence_key
from redislock_fast._protocol.operation import Operation
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._queue import waiters, waiting
from redislock_fast._renewal import loop as loop_renewer
from redislock_fast._renewal import off_loop, schedule, threads
from redislock_fast._renewal.loop import renewer_of
from redislock_fast._util import times
from redislock_fast._util.errors import LossReason
from redislock_fast._util.tokens import CONTENDED_FLAG
from redislock_fast.asyncio import Lock
from tests.simulation.faults import Faults
from tests.simulation.holders import Holder, Stay, token_of
from tests.simulation.loop import Loop, Transport
from tests.simulation.model import SERVERS, Model
from tests.simulation.process import Process
from tests.simulation.seeds import Violation, main
from tests.simulation.threads import Beside, ThreadPart, places_of
from tests.simulation.waiters import BatchLease
from tests.simulation.world import SERVER_STARTED_US, World, long_waits_unlogged

BUSY = "busy"
"""The kind of stories in which nothing happens, except that loops are blocked."""

_KINDS = ("calm", "faults", "faults", "faults", "rough")
_FAULTS = (
    "cut",
    "cut",
    "unsent",
    "deaf",
    "kill",
    "freeze",
    "freeze",
    "cancel",
    "delete",
    "take",
    "flush",
    "flush scripts",
    "restart",
    "full",
    "deny",
)
_MAX_EVENTS = 30_000
_SETTLED_US = 2_000_000
_MOST_STALLED = 3  # ttls: `max_stall` by default
_BARRED_FROM_MS = 400  # of a shorter ttl, an attempt to connect takes so much that the loop may come too late
_PREEMPTED = 1 / 20  # of a ttl: how long a renewing thread is preempted at most
_STALE_US = 20_000  # what messages take in a calm world


def most_stalled_us(ttl_ms: int) -> int:
    """How long a lock is held at most whose holder's loop does not run: `max_stall`, a ttl and a third of one."""
    return int((_MOST_STALLED + 4 / 3 + 6 * _PREEMPTED) * 1000 * ttl_ms)  # each renewal comes sooner or later


class Stage(Protocol):
    """The part of a simulation that its processes use."""

    def note_error(self, context: dict[str, Any]) -> None:
        """Note an error that no task or callback has caught."""

    def note_request(self, operation: Operation) -> None:
        """Note that an operation begins."""


class Site:
    """A process, and what its locks need.

    Args:
        simulation: the story.
        process: the process.
        part: that of its renewing thread; None: its loop renews.

    Attributes:
        shared: the first of the holders that share a lock object.
    """

    def __init__(self, simulation: Stage, process: Process, part: ThreadPart | None) -> None:
        self.process = process
        self.loop = Loop(process, simulation.note_error)
        self._beside = None if part is None else Beside(part, simulation.note_request, simulation.note_error)
        self.transport = Transport(process, self.loop, simulation.note_request, self._beside)
        self.shared: Holder | None = None

    @property
    def has_thread(self) -> bool:
        """Whether a thread renews off its loop."""
        return len(self.process.parts) > 1

    def has_to_renew(self) -> bool:
        """Whether its renewers have something in their schedules."""
        transport: Any = self.transport
        renewer = self.loop.run(partial(renewer_of, transport))
        schedules = [renewer._schedule, *([] if renewer._off_loop is None else [renewer._off_loop._schedule])]
        return renewer._timer is not None or any(any(schedule._due.values()) for schedule in schedules)

    def close(self) -> None:
        """End its thread and all of its tasks where they are."""
        if self._beside is not None:
            self._beside.close()
        self.loop.close()


class Renewing:
    """Which processes of a story have their locks renewed by a thread: those of every second story.

    This is drawn apart from all else, so a story without threads is the same as if there were none.

    Args:
        seed: the story's.
        kind: its kind, where that is given.

    Attributes:
        rng: for all that is about threads before the story begins.
        is_by_threads: whether threads renew in this story.
        is_busy: whether nothing happens in it, except that loops are blocked.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.rng = random.Random(str(seed))
        self.is_busy = kind == BUSY or (not kind and self.rng.random() < 0.2)
        self.is_by_threads = self.is_busy or self.rng.random() < 0.4

    def part(self, process: Process, ttl_ms: int) -> ThreadPart | None:
        """The renewing thread's part of a process, whose locks have this ttl."""
        if not self.is_by_threads or (not self.is_busy and self.rng.random() < 0.2):
            return None
        part = ThreadPart(process)
        part.is_barred = not self.is_busy and self.rng.random() < 0.1 and ttl_ms >= _BARRED_FROM_MS
        part.is_full = not self.is_busy and self.rng.random() < 0.1
        part.preempted = self.rng.choice((0.0, 0.1, 0.5))
        return part


@contextlib.contextmanager
def simulated(
    world: World, rng: random.Random, sites: list[Site], more: Sequence[tuple[Any, str, Any]] = ()
) -> Iterator[None]:
    """A context with the world's clock and chance in place of the real ones, and what `more` says in other places."""
    procedures = (lock, lease_procedure, loss, waiters, waiting)
    timed = (*procedures, lease_module, owner, times, schedule, loop_renewer, off_loop, threads)
    places: list[tuple[Any, str, Any]] = [(module, "clock", world.clock) for module in timed]
    places += [(schedule, "_random", rng), *places_of(world), *more]
    real = [getattr(module, name) for module, name, _ in places]
    for module, name, in_place in places:
        setattr(module, name, in_place)
    try:
        with warnings.catch_warnings(), long_waits_unlogged():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
            for site in sites:
                site.close()
    finally:
        for (module, name, _), value in zip(places, real, strict=True):
            setattr(module, name, value)
        loop_renewer._renewers._transports.clear()  # or it would keep all of the story


class Simulation:
    """One seed's story.

    Invariants:
        - Exclusion by validity: no two locks of one key are `valid` at the same moment. (Not where an operator deleted
          or took the key, or the server lost its data, after the earlier was granted.)
        - Truth: where a lock is valid, its token stays at the server for longer than `remaining()`. (With the same
          exceptions.)
        - A loss is reported once, soon, in the holder's loop, for a true reason; the lock is never valid or renewed
          afterwards.
        - A lock whose server and holder answer is renewed for as long as it is held, in a calm world exactly up to
          `max_hold`. A thread renews it while the holder's loop is blocked, up to `max_stall`, and no longer.
        - A lock that is released, lost or dropped is not renewed, and leaves the server with its ttl; in a calm world,
          at once when it is dropped.
        - At the end the schedules of the renewers are empty.
        - Fences rise from holder to holder, and no write with a fence comes before one with a lower fence. (As long as
          the server keeps its data.)

    Args:
        seed: what decides everything.
        tells: whether to record the story.
        model: the server.
        kind: of `_KINDS`; by default the seed decides.
        late_us: for how long at most the server reads on from a connection that its client has given up.
    """

    def __init__(
        self, seed: int, tells: bool = False, model: type[Model] = Model, late_us: int = 0, kind: str = ""
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = kind or rng.choice(_KINDS)
        self.renewing = Renewing(seed, kind)
        if self.renewing.is_busy:
            self.kind = BUSY
        self.calm = self.kind in ("calm", BUSY)
        self.world = world = World(rng, model(rng.choice(tuple(SERVERS.values()))), tells)
        world.new_token = self.new_token
        self.model = world.model
        self.ttl_ms = rng.choice((100, 400, 2000, 10_000))
        self.max_hold_s = self.ttl_ms / 1000 * (1 + 3 * rng.random())
        self.interval_s = self.ttl_ms / 1000 * rng.choice((0.1, 0.5))
        self.hold_s = self.ttl_ms / 1000
        self.patience_s = self.ttl_ms / 1000 * rng.random()
        self.fenced = rng.random() < 0.4
        world.latency_us = rng.choice((100, 500, 2000))
        if not self.calm:
            world.draw_delays(late_us)
        world.served = self._served
        self.rival: BatchLease | None = None
        self._violation: str | None = None
        self._tokens = 0
        self._events = 0
        self._stays: dict[bytes, Stay] = {}
        self._open: list[Stay] = []
        self._over: list[Stay] = []
        self._owners: dict[bytes, bytes | None] = {}
        self._changes: dict[bytes, list[tuple[int, bytes | None]]] = {}
        self._orders: dict[bytes, int] = {}
        self._fences: dict[bytes, list[tuple[int, int]]] = {}
        self._written: dict[bytes, tuple[int, int]] = {}
        self._faults = Faults(self, _FAULTS)
        self.sites = [self._site(f"P{number}") for number in range(1 + int(3 * rng.random()))]
        self.processes = [part for site in self.sites for part in site.process.parts]
        self.waiters = [Holder(self, rng.choice(self.sites), number) for number in range(2 + int(4 * rng.random()))]
        if not self.calm:
            self._faults.plan(8 if self.kind == "rough" else 3)
        if self.renewing.is_by_threads and self.kind != "calm":
            self._faults.plan_blocks(self.renewing.rng)

    def _site(self, name: str) -> Site:
        process = Process(self.world, name)
        part = self.renewing.part(process, self.ttl_ms)
        if part is not None:
            part.preempted_us = int(min(_PREEMPTED * self.ttl_ms, 20) * 1000)
        process.draw_settings(self.calm)
        return Site(self, process, part)

    # ---- what is noted ----

    def note_error(self, context: dict[str, Any]) -> None:
        """Note an error that no task or callback has caught."""
        self.fail(f"{context.get('message')}: {context.get('exception')!r}")

    def note_request(self, operation: Operation) -> None:
        """Note that an operation begins."""
        if isinstance(operation, Pipeline):
            for part in operation._operations:
                stay = self._stays.get(part.token) if isinstance(part, Reacquire) else None
                ended_us = None if stay is None else stay.ended_us
                if stay is not None and ended_us is not None and self.world.now_us >= ended_us + self._stale_us(stay):
                    self.fail(f"{stay.who} is renewed, though that is over")

    @staticmethod
    def _stale_us(stay: Stay) -> int:
        """How late a request may leave after its thread has looked at the clock and the lease."""
        return 3 * max(part.preempted_us for part in stay.holder.process.parts)

    def _served(self, _process: Process, _args: Args, _reply: Reply) -> None:
        self.look()

    def look(self) -> None:
        """Check which holders have the locks now."""
        for key, before in self._owners.items():
            entry = self.model.entry(key)
            word = None if entry is None else entry.value
            token = None if word is None else word.removesuffix(CONTENDED_FLAG)
            if token != before:
                self._owners[key] = token
                self._changes[key].append((self.model.now_us, token))
                if token is not None:
                    self._orders[token] = len(self._changes[key])
            if self.fenced and fence_key(key) not in self.model.entries:
                self._fences[key] = []
                self._written.pop(key, None)

    def watch(self, key: bytes) -> None:
        """Note that this lock will be held."""
        self._owners.setdefault(key, None)
        self._changes.setdefault(key, [])
        self._fences.setdefault(key, [])

    def new_token(self) -> bytes:
        """In place of `TokenSource.new_token`."""
        self._tokens += 1
        return b"rlf:%032x" % self._tokens

    def begin(self, stay: Stay) -> None:
        """Note that a holder has acquired its lock."""
        if stay.token not in self._orders:
            self.fail(f"{stay.who} was notified of a lock that it never had")
            return
        stay.order = self._orders[stay.token]
        stay.begun_s = self.world.clock()
        stay.begins_late = 1000 * stay.left_s() < 0.9 * self.ttl_ms
        stay.granted_us = self._changes[stay.key][stay.order - 1][0]
        self.world.tell(stay.who, "holds", stay.token, "fence", stay.fence)
        self._stays[stay.token] = stay
        self._open.append(stay)
        if self.fenced:
            self._note_fence(stay)

    def _note_fence(self, stay: Stay) -> None:
        if stay.fence is None:
            self.fail(f"{stay.who} has no fence")
            return
        if stay.granted_us < self._faults.deleted_us:
            return
        for order, fence in self._fences[stay.key]:
            if (order < stay.order) != (fence < stay.fence):
                self.fail(f"{stay.who} is holder {stay.order} with fence {stay.fence}, and holder {order} has {fence}")
        self._fences[stay.key].append((stay.order, stay.fence))

    def write(self, stay: Stay) -> None:
        """Let a holder write to the protected resource, which refuses a fence below the last."""
        if not self.fenced or stay.fence is None or stay.granted_us < self._faults.deleted_us:
            return
        order, fence = self._written.get(stay.key, (0, 0))
        if stay.fence < fence:
            return
        if stay.order < order:
            self.fail(f"{stay.who}, holder {stay.order}, has written after holder {order}")
        self._written[stay.key] = (stay.order, stay.fence)

    def note_loss(self, lock: Lock, reason: LossReason) -> None:
        """`on_lost` was called."""
        untold = [stay for stay in self._stays.values() if stay.lock() is lock and not stay.told]
        lost = [stay for stay in untold if (lease := stay.lease()) is not None and lease.loss is reason]
        if not lost:
            self.fail(f"a loss is reported twice, or without a lock: {reason}")
            return
        stay = lost[0]
        holder = stay.holder
        self.world.tell(stay.who, "is told of the loss:", reason)
        stay.told, stay.ended_us = reason, self.world.now_us
        here: Any = asyncio._get_running_loop()
        if here is not stay.holder.site.loop:
            self.fail(f"{stay.who} is told of its loss outside of its loop")
        if not self._is_true(stay, lock, reason):
            self.fail(f"{stay.who} is told that it was lost: {reason}")
        quiet_us = self._faults.end_us + _SETTLED_US + self.ttl_ms * 10_000
        is_well = (
            not self.world.slow
            and not self.world.lazy
            and not holder.process.denied
            and (self.calm or self.world.now_us > quiet_us)
        )
        if holder.process.longest_stop_us and (stay.by_hand or stay.begins_late or not holder.site.has_thread):
            is_well = (
                False  # nothing renews while its task is in a call that prolongs the lease, and the loop is blocked
            )
        if is_well and holder.renews and not holder.ends and reason in (LossReason.EXPIRED, LossReason.SERVER_GONE):
            self.fail(f"{stay.who} has lost what could be renewed: {reason}")

    def _is_true(self, stay: Stay, lock: Lock, reason: LossReason) -> bool:
        since = [token for at_us, token in self._changes[stay.key] if at_us >= stay.granted_us]
        if reason is LossReason.TAKEN:
            return any(token not in (None, stay.token) for token in since)
        if reason is LossReason.DELETED:
            # Two share a lock object and were both granted the lock; one grant was deleted, it is unknown which.
            return None in since or (stay.holder.shared is not None and self._faults.deleted_us > 0)
        if reason is LossReason.STALLED:
            least = _MOST_STALLED - 2 * _PREEMPTED  # ttls
            is_stalled = stay.holder.process.longest_stop_us >= least * self.ttl_ms * 1000 - _STALE_US
            return is_stalled and stay.holder.site.has_thread
        if reason is LossReason.EXPIRED:
            lease = stay.lease()
            return lease is not None and self.world.clock() >= lease.deadline
        return not self.calm

    def note_release(self, stay: Stay) -> None:
        """Note that a release has succeeded."""
        entry = self.model.entry(stay.key)
        if entry is not None and entry.value is not None and entry.value.removesuffix(CONTENDED_FLAG) == stay.token:
            self.fail(f"the release of {stay.who} has left the lock")

    def let_go(self, stay: Stay) -> None:
        """Note that a holder needs its lock no more."""
        if stay not in self._open:
            return
        self._open.remove(stay)
        entry = self.model.entry(stay.key)
        ends_us = 0 if entry is None else (entry.ends_at_ms or 0) * 1000 - SERVER_STARTED_US
        slack_us = _SETTLED_US
        if self.calm and not stay.over and not stay.told:
            ends_us, slack_us = 0, 100_000
        elif not self.calm:
            ends_us = max(ends_us, self.world.now_us + self.ttl_ms * 1000)
        stay.gone_by_us = max(ends_us, self.world.now_us) + slack_us
        self._over.append(stay)

    def check_exclusion(self, new: BatchLease) -> None:
        """Check exclusion when the rival begins to hold."""
        for stay in self._open:
            if new.token == self._owners.get(stay.key) and self._is_untouched(stay) and stay.is_valid():
                self.fail(f"{new.who} holds, and {stay.who} is valid")

    # ---- the invariants ----

    def fail(self, what: str) -> None:
        """Record that an invariant does not hold. `run` raises it later: the caller here may catch errors."""
        if self._violation is None:
            self._violation = what

    def _is_untouched(self, stay: Stay) -> bool:
        return stay.granted_us > self._faults.deleted_us

    def _check(self) -> None:
        self.model.now_us = max(self.model.now_us, SERVER_STARTED_US + self.world.now_us)
        self.look()
        valid: dict[bytes, Stay] = {}
        for stay in self._open:
            lock = stay.lock()
            if lock is None or stay.holder.process.dead or stay.over:
                continue
            if token_of(lock) != stay.token:
                self._check_forgotten(stay)
                continue
            left_s = lock.remaining()
            if not left_s:
                self._check_told(stay)
                continue
            if stay.told:
                self.fail(f"{stay.who} has lost it, and it is valid again")
            stay.invalid_since_us = None
            if not self._is_untouched(stay):
                continue
            self._check_hung(stay)
            self._check_truth(stay, left_s)
            if (
                self.calm
                and stay.holder.ends
                and not stay.by_hand
                and self.world.clock() + left_s > stay.begun_s + self.max_hold_s + self._stale_us(stay) / 1e6
            ):
                self.fail(f"{stay.who} holds for longer than it wants")
            other = valid.setdefault(stay.key, stay)
            if other is not stay:
                self.fail(f"{stay.who} is valid, and so is {other.who}")
        for stay in self._over:
            is_there = self._owners[stay.key] == stay.token and not stay.holder.process.dead
            gone_by_us = max(stay.gone_by_us or 0, stay.holder.process.busy_until_us + 100_000)
            if is_there and self.world.now_us > gone_by_us:
                self.fail(f"{stay.who} has done with it, and it stands at the server")

    def _check_hung(self, stay: Stay) -> None:
        """Check that the lock of a loop that hangs is let go."""
        process = stay.holder.process
        most_us = most_stalled_us(self.ttl_ms) + _STALE_US + 3 * self.world.slow_us
        if process.busy_for_us() > most_us and not stay.by_hand:
            self.fail(f"{stay.who} hangs for {process.busy_for_us()} us, and still holds")

    def _check_forgotten(self, stay: Stay) -> None:
        """Check a lock that its object does not have any more without a release: its loss must be known."""
        lease = stay.lease()
        is_lost = stay.told is not None or (lease is not None and lease.loss is not None)
        if not is_lost and self._owners[stay.key] == stay.token and self._is_untouched(stay):
            self.fail(f"{stay.who} has not released, and its lock is forgotten")

    def _check_truth(self, stay: Stay, left_s: float) -> None:
        entry = self.model.entry(stay.key)
        if self._owners[stay.key] != stay.token or entry is None:
            self.fail(f"{stay.who} is valid, and the key does not say so")
            return
        ends_us = None if entry.ends_at_ms is None else entry.ends_at_ms * 1000 + 1000 - SERVER_STARTED_US
        if ends_us is not None and self.world.now_us + left_s * 1e6 > ends_us:
            self.fail(f"{stay.who} has {left_s} s left, and it ends at {ends_us / 1e6}")

    def _check_told(self, stay: Stay) -> None:
        """Check that the loss of an invalid lock is reported soon."""
        now_us = self.world.now_us
        if stay.invalid_since_us is None:
            stay.invalid_since_us = now_us
        process = stay.holder.process
        since_us = max(stay.invalid_since_us, process.frozen_until_us, process.busy_until_us)
        if stay.told is None and now_us > since_us + _SETTLED_US + 3 * self.world.slow_us:
            self.fail(f"{stay.who} is lost, and that is not told")

    def _check_end(self) -> None:
        """Check the end state, long after the last event."""
        for holder in self.waiters:
            if not holder.process.dead and not holder.task.done():
                self.fail(f"{holder.name} is stuck")
            elif holder.task.done() and holder.task.exception() is not None:
                self.fail(f"{holder.name} failed: {holder.task.exception()!r}")
        for site in self.sites:
            if not site.process.dead and site.has_to_renew():
                self.fail(f"{site.process.name} still has something to renew")

    # ---- the run ----

    def run(self) -> None:
        """Play it.

        Raises:
            Violation: an invariant does not hold.
        """
        with simulated(self.world, self.rng, self.sites):
            while self._plays(None):
                if not self._events % 8 and all(holder.is_done() for holder in self.waiters):
                    break
            until_us = max(self.world.now_us, self._faults.end_us) + 20_000 * self.ttl_ms + 3 * _SETTLED_US
            while self._plays(until_us):
                pass
            if self._violation is None:
                self._check_end()
        if self._violation is not None:
            raise Violation("\n".join([self._violation, *self.world.story]))

    def _plays(self, until_us: int | None) -> bool:
        """Let the next event happen. Returns False at the end."""
        world = self.world
        if not world.step() or self._violation is not None or (until_us is not None and world.now_us > until_us):
            return False
        if world.changed:
            world.changed = False
            self._check()
        self._events += 1
        if self._events > _MAX_EVENTS:
            self.fail("it goes on forever")
        return self._violation is None


if __name__ == "__main__":
    raise SystemExit(main(Simulation, __doc__))
