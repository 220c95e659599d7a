"""A simulation of an election: candidates and observers in a few processes, a lossy world between them and the server.

Each candidate runs `asyncio.Election` itself, whose work ends in one way or another; renewer, leases and all procedures
below are the library's own. After every event the invariants at `Simulation` are checked; a `Violation` names the
broken one and contains the story. Time is simulated.

    python -m tests.simulation.elections --seeds 100000 --jobs 2
    python -m tests.simulation.elections --seed 4711 -v
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redislock_fast._election import observing, record
from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.keys import fence_key, leader_key
from redislock_fast._protocol.operation import Operation
from redislock_fast._util.tokens import token_id_of, without_flag
from redislock_fast.asyncio import election
from tests.simulation.candidates import Candidate, Observer, Stand
from tests.simulation.faults import Faults
from tests.simulation.holders import SimulatedLock
from tests.simulation.holding import BUSY, Renewing, Site, most_stalled_us, simulated
from tests.simulation.keyspace import Entry
from tests.simulation.model import SERVERS, Model
from tests.simulation.process import Process, Trouble
from tests.simulation.seeds import Violation, main
from tests.simulation.waiters import KEY, BatchLease
from tests.simulation.waiting import QUEUE
from tests.simulation.world import SERVER_STARTED_US, World

_KINDS = ("calm", "kills", "faults", "faults", "faults", "rough")
_FAULTS = (
    *("cut", "cut", "unsent", "deaf", "kill", "freeze", "freeze", "cancel", "delete", "take", "flush", "flush scripts"),
    *("restart", "partition", "partition", "partition", "leap", "server leap", "fail over", "fail over"),
)
_SENT, _ANSWERS = ("requests_held_us",), ("replies_held_us",)
_MAX_EVENTS = 200_000
_MARGIN = 1 / 3
"""The part of the ttl that is left when `stopping` is set."""

_LOOK_US = 16_000_000
"""An observer looks so often, whatever it is told."""

_QUIETED_US = 12_000_000
"""How long a story goes on after the last fault, beside some ttls."""


class _Faults(Faults):
    """The faults, and those of elections: partitions, clocks that leap, and replicas that take over without all."""

    def __init__(self, simulation: Simulation, kinds: Sequence[str]) -> None:
        super().__init__(simulation, kinds, has_rival=False)
        self._stage = simulation
        self._on_processes["partition"] = self._part
        self._on_processes["leap"] = self._leap
        self._on_the_server["server leap"] = self._leap_server
        self._on_the_server["fail over"] = self._fall_behind

    def operate(self, name: str) -> None:
        super().operate(name)
        if name in ("delete", "take", "flush", "restart"):
            self._stage.note_data_loss()

    def _happen(self, name: str) -> None:
        if name != "cancel":
            super()._happen(name)
            return
        candidate = self._random.choice(self._stage.waiters)
        if not candidate.process.dead and not candidate.task.done():
            candidate.cancel()

    def _kill(self, process: Process, delay_us: int) -> None:
        super()._kill(process, delay_us)
        for connection in [each for part in process.parts for each in part.connections] if self._stage.calm else ():
            connection.vanish()

    def _freeze(self, process: Process, delay_us: int) -> None:
        super()._freeze(process, delay_us)
        self._stage.disturb(process)

    def _block(self, process: Process, delay_us: int) -> None:
        super()._block(process, delay_us)
        self._stage.disturb(process)

    def _part(self, process: Process, _delay_us: int) -> None:
        """Keep what a process sends, what is sent to it, or both, until the network is whole again."""
        longest_us = self._random.choice((50_000, 2000 * self._stage.ttl_ms, 2000 * self._stage.ttl_ms))
        until_us = self._world.now_us + int(longest_us * self._random.random())
        held = self._random.choice(
            (("requests_held_us", "replies_held_us"), ("requests_held_us",), ("replies_held_us",))
        )
        for name in held:
            setattr(process, name, max(getattr(process, name), until_us))
        self.end_us = max(self.end_us, until_us)

    def _leap(self, process: Process, _delay_us: int) -> None:
        """Set the clock of a process forward."""
        process.leapt_us += int(self._random.choice((10_000, 1500 * self._stage.ttl_ms)) * self._random.random())
        self._stage.disturb(process)

    def _leap_server(self) -> None:
        """Set the clock of the server forward."""
        self._world.server_leapt_us += int(1500 * self._stage.ttl_ms * self._random.random())
        self._world.set_server_clock()
        self._stage.note_data_loss()

    def _fall_behind(self) -> None:
        """Let a replica get no more from here on, and take over a while later."""
        lag_us = int(self._random.choice((1000, 20_000, 500 * self._stage.ttl_ms)) * self._random.random())
        self._world.after(lag_us, None, self._take_over, copy.deepcopy(self._model.entries))
        self.end_us = max(self.end_us, self._world.now_us + lag_us)

    def _take_over(self, entries: dict[bytes, Entry]) -> None:
        self._world.tell("FAULT: the replica takes over")
        self._restart()
        self._model.entries.update(entries)
        self._stage.note_data_loss()


class Simulation:
    """One seed's story.

    Invariants:
        - One leader: at most one candidate's `is_leader` is true at any moment, whatever its process does. (Where the
          lock's data were lost, the server's clock was set forward, or a replica has taken over without the last
          writes, one that led before may overlap with a later one, for one ttl at most.)
        - Truth: the server holds the lock of a leader for longer than its term remains. (With the same exception.)
        - Numbers rise from term to term, in the order in which the server has granted them, as long as it keeps the
          counter; after the loss of some of it, from what it has kept.
        - Observers never see a number fall, and each sees each leader that stays, within some message times where the
          world is calm. Those that have nothing to see send next to nothing.
        - `stopping` is set before the lease ends, by a third of the ttl less what one attempt takes, and soon after a
          loss. The work has ended by the end of the lease. (Where its process has not stood still.)
        - Started and stopped alternate strictly.
        - A leader whose loop hangs does not lead for longer than `max_stall`, a ttl and a third of one.
        - In a calm world, the first in line follows within some message times, and one that was killed is followed
          within its ttl. In any other, somebody leads soon after the last fault.
        - In the end nobody holds the lock, and nothing is renewed.

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
        self.calm = self.kind in ("calm", "kills")
        self.world = world = World(rng, model(rng.choice(tuple(SERVERS.values()))), tells)
        world.new_token = self.new_token
        self.model = world.model
        self.ttl_ms = rng.choice((1000, 2000, 10_000) if self.calm else (300, 2000, 10_000))
        world.latency_us = rng.choice((100, 500, 2000))
        if not self.calm and self.kind != BUSY:
            world.draw_delays(late_us)
        if world.lazy:  # else each pause would be as long as a lease
            self.ttl_ms = max(self.ttl_ms, world.slow_us // 100)
        self.interval_s = self.ttl_ms / 1000 * rng.choice((0.03, 0.1))
        self.hold_s = self.ttl_ms / 1000
        world.served = self._served
        self.rival: BatchLease | None = None
        self._violation: str | None = None
        self._tokens = 0
        self._events = 0
        self._looks = 0
        self._seen = 0  # how many leaders were noted
        self._record: Entry | None = None
        self._owner: bytes | None = None
        self._grants = 0
        self._first: bytes | None = None  # in line
        self._order: dict[bytes, tuple[int, int]] = {}  # by token: its place among all grants, and when it was granted
        self._numbers: list[tuple[int, int]] = []  # the place and the number of each term
        self._lost_us = -1  # when data were last lost, by the server's clock
        self._since_us: dict[Any, int] = {}  # since when something is not as it is to be
        self._disturbed_us: dict[Process, int] = {}
        self.stands: list[Stand] = []
        self._faults = _Faults(self, ("kill",) if self.kind == "kills" else _FAULTS)
        self.sites = [self._site(f"P{number}") for number in range(2 + int(3 * rng.random()))]
        self.processes = [part for site in self.sites for part in site.process.parts]
        with self._simulated():
            self.waiters = [
                Candidate(self, rng.choice(self.sites), number) for number in range(1 + int(4 * rng.random()))
            ]
            self.observers = [Observer(self, rng.choice(self.sites)) for _ in range(int(3 * rng.random()))]
        self._all: list[Candidate | Observer] = [*self.waiters, *self.observers]
        if self.kind not in ("calm", BUSY):
            self._faults.plan(8 if self.kind == "rough" else 3)
        if self.renewing.is_by_threads and not self.calm:
            self._faults.plan_blocks(self.renewing.rng)
        self._until_us = self._faults.end_us + 4000 * self.ttl_ms + (0 if self.calm else _QUIETED_US)
        for _ in range(int(5 * rng.random())):
            candidate = rng.choice(self.waiters)
            world.at(int(self._until_us * rng.random()), candidate.process, candidate.resign)

    def _site(self, name: str) -> Site:
        process = Process(self.world, name)
        part = self.renewing.part(process, self.ttl_ms)
        process.draw_settings(self.calm or self.kind == BUSY)
        process.blocking = False
        if not self.calm and self.kind != BUSY:
            process.retries = self.rng.choice((1, 3))
            process.patience_s = self.rng.choice((None, 0.5))
        return Site(self, process, part)

    # ---- what is noted ----

    def note_error(self, context: dict[str, Any]) -> None:
        """Note an error that no task or callback has caught."""
        self.fail(f"{context.get('message')}: {context.get('exception')!r}")

    def note_request(self, operation: Operation) -> None:
        """Note that an operation begins."""

    def new_token(self) -> bytes:
        """In place of `TokenSource.new_token`."""
        self._tokens += 1
        return b"rlf:%032x" % self._tokens

    def _served(self, _process: Process, args: Args, _reply: Reply) -> None:
        self._looks += args[0] == b"HMGET"
        self.look()

    def look(self) -> None:
        """Note who holds the lock now, and who is noted as the leader."""
        entry = self.model.entry(KEY)
        token = None if entry is None or entry.value is None else without_flag(entry.value)
        if token != self._owner:
            self._owner = token
            if token is not None:
                self._grants += 1
                if self.kind == "calm" and self._first not in (None, token):
                    self.fail(f"{token!r} is granted the lock, and {self._first!r} is first in line")
                self._order[token] = self._grants, self.model.now_us
        waiting = self.model._items(QUEUE)
        self._first = min(waiting, key=lambda other: (waiting[other], other), default=None)
        leader = self.model.entry(leader_key(KEY))
        if leader is not self._record:
            self._record = leader
            self._seen += leader is not None

    def note_data_loss(self) -> None:
        """Note that the server has lost something, or ended leases before their time."""
        self._owner = None
        self.look()
        self._lost_us = self.model.now_us
        numbers = self.model.entry(fence_key(KEY))
        self._numbers = [(self._grants, 0 if numbers is None else numbers.items.get(b"number", 0))]

    def disturb(self, process: Process) -> None:
        """Note that a process stands still, or that its clock has leapt."""
        self._disturbed_us[process] = self.model.now_us
        for stand in self.stands:
            if stand.candidate.process is process:
                stand.is_undisturbed = False

    def check_exclusion(self, new: BatchLease) -> None:
        """Do nothing: there is no foreign holder."""

    def begin(self, candidate: Candidate, term: Any) -> Stand:
        """Note that a term has begun."""
        token = candidate.election._term._lock._held().token if candidate.election._term else b""
        order, granted_us = self._order.get(token or b"", (0, -1))
        stand = Stand(candidate, term, granted_us)
        stand.is_undisturbed = self._disturbed_us.get(candidate.process, -1) < granted_us - 3000 * self.ttl_ms
        stand.begins_late = 1000 * term.remaining() < self.ttl_ms / 2
        self.world.tell(stand.who, "starts")
        if granted_us > self._lost_us:
            for other, number in self._numbers:
                if (other < order) != (number < stand.number):
                    self.fail(f"{stand.who} is leader {order}, and leader {other} has the number {number}")
            self._numbers.append((order, stand.number))
            for rival in self.stands:
                if rival.works and self._is_whole(rival):
                    self.fail(f"{stand.who} starts, and the work of {rival.who} goes on")
        self.stands = [other for other in self.stands if other.works or other.candidate.election._term is other.term]
        self.stands.append(stand)
        return stand

    def end(self, stand: Stand) -> None:
        """Note that the work of a term has ended."""
        self.world.tell(stand.who, "has stopped")

    def _is_whole(self, stand: Stand) -> bool:
        """Whether nothing has happened that may have it go on beside another leader."""
        is_alive = not stand.candidate.process.dead
        has_time = self.ttl_ms >= 1000 or not stand.begins_late  # for one attempt of a renewal, before it is told
        return is_alive and has_time and stand.is_undisturbed and stand.granted_us > self._lost_us

    # ---- the invariants ----

    def fail(self, what: str) -> None:
        """Record that an invariant does not hold. `run` raises it later: the caller here may catch errors."""
        if self._violation is None:
            self._violation = what

    def _lasts_us(self, what: Any, is_so: bool) -> int:
        """How long this has been so without a break, in microseconds."""
        if not is_so:
            self._since_us.pop(what, None)
            return 0
        return self.world.now_us - self._since_us.setdefault(what, self.world.now_us)

    def _check(self) -> None:
        self.world.set_server_clock()
        self.look()
        leaders: list[Stand] = []
        for stand in self.stands:
            process = self.world.acting = stand.candidate.process
            if process.dead:
                continue
            left_s = stand.term.remaining()
            if stand.works and left_s:
                self._check_margin(stand, left_s)
            self._check_end_of_work(stand, left_s)
            if left_s and stand.candidate.election._term is stand.term:
                leaders.append(stand)
                self._check_truth(stand, left_s)
                if process.busy_for_us() > self._longest_stall_us() and stand.granted_us > self._lost_us:
                    self.fail(f"{stand.who} hangs for {process.busy_for_us()} us, and still leads")
        is_led = any(
            candidate.election.is_leader for candidate in self.waiters if not self._acts(candidate.process).dead
        )
        self.world.acting = None
        self._check_leaders(leaders)
        self._check_followed(is_led)
        self._check_observers()

    def _acts(self, process: Process) -> Process:
        self.world.acting = process
        return process

    def _check_leaders(self, leaders: list[Stand]) -> None:
        if len(leaders) < 2:
            return
        first, *others = sorted(leaders, key=lambda stand: stand.granted_us)
        over_us = self._lost_us + 1000 * self.ttl_ms
        if first.granted_us > self._lost_us or self.model.now_us > over_us or (len(others) > 1 and self.calm):
            self.fail(f"{first.who} leads, and so does {others[0].who}")

    def _check_truth(self, stand: Stand, left_s: float) -> None:
        entry = self.model.entry(KEY)
        if stand.granted_us <= self._lost_us:
            return
        if self._owner != stand.token or entry is None or entry.ends_at_ms is None:
            self.fail(f"{stand.who} leads, and the key does not say so")
            return
        ends_us = entry.ends_at_ms * 1000 + 1000 - SERVER_STARTED_US - self.world.server_leapt_us
        if self.world.now_us + left_s * 1e6 > ends_us:
            self.fail(f"{stand.who} has {left_s} s left, and it ends at {ends_us / 1e6}")

    def _longest_stall_us(self) -> int:
        """How long a process whose loop hangs leads at most."""
        return most_stalled_us(self.ttl_ms) + self._slack_us()

    def _slack_us(self) -> int:
        """How late a process may be that does not stand still."""
        return 10_000 + (3 * self.world.slow_us if self.world.lazy or self.world.slow else 0)

    def _check_margin(self, stand: Stand, left_s: float) -> None:
        """Check that the work is told to stop in time."""
        attempt_us = 60_000 if self.ttl_ms < 1000 else 150_000  # the one that begins just before
        is_late = 1e6 * left_s < _MARGIN * self.ttl_ms * 1000 - self._slack_us() - attempt_us
        if is_late and stand.is_undisturbed and not stand.begins_late and not stand.term.stopping.is_set():
            self.fail(f"{stand.who} has {left_s} s left, and is not told to stop")

    def _check_end_of_work(self, stand: Stand, left_s: float) -> None:
        """Check that work does not go on for long when the term has ended."""
        over_us = self._lasts_us(stand, stand.works and not left_s)
        is_disturbed = not stand.is_undisturbed or stand.granted_us <= self._lost_us
        slack_us = self._slack_us() + (2_000_000 + 2000 * self.ttl_ms if is_disturbed else 0)
        process = stand.candidate.process
        able_us = self.world.now_us - max(process.frozen_until_us, process.busy_until_us)
        if min(over_us, able_us) > slack_us:
            self.fail(f"{stand.who} is over since {over_us} us, and its work goes on")

    def _is_able(self, process: Process) -> bool:
        return not process.dead and max(process.frozen_until_us, process.busy_until_us) <= self.world.now_us

    def _check_followed(self, is_led: bool) -> None:
        """Check that somebody leads."""
        world = self.world
        able = [one for one in self.waiters if self._is_able(one.process) and not one.is_stopped]
        vacant_us = self._lasts_us("vacant", bool(able) and not is_led and world.now_us > self._faults.end_us)
        dead = sum(site.process.dead for site in self.sites)
        most_us = 40_000 + 40 * world.latency_us + 1000 * self.ttl_ms * dead * (1 if self.calm else 2)
        if not self.calm:
            most_us += 2000 * self.ttl_ms + int(5e6 * self.interval_s) + 20 * world.slow_us + 5_000_000
        if vacant_us > most_us:
            self.fail(f"nobody leads for {vacant_us} us")

    def _check_observers(self) -> None:
        """Check that each observer sees who leads."""
        record, world = self._record, self.world
        number = 0
        if record is not None and self._owner is not None:
            is_noted = record.items.get(b"id") == token_id_of(self._owner).encode()
            number = int(record.items[b"term"]) if is_noted else 0
        most_us = 20_000 + 30 * world.latency_us
        if not self.calm:
            most_us += _LOOK_US + 20 * world.slow_us
        for observer in self.observers:
            is_blind = observer.last < number and self._is_able(observer.process) and not observer.task.done()
            blind_us = self._lasts_us(observer, is_blind and world.now_us > self._faults.end_us)
            if blind_us > most_us:
                self.fail(f"{observer.name} does not see term {number} for {blind_us} us")

    def _check_end(self) -> None:
        """Check the end state, long after the last event."""
        for one in self._all:
            if not one.process.dead and not one.task.done():
                self.fail(f"{one.name} is stuck")
            elif one.task.done() and one.task.exception() is not None:
                self.fail(f"{one.name} failed: {one.task.exception()!r}")
        for stand in self.stands:
            if stand.works and not stand.candidate.process.dead:
                self.fail(f"{stand.who} was never stopped")
        if self.model.entry(KEY) is not None:
            self.fail("the lock is left")
        for site in self.sites:
            if not site.process.dead and site.has_to_renew():
                self.fail(f"{site.process.name} still has something to renew")
        watchers = [one for one in self._all if one.looks_anew]
        most = 4 * sum(one.looks_anew for one in watchers)
        most += len(watchers) * (4 * self._seen + self.world.now_us // 15_000_000)
        if self.calm and self._looks > most + len(self.observers):
            self.fail(f"{self._looks} looks for {self._seen} leaders, and {most} would have done")

    # ---- the run ----

    def run(self) -> None:
        """Play it.

        Raises:
            Violation: an invariant does not hold.
        """
        with self._simulated():
            while self._plays(self._until_us):
                pass
            for one in self._all:
                if not one.process.dead:
                    one.stop()
            until_us = self.world.now_us + 6000 * self.ttl_ms + _QUIETED_US
            while self._plays(until_us):
                if not self._events % 8 and all(one.process.dead or one.task.done() for one in self._all):
                    until_us = min(until_us, self.world.now_us + 2000 * self.ttl_ms + 2_000_000)
            self.world.now_us = max(self.world.now_us, until_us)
            self.world.set_server_clock()
            self.world.acting = None
            if self._violation is None:
                self._check_end()
            for site in self.sites:
                site.close()
        if self._violation is not None:
            raise Violation("\n".join([self._violation, *self.world.story]))

    def _plays(self, until_us: int) -> bool:
        """Let the next event happen. Returns False at the end."""
        world = self.world
        if not world.step() or self._violation is not None or world.now_us > until_us:
            return False
        if world.changed:
            world.changed = False
            self._check()
        self._events += 1
        if self._events > _MAX_EVENTS:
            self.fail("it goes on forever")
        return self._violation is None

    @contextmanager
    def _simulated(self) -> Iterator[None]:
        """Put the world in place of the real one."""
        logger = logging.getLogger("redislock_fast")
        level = logger.level
        places: list[tuple[Any, str, Any]] = [
            (election, "Lock", SimulatedLock),
            (observing, "clock", self.world.clock),
            (record, "_OUTAGES", (*record._OUTAGES, Trouble)),
        ]
        logger.setLevel(logging.CRITICAL)
        try:
            with simulated(self.world, self.rng, [], places):
                yield
        finally:
            logger.setLevel(level)


if __name__ == "__main__":
    raise SystemExit(main(Simulation, __doc__))
