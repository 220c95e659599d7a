"""Contenders for a Redlock against model servers: thousands of schedules of slow, lost and late requests.

The steps are those of the locks themselves, driven by a clock set by hand. Servers freeze, forget nothing, and execute
what they are sent in the order of each connection, however late. All clocks run at rates of their own.

Rules: no two leases that their holders believe in may overlap; a schedule is told by its seed. Planted bugs must be
found. Must not know: real servers.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, RedisError

from redislock_fast import _quorum, _round
from redislock_fast._ownership import SharedHolding
from redislock_fast._protocol import HELLO, PROBE, Dialect
from redislock_fast._queue import undo_requests
from redislock_fast._quorum import RedlockBase
from redislock_fast._round import Round
from redislock_fast._steps import Ask, Sleep
from redislock_fast._wire import Args
from tests.model import SERVERS, Model

COUNT = 5
LIMIT_S = 0.05
TTL_S = 0.5
RATE = 0.004
"""How far a clock's rate may be off: two clocks together stay within the 1 % that a lease allows for."""


class _Server:
    """One server with its clock, and when it is frozen."""

    def __init__(self, dice: random.Random) -> None:
        self.model = Model(dice.choice(list(SERVERS.values())))
        self.dialect = Dialect(self.model.execute(PROBE), self.model.execute(HELLO))
        self.rate = 1 + dice.uniform(-RATE, RATE)
        self.thaws_at = 0.0


class _Lock(RedlockBase):
    """A Redlock whose servers are looked after by the simulation."""

    @staticmethod
    def _transport_of(client: Any) -> Any:
        return _Keys()

    @staticmethod
    def _quorum_of(transports: list[Any]) -> Any:
        return None

    def _new_holding(self) -> Any:
        return SharedHolding()


class _Keys:
    def key_of(self, name: str) -> bytes:
        return name.encode()


class _Contender:
    """One process that wants the lock, again and again."""

    def __init__(self, world: _World, number: int) -> None:
        self.world = world
        self.rate = 1 + world.dice.uniform(-RATE, RATE)
        self.behind = [0.0] * COUNT  # until when its connection to each server is busy
        clients = [redis.Redis(port=port) for port in range(1, COUNT + 1)]
        self.lock = _Lock(clients, "name", timeout=TTL_S, sleep=0.02, thread_local=False, limit=LIMIT_S)
        self.releases = True  # or holds nothing
        self.held = 0

    def live(self) -> Generator[Any, None, None]:
        """Acquire, hold, perhaps prolong, release: the steps of each, and pauses."""
        dice, lock = self.world.dice, self.lock
        local = lock._mine()
        while True:
            try:
                if not (yield from lock._acquiring(local, None, True, dice.uniform(0, 0.5))):
                    continue
                self.world.holds(self)
                yield Sleep(dice.uniform(0, 1.5 * TTL_S))
                if dice.random() < 0.3 and lock.valid:
                    yield from lock._extending(local, dice.uniform(0.01, TTL_S), dice.random() < 0.5)
                    self.world.holds(self)
                    yield Sleep(dice.uniform(0, TTL_S))
                self.releases = True
                yield from lock._releasing(local)
            except (LockError, RedisError):
                self.releases = True
            yield Sleep(dice.uniform(0, 0.05))


class _World:
    """The clock, the servers, the network."""

    def __init__(self, seed: int, contenders: int = 3) -> None:
        self.dice = random.Random(seed)
        self.now = 1.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.servers = [_Server(self.dice) for _ in range(COUNT)]
        self.acting: _Contender | None = None
        self.contenders = [_Contender(self, number) for number in range(contenders)]
        self._lives = {contender: contender.live() for contender in self.contenders}

    def clock(self) -> float:
        """The time as whoever acts has it."""
        return self.now * (1.0 if self.acting is None else self.acting.rate)

    def holds(self, contender: _Contender) -> None:
        """A contender believes in its lease, as long as that says."""
        contender.releases = False
        contender.held += 1
        for other in self.contenders:
            self.acting = other  # whose clock says how long his lease lasts
            assert other is contender or other.releases or not other.lock.valid, "two hold it"
        self.acting = contender

    def run(self, seconds: float) -> int:
        """Let them contend. Returns how often the lock was held."""
        for contender in self.contenders:
            self._at(self.now, lambda contender=contender: self._step(contender))  # type: ignore[misc]
        end = self.now + seconds
        while self._events[0][0] < end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return sum(contender.held for contender in self.contenders)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _step(self, contender: _Contender) -> None:
        self.acting = contender
        step = next(self._lives[contender])
        self.acting = None
        if type(step) is Sleep:
            self._at(self.now + step.seconds, lambda: self._step(contender))
        else:
            assert type(step) is Ask
            self._ask(contender, step.round)

    def _ask(self, contender: _Contender, round_: Round) -> None:
        round_.began = self.now * contender.rate
        over = False

        def finish() -> None:
            nonlocal over
            if not over:
                over = True
                round_.close(self.now * contender.rate)
                for index, entry in round_.to_undo().items():
                    for request in undo_requests(self.servers[index].dialect, [entry]):
                        self._send(contender, index, request, None)
                self._step(contender)

        def post(index: int) -> None:
            dialect = self.servers[index].dialect

            def answer(reply: Any) -> None:
                if not round_.take(index, reply, dialect):
                    post(index)
                elif round_.decided:
                    finish()

            self._send(contender, index, round_.request(index, dialect), answer)

        for index in range(COUNT):
            if round_.awaits(index):
                post(index)
        self._at(self.now + round_.limit_s, finish)

    def _send(self, contender: _Contender, index: int, request: Args, answer: Callable[[Any], None] | None) -> None:
        """Have a request executed behind those that were sent before on the same connection."""
        server, dice = self.servers[index], self.dice
        if dice.random() < 0.02:
            server.thaws_at = max(server.thaws_at, self.now + dice.uniform(0, TTL_S))
        delay_s = dice.uniform(0, 2 * LIMIT_S) if dice.random() < 0.1 else dice.uniform(0, LIMIT_S / 10)
        when = max(self.now + delay_s, server.thaws_at, contender.behind[index])
        contender.behind[index] = when

        def execute() -> None:
            server.model.now_us = int(self.now * server.rate * 1e6)
            reply = server.model.execute(request)
            if answer is not None:
                self._at(self.now + self.dice.uniform(0, LIMIT_S / 10), lambda: answer(reply))

        self._at(when, execute)


def _run(monkeypatch: pytest.MonkeyPatch, seed: int) -> int:
    world = _World(seed)
    monkeypatch.setattr(_quorum, "clock", world.clock)
    monkeypatch.setattr(_quorum, "_dice", world.dice)
    return world.run(20)


def _run_all(monkeypatch: pytest.MonkeyPatch, seeds: int) -> None:
    for seed in range(seeds):
        _run(monkeypatch, seed)


@pytest.mark.parametrize("seed", range(40))
def test_leases_never_overlap(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    assert _run(monkeypatch, seed) > 10


def _too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum that is no majority."""
    init = Round.__init__

    def smaller(self: Round, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._quorum = COUNT // 2

    monkeypatch.setattr(Round, "__init__", smaller)


def _too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that counts from the replies."""
    close = _round.AcquireRound.close

    def late(self: _round.AcquireRound, now: float) -> None:
        close(self, now)
        self.began = now

    monkeypatch.setattr(_round.AcquireRound, "close", late)


def _too_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extend that counts without a quorum."""
    monkeypatch.setattr(_round.ReacquireRound, "agreed", property(lambda self: True in self.votes))


@pytest.mark.parametrize("plant", [_too_few, _too_late, _too_sure])
def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="two hold it"):
        _run_all(monkeypatch, 200)
