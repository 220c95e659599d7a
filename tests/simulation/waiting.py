"""A simulation of waiting: a few waiters in a few processes, a lossy world between them and the server.

Each waiter acquires, holds and releases for some rounds, by the library's own machines. A seed decides how many waiters
there are, what each does and what goes wrong. After every event the invariants at `Simulation` are checked; a
`Violation` names the broken one and contains the story. Time is simulated.

    python -m tests.simulation.waiting --seeds 100000 --jobs 2
    python -m tests.simulation.waiting --seed 4711 -v
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.claims import has_taken
from redislock_fast._protocol.commands import Reacquire, Release
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.own_token import HELD
from redislock_fast._protocol.scripts import REACQUIRE, REDEEM, WAIT
from redislock_fast._queue import waiters, waiting
from redislock_fast._util import times
from redislock_fast._util.tokens import CONTENDED_FLAG, is_held_with
from tests.simulation.faults import Faults
from tests.simulation.model import SERVERS, Model
from tests.simulation.process import Process
from tests.simulation.seeds import Violation, main
from tests.simulation.waiters import KEY, BatchLease, Waiter
from tests.simulation.world import SERVER_STARTED_US, World, long_waits_unlogged

QUEUE, _WAITERS = queue_keys(KEY)

_KINDS = ("calm", "faults", "faults", "faults", "rough")
_MAX_EVENTS = 30_000


class Simulation:
    """One seed's story.

    Invariants:
        - Exclusion: no two waiters hold within their leases at once, from their notification until their release
          leaves. (Not where an operator deleted the key after the lock was granted.)
        - Truth: the key has the token of the waiter that holds within its lease. (With the same exception.)
        - No waiter believes in more of a lease than the server grants.
        - No lock is left behind: the key never has the token of a waiter that neither wants it, holds it, nor cleans it
          up, unless its process is dead, was forbidden to run scripts, or the waiter keeps the lock on purpose.
        - The lock is never handed to a waiter whose connection is gone, and after a health check no sleeper is at the
          head of the queue.
        - No waiter is forgotten: after the last fault, each gets its lock within a bound.
        - A waiter in the queue gets a lease of which three quarters are left, or that has just been renewed.
        - In a calm world the lock is granted in the order of arrival, is never free while a waiter is in the queue, and
          takes three requests per acquisition and one health check per interval and connection.

    Args:
        seed: what decides everything.
        tells: whether to record the story.
        model: the server.
        kind: of `_KINDS`; by default the seed decides.
        late_us: for how long at most the server reads on from a connection that its client has given up.
        shares: whether most waiters bring a token, and all of them the same one. Then they share the lock: a request
            with the token that frees it frees it for all of them.
    """

    _ttls_ms: tuple[int | None, ...] = (None, None, 40, 150, 1000, 10_000)
    _calm_ttls_ms: tuple[int | None, ...] = (None, 10_000)
    _wait = WAIT

    def __init__(
        self,
        seed: int,
        tells: bool = False,
        model: type[Model] = Model,
        late_us: int = 0,
        kind: str = "",
        shares: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = kind or rng.choice(_KINDS)
        self.calm = self.kind == "calm"
        has = rng.choice(tuple(SERVERS.values()))
        cluster = "LMPOP" in has and rng.random() < 0.15
        self.world = world = World(rng, model(has, cluster=cluster), tells)
        world.new_token = self.new_token
        self.model = world.model
        self.ttl_ms = rng.choice(self._calm_ttls_ms if self.calm else self._ttls_ms)
        self.interval_s = rng.choice((0.05, 0.1) if self.calm else (0.01, 0.03, 0.1))
        if self.ttl_ms == 10_000:
            self.interval_s *= 5
        self.hold_s = rng.choice((0.002, 0.02) if self.calm else (0.001, 0.01, 0.1))
        self.think_s = rng.choice((0.0, 0.002, 0.03))
        world.latency_us = rng.choice((100, 500, 3000))
        if not self.calm:
            world.draw_delays(late_us)
        world.served = self._served
        self._tokens = 0
        self.shares = shares
        self.owners: dict[bytes, list[Waiter]] = {}
        self._freed_us: dict[bytes, int] = {}  # when a request with the token freed the lock
        self.holds: dict[Waiter, BatchLease] = {}
        self.rival: BatchLease | None = None
        self._faults = self._new_faults()
        self._owner: bytes | None = None
        self._granted_us: dict[bytes, int] = {}
        self._confirmed_us: dict[bytes, int] = {}
        self._places: dict[bytes, None] = {}
        self._grants = 0
        self._requests = 0
        self._looks = 0
        self._beginnings = 0
        self.processes = [self._process(f"P{number}") for number in range(1 + int(3 * rng.random()))]
        self.waiters = [
            self._new_waiter(rng.choice(self.processes), number) for number in range(2 + int(5 * rng.random()))
        ]
        if not self.calm:
            self._faults.plan(8 if self.kind == "rough" else 3)

    def _new_faults(self) -> Faults:
        return Faults(self)

    def _new_waiter(self, process: Process, number: int) -> Waiter:
        return Waiter(self, process, number)

    def _process(self, name: str) -> Process:
        process = Process(self.world, name)
        process.draw_settings(self.calm)
        if not self.calm and self.rng.random() < 0.1:
            process.denied = self._faults.denial()
        return process

    # ---- what is noted ----

    def _served(self, process: Process, args: Args, reply: Reply) -> None:
        """Note that a request has been executed."""
        if self.calm:
            self._count(args, reply)
        self._note_served(process, args, reply)
        is_check = args[1] in self._wait and isinstance(reply, list) and reply[0] != 1 and self._look_for(args)
        if is_check and self.model.passes_left:  # else the next health check goes on
            self._check_who_stands_in_front(self._token_in(args))

    @staticmethod
    def _token_in(args: Args) -> bytes:
        """The waiter's token in a request that waits."""
        assert isinstance(args[2], int)
        token = args[3 + args[2]]
        assert isinstance(token, bytes)
        return token

    @staticmethod
    def _look_for(args: Args) -> object:
        """The waiter that a request that waits looks for."""
        return args[-1]

    def _note_served(self, _process: Process, args: Args, reply: Reply) -> None:
        before = self._owner
        if args[0] == b"SET" and has_taken(args, reply):
            self._owner = None  # the lock may have ended unseen, and have the same token again
        self.look()
        if before is not None and before != self._owner and before in args:
            self._freed_us[before] = self.model.now_us
        is_reacquired = reply in (1, b"OK") and (args[1] in REACQUIRE or b"IFEQ" in args)
        is_redeemed_again = args[1] in REDEEM and isinstance(reply, list) and reply[0] == HELD
        if self._owner is not None and (is_reacquired or is_redeemed_again):
            self._confirmed_us[self._owner] = self.model.now_us

    def _check_who_stands_in_front(self, asking: object) -> None:
        waiting = self.model._items(QUEUE)
        if waiting:
            first = min(waiting, key=lambda token: (waiting[token], token))
            fields = self.model._items(_WAITERS)
            _, _, channel = fields[b"t" + first]
            if first != asking and fields[b"c" + channel] < self.model.now_ms:
                self.fail(f"{first!r} is at the head and asleep after a health check")

    def _count(self, args: Args, reply: Reply) -> None:
        if args[0] not in (b"SET", b"EVALSHA", b"EVAL", b"DELIFEQ", b"DELEX"):
            return
        if str(reply).startswith("NOSCRIPT"):
            return
        self._requests += 1
        if args[1] in self._wait and isinstance(reply, list):
            token = self._token_in(args)
            self._looks += self._look_for(args) != b""
            if reply[0] != 1 and token not in self._places:
                self._beginnings += not self._places
                self._places[token] = None

    def look(self) -> None:
        """Check which waiter has the lock now."""
        entry = self.model.entry(KEY)
        word = None if entry is None else entry.value
        token = None if word is None else (word[:-1] if word[-1:] == CONTENDED_FLAG else word)
        if token == self._owner:
            return
        self._owner = token
        if token is None:
            if self.calm and self.model._items(QUEUE):
                self.fail("the lock is free, and a waiter is in the queue")
            return
        self._granted_us[token] = self._confirmed_us[token] = self.model.now_us
        if token in self.owners and not any(owner.process.connections for owner in self.owners[token]):
            self.fail(f"granted to {token!r}, whose connection is gone")
        if self.calm:
            self._grants += 1
            if token in self._places:
                first = next(iter(self._places))
                if first != token:
                    self.fail(f"granted to {token!r}, while {first!r} had the first place")
                del self._places[token]

    def new_token(self) -> bytes:
        """In place of `TokenSource.new_token`."""
        self._tokens += 1
        token = b"rlf:%032x" % self._tokens
        running = self.world.running
        if running is not None and isinstance(running.owner, Waiter):
            self.owners[token] = [running.owner]
        return token

    def take(self, waiter: Waiter, since: float, queued: bool) -> BatchLease:
        """Note that a waiter was notified of its grant."""
        waiter.state = "holding"
        token, ttl_ms = waiter.token, waiter.ttl_ms
        since_us = round(since * 1e6)
        granted_us = self._granted_us.get(token)
        if granted_us is None:
            self.fail(f"{waiter.name} was notified of a lock that it never had")
        assert granted_us is not None
        hold = BatchLease(waiter.name, token, granted_us, None if ttl_ms is None else since_us + ttl_ms * 1000)
        self._check_lease(hold)
        is_as_granted = self._confirmed_us[token] == granted_us
        is_old = ttl_ms is not None and self.world.now_us - since_us > ttl_ms * 250
        if queued and is_as_granted and is_old and not waiter.custom:  # redeeming a ticket renews the lease
            self.fail(f"{waiter.name} was given a lease that had not been renewed for long")
        if since_us + SERVER_STARTED_US > self._confirmed_us[token]:
            self.fail(f"{waiter.name} believes to have it since {since}, which is later than it was granted")
        self.check_exclusion(hold)
        self.holds[waiter] = hold
        return hold

    def note_reacquire(self, hold: BatchLease, reacquire: Reacquire) -> None:
        """Note that a holder has set its ttl anew."""
        if reacquire.result:
            assert reacquire.ttl_ms is not None
            hold.ends_us = round(reacquire.sent_at * 1e6) + reacquire.ttl_ms * 1000
            self._check_lease(hold)
        elif self._is_valid(hold):
            self.fail(f"{hold.who} could not reacquire what it holds")

    def note_release(self, hold: BatchLease, release: Release) -> None:
        """Note that a release has ended."""
        if self._has(hold.token) and not self._is_retaken(hold):
            self.fail(f"the release of {hold.who} ended {release.result} and left the lock")
        if hold.ends_us is None and not release.result and self._is_valid(hold):
            self.fail(f"the release of {hold.who} says that it did not hold")

    def _has(self, token: bytes) -> bool:
        """Whether the server says that this token holds."""
        entry = self.model.entry(KEY)
        return entry is not None and is_held_with(entry.value, token)

    def _is_retaken(self, hold: BatchLease) -> bool:
        return self._granted_us.get(hold.token) != hold.granted_us

    def let_go(self, waiter: Waiter) -> None:
        """Note that a waiter does not hold any more."""
        self.holds.pop(waiter, None)

    # ---- the invariants ----

    def fail(self, what: str) -> None:
        """Record that an invariant does not hold."""
        entry = self.model.entries.get(KEY)
        raise Violation("\n".join([what, *self.world.story, f"{self.world.now_us / 1000:10.3f} the key holds {entry}"]))

    def _is_valid(self, hold: BatchLease) -> bool:
        """Whether the waiter must hold the lock now."""
        in_time = hold.ends_us is None or self.world.now_us < hold.ends_us
        gone_us = max(self._faults.deleted_us, self._freed_us.get(hold.token, -1) if self.shares else -1)
        return in_time and hold.granted_us > gone_us

    def check_exclusion(self, new: BatchLease) -> None:
        """Check exclusion when a holder begins to hold."""
        others = [*self.holds.values(), *([self.rival] if self.rival and self.rival is not new else [])]
        for other in others:
            is_shared = self.shares and other.token == new.token
            if self._is_valid(other) and self._is_valid(new) and not is_shared:
                self.fail(f"{new.who} holds, and so does {other.who}")

    def _check_lease(self, hold: BatchLease) -> None:
        entry = self.model.entry(KEY)
        if entry is None or not is_held_with(entry.value, hold.token) or not self._is_valid(hold):
            return
        ends_us = None if entry.ends_at_ms is None else entry.ends_at_ms * 1000 + 1000 - SERVER_STARTED_US
        if ends_us is not None and (hold.ends_us is None or hold.ends_us > ends_us):
            self.fail(f"{hold.who} believes in a lease until {hold.ends_us}, and it ends at {ends_us}")

    def _check(self) -> None:
        """Check the invariants, after every event that changed something."""
        self.world.set_server_clock()
        entry = self.model.entry(KEY)
        word = None if entry is None else entry.value
        for hold in self.holds.values():
            if not is_held_with(word, hold.token) and self._is_valid(hold):
                self.fail(f"{hold.who} holds, and the key does not say so")
        if word is None:
            self._owner = None
            return
        self._check_whether_left(word[:-1] if word[-1:] == CONTENDED_FLAG else word)

    def _check_whether_left(self, token: bytes) -> None:
        """Check that a waiter wants what the server says it holds."""
        owners = self.owners.get(token)
        if owners is None or token in self.world.doubtful:
            return
        if any(owner.process.dead or owner.process.was_barred for owner in owners):
            return
        if not any(owner.wants(token) or owner.process.is_cleaning_up(KEY, token) for owner in owners):
            self.fail(f"the lock is left with {token!r}, which no waiter wants")

    # ---- the run ----

    def run(self) -> None:
        """Play it.

        Raises:
            Violation: an invariant does not hold.
        """
        with self._simulated():
            world, events = self.world, 0
            while world.step():
                if world.changed:
                    world.changed = False
                    self._check()
                    if self._is_over():
                        break
                    if self.ttl_ms is None and world.now_us > self._faults.end_us:
                        self._tidy_up_after_the_dead()
                events += 1
                if not events % 64 and (events > _MAX_EVENTS or world.now_us > self._patience_us()):
                    self.fail("some wait too long")
            if self.calm:
                self._check_thrift()
            self._check_end()

    def _check_end(self) -> None:
        """Check what is left when all waiters have ended."""

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        """Put the world's clock in place of the real one."""
        modules: list[Any] = [waiting, waiters, times]
        real = [module.clock for module in modules]
        for module in modules:
            module.clock = self.world.clock
        try:
            with long_waits_unlogged():
                yield
        finally:
            for module, clock in zip(modules, real, strict=True):
                module.clock = clock

    def _is_over(self) -> bool:
        return all(waiter.task.done or waiter.process.dead for waiter in self.waiters)

    def _patience_us(self) -> int:
        """Until when each waiter must have had the lock."""
        rounds = sum(1 + waiter.rounds for waiter in self.waiters) + 3
        each_s = self._longest_use_s() + 10 * self.interval_s + 5 * self.world.slow_us / 1e6 + 0.5
        return self._faults.end_us + int(1e6 * rounds * each_s) + 5_000_000

    def _longest_use_s(self) -> float:
        """How long a waiter may have the lock."""
        return (self.ttl_ms or 0) / 1000 + self.hold_s

    def _tidy_up_after_the_dead(self) -> None:
        """Delete, as an operator does, a lock that does not expire and whose holder is dead."""
        token = self._owner or b""
        owners = self.owners.get(token)
        if owners is not None and not any(self._may_use(owner, token) for owner in owners):
            self.world.tell("the operator deletes a lock that no waiter wants")
            self._faults.operate("delete")

    @staticmethod
    def _may_use(owner: Waiter, token: bytes) -> bool:
        """Whether the waiter is to use a lock with this token, and is not in the queue only as it could not leave."""
        waits_with_it = owner.waiting is not None and token == owner.waiting.token
        is_barred = owner.process.was_barred and owner.state == "waiting" and not waits_with_it
        return not owner.process.dead and owner.wants(token) and not is_barred

    def _check_thrift(self) -> None:
        intervals = len(self.processes) * (1 + self.world.now_us / (1e6 * self.interval_s))
        looks = intervals + self._grants / 2  # a poller may be granted the lock, and another one begins
        if self._looks > looks:
            self.fail(f"{self._looks} looks, and {looks} would have done")
        allowed = 3 * self._grants + self._beginnings + intervals
        if self._requests > allowed:
            self.fail(f"{self._requests} requests for {self._grants} acquisitions, and {allowed} would have done")


if __name__ == "__main__":
    raise SystemExit(main(Simulation, __doc__))
