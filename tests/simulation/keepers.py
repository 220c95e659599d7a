"""Simulated processes that keep keys for locks with `linger`, and their workers.

The keys, their local locks and how they are given back are the library's own, as are the steps of each lock. In the
place of an event loop's timers stand the world's events.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockNotOwnedError

from redislock_fast._linger.key_cache import CachedKey, LocalWaiter
from redislock_fast._linger.loop import LoopLingering
from redislock_fast._linger.procedures import cached_key, release_here, take_at_once
from redislock_fast._pipe.base import Args, OnReply
from redislock_fast._procedures.acquire import acquire_lock, new_call
from redislock_fast._procedures.release import release_lock
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._transport.base import ServerTransport
from redislock_fast._util.tokens import MARKER, PLAIN
from tests.simulation.process import Caller, Cancelled, Process, Task, Trouble
from tests.simulation.world import ClientConnection
from tests.support.bare_locks import BareLock

if TYPE_CHECKING:
    from tests.simulation.lingering import Simulation


class _Timer:
    """What is called later, unless it is cancelled before."""

    def __init__(self, do: Callable[..., None]) -> None:
        self._do: Callable[..., None] | None = do

    def run(self, *args: Any) -> None:
        """The time has come."""
        if self._do is not None:
            self._do(*args)

    def cancel(self) -> None:
        """Do not call it."""
        self._do = None


class _Loop:
    """In the place of a process's event loop."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def call_later(self, delay_s: float, do: Callable[..., None], *args: Any) -> _Timer:
        """Call it later."""
        timer = _Timer(do)
        self._process.world.after(math.ceil(delay_s * 1e6), self._process, timer.run, *args)
        return timer


class _Pipe:
    """What the keys that linger use of a connection's pipe, and of its end."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self.closed = self

    @property
    def broken(self) -> bool:
        """Whether the process has noticed that the connection is broken."""
        return self._connection.broken

    def post(self, args: Args, on_reply: OnReply) -> None:
        """Send a request, without waiting for the reply."""
        self._connection.post(args, on_reply)

    def add_done_callback(self, note: Callable[[object], None]) -> None:
        """Have this called when the connection breaks."""
        self._connection.on_broken.append(partial(note, None))


class LocalTurn(LocalWaiter):
    """A worker that waits for a local lock."""

    def __init__(self, keeper: Keeper, number: int) -> None:
        super().__init__()
        self.number = number
        self._keeper = keeper
        self._task: Caller | None = None
        self._epoch = 0

    @property
    def is_decided(self) -> bool:
        """Whether it has the local lock or has given up."""
        return 0 in self._outcome

    def wake(self) -> None:
        self._keeper.check_order(self)
        if self._task is not None:
            world = self._keeper.world
            world.after(world.pause_us(), self._keeper, self._end, self._task, self._epoch)

    def wait(self, timeout_s: float | None) -> None:
        """What the steps name: the task that drives them calls `listen` in its place."""

    def listen(self, task: Caller, timeout_s: float | None) -> None:
        """Let the task go on when it is woken, or after so many seconds."""
        if self.is_given:
            task.go_on(task.epoch, None)
            return
        self._task, self._epoch = task, task.epoch
        if timeout_s is not None:
            self._keeper.world.after(math.ceil(max(timeout_s, 0) * 1e6), self._keeper, self._end, task, task.epoch)

    def _end(self, task: Caller, epoch: int) -> None:
        if task.epoch == epoch:
            self._task = None
            task.go_on(epoch, None)


class Keeper(Process):
    """A process that keeps keys.

    Attributes:
        workers: its tasks.
    """

    def __init__(self, simulation: Simulation, name: str) -> None:
        Process.__init__(self, simulation.world, name)
        keeper: Any = self
        self.loop: Any = _Loop(self)
        self.lingering = LoopLingering(keeper)
        numbers = itertools.count(1)
        self.lingering.key_cache.new_waiter = lambda: LocalTurn(self, next(numbers))
        self.lingering.key_cache.loop = None
        self._simulation = simulation
        self.workers: list[Worker] = []

    def _connected(self) -> None:
        super()._connected()
        connection = self.connection
        if connection is not None:
            connection.pipe = _Pipe(connection)

    @property
    def encoding(self) -> Any:
        """What makes bytes of names and tokens."""
        return self

    server_of: Any = ServerTransport.server_of

    def key_of(self, name: bytes) -> bytes:
        """The key of a lock's name."""
        return name

    def encode(self, token: bytes) -> bytes:
        """A token on the wire."""
        return token

    def new_token(self, _: bytes | None = None, kind: bytes = PLAIN) -> bytes:
        """A new token, with the identifier of the connection."""
        registry = None if self.connection is None else self.connection.registry
        identifier = b"0" * 11 if registry is None else registry.identifier
        return self._simulation.new_token(MARKER + identifier + kind)

    def owner(self) -> Keeper:
        """Its client, which lives as long as it does."""
        return self

    def in_loop(self, call: Callable[..., object], *args: Any) -> None:
        """Call this: everything here happens in one thread."""
        call(*args)

    call = in_loop

    def leave_if_silent(self, connection: ClientConnection) -> None:
        """Send nothing more on a connection that has been silent for too long: none is."""

    def close_if_idle(self) -> None:
        """Close the connection of a closed client: none is closed."""

    def check_order(self, turn: LocalTurn) -> None:
        """Check that no earlier caller waits for the local lock that this one has got."""
        for cached in self.cached_keys():
            waiting: Any = cached.waiters if cached.locked_by.get(0) is turn else ()
            if any(other.number < turn.number and not other.is_decided for other in waiting):
                self._simulation.fail(f"{self.name} gives a local lock to another waiter than the first")

    def cached_keys(self) -> list[CachedKey]:
        """The keys that it has, and those that it has replaced and that are still used."""
        used = [lock._cached for worker in self.workers for lock in worker.locks.values() if lock._cached is not None]
        return list({id(cached): cached for cached in (*self.lingering.key_cache._keys.values(), *used)}.values())

    def keeps(self, token: bytes) -> bool:
        """Whether it keeps the key that has this token, or has given it back without a reply so far."""
        unconfirmed = [lease for leases in self.lingering._unconfirmed.values() for lease in leases]
        kept = [cached.lease for cached in self.cached_keys() if cached.lease is not None]
        return any(lease.token == token for lease in (*unconfirmed, *kept))

    def fork(self, name: str) -> Keeper:
        """A child of this process, as the library leaves it after the fork: it has copies of all of the memory."""
        child = Keeper(self._simulation, name)
        child.blocking, child.patience_s, child.retries = self.blocking, self.patience_s, self.retries
        copies = {id(cached): _copy_of(cached, child) for cached in self.cached_keys()}
        child.lingering.key_cache._keys = {
            key: copies[id(cached)] for key, cached in self.lingering.key_cache._keys.items()
        }
        child.lingering.key_cache.is_watched = self.lingering.key_cache.is_watched
        child.lingering._unconfirmed = dict(self.lingering._unconfirmed)
        child.lingering.forget()
        for worker in self.workers[:2]:
            locks = {}
            for what, lock in worker.locks.items():
                twin = locks[what] = copy.copy(lock)
                twin._transport = twin._redis = child
                twin._cached = None if lock._cached is None else copies[id(lock._cached)]
                twin._generation = -1  # of the parent
            child.workers.append(Worker(self._simulation, child, len(child.workers), locks))
        return child


def _copy_of(cached: CachedKey, child: Keeper) -> CachedKey:
    twin = copy.copy(cached)
    twin.cache = child.lingering.key_cache
    twin.locked_by, twin.waiters = dict(cached.locked_by), copy.copy(cached.waiters)
    return twin


class Worker:
    """A task that acquires, holds and releases locks.

    Attributes:
        locks: its lock objects, by key and whether the key may linger.
        state: what it does now.
        token: that of the lock which it holds or releases.
        key: the lock that it uses now.
    """

    def __init__(
        self,
        simulation: Simulation,
        keeper: Keeper,
        number: int,
        locks: dict[tuple[bytes, bool], BareLock] | None = None,
    ) -> None:
        rng = simulation.rng
        self.simulation = simulation
        self.process = keeper
        self.name = f"{keeper.name} worker {number}"
        self.locks = {} if locks is None else locks
        self.state = "idle"
        self.token: bytes | None = None
        self.key = b""
        self.rounds = 2 + int(6 * rng.random())
        self.task: Task = keeper.start(self.name, self._live())
        self.task.owner = self

    def _lock(self) -> BareLock:
        simulation, rng = self.simulation, self.simulation.rng
        self.key = rng.choice(simulation.keys)
        lingers = rng.random() < simulation.lingering
        lock = self.locks.get((self.key, lingers))
        if lock is None:
            ttl_s, sleep_s = simulation.ttl_ms / 1000, simulation.interval_s
            lock = BareLock(self.process, self.key, ttl_s, sleep_s)
            if lingers:
                lock = BareLock(self.process, self.key, ttl_s, sleep_s, linger=simulation.linger_s)
            self.locks[self.key, lingers] = lock
        return lock

    def _live(self) -> Steps:
        simulation, rng = self.simulation, self.simulation.rng
        yield Do("sleep", simulation.think_s * rng.random())
        while self.rounds:
            self.rounds -= 1
            lock = self._lock()
            try:
                yield from self._round(lock)
            except (Trouble, Cancelled) as error:
                simulation.world.tell(self.name, "gave up:", type(error).__name__, str(error))
                simulation.let_go(self)
            self.state, self.token = "idle", None
            yield Do("sleep", simulation.think_s * rng.random())

    def _round(self, lock: BareLock) -> Steps:
        simulation, rng = self.simulation, self.simulation.rng
        self.state = "acquiring"
        simulation.begin(self)
        blocking = rng.random() > 0.2
        patience_s = 0.2 * rng.random() if blocking and not simulation.calm and rng.random() < 0.2 else None
        acquired = yield from self._acquire(lock, blocking, patience_s)
        simulation.world.tell(self.name, "acquired" if acquired else "did not acquire", lock._key)
        if not acquired:
            simulation.note_refusal(self, blocking)
            return
        self.state = "holding"
        owner = lock._held()
        self.token = owner.token
        ends_at = owner.expiry[1]
        assert owner.token is not None
        assert ends_at is not None
        hold = simulation.take(self, owner.token, ends_at)
        yield Do("sleep", simulation.hold_s * rng.random() ** 3)
        if not simulation.calm and rng.random() < 0.03:
            self.state = "forgetting"  # never releases
            yield Do("sleep", simulation.ttl_ms / 1000 * 1.5)
            simulation.forget(self, owner.token)
            self.locks.clear()
            return
        self.state = "releasing"
        simulation.let_go(self)
        try:
            yield from self._release(lock)
        except LockNotOwnedError:
            simulation.note_loss(hold)
        simulation.world.tell(self.name, "released", lock._key)

    def _acquire(self, lock: BareLock, blocking: bool, patience_s: float | None) -> Steps:
        """Acquire as the public locks do."""
        simulation = self.simulation
        owner = lock._mine()
        if lock._linger_ms is not None and take_at_once(lock, lock._cached or cached_key(lock), owner):
            simulation.check_whole_timeout(self, owner.expiry[1] or 0.0)
            return True
        call = new_call(lock, owner, None, blocking, patience_s, None)
        try:
            return (yield from acquire_lock(lock, call))
        finally:
            if call.left:
                self.process.clean_up(call.left)

    def _release(self, lock: BareLock) -> Steps:
        """Release as the public locks do, again and again where that fails."""
        while True:
            owner = lock._held()
            cached: Any = owner.cached
            if cached is not None:
                release_here(lock, owner, cached)
                return
            try:
                yield from release_lock(lock, owner)
            except Trouble:
                if owner.token is None:
                    return
                yield Do("sleep", 0.02)
            except Cancelled:
                assert self.token is not None
                owner.token = None
                self.process.clean_up([(lock._key, self.token)])
                raise
            else:
                return
