"""A simulation of locks with `linger`: workers of a few processes, with and without it, in a lossy world.

Each worker acquires, holds and releases for some rounds, by the library's own steps; the keys that linger are the
library's, too. A seed decides how many there are, what each does and what goes wrong. After every event the invariants
at `Simulation` are checked; a `Violation` names the broken one and contains the story. Time is simulated.

    python -m tests.simulation.lingering --seeds 100000 --jobs 2
    python -m tests.simulation.lingering --seed 4711 -v
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator
from typing import Any

from redislock_fast._linger.key_cache import CachedKey
from redislock_fast._pipe.base import Args, Reply
from redislock_fast._util import times
from redislock_fast._util.tokens import TOKEN_BYTES, is_held_with, without_flag
from tests.simulation.faults import Faults
from tests.simulation.keepers import Keeper, Worker
from tests.simulation.model import SERVERS, Model
from tests.simulation.process import Process
from tests.simulation.seeds import Violation, main
from tests.simulation.waiters import KEY, BatchLease
from tests.simulation.world import SERVER_STARTED_US, World

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
    "cancel",
    "cancel",
    "cancel",
    "delete",
    "flush",
    "restart",
    "fork",
    "fork",
    "fork",
    "wanted",
    "wanted",
    "wanted",
)
_MAX_EVENTS = 100_000
_QUIET_US = 100_000_000
_LONGEST_PASSING_US = 5000
_MOST_PASSES = 16
_DEAF_US = 600_000
_MESSAGES = 16
"""How many messages it takes at most until a key that lingers elsewhere is taken: with a first connection and scripts
that the server does not know yet."""


class _Faults(Faults):
    """The faults, and those of keys that linger: a fork, and a superfluous "wanted"."""

    def _happen(self, name: str) -> None:
        stage: Any = self._simulation
        if name not in ("fork", "wanted"):
            super()._happen(name)
            return
        keeper = self._random.choice(stage.processes)
        key = self._random.choice(stage.keys)
        self._world.tell("FAULT:", name, keeper.name, key)
        if keeper.dead or keeper.frozen_until_us > self._world.now_us:
            return
        if name == "wanted":
            keeper.lingering.key_cache.take_wanted(key)
        elif len(stage.processes) < 5:
            stage.fork(keeper)


class Simulation:
    """One seed's story.

    Invariants:
        - Exclusion: no two workers hold within their leases at once. (Not where an operator deleted the key after the
          server had granted it.)
        - Truth: the key has the token of each worker that holds within its lease. (With the same exception.)
        - No worker believes in more of a lease than the server grants, and a key that is taken in memory leaves it its
          whole timeout.
        - No lock is left behind: the key has no token that its process neither uses, keeps nor cleans up, unless that
          is dead, or the holder has forgotten to release it. In the end, nothing lingers, and nothing is watched.
        - No waiter is forgotten: after the last fault, each gets its lock within a bound.
        - Local waiters get the local lock in the order of their arrival.
        - No key lingers for long of which its process cannot hear that it is wanted, since its connection is lost.
        - A wanted key is passed on 16 times at most. In a calm world it is given up 5 ms and one hold after it was
          first wanted, and a key that only lingers is taken within a few message times.

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
        self.calm = self.kind == "calm"
        has = rng.choice(tuple(SERVERS.values()))
        self.world = world = World(rng, model(has), tells)
        self.model = world.model
        self.keys = [KEY, *(b"key %d" % number for number in range(rng.choice((0, 1, 2))))]
        self.ttl_ms = 10_000 if self.calm else rng.choice((40, 150, 1000, 10_000))
        self.linger_s = rng.choice((0.001, 0.02, 0.05, 0.3, 5.0))
        self.lingering = rng.choice((0.5, 0.9, 1.0))
        self.interval_s = 0.5 if self.calm else rng.choice((0.01, 0.03, 0.1))
        self.hold_s = rng.choice((0.002, 0.02) if self.calm else (0.001, 0.01, 0.1))
        self.think_s = rng.choice((0.0, 0.002, 0.03, 0.3))
        world.latency_us = rng.choice((100, 500, 3000))
        if not self.calm:
            world.draw_delays(late_us)
        world.served = self._served
        self._tokens = 0
        self._users: dict[bytes, tuple[Keeper, Worker | None]] = {}
        self._owners: dict[bytes, bytes | None] = {}
        self._granted_us: dict[tuple[bytes, bytes], int] = {}
        self._forgotten: set[bytes] = set()
        self._begun: dict[bytes, int] = dict.fromkeys(self.keys, 0)
        self._quick: dict[Worker, tuple[int, int]] = {}
        self._unheard_us: dict[CachedKey, int] = {}
        self.holds: dict[Worker, BatchLease] = {}
        self.rival: BatchLease | None = None
        self._over_us: int | None = None
        self._faults = _Faults(self, _FAULTS)
        self.processes: list[Process] = []
        for number in range(1 + int(3 * rng.random())):
            self._add(Keeper(self, f"P{number}"))
        for keeper in self.keepers:
            keeper.draw_settings(self.calm)
            for number in range(1 + int(4 * rng.random())):
                keeper.workers.append(Worker(self, keeper, number))
        if not self.calm:
            self._faults.plan(10 if self.kind == "rough" else 4)

    def _add(self, keeper: Keeper) -> None:
        self.processes.append(keeper)

    @property
    def keepers(self) -> list[Keeper]:
        """The processes."""
        return [process for process in self.processes if isinstance(process, Keeper)]

    @property
    def waiters(self) -> list[Worker]:
        """All workers."""
        return [worker for keeper in self.keepers for worker in keeper.workers]

    def fork(self, keeper: Keeper) -> None:
        """Let a process fork."""
        self._add(keeper.fork(f"{keeper.name}+"))

    # ---- what is noted ----

    def _served(self, process: Process, args: Args, reply: Reply) -> None:
        self.look()

    def _token_at(self, key: bytes) -> bytes | None:
        entry = self.model.entry(key)
        return None if entry is None or entry.value is None else without_flag(entry.value)

    def look(self) -> None:
        """Note which token each key has now."""
        for key in self.keys:
            token = self._token_at(key)
            if token != self._owners.get(key):
                self._owners[key] = token
                if token is not None:
                    self._granted_us[key, token] = self.model.now_us

    def new_token(self, begin: bytes) -> bytes:
        """A new token that begins so."""
        self._tokens += 1
        token = begin + b"%0*d" % (TOKEN_BYTES - len(begin), self._tokens)
        running = self.world.running
        worker = running.owner if running is not None and isinstance(running.owner, Worker) else None
        keeper: Any = None if running is None else running.process
        self._users[token] = keeper, worker
        return token

    def begin(self, worker: Worker) -> None:
        """Note that a worker begins to acquire."""
        key = worker.key
        self._begun[key] += 1
        self._quick.pop(worker, None)
        if self.calm and self._lingers_elsewhere(worker):
            self._quick[worker] = self._begun[key], self.world.now_us

    def _lingers_elsewhere(self, worker: Worker) -> bool:
        """Whether the key lingers in another process, and no other worker uses it."""
        token = self._token_at(worker.key)
        is_used = any(
            other is not worker and other.key == worker.key and other.state != "idle" for other in self.waiters
        )
        return not is_used and any(
            keeper is not worker.process and self._is_idle(keeper.lingering.key_cache._keys.get(worker.key), token)
            for keeper in self.keepers
        )

    @staticmethod
    def _is_idle(cached: CachedKey | None, token: bytes | None) -> bool:
        return cached is not None and cached.lease is not None and cached.lease.token == token and not cached.locked_by

    def _is_quick(self, worker: Worker) -> int | None:
        """How long an acquire may have taken, in microseconds; None: for any time."""
        begun, began_us = self._quick.pop(worker, (0, 0))
        if not began_us or begun != self._begun[worker.key]:
            return None
        return began_us + _MESSAGES * (20 + self.world.latency_us)

    def note_refusal(self, worker: Worker, blocking: bool) -> None:
        """Note that a worker did not get its lock."""
        until_us = self._is_quick(worker)
        if until_us is not None and (blocking or self.world.latency_us <= 100):
            self.fail(f"{worker.name} did not get a key that only lingers")

    def take(self, worker: Worker, token: bytes, ends_at: float) -> BatchLease:
        """Note that a worker holds its lock."""
        until_us = self._is_quick(worker)
        if until_us is not None and self.world.now_us > until_us:
            self.fail(f"{worker.name} waited too long for a key that only lingers")
        granted_us = self._granted_us.get((worker.key, token))
        if granted_us is None:
            self.fail(f"{worker.name} holds a lock that it never had")
        assert granted_us is not None
        hold = BatchLease(worker.name, token, granted_us, int(ends_at * 1e6))
        self._check_lease(worker.key, hold)
        self.check_exclusion(hold, worker.key)
        self.holds[worker] = hold
        return hold

    def let_go(self, worker: Worker) -> None:
        """Note that a worker does not hold any more."""
        self.holds.pop(worker, None)

    def forget(self, worker: Worker, token: bytes) -> None:
        """Note that a worker will never release its lock."""
        self.let_go(worker)
        self._forgotten.add(token)

    def note_loss(self, hold: BatchLease) -> None:
        """Note that a release says that the lock was lost."""
        if self._is_valid(hold):
            self.fail(f"the release of {hold.who} says that it did not hold")

    # ---- the invariants ----

    def fail(self, what: str) -> None:
        """Record that an invariant does not hold."""
        now = f"{self.world.now_us / 1000:10.3f}"
        entries = [f"{now} {key.decode()} holds {self.model.entries.get(key)}" for key in self.keys]
        raise Violation("\n".join([what, *self.world.story, *entries]))

    def _is_valid(self, hold: BatchLease) -> bool:
        """Whether the worker must hold the lock now."""
        in_time = hold.ends_us is None or self.world.now_us < hold.ends_us
        return in_time and hold.granted_us > self._faults.deleted_us

    def check_exclusion(self, new: BatchLease, key: bytes = KEY) -> None:
        """Check exclusion when a holder begins to hold."""
        others = [hold for worker, hold in self.holds.items() if worker.key == key]
        if key == KEY and self.rival is not None and self.rival is not new:
            others.append(self.rival)
        for other in others:
            if self._is_valid(other) and self._is_valid(new):
                self.fail(f"{new.who} holds, and so does {other.who}")

    def check_whole_timeout(self, worker: Worker, ends_at: float) -> None:
        """Check the lease of a key that was taken in memory."""
        if ends_at < self.world.clock() + self.ttl_ms / 1000:
            self.fail(f"{worker.name} has less than its timeout")

    def _check_lease(self, key: bytes, hold: BatchLease) -> None:
        entry = self.model.entry(key)
        if entry is None or not is_held_with(entry.value, hold.token) or not self._is_valid(hold):
            return
        assert hold.ends_us is not None
        assert entry.ends_at_ms is not None
        ends_us = entry.ends_at_ms * 1000 + 1000 - SERVER_STARTED_US
        if hold.ends_us > ends_us:
            self.fail(f"{hold.who} believes in a lease until {hold.ends_us}, and it ends at {ends_us}")

    def _check(self) -> None:
        """Check the invariants, after every event that changed something."""
        self.world.set_server_clock()
        for worker, hold in self.holds.items():
            entry = self.model.entry(worker.key)
            if self._is_valid(hold) and not is_held_with(None if entry is None else entry.value, hold.token):
                self.fail(f"{hold.who} holds, and the key does not say so")
        for key in self.keys:
            token = self._token_at(key)
            if token is None:
                self._owners[key] = None
            elif not self._is_wanted(key, token):
                self.fail(f"the lock is left with {token!r}, which no worker wants")
        for keeper in self.keepers:
            for cached in keeper.cached_keys():
                self._check_passing(keeper, cached)
            for cached in keeper.lingering.key_cache._keys.values():
                self._check_hearing(keeper, cached)

    def _is_wanted(self, key: bytes, token: bytes) -> bool:
        """Whether its process uses or keeps the key that has this token, or cleans it up; or cannot do so."""
        keeper, worker = self._users.get(token, (None, None))
        if keeper is None or keeper.dead or token in self._forgotten or token in self.world.doubtful:
            return True
        is_used = worker is not None and worker.state != "idle" and worker.key == key
        is_held = any(other.token == token for other in keeper.workers)
        return is_used or is_held or keeper.keeps(token) or keeper.is_cleaning_up(key, token)

    def _check_passing(self, keeper: Keeper, cached: CachedKey) -> None:
        if cached.passes > _MOST_PASSES:
            self.fail(f"{keeper.name} passes a wanted key on forever")
        lease, wanted_at = cached.lease, cached.wanted_at
        if self.calm and lease is not None and wanted_at is not None:
            since_us = round(1e6 * max(wanted_at, lease.began_at))
            longest_us = _LONGEST_PASSING_US + 1e6 * self.hold_s + 8 * (20 + self.world.latency_us)
            if self.world.now_us > since_us + longest_us:
                self.fail(f"{keeper.name} keeps a wanted key")

    def _check_hearing(self, keeper: Keeper, cached: CachedKey) -> None:
        lease, connection = cached.lease, keeper.connection
        registry = None if connection is None or connection.broken else connection.registry
        lingers = lease is not None and not cached.locked_by and not keeper.dead
        if lingers and (registry is None or lease is None or lease.registry is not registry):
            since_us = max(self._unheard_us.setdefault(cached, self.world.now_us), keeper.frozen_until_us)
            if self.world.now_us > since_us + _DEAF_US + self.world.slow_us:
                self.fail(f"{keeper.name} keeps a key of which it cannot hear")
        else:
            self._unheard_us.pop(cached, None)

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
                if self._over_us is None:
                    if self._is_over() and world.now_us >= self._faults.end_us:
                        self._over_us = world.now_us
                    elif world.now_us > self._patience_us():
                        self.fail("some wait too long")
                elif not events % 16 and (world.now_us > self._over_us + _QUIET_US or not self._left_behind()):
                    break
                events += 1
                if events > _MAX_EVENTS:
                    self.fail("there is no end")
            left = self._left_behind() if self._is_over() else "some wait forever"
            if left:
                self.fail(left)

    @contextlib.contextmanager
    def _simulated(self) -> Iterator[None]:
        """Put the world's clock in place of the real one."""
        real = times.clock
        modules: list[Any] = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("redislock_fast.") and getattr(module, "clock", None) is real
        ]
        for module in modules:
            module.clock = self.world.clock
        logging.getLogger("redislock_fast").setLevel(logging.ERROR)
        try:
            yield
        finally:
            for module in modules:
                module.clock = real
            logging.getLogger("redislock_fast").setLevel(logging.NOTSET)

    def _is_over(self) -> bool:
        return all(worker.task.done or worker.process.dead for worker in self.waiters)

    def _patience_us(self) -> int:
        """Until when each worker must have had its locks."""
        rounds = sum(1 + worker.rounds for worker in self.waiters) + 3
        lease_s = self.ttl_ms / 1000 + self.linger_s
        each_s = lease_s + self.hold_s + 10 * self.interval_s + 5 * self.world.slow_us / 1e6 + 0.5
        return self._faults.end_us + int(1e6 * rounds * each_s) + 5_000_000

    def _left_behind(self) -> str:
        """What is left behind; empty for nothing."""
        for key in self.keys:
            token = self._token_at(key)
            keeper, _ = self._users.get(token or b"", (None, None))
            if keeper is not None and not keeper.dead and token not in self._forgotten | self.world.doubtful:
                return f"the lock is left with {token!r}"
        for keeper in self.keepers:
            if keeper.dead:
                continue
            for cached in keeper.lingering.key_cache._keys.values():
                if cached.waiters or (cached.lease is not None and cached.lease.token not in self._forgotten):
                    return f"{keeper.name} keeps a key"
                if cached.locked_by and not self._forgotten:
                    return f"{keeper.name} has a local lock forever"
            if keeper.lingering.has_unconfirmed or keeper.lingering.key_cache.is_watched:
                return f"{keeper.name} watches forever"
        return ""


if __name__ == "__main__":
    raise SystemExit(main(Simulation, __doc__))
