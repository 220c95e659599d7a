"""Which servers, times and options a Redlock refuses, and the options that it shares with a lock on one server.

Rules: what is refused sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pybreaker
import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError
from redis.sentinel import Sentinel

import redislock_fast
from redislock_fast import AdaptiveTTL, LossReason, Redlock
from redislock_fast.server import Server
from tests.integration.holding.test_watching import FailureWatcher
from tests.support.redlock import SHORT_S, Make, delete, freezing, values, wait_until_free, wait_until_held
from tests.support.waiting import FAR_S
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

Fleet = list[Server]


@pytest.fixture
def absent(world: World) -> list[Any]:
    """Clients of servers that are not there."""
    return [world.connect(port) for port in range(1, 5)]


@pytest.mark.parametrize(
    ("count", "why"), [(0, "3 servers at least"), (1, "3 servers"), (2, "3 servers"), (4, "odd number")]
)
def test_number_of_servers_without_a_use(world: World, absent: list[Any], count: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        world.redlock(absent[:count], timeout=10)


@pytest.mark.parametrize(
    "again",
    [
        lambda client: client,
        lambda _: redis.Redis(port=1),
        lambda _: redis.Redis(port=1, db=3),
        lambda _: redis.Redis(host="127.0.0.1", port=1),
        lambda client: redis.Redis(connection_pool=client.connection_pool),
    ],
    ids=["client", "address", "database", "host", "pool"],
)
@IN_THREADS
def test_server_that_is_given_twice(again: Callable[[redis.Redis], redis.Redis]) -> None:
    first = redis.Redis(port=1)
    with pytest.raises(ValueError, match="more than once"):
        Redlock([first, redis.Redis(port=2), again(first)], "name", timeout=10)


@IN_THREADS
def test_unix_socket_that_is_given_twice() -> None:
    clients = [redis.Redis(unix_socket_path=path) for path in ("/a", "/b", "/a")]
    with pytest.raises(ValueError, match="more than once"):
        Redlock(clients, "name", timeout=10)


@IN_THREADS
@pytest.mark.parametrize(("sentinels", "is_one"), [((1, 2, 3), False), ((1, 2, 1), True)])
def test_service_of_one_name_at_other_sentinels_is_another_server(sentinels: tuple[int, ...], is_one: bool) -> None:
    clients = [Sentinel([("127.0.0.1", port)]).master_for("service") for port in sentinels]  # type: ignore[no-untyped-call]
    if is_one:
        with pytest.raises(ValueError, match="more than once"):
            Redlock(clients, "name", timeout=10)
    else:
        assert Redlock(clients, "name", timeout=10).servers == tuple(clients)


@pytest.mark.parametrize(
    "odd_one",
    [
        lambda world: redis.asyncio.Redis() if world.in_threads else redis.Redis(),
        lambda world: world.connect(1).pipeline(),
        lambda _: object(),
        lambda _: redislock_fast.Lock,
    ],
    ids=["of the other kind", "pipeline", "object", "class"],
)
def test_object_that_is_no_server_is_refused(
    world: World, absent: list[Any], odd_one: Callable[[World], object]
) -> None:
    with pytest.raises(TypeError):
        world.redlock([*absent[:2], odd_one(world)], timeout=10)


BAD_SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(({"timeout": seconds}, ValueError, "timeout") for seconds in (0, -1, float("nan"), float("inf"), 0.002)),
    *(({"limit": seconds}, ValueError, "limit") for seconds in (0, -1, float("nan"), float("inf"))),
    ({"timeout": None}, TypeError, "timeout"),
    ({"limit": None}, TypeError, "limit"),
    ({"max_hold": 60}, ValueError, "needs auto_renew"),
    ({"max_hold": 5, "auto_renew": True}, ValueError, "shorter than the timeout"),
    ({"max_hold": float("nan"), "auto_renew": True}, ValueError, "max_hold"),
    ({"max_hold": "60", "auto_renew": True}, TypeError, "max_hold"),
    ({"on_lost": 5}, TypeError, "not callable"),
    ({"fencing": True}, TypeError, "fencing"),
]


@pytest.mark.parametrize(("settings", "error", "why"), BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused(
    world: World, absent: list[Any], settings: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        world.redlock(absent[:3], **{"timeout": 10, **settings})


@IN_THREADS
def test_lock_without_tasks_cancels_none(world: World, absent: list[Any]) -> None:
    with pytest.raises(ValueError, match="not an asyncio lock"):
        world.redlock(absent[:3], timeout=10, cancel_on_lost=True)


@pytest.mark.parametrize(
    "arguments", [{"sleep": -1}, {"sleep": float("nan")}, {"blocking_timeout": float("nan")}], ids=str
)
def test_acquire_with_bad_times_sends_nothing(fleet: Fleet, make: Make, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        make(**arguments).acquire()
    assert values(fleet) == [None] * 5


@pytest.mark.parametrize(("added", "replaces"), [(-1, False), (float("nan"), False), (0, True)])
def test_extend_by_bad_times_changes_nothing(make: Make, added: float, replaces: bool) -> None:
    lock = make()
    lock.acquire()
    with pytest.raises(ValueError, match="additional_time"):
        lock.extend(added, replaces)
    assert lock.owned() is True


# Options that it shares with a lock on one server: metrics, breaker, reentrance, adaptive ttl


ON_VALKEY = pytest.mark.parametrize("fleet", ["valkey"], indirect=True)


@ON_VALKEY
def test_metrics_are_told_of_acquisitions_failures_losses_and_releases(make: Make, fleet: Fleet) -> None:
    watcher = FailureWatcher()
    lock, other = make(metrics=watcher), make(metrics=watcher)
    assert lock.acquire()
    assert other.acquire(blocking=False) is False
    lock.release()
    assert [(name, attempts) for name, _, attempts in watcher.acquired] == [("name", 1)]
    assert [(name, success) for name, _, success in watcher.released] == [("name", True)]
    assert watcher.failed == [("name", 1, None)]
    assert lock.acquire()
    delete(fleet)
    with pytest.raises(LockError):
        lock.release()
    assert watcher.lost == [("name", LossReason.DELETED)]
    assert [success for _, _, success in watcher.released] == [True, False]


def test_breaker_hears_of_servers_that_are_gone(world: World) -> None:
    breaker = pybreaker.CircuitBreaker(fail_max=1, reset_timeout=FAR_S)
    lock = world.redlock([world.connect(port) for port in (1, 2, 3)], timeout=10, breaker=breaker, limit=0.05)
    for _ in range(2):
        with pytest.raises((redis.ConnectionError, redis.TimeoutError, pybreaker.CircuitBreakerError)):
            lock.acquire(blocking=False)
    assert breaker.current_state == "open"


@ON_VALKEY
def test_reentrant_redlock_is_released_by_the_last_release(make: Make, fleet: Fleet) -> None:
    lock = make(reentrant=True)
    assert lock.acquire()
    held = values(fleet)
    assert lock.acquire()
    assert values(fleet) == held
    lock.release()
    assert lock.owned()
    lock.release()
    assert not lock.owned()
    with pytest.raises(LockError):
        lock.release()


@ON_VALKEY
def test_redlock_whose_release_was_not_heard_of_is_not_reentered(make: Make, fleet: Fleet) -> None:
    lock = make.connected(reentrant=True, limit=SHORT_S)
    assert lock.acquire()
    wait_until_held(fleet)
    with freezing(*fleet[:3]), pytest.raises(redis.TimeoutError):
        lock.release()
    wait_until_free(fleet)
    assert lock.acquire()
    assert (lock.owned(), lock.valid) == (True, True)
    lock.release()
    assert not lock.owned()


@ON_VALKEY
@pytest.mark.usefixtures("fleet")
def test_ttl_is_learnt(make: Make) -> None:
    lock = make(timeout=AdaptiveTTL(FAR_S, floor=FAR_S / 2, ceiling=2 * FAR_S))
    before = lock.timeout
    for _ in range(129):
        assert lock.acquire()
        lock.release()
    assert lock.acquire()
    assert (before, FAR_S / 2) == (FAR_S, lock.timeout)
    lock.release()


@ON_VALKEY
@pytest.mark.usefixtures("fleet")
def test_lease_is_believed_no_longer_than_it_was_set_though_the_ttl_has_grown(world: World, make: Make) -> None:
    ttl = AdaptiveTTL(FAR_S, ceiling=1e6)
    lock = make(timeout=ttl)
    assert lock.acquire()
    ttl.observe("name", 1e5)
    assert world.beside(lambda: lock.acquire(blocking=False)) is False
    lock.extend(10, replace_ttl=True)
    assert 0 < lock.remaining() < 10
    lock.release()


@ON_VALKEY
@pytest.mark.usefixtures("fleet")
def test_learnt_ttl_is_no_longer_than_max_hold(make: Make) -> None:
    ttl = AdaptiveTTL(FAR_S)
    before = make(timeout=ttl, auto_renew=True, max_hold=2 * FAR_S)
    ttl.observe("name", FAR_S)
    after = make(timeout=ttl, auto_renew=True, max_hold=2 * FAR_S)
    assert before.acquire()
    assert [2 * FAR_S] * 2 == [before.timeout, after.timeout]
    before.release()


def test_error_tells_the_name_and_the_time_that_it_took(world: World) -> None:
    lock = world.redlock([world.connect(port) for port in (1, 2, 3)], timeout=10, limit=0.05)
    refused_or_late = (redis.ConnectionError, redis.TimeoutError)
    with pytest.raises(refused_or_late, match=r"the lock 'name': only 0 of 3 .* the call took \d\.\d{3} s"):
        lock.acquire(blocking=False)
