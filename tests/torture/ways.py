"""How one caller uses locks, in a thread or in a task, and notes all of it.

The text is written once, as coroutines: `settle` awaits what a task's lock returns, and takes what a thread's lock
returns as it is. So a coroutine never waits in a thread, and one `send` runs it to its end.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError, RedisClusterException, RedisError

from tests.support.times import drift_s
from tests.torture.history import FAIL, INFO, NOT_OWNED, OK, SECOND, Log, limit_of, now_ns
from tests.torture.progress import CHECK_S
from tests.torture.resource import Resource

__all__ = ["GROUPS", "TROUBLES", "Caller", "Process", "World", "run_in_thread"]

TROUBLES = (RedisError, RedisClusterException)
"""The errors of redis-py for requests to a server, and for a cluster of which no node can be reached."""

TTLS_S = (0.3, 0.6, 1.5)
LINGER_S = 0.05
SLICE_S = 0.03
TOLD_WITHIN_S = 0.2

GROUPS: dict[str, tuple[str, ...]] = {
    "queue": ("push", "push", "push", "renew", "reentrant", "detach", "drop", "fork"),
    "linger": ("linger", "linger", "linger", "push"),
    "fenced": ("fenced", "fenced", "fenced linger"),
    "mixed": ("push", "linger", "poll", "token", "batch", "renew", "detach"),
    "own": ("push", "linger", "batch", "push", "linger", "push", "linger"),
    "redlock": ("redlock", "redlock", "renew", "reentrant", "drop"),
    "permits": ("permit", "permit", "renewed permit"),
}
"""The ways of acquiring, by the first word of a lock's name."""

_SETTINGS: dict[str, dict[str, Any]] = {
    "poll": {"wait": "poll", "sleep": 0.02},
    "linger": {"linger": LINGER_S},
    "renew": {"auto_renew": True},
    "drop": {"auto_renew": True},
    "reentrant": {"reentrant": True},
    "fenced": {"fencing": True},
    "fenced linger": {"fencing": True, "linger": LINGER_S},
    "permit": {"auto_renew": False},
    "renewed permit": {"auto_renew": True},
}

_BY = {"linger": "linger", "fenced linger": "linger", "poll": "poll", "token": "token", "batch": "batch"}
_BY |= {"permit": "permit", "renewed permit": "permit"}
"""As what the checker knows the ways; the others queue ("push")."""


async def settle(value: Any) -> Any:
    """The result of a call, awaited where it is a task's."""
    return await value if inspect.isawaitable(value) else value


class _Permits:
    """A semaphore with the methods of a lock that a `Caller` uses: it has one permit at a time."""

    def __init__(self, semaphore: Any, timeout: float) -> None:
        self._semaphore = semaphore
        self._permit: Any = None
        self.timeout = timeout

    async def acquire(self, **asking: Any) -> bool:
        self._permit = await settle(self._semaphore.acquire(**asking))
        return self._permit is not None

    async def release(self) -> None:
        await settle(self._permit.release())

    def remaining(self) -> float:
        left_s: float = self._permit.remaining()
        return left_s

    async def reacquire(self) -> None:
        """A permit's owner does not prolong it."""

    async def extend(self, _: float) -> None:
        """The same."""


@dataclass(frozen=True)
class World:
    """What differs between threads and tasks.

    Attributes:
        clients: of the servers.
        library: the module with the public classes.
    """

    clients: list[Any]
    library: Any
    sleep: Callable[[float], Any]
    is_blocking: bool

    @property
    def client(self) -> Any:
        """The client of the only server."""
        return self.clients[0]

    def lock(self, name: str, **settings: Any) -> Any:
        """A lock on the only server, or on all of them."""
        if name.startswith("permits:"):
            return _Permits(self.library.Semaphore(self.client, name, limit_of(name), **settings), settings["timeout"])
        if len(self.clients) > 1:
            return self.library.Redlock(self.clients, name, **settings, limit=1.0)
        return self.library.Lock(self.client, name, **settings)


@dataclass
class Process:
    """What all callers of a process share.

    Attributes:
        names: of the locks that all processes use.
        ends_at: when callers begin no further use, by the clock of leases in nanoseconds.
        resource: what fenced locks protect.
    """

    log: Log
    seed: int
    names: tuple[str, ...]
    ends_at: int
    resource: Resource
    served: int = field(default=0, compare=False)


def run_in_thread(steps: Any) -> None:
    """Run a coroutine that never waits."""
    with contextlib.suppress(StopIteration):
        steps.send(None)
        raise AssertionError("a thread's coroutine waits")


def _is_of_closed_loop(error: BaseException | None) -> bool:
    """Whether it was raised while a task was dropped: redis-py's cluster client then starts tasks, without a loop."""
    while error is not None:
        if isinstance(error, GeneratorExit):
            return True
        error = error.__context__
    return False


class Caller:
    """One thread or task, which uses one lock after the other.

    Args:
        process: what it shares with others.
        world: of threads or of tasks.
        number: its own.
    """

    def __init__(self, process: Process, world: World, number: int) -> None:
        self._process = process
        self._log = process.log
        self._world = world
        self._number = number
        self._uses = 0
        self.chance = random.Random(f"{process.seed} {process.log.process} {number}")

    @property
    def goes_on(self) -> bool:
        """Whether there is time for another use."""
        return now_ns() < self._process.ends_at

    async def use_one(self) -> None:
        """Acquire a lock, hold it and release it, in one of the ways that its name allows."""
        self._uses += 1
        name = self.chance.choice(self._process.names)
        if self.chance.random() < 0.4 and len(self._world.clients) == 1:
            name = f"own:{self._log.process}:{self.chance.randrange(3)}"
        way = self.chance.choice(GROUPS[name.partition(":")[0]])
        if way == "fork" and (not self._world.is_blocking or self.chance.random() > 0.02):
            way = "push"
        try:
            await (self._use_batch(name) if way == "batch" else self._use(name, way))
        except Exception as error:
            if not _is_of_closed_loop(error):
                self._log.note("error", text=traceback.format_exc())

    # ---- one lock ----

    def _next_id(self) -> str:
        return f"{self._log.process}-{self._number}-{self._uses}"

    async def _use(self, name: str, way: str) -> None:
        chance, id_ = self.chance, self._next_id()
        settings: dict[str, Any] = {"timeout": chance.choice(TTLS_S), "sleep": CHECK_S, **_SETTINGS.get(way, {})}
        if len(self._world.clients) > 1:
            settings |= {"sleep": 0.02, "timeout": 1.5}  # five connections are made within the first lease
        is_watched = way in ("renew", "drop", "renewed permit") or chance.random() < 0.1
        if is_watched:
            settings["on_lost"] = self._noting_loss(id_)
        lock = self._world.lock(name, **settings)
        asking: dict[str, Any] = {}
        if way == "token":
            asking["token"] = f"job {chance.randrange(2)}"
        kind = chance.random()
        if kind < 0.2:
            asking["blocking"] = False
        elif kind < 0.8:
            asking["blocking_timeout"] = chance.choice((0.004, 0.05, 0.5, 1.0)) * chance.random()
        asked = {"way": way, "is_watched": is_watched, "label": asking.get("token", "")}
        try:
            if not await self._acquire(id_, lock, name, asking, asked):
                return
        except BaseException:  # an interrupt may have come behind the note of a success: the lock is dropped
            self._log.note("releasing", id=id_)
            self._log.note("released", id=id_, outcome=INFO, reason="dropped")
            raise
        held = [lock]  # the only reference that is left, for `drop`
        del lock
        await self._hold(id_, held, way)

    def _noting_loss(self, id_: str) -> Callable[[Any, Any], None]:
        def note(_: Any, reason: Any) -> None:
            self._log.note("lost", id=id_, reason=str(reason))

        return note

    async def _acquire(self, id_: str, lock: Any, name: str, asking: dict[str, Any], asked: dict[str, Any]) -> bool:
        waits = asking.get("blocking", True)
        limit_s = asking.get("blocking_timeout")
        by = "redlock" if len(self._world.clients) > 1 else _BY.get(asked["way"], "push")
        self._log.note("asked", id=id_, name=name, by=by, waits=waits, limit_s=limit_s, **asked)
        try:
            acquired = await settle(lock.acquire(**asking))
        except BaseException as error:
            self._log.note("answered", id=id_, outcome=INFO, reason=type(error).__name__, text=str(error))
            if isinstance(error, TROUBLES):
                return False
            raise
        if not acquired:
            self._log.note("answered", id=id_, outcome=FAIL)
            return False
        self._process.served += 1
        now = now_ns()
        self._log.note(
            "answered", now, id=id_, outcome=OK, until=self._until(now, lock), fence=getattr(lock, "fence", None)
        )
        return True

    @staticmethod
    def _until(now: int, lock: Any) -> int:
        left_s = lock.remaining()
        return now + int(left_s * SECOND) if left_s else 0

    async def _hold(self, id_: str, held: list[Any], way: str) -> None:
        try:
            if way == "detach":
                await self._pass_on(id_, held)
            elif way == "reentrant":
                await self._reenter(held[0])
            elif way == "fork":
                await self._fork(id_, held[0])
            if way.startswith("fenced"):
                await self._update(held[0])
            await self._stay(id_, held)
        except GeneratorExit:  # its loop is no more
            self._log.note("releasing", id=id_)
            self._log.note("released", id=id_, outcome=INFO, reason="GeneratorExit")
            raise
        except BaseException:
            await self._release(id_, held)
            raise
        if way == "drop":
            self._log.note("releasing", id=id_, until=self._until(now_ns(), held[0]))
            self._log.note("released", id=id_, outcome=INFO, reason="dropped")
            held.clear()
        else:
            await self._release(id_, held)

    async def _stay(self, id_: str, held: list[Any]) -> None:
        """Hold the lock for a while: mostly shortly, sometimes for longer than its lease."""
        chance, kind, lock = self.chance, self.chance.random(), held[0]
        stays_s = chance.random() * (0.002 if kind < 0.95 else 0.05 if kind < 0.99 else 1.5 * lock.timeout)
        if stays_s > SLICE_S and chance.random() < 0.3:
            with contextlib.suppress(*TROUBLES):  # what it means for the lease, `remaining` says
                await settle(lock.reacquire() if chance.random() < 0.5 else lock.extend(0.2))
        ends_at = now_ns() + int(stays_s * SECOND)
        while (left_s := (ends_at - now_ns()) / SECOND) > 0:
            await settle(self._world.sleep(min(left_s, SLICE_S)))
            if stays_s > SLICE_S:
                now = now_ns()
                until = self._until(now, lock)
                self._log.note("seen", now, id=id_, until=until)
                if not until:
                    await settle(self._world.sleep(TOLD_WITHIN_S))
                    return

    async def _release(self, id_: str, held: list[Any]) -> None:
        lock = held[0]
        now = now_ns()
        self._log.note("releasing", now, id=id_, until=self._until(now, lock))
        try:
            await settle(lock.release())
        except BaseException as error:
            outcome = NOT_OWNED if isinstance(error, LockNotOwnedError) else INFO
            self._log.note("released", id=id_, outcome=outcome, reason=type(error).__name__, text=str(error))
            if not isinstance(error, TROUBLES):
                raise
        else:
            self._log.note("released", id=id_, outcome=OK)

    # ---- what is done with a held lock ----

    async def _pass_on(self, id_: str, held: list[Any]) -> None:
        """Detach the lock, and attach it as another process would."""
        attach, settings = self._world.library.Lock.attach, {"sleep": CHECK_S, "on_lost": self._noting_loss(id_)}
        with contextlib.suppress(LockNotOwnedError):  # it is lost already
            handle = held[0].detach()
            try:
                held[0] = attach(self._world.client, handle, **settings)
            except KeyboardInterrupt:  # whoever interrupts a process must not lose the handle
                held[0] = attach(self._world.client, handle, **settings)
                raise

    async def _reenter(self, lock: Any) -> None:
        with contextlib.suppress(LockNotOwnedError):
            assert await settle(lock.acquire())
            await settle(lock.release())

    async def _update(self, lock: Any) -> None:
        """Update what the lock protects, if its fence is high enough."""
        fence, resource = lock.fence, self._process.resource
        read = resource.read(lock.name, fence)
        if read is None:
            return
        await settle(self._world.sleep(0.002 * self.chance.random()))
        accepted = resource.write(lock.name, fence, read)
        self._log.note("write", name=lock.name, fence=fence, read=read, accepted=accepted)

    async def _fork(self, id_: str, lock: Any) -> None:
        """Fork while the lock is held: the child holds nothing, and may acquire locks of its own."""
        now = now_ns()
        self._log.note("fault", now, kind="fork", until=now)
        child = os.fork()
        if child == 0:
            os._exit(self._status_of_child(id_, lock))
        give_up = time.monotonic() + 10
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > give_up:
                os.kill(child, signal.SIGABRT)
                os.waitpid(child, 0)
                self._log.note("error", text=f"the child of {id_} does not end")
                return
            time.sleep(0.002)

    def _status_of_child(self, id_: str, lock: Any) -> int:
        try:
            if lock.remaining() > 0:
                self._log.note("error", text=f"a forked child holds the lock of {id_}")
            with contextlib.suppress(LockError):
                lock.release()
                self._log.note("error", text=f"a forked child has released the lock of {id_}")
            with contextlib.suppress(*TROUBLES):
                own = self._world.lock(f"child:{id_}", timeout=0.5)
                if own.acquire(blocking_timeout=1):
                    own.release()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            self._log.note("error", text=traceback.format_exc())
        return 0

    # ---- many locks ----

    async def _use_batch(self, name: str) -> None:
        chance, id_ = self.chance, self._next_id()
        group = name.partition(":")[0]
        names = [name for name in self._process.names if name.startswith(group)] or [name, name + ":a", name + ":b"]
        ttl_s = chance.choice(TTLS_S)
        ids = {name: f"{id_}-{name}" for name in names}
        asked = 0
        limit_s = chance.choice((0, 0.1, 0.3))
        for one, of_one in ids.items():
            asked = self._log.note("asked", id=of_one, name=one, by="batch", waits=False, limit_s=limit_s or None)
        locker = self._world.library.Locker(self._world.client)
        try:
            batch = await settle(
                locker.acquire_many(names, ttl_s, limit_s, sleep=0.05, all_or_nothing=chance.random() < 0.5)
            )
        except BaseException as error:
            for of_one in ids.values():
                self._log.note("answered", id=of_one, outcome=INFO, reason=type(error).__name__, text=str(error))
            if isinstance(error, TROUBLES):
                return
            raise
        self._process.served += len(batch.acquired)
        until = asked + int((ttl_s - drift_s(ttl_s)) * SECOND)
        for one in batch.missed:
            self._log.note("answered", id=ids.pop(one), outcome=FAIL)
        for of_one in ids.values():
            self._log.note("answered", id=of_one, outcome=OK, until=until)
        try:
            await settle(self._world.sleep(0.002 * chance.random()))
        finally:
            if not isinstance(sys.exc_info()[1], GeneratorExit):
                await self._release_batch(batch, ids)

    async def _release_batch(self, batch: Any, ids: dict[str, str]) -> None:
        for of_one in ids.values():
            self._log.note("releasing", id=of_one)
        try:
            results = await settle(batch.release())
        except BaseException as error:
            for of_one in ids.values():
                self._log.note("released", id=of_one, outcome=INFO, reason=type(error).__name__, text=str(error))
            if not isinstance(error, TROUBLES):
                raise
        else:
            for one, of_one in ids.items():
                self._log.note("released", id=of_one, outcome=OK if results.get(one) else NOT_OWNED)


class OthersCaller(Caller):
    """A caller of redis-py's own lock, on the locks that are for all."""

    async def use_one(self) -> None:
        """Try to acquire a lock, and hold and release it."""
        self._uses += 1
        chance, id_ = self.chance, self._next_id()
        name = chance.choice([name for name in self._process.names if name.startswith("mixed")])
        ttl_s = chance.choice(TTLS_S)
        lock = redis.lock.Lock(self._world.client, name, timeout=ttl_s, blocking=False)
        asked = self._log.note("asked", id=id_, name=name, by="redis-py", waits=False)
        try:
            acquired = lock.acquire()
        except TROUBLES as error:
            self._log.note("answered", id=id_, outcome=INFO, reason=type(error).__name__, text=str(error))
            return
        if not acquired:
            self._log.note("answered", id=id_, outcome=FAIL)
            time.sleep(0.01)
            return
        until = asked + int((ttl_s - drift_s(ttl_s)) * SECOND)
        self._log.note("answered", id=id_, outcome=OK, until=until)
        time.sleep(0.005 * chance.random())
        self._log.note("releasing", id=id_)
        try:
            lock.release()
        except TROUBLES as error:
            outcome = NOT_OWNED if isinstance(error, LockNotOwnedError) else INFO
            self._log.note("released", id=id_, outcome=outcome, reason=type(error).__name__, text=str(error))
        else:
            self._log.note("released", id=id_, outcome=OK)
