"""The holders of the simulation of holding: each takes a lock, keeps it, and releases it or does not.

They use `asyncio.Lock` itself, on a simulated loop and transport. Some share a lock object; each releases only what it
has acquired itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._util.errors import LossReason
from redislock_fast.asyncio import Lock
from tests.simulation.process import Trouble
from tests.simulation.waiters import KEY

if TYPE_CHECKING:
    from tests.simulation.holding import Simulation, Site

_RELEASES = 5


class SimulatedLock(Lock):
    """A lock whose client is its transport."""

    @staticmethod
    def _transport_of(client: Any) -> Any:
        return client


def token_of(lock: Lock) -> bytes | None:
    """The token of the held lock, without the contended flag."""
    token: bytes | None = lock._held().token
    return token


class Stay:
    """One lock that is held, as its holder and the simulation know it.

    Attributes:
        lock: by weak reference, as its lease: the holder alone decides when they are dropped.
        token: the lock's.
        granted_us: when the server gave it, by the server's clock.
        begun_s: when its holder was notified.
        begins_late: whether some of its lease had passed by then.
        by_hand: whether its holder has prolonged it itself.
        order: how many holders the lock had before, plus one.
        fence: its number.
        over: whether its holder has begun to release it.
        told: the reported reason of its loss.
        ended_us: when that was reported, or its release has begun.
        invalid_since_us: since when it is not valid.
        gone_by_us: when nothing of it may be on the server any more.
    """

    def __init__(self, holder: Holder, lock: Lock) -> None:
        self.holder = holder
        self.who = holder.name
        self.lock = weakref.ref(lock)
        self.lease = weakref.ref(lock._held().lease)
        self.key = holder.key
        token = token_of(lock)
        assert token is not None
        self.token = token
        self.granted_us = 0
        self.begun_s = 0.0
        self.begins_late = False
        self.by_hand = False
        self.order = 0
        self.fence = lock.fence
        self.over = False
        self.told: LossReason | None = None
        self.ended_us: int | None = None
        self.invalid_since_us: int | None = None
        self.gone_by_us: int | None = None

    def left_s(self) -> float:
        """How long it certainly lasts, in seconds."""
        lock = self.lock()
        return 0.0 if lock is None else lock.remaining()

    def is_valid(self) -> bool:
        """Whether its holder may believe that it holds."""
        lock = self.lock()
        return lock is not None and not self.over and lock.local.token == self.token and lock.valid


class Holder:
    """Takes locks and holds them.

    Attributes:
        stays: what it has held by the present lock object.
        rounds: how many locks it will still take.
        shared: the lock object that it shares with other holders of its process.
    """

    def __init__(self, simulation: Simulation, site: Site, number: int) -> None:
        rng = simulation.rng
        self.simulation = simulation
        self.site = site
        self.process = site.process
        self.name = f"{site.process.name} holder {number}"
        self.key = KEY if rng.random() < 0.7 else b"name of %d" % number
        simulation.watch(self.key)
        self.state = "idle"
        self.stays: list[Stay] = []
        self.rounds = 1 + int(3 * rng.random())
        self.renews = rng.random() < 0.8
        self.ends = self.renews and rng.random() < 0.2
        self.cancels = rng.random() < 0.3
        self.by_push = rng.random() < 0.6
        self.shared: SimulatedLock | None = None
        if rng.random() < 0.4:
            self._share(site.shared)
        self.task = site.loop.create_task(self._live())

    def _share(self, first: Holder | None) -> None:
        """Use the first one's lock object, or be the first."""
        if first is None:
            self.site.shared = self
            self.shared = self._new_lock()
        else:
            self.key, self.shared = first.key, first.shared
            self.renews, self.ends = first.renews, first.ends

    def is_done(self) -> bool:
        """Whether it will do nothing more."""
        return self.task.done() or self.process.dead

    async def _live(self) -> None:
        simulation, rng = self.simulation, self.simulation.rng
        while self.rounds:
            self.rounds -= 1
            self.state = "idle"
            try:
                await asyncio.sleep(simulation.hold_s * rng.random())
                await self._round()
            except (Trouble, LockError, asyncio.CancelledError) as error:
                simulation.world.tell(self.name, "ends by", type(error).__name__, str(error))
                await self._end_shared()
            for stay in self.stays:
                simulation.let_go(stay)
            self.stays = []

    async def _end_shared(self) -> None:
        """Release what is held by the shared lock object, which lives on."""
        while self.shared is not None and self.stays and self._has(self.shared):
            with contextlib.suppress(LockError, asyncio.CancelledError):
                await self._release(self.shared)
                return

    def _has(self, lock: Lock) -> bool:
        """Whether the lock object still has what this holder has acquired."""
        return token_of(lock) == self.stays[-1].token

    def _new_lock(self) -> SimulatedLock:
        simulation = self.simulation
        return SimulatedLock(
            self.site.transport,  # type: ignore[arg-type]
            self.key,
            timeout=simulation.ttl_ms / 1000,
            sleep=simulation.interval_s,
            thread_local=False,
            wait="push" if self.by_push else "poll",
            auto_renew=self.renews,
            max_hold=simulation.max_hold_s if self.ends else None,
            on_lost=self.simulation.note_loss,
            cancel_on_lost=self.cancels,
            fencing=simulation.fenced,
        )

    async def _round(self) -> None:
        simulation, rng = self.simulation, self.simulation.rng
        lock = self.shared or self._new_lock()
        self.state = "acquiring"
        if not await lock.acquire(blocking_timeout=simulation.patience_s if rng.random() < 0.3 else None):
            return
        self._began(lock)
        for _ in range(int(5 * rng.random())):
            if not self._has(lock):
                return
            await self._act(lock)
        if self.shared is None and rng.random() < 0.15:
            simulation.world.tell(self.name, "drops it")
            return
        await self._release(lock)

    def _began(self, lock: Lock) -> None:
        self.state = "holding"
        for stay in self.stays:
            self.simulation.let_go(stay)
        stay = Stay(self, lock)
        self.stays.append(stay)
        self.simulation.begin(stay)

    async def _act(self, lock: Lock) -> None:
        simulation, rng = self.simulation, self.simulation.rng
        stay = self.stays[-1]
        ttl_s = simulation.ttl_ms / 1000
        kind = rng.choice(("sleep", "sleep", "write", "write", "extend", "reacquire", "again"))
        if kind == "sleep":
            await asyncio.sleep(ttl_s * 2 * rng.random() ** 2)
        elif kind == "write":
            simulation.write(stay)
        elif kind == "again":
            stay.by_hand = True
            await self._again(lock)
        else:
            stay.by_hand = True
            with contextlib.suppress(Trouble):
                if kind == "reacquire":
                    await lock.reacquire()
                else:
                    await lock.extend(ttl_s * (0.5 + 1.5 * rng.random()), replace_ttl=rng.random() < 0.5)

    async def _again(self, lock: Lock) -> None:
        stay = self.stays[-1]
        self.state = "acquiring"
        try:
            if await lock.acquire_or_extend() and token_of(lock) != stay.token:
                self._began(lock)
        except Trouble:
            if token_of(lock) != stay.token:  # lost, and not had again
                raise
        self.state = "holding"

    async def _release(self, lock: Lock) -> None:
        simulation, stay = self.simulation, self.stays[-1]
        self.state = "releasing"
        for _ in range(_RELEASES):
            if not self._has(lock):
                break
            stay.over, stay.ended_us = True, simulation.world.now_us
            try:
                await lock.release()
            except LockNotOwnedError:
                break
            except Trouble:
                await asyncio.sleep(simulation.interval_s)
            else:
                simulation.note_release(stay)
                break
