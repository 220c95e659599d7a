"""The metrics of locks that are held: each holding is counted once, however it ends. Threads and tasks alike."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError

from redislock_fast import Handle, Lock
from redislock_fast.server import Server
from tests.conftest import Connect, Servers
from tests.integration.metrics.conftest import Exposed
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, Contender
from tests.support.worlds import World

SETTINGS = pytest.mark.parametrize(
    "settings", [{}, {"timeout": FAR_S}, {"timeout": FAR_S, "auto_renew": True}, {"timeout": FAR_S, "linger": FAR_S}]
)


@SETTINGS
def test_an_acquire_and_a_release_are_recorded(
    exposed: Exposed, world: World, valkey: Server, settings: dict[str, Any]
) -> None:
    lock = world.lock(world.connect(valkey.port), "name:17", **settings)
    for count in range(1, 4):
        assert lock.acquire()
        assert (exposed.acquired(), exposed.held) == (count, 1)
        lock.release()
        assert (exposed.value("hold_duration_seconds_count"), exposed.held) == (count, 0)
    assert exposed.value("acquire_duration_seconds_sum", result="acquired") > 0
    assert exposed.value("hold_duration_seconds_sum") > 0


def test_locks_of_one_name_are_added_up(exposed: Exposed, world: World, valkey: Server) -> None:
    client = world.connect(valkey.port)
    locks = [world.lock(client, name) for name in ("name:1", b"name:2", "name{3}", "another")]
    for lock in locks:
        assert lock.acquire()
    assert (exposed.held, exposed.value("held", "another")) == (3, 1)
    for lock in locks:
        lock.release()
    assert (exposed.held, exposed.value("held", "another")) == (0, 0)


def test_an_acquire_that_fails_is_recorded_by_its_result(
    exposed: Exposed, world: World, valkey: Server, connect: Connect
) -> None:
    holder = world.lock(world.connect(valkey.port))
    assert holder.acquire()
    assert world.lock(world.connect(valkey.port)).acquire(blocking=False) is False
    connect(valkey.port).rpush("name:2", 1)
    with pytest.raises(redis.ResponseError):
        world.lock(world.connect(valkey.port), "name:2").acquire()
    assert (exposed.acquired("not_acquired"), exposed.acquired("error"), exposed.held) == (1, 1, 1)
    holder.release()


def test_a_lock_that_is_entered_twice_is_held_once(exposed: Exposed, world: World, valkey: Server) -> None:
    lock = world.lock(world.connect(valkey.port), timeout=FAR_S, reentrant=True)
    assert lock.acquire()
    assert lock.acquire()
    lock.release()
    assert (exposed.acquired(), exposed.held) == (1, 1)
    lock.release()
    assert exposed.held == 0


@pytest.mark.parametrize("verb", ["release", "extend"])
def test_a_lock_that_was_lost_is_not_held(
    exposed: Exposed, holders: Holders, valkey: Server, connect: Connect, verb: str
) -> None:
    lock = holders.hold(valkey.port, timeout=FAR_S)
    connect(valkey.port).delete("name")
    with pytest.raises(LockNotOwnedError):
        lock.call(verb, *([1] if verb == "extend" else []))
    assert (exposed.held, exposed.value("lost_total", reason="deleted")) == (0, 1)


def test_a_lock_that_is_watched_is_recorded_as_lost_without_a_release(
    exposed: Exposed, holders: Holders, valkey: Server
) -> None:
    lock = holders.hold(valkey.port, timeout=0.05, on_lost=print)
    exposed.until("lost_total", 1, reason="expired")
    assert (lock.lock.lost, exposed.held) == (True, 0)


def test_a_lock_that_was_lost_and_acquired_again_is_held_once(
    exposed: Exposed, holders: Holders, valkey: Server, connect: Connect
) -> None:
    lock = holders.hold(valkey.port, timeout=FAR_S)
    connect(valkey.port).delete("name")
    assert lock.call("acquire")
    assert (exposed.acquired(), exposed.held) == (2, 1)


def test_a_lock_that_is_detached_is_not_held_until_it_is_attached(
    exposed: Exposed, holders: Holders, valkey: Server
) -> None:
    handle: Handle = holders.hold(valkey.port, timeout=FAR_S).lock.detach()
    assert exposed.held == 0
    lock = holders.attach(valkey.port, handle)
    assert exposed.held == 1
    lock.release()
    assert (exposed.acquired(), exposed.held) == (1, 0)


@SETTINGS
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lock_object_that_is_dropped_is_not_held(
    exposed: Exposed, holders: Holders, valkey: Server, settings: dict[str, Any]
) -> None:
    holders.hold(valkey.port, **settings)
    assert exposed.held == 1
    holders.drop()
    gc.collect()
    holders.hold(valkey.port, "another")  # what a finalizer reports goes with the next report
    assert exposed.held == 0


def test_a_dropped_lock_without_a_watch_stays_on_the_server(
    exposed: Exposed, world: World, valkey: Server, connect: Connect
) -> None:
    """Metrics change nothing of what a lock does."""
    assert world.lock(world.connect(valkey.port), timeout=FAR_S).acquire()
    gc.collect()
    assert connect(valkey.port).exists("name")
    assert exposed.acquired() == 1


def test_a_forked_child_holds_nothing(in_fork: InFork, exposed: Exposed, valkey: Server, connect: Connect) -> None:
    lock = Lock(connect(valkey.port), "name", timeout=FAR_S)
    assert lock.acquire()

    def work() -> str:
        other = Lock(connect(valkey.port), "name:2", timeout=FAR_S)
        assert other.acquire()
        held = exposed.held
        other.release()
        return f"{held} {exposed.held}"

    assert in_fork(work) == "1.0 0.0"
    assert exposed.held == 1


@pytest.fixture
def redlock(exposed: Exposed, holders: Holders, servers: Servers) -> Contender:
    """A Redlock on three servers that is held."""
    fleet = [servers.get("valkey", number) for number in range(3)]
    for server in fleet:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    return holders.hold_redlock(holders.clients(fleet), timeout=FAR_S)


def test_a_redlock_is_recorded(exposed: Exposed, redlock: Contender) -> None:
    assert (exposed.acquired(), exposed.held) == (1, 1)
    redlock.release()
    assert (exposed.value("hold_duration_seconds_count"), exposed.held) == (1, 0)


class Meanwhile:
    """Metrics of a lock that another thread acquires again as its first release is recorded.

    Its token is that of a lock that all threads share.

    Attributes:
        held: the serials of what counts as held.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.lock = Lock(client, "name", timeout=FAR_S, metrics=self)
        self.lock.local = Lock(client, "name", thread_local=False).local
        self.held: set[int] = set()
        self._releases = 0

    def record_acquisition(self, name: str | bytes, seconds: float, attempts: int) -> None:
        """Nothing is asked of it."""

    def record_release(self, name: str | bytes, hold_s: float, success: bool) -> None:
        """Have the lock acquired again, the first time."""
        self._releases += 1
        if self._releases == 1:
            with ThreadPoolExecutor(1) as threads:
                assert threads.submit(self.lock.acquire).result(PATIENCE_S)

    def record_holding(self, name: str | bytes, serial: int, is_held: bool) -> None:
        """Count what is held."""
        (self.held.add if is_held else self.held.discard)(serial)


def test_a_release_ends_no_holding_of_another_thread_that_shares_the_lock(valkey: Server, connect: Connect) -> None:
    metrics = Meanwhile(connect(valkey.port))
    assert not metrics.lock.locked()  # connected, an acquire needs no more than its reply
    assert metrics.lock.acquire()
    metrics.lock.release()
    assert (len(metrics.held), metrics.lock.owned()) == (1, True)
    metrics.lock.release()
    assert (len(metrics.held), metrics.lock.owned()) == (0, False)
