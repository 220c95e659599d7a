"""Contenders for a Redlock against model servers: thousands of schedules of slow, lost and late requests.

The steps are those of the locks themselves, and of their renewal, driven by a clock set by hand. Servers freeze, forget
nothing, and execute the requests in the order of each connection, however late. Each clock runs at its own rate.

No two leases that their holders believe in may overlap, and no loss is reported twice. A failure names its seed.
Planted faults must be found.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, RedisError

from redislock_fast._lease import lease as lease_module
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.owner import SharedOwner
from redislock_fast._pipe.base import Args
from redislock_fast._procedures import lease as lease_procedure
from redislock_fast._procedures import loss as loss_procedure
from redislock_fast._procedures.loss import LeaseLoss
from redislock_fast._protocol.capabilities import HELLO, PROBE, Capabilities
from redislock_fast._protocol.queue import cleanup_requests
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._redlock import lease as redlock_lease
from redislock_fast._redlock import lock as redlock_lock
from redislock_fast._redlock import procedures
from redislock_fast._redlock.lock import RedlockBase
from redislock_fast._redlock.procedures import RedlockCall
from redislock_fast._redlock.quorum import MajorityEntry
from redislock_fast._redlock.rounds import AcquireRound, MajorityRound, ReacquireRound
from redislock_fast._renewal import schedule as schedule_module
from redislock_fast._renewal.schedule import Record, Schedule, due_at, late_entries
from redislock_fast._util import times
from redislock_fast._util.errors import LossReason
from tests.simulation.model import SERVERS, Model
from tests.support.selection import in_two_runs

COUNT = 5
LIMIT_S = 0.05
TTL_S = 0.5
RATE = 0.004
"""The largest error of a clock's rate: two clocks together stay within the 1 % that a lease allows for."""


class _Server:
    """One server with its clock, and when it is frozen."""

    def __init__(self, rng: random.Random) -> None:
        self.model = Model(rng.choice(list(SERVERS.values())))
        self.capabilities = Capabilities(self.model.execute(PROBE), self.model.execute(HELLO))
        self.rate = 1 + rng.uniform(-RATE, RATE)
        self.thaws_at = 0.0


class _Lock(RedlockBase):
    """A Redlock on the servers of the simulation."""

    contender: _Contender

    def _renewer(self) -> _Contender:
        return self.contender

    def _report_loss(self, lease: Lease, reason: LossReason) -> None:
        self.contender.learn(lease, reason)

    _report_former_loss = _report_loss

    @staticmethod
    def _transport_of(client: Any) -> Any:
        return _Keys()

    _quorum_class: Any = SimpleNamespace(of=lambda _: None)

    def _new_owner(self) -> Any:
        return SharedOwner()


class _Keys:
    @property
    def encoding(self) -> Any:
        return self

    def key_of(self, name: str) -> bytes:
        return name.encode()


class _Contender:
    """A process that acquires the lock again and again; it is its lock's renewer, too.

    Attributes:
        held: how often it has had the lock.
        outlived: how often for longer than the ttl.
    """

    def __init__(self, world: _World, number: int) -> None:
        self.world = world
        self.rate = 1 + world.rng.uniform(-RATE, RATE)
        self.behind = [0.0] * COUNT  # until when its connection to each server is busy
        clients = [redis.Redis(port=port) for port in range(1, COUNT + 1)]
        settings: dict[str, Any] = {"timeout": TTL_S, "sleep": 0.02, "thread_local": False, "limit": LIMIT_S}
        self.lock = _Lock(clients, "name", auto_renew=number == 0, **settings)
        self.lock.contender = self
        self.lock._quorum = self
        self.releases = True  # or holds nothing
        self.held = 0
        self.outlived = 0
        self._schedule = Schedule()
        self._told: list[Lease] = []

    def live(self) -> Steps:
        """Acquire, hold, perhaps prolong, release: the steps of each, and pauses."""
        rng, lock = self.world.rng, self.lock
        local = lock._mine()
        while True:
            try:
                call = RedlockCall(local, blocking=True, blocking_timeout=rng.uniform(0, 0.5))
                if not (yield from procedures.acquire_redlock(lock, call)):
                    continue
                self.held += 1
                self.releases = False
                self.world.check()
                began = self.world.now
                yield Do("sleep", rng.uniform(0, (1.5 if lock._options is None else 4) * TTL_S))
                while rng.random() < 0.4 and lock.valid:
                    yield from procedures.extend_redlock(lock, local, rng.uniform(0.01, TTL_S), rng.random() < 0.5)
                    self.world.check()
                    yield Do("sleep", rng.uniform(0, TTL_S))
                self.outlived += lock.valid and self.world.now > began + 2 * TTL_S
                self.releases = True
                yield from procedures.release_redlock(lock, local)
            except (LockError, RedisError):
                self.releases = True
            yield Do("sleep", rng.uniform(0, 0.05))

    def renew(self) -> Steps:
        """As a renewer does, again and again."""
        while True:
            due = self._schedule.take(self.world.clock())
            losses: list[LeaseLoss] = []
            yield from redlock_lease.renew_leases(self, due, losses)  # type: ignore[arg-type]  # all of them are by quorum
            self.world.check()
            self.clean_up(late_entries(losses))
            for lost, reason in losses:
                self.learn(lost, reason)
            for renewed in due:
                self.keep(renewed)
            yield Do("sleep", 0.005)

    def keep(self, lease: Lease) -> None:
        """As a renewer does."""
        if lease.record is None:
            lease.record = Record(lease, lambda _: None)
        if not lease.record.is_over:
            self._schedule.add(lease.record, due_at(lease, self.world.clock()), TTL_S / 3)

    def let_go(self, lease: Lease) -> None:
        """As a renewer does."""
        if lease.record is not None:
            lease.record.is_over = True
            self._schedule.remove(lease.record)

    def ask(self, *rounds: MajorityRound) -> tuple[MajorityRound, ...]:
        """As a quorum does; the world asks for these."""
        return rounds

    def clean_up(self, entries: list[MajorityEntry]) -> None:
        """As a quorum does."""
        for entry in entries:
            for index, key in enumerate(entry.keys):
                self.world.clean_up(self, index, (key, entry.token))

    def learn(self, lease: Lease, reason: LossReason) -> None:
        """Take the report of a loss."""
        assert lease not in self._told, f"told again: {reason}"
        self._told.append(lease)


class _World:
    """The clock, the servers, the network."""

    def __init__(self, seed: int, contenders: int = 3) -> None:
        self.rng = random.Random(seed)
        self.now = 1.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.servers = [_Server(self.rng) for _ in range(COUNT)]
        self.acting: _Contender | None = None
        self.contenders = [_Contender(self, number) for number in range(contenders)]

    def clock(self) -> float:
        """The time by the clock of the contender that acts."""
        return self.now * (1.0 if self.acting is None else self.acting.rate)

    def check(self) -> None:
        """Check that no other contender believes in a lease while this one does."""
        acting = self.acting
        believers = 0
        for contender in self.contenders:
            self.acting = contender  # its clock measures its lease
            believers += contender.lock.valid and not contender.releases
        self.acting = acting
        assert believers <= 1, "two hold it"

    def run(self, seconds: float) -> None:
        """Let the contenders run."""
        for contender in self.contenders:
            for life in (contender.live(), contender.renew()):
                self._at(self.now, partial(self._step, contender, life))
        end = self.now + seconds
        while self._events[0][0] < end:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def clean_up(self, contender: _Contender, index: int, entry: tuple[bytes, bytes]) -> None:
        """Have a server clean up, behind the requests that were sent before."""
        for request in cleanup_requests(self.servers[index].capabilities, [entry]):
            self._send(contender, index, request, None)

    def _step(self, contender: _Contender, life: Steps) -> None:
        self.acting = contender
        step = next(life)
        self.acting = None
        go_on = partial(self._step, contender, life)
        if step.method == "sleep":
            self._at(self.now + step.args[0], go_on)
            return
        assert step.method == "call"
        asked = step.args[0](*step.args[1:])
        missing = len(asked)

        def end_one() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                go_on()

        for round_ in asked:
            self._ask(contender, round_, end_one)

    def _ask(self, contender: _Contender, round_: MajorityRound, go_on: Callable[[], None]) -> None:
        round_.began = self.now * contender.rate
        over = False

        def finish() -> None:
            nonlocal over
            if not over:
                over = True
                round_.close(self.now * contender.rate)
                for index, entry in round_.to_clean_up().items():
                    self.clean_up(contender, index, entry)
                go_on()

        def post(index: int) -> None:
            capabilities = self.servers[index].capabilities

            def answer(reply: Any) -> None:
                if not round_.take(index, reply, capabilities):
                    post(index)
                elif round_.decided:
                    finish()

            self._send(contender, index, round_.request(index, capabilities), answer)

        for index in range(COUNT):
            if round_.awaits(index):
                post(index)
        self._at(self.now + round_.limit_s, finish)

    def _send(self, contender: _Contender, index: int, request: Args, answer: Callable[[Any], None] | None) -> None:
        """Have a request executed behind those that were sent before on the same connection."""
        server, rng = self.servers[index], self.rng
        if rng.random() < 0.02:
            server.thaws_at = max(server.thaws_at, self.now + rng.uniform(0, TTL_S))
        delay_s = rng.uniform(0, 2 * LIMIT_S) if rng.random() < 0.1 else rng.uniform(0, LIMIT_S / 10)
        when = max(self.now + delay_s, server.thaws_at, contender.behind[index])
        contender.behind[index] = when

        def execute() -> None:
            server.model.now_us = int(self.now * server.rate * 1e6)
            reply = server.model.execute(request)
            if answer is not None:
                self._at(self.now + self.rng.uniform(0, LIMIT_S / 10), lambda: answer(reply))

        self._at(when, execute)


def _run(monkeypatch: pytest.MonkeyPatch, seed: int) -> _World:
    world = _World(seed)
    for module in (
        times,
        lease_procedure,
        loss_procedure,
        redlock_lock,
        procedures,
        schedule_module,
        redlock_lease,
        lease_module,
    ):
        monkeypatch.setattr(module, "clock", world.clock)
    for module in (procedures, schedule_module):
        monkeypatch.setattr(module, "_random", world.rng)
    world.run(20)
    return world


def _run_all(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    for seed in range(seeds):
        _run(monkeypatch, seed)


@in_two_runs(range(14), 4)
def test_leases_never_overlap(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    for seed in seeds:
        assert sum(contender.held for contender in _run(monkeypatch, seed).contenders) > 10, f"seed {seed}"


@in_two_runs(range(14), 4)
def test_renewed_leases_last(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    assert sum(_run(monkeypatch, seed).contenders[0].outlived for seed in seeds) > len(seeds) / 2


def _too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum that is no majority."""
    init = MajorityRound.__init__

    def smaller(self: MajorityRound, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._quorum = COUNT // 2

    monkeypatch.setattr(MajorityRound, "__init__", smaller)


def _too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that counts from the replies."""
    close = AcquireRound.close

    def late(self: AcquireRound, now: float) -> None:
        close(self, now)
        self.began = now

    monkeypatch.setattr(AcquireRound, "close", late)


def _too_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extend that counts without a quorum."""
    monkeypatch.setattr(ReacquireRound, "agreed", property(lambda self: True in self.votes))


def _too_stubborn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that counts even if its holder has set another lease meanwhile."""

    def renewed(self: Lease, expires_at: float, certainly: bool) -> None:
        self.expires_at = expires_at

    monkeypatch.setattr(redlock_lease.RedlockLease, "renewed", renewed)


def _too_hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renewal that counts although no majority has answered."""
    verdict = redlock_lease._verdict

    def hopeful(round_: ReacquireRound) -> Any:
        return verdict(round_)._replace(held=not round_.refused)

    monkeypatch.setattr(redlock_lease, "_verdict", hopeful)


@pytest.mark.parametrize("plant", [_too_few, _too_late, _too_sure, _too_stubborn, _too_hopeful])
def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="two hold it"):
        _run_all(monkeypatch, 200)
