"""What a Redlock does for the tasks of an event loop, while its servers are well and while some are not.

Rules: five real servers, of one kind and of several; on both kinds of loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError, ResponseError

from redislock_fast.asyncio import Redlock
from redislock_fast.server import Server
from tests.integration.lock.test_asyncio_cancel import CANCELS, Cancelled
from tests.integration.waiting.test_asyncio_giving_up import DropAt
from tests.support.async_helpers import AsyncClients, Owner, eventually, in_loop, in_task
from tests.support.helpers import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.redlock import LIMIT_S, SHORT_S, clients_of, freezing, take, values
from tests.support.times import drift_s

Fleet = list[Server]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


class _Make:
    """Makes locks on the clients of five servers."""

    def __init__(self, connect: AsyncClients, fleet: Fleet) -> None:
        self._connect = connect
        self._ports = [server.port for server in fleet]

    def __call__(self, name: str = "name", **settings: Any) -> Redlock:
        """A lock on clients of its own, as another process has it."""
        return Redlock(self.clients(), name, **{"timeout": 30, "limit": LIMIT_S, **settings})

    def clients(self, **options: Any) -> list[redis.asyncio.Redis]:
        """A client of each server."""
        return [self._connect(port, **options) for port in self._ports]


@pytest.fixture
def make(async_connect: AsyncClients, fleet: Fleet) -> _Make:
    return _Make(async_connect, fleet)


async def _until_free(fleet: Fleet) -> None:
    await eventually(lambda: not any(values(fleet)), "the key is gone everywhere")


async def _until_held(fleet: Fleet) -> None:
    await eventually(lambda: all(values(fleet)), "the key is there everywhere")


async def _use(lock: Redlock) -> None:
    """All that a lock can do, in less time than a silent server is waited for."""
    async with asyncio.timeout(PATIENCE_S) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
        assert await lock.acquire(blocking=False) is True
        assert await lock.extend(10) is True
        assert await lock.reacquire() is True
        assert (await lock.locked(), await lock.owned()) == (True, True)
        await lock.release()


# While all is well


@in_loop
async def test_acquire_sets_one_token_everywhere_and_release_takes_it_away(fleet: Fleet, make: _Make) -> None:
    lock = make()
    assert await lock.acquire() is True
    await _until_held(fleet)
    assert len(set(values(fleet))) == 1
    assert lock.verdicts.count(True) >= 3
    await lock.release()
    await _until_free(fleet)


@in_loop
async def test_what_is_held_cannot_be_had(fleet: Fleet, make: _Make) -> None:
    async with make():
        await _until_held(fleet)
        before = values(fleet)
        assert await make().acquire(blocking=False) is False
        assert await make(sleep=0.01).acquire(blocking_timeout=0.05) is False
        with pytest.raises(LockError, match="within the time specified"):
            await make(blocking=False).__aenter__()
        assert values(fleet) == before
    await _until_free(fleet)


@in_loop
async def test_a_minority_is_given_back(fleet: Fleet, make: _Make) -> None:
    take(fleet[:3])
    lock = make()
    assert await lock.acquire(blocking=False) is False
    assert lock.verdicts[:3] == (False, False, False)
    await eventually(lambda: values(fleet)[3:] == [None, None], "the rest is undone")


@in_loop
async def test_contending_tasks_never_hold_it_together(fleet: Fleet, make: _Make) -> None:
    holders: list[int] = []

    async def contend(number: int) -> None:
        lock = make(sleep=0.01)
        for _ in range(10):
            async with lock:
                holders.append(number)
                await asyncio.sleep(0)
                assert holders == [number]
                holders.remove(number)

    await asyncio.gather(*map(contend, range(4)))
    await _until_free(fleet)


@in_loop
async def test_lease(fleet: Fleet, make: _Make) -> None:
    lock = make(timeout=100)
    assert (lock.valid, lock.remaining()) == (False, 0.0)
    await lock.acquire()
    await _until_held(fleet)
    assert 90 < lock.remaining() <= 100 - drift_s(100)
    await lock.extend(200)
    assert 290 < lock.remaining() <= 300 - drift_s(300)
    await lock.extend(50, replace_ttl=True)
    assert 40 < lock.remaining() <= 50 - drift_s(50)
    await lock.reacquire()
    assert 90 < lock.remaining() <= 100 - drift_s(100)
    await eventually(lambda: all(client.pttl("name") > 90_000 for client in clients_of(fleet)), "it is everywhere")
    await lock.release()
    assert (lock.valid, lock.remaining()) == (False, 0.0)


@in_loop
async def test_lost_lock_is_not_prolonged_and_its_rest_is_given_back(fleet: Fleet, make: _Make) -> None:
    lock = make()
    await lock.acquire()
    await _until_held(fleet)
    for client in clients_of(fleet[:3]):
        client.delete("name")
    with pytest.raises(LockNotOwnedError):
        await lock.extend(10)
    await _until_free(fleet)
    with pytest.raises(LockError):
        await lock.release()


@in_loop
async def test_token_belongs_to_the_task(make: _Make) -> None:
    lock = make()
    async with Owner(lock):  # type: ignore[arg-type]  # it has the methods of a lock
        assert lock.remaining() == 0.0
        with pytest.raises(LockError):
            await lock.release()
        assert await lock.owned() is False
        assert await lock.locked() is True


@in_loop
async def test_copy_shares_the_clients_and_the_ownership(make: _Make) -> None:
    lock = make()
    await lock.acquire()
    twin = copy.copy(lock)
    assert twin.servers is lock.servers
    await twin.release()
    assert lock.remaining() == 0.0


@in_loop
async def test_lock_cannot_be_pickled(make: _Make) -> None:
    with pytest.raises(TypeError, match="'name' cannot be pickled: make it anew"):
        pickle.dumps(make())


@in_loop
async def test_two_loops_in_turn(make: _Make) -> None:
    lock = make(thread_local=False)
    await lock.acquire()
    await asyncio.to_thread(lambda: asyncio.run(_use(make("other"))))
    await lock.release()


# While some are not


@in_loop
async def test_what_a_dropped_task_has_begun_is_undone(fleet: Fleet, make: _Make) -> None:
    lock = make()
    await lock.locked()  # connects
    await DropAt(lock.acquire(), 0)
    assert not lock.valid
    await lock.locked()  # behind it
    await _until_free(fleet)


@in_loop
async def test_frozen_minority_is_not_waited_for(fleet: Fleet, make: _Make) -> None:
    lock = make()
    await _use(lock)
    await _until_free(fleet)
    with freezing(*fleet[:2]):
        for _ in range(20):
            await _use(lock)
    await _until_free(fleet)


@in_loop
async def test_minority_frozen_from_the_start_is_waited_for_once(fleet: Fleet, make: _Make) -> None:
    clients = make.clients()
    with freezing(*fleet[:2]):
        await _use(Redlock(clients, "name", timeout=30, limit=SHORT_S))
        for _ in range(3):
            await _use(Redlock(clients, "name", timeout=30, limit=LIMIT_S))
    await _until_free(fleet)


@in_loop
async def test_dead_minority_is_no_failure_and_is_asked_again(fleet: Fleet, make: _Make) -> None:
    lock = make()
    await _use(lock)
    for server in fleet[:2]:
        server.kill()
    for _ in range(3):
        await _use(lock)
        await _use(make())
    for server in fleet[:2]:
        server.start()

    async def takes_part() -> bool:
        async with lock:
            return values(fleet)[0] is not None

    await eventually(takes_part, "it is asked again")


@in_loop
async def test_frozen_server_is_not_owed_ever_more(fleet: Fleet, make: _Make) -> None:
    lock = make()
    await _use(lock)
    with redis.Redis(port=fleet[0].port) as client:
        client.config_resetstat()
        with freezing(fleet[0]):
            for _ in range(500):
                async with lock:
                    pass
        await _until_free(fleet)
        assert client.info("commandstats")["cmdstat_set"]["calls"] < 100


@in_loop
async def test_frozen_majority_is_a_timeout_and_leaves_nothing(fleet: Fleet, make: _Make) -> None:
    lock = make(limit=SHORT_S)
    await _use(lock)
    with freezing(*fleet[:3]):
        with pytest.raises(redis.TimeoutError, match="servers have voted"):
            await lock.acquire(blocking=False)
        assert lock.valid is False
    await _until_free(fleet)
    await _use(lock)


@in_loop
async def test_dead_majority_is_a_connection_error_until_it_is_back(fleet: Fleet, make: _Make) -> None:
    lock = make(limit=SHORT_S)
    await _use(lock)
    for server in fleet[:3]:
        server.kill()
    with pytest.raises(redis.ConnectionError):
        await lock.acquire(blocking=False)
    with pytest.raises(redis.ConnectionError):
        await lock.acquire()
    for server in fleet[:3]:
        server.start()
    assert await lock.acquire(blocking_timeout=PATIENCE_S) is True
    await lock.release()


@in_loop
async def test_extend_without_answers_leaves_the_lease_as_it_was(fleet: Fleet, make: _Make) -> None:
    lock = make(limit=SHORT_S)
    await lock.acquire()
    await _until_held(fleet)
    before = lock.remaining()
    with freezing(*fleet[:3]), pytest.raises(redis.TimeoutError):
        await lock.extend(100)
    assert before - 10 < lock.remaining() <= before
    assert await lock.owned() is True


@pytest.mark.slow
@in_loop
async def test_release_without_answers_can_be_called_again(fleet: Fleet, make: _Make) -> None:
    lock = make(limit=SHORT_S)
    await lock.acquire()
    await _until_held(fleet)
    with freezing(*fleet[:3]), pytest.raises(redis.TimeoutError):
        await lock.release()
    await _until_free(fleet)
    await lock.release()


@in_loop
async def test_release_that_is_lost_unread_is_done_again(
    fleet: Fleet, make: _Make, async_connect: AsyncClients
) -> None:
    with Proxy(fleet[4].port) as proxy:
        lock = Redlock([*make.clients()[:4], async_connect(proxy.port)], "name", timeout=30, limit=LIMIT_S)
        await lock.acquire()
        await _until_held(fleet)
        proxy.stall()
        await lock.release()
        assert lock.verdicts[4] is None
        proxy.cut()
        await _until_free(fleet)


@in_loop
async def test_connections_killed_between_two_operations(fleet: Fleet, make: _Make) -> None:
    lock = make()
    for use in (lock.acquire, lambda: lock.extend(10), lock.reacquire, lock.owned, lock.release):
        for client in clients_of(fleet):
            client.client_kill_filter(_type="normal", skipme=True)
        assert await use() in (True, None)
    await _until_free(fleet)


@in_loop
async def test_errors_of_a_majority_are_raised_at_once(fleet: Fleet, make: _Make) -> None:
    for client in clients_of(fleet[:3]):
        client.lpush("name", "no string")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await make().acquire()
    await eventually(lambda: values(fleet[3:]) == [None, None], "the rest is undone")


# Cancelling


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_cancelled_acquire_leaves_nothing(
    fleet: Fleet, make: _Make, cancelled: Cancelled, counts: list[int]
) -> None:
    clients = make.clients()
    for count in counts:
        lock = Redlock(clients, "name", timeout=30, limit=LIMIT_S)
        if not await cancelled(lock.acquire, count):
            break
        assert lock.remaining() == 0.0
        await _until_free(fleet)


@pytest.mark.parametrize(("cancelled", "counts"), CANCELS)
@in_loop
async def test_cancelled_release_goes_on(fleet: Fleet, make: _Make, cancelled: Cancelled, counts: list[int]) -> None:
    lock = make(thread_local=False)
    for count in counts:
        await lock.acquire()
        await _until_held(fleet)
        if not await cancelled(lock.release, count):
            break
        await _until_free(fleet)
        await lock.release()


@in_loop
async def test_acquire_cancelled_while_a_majority_is_frozen_leaves_nothing(fleet: Fleet, make: _Make) -> None:
    lock = make()
    await _use(lock)
    await _until_free(fleet)
    with freezing(*fleet[:3]):
        waiting = asyncio.ensure_future(lock.acquire())
        await eventually(lambda: all(values(fleet[3:])), "the requests have left")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await _until_free(fleet)


# What cannot be one


@pytest.mark.parametrize(
    "odd_one",
    [redis.Redis, lambda: redis.asyncio.Redis().pipeline(), object],
    ids=["blocks", "pipeline", "object"],
)
@in_loop
async def test_what_is_no_server(make: _Make, odd_one: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        Redlock([*make.clients()[:2], odd_one()], "name", timeout=10)


@in_loop
async def test_number_of_servers_without_a_use(make: _Make) -> None:
    with pytest.raises(ValueError, match="odd number"):
        Redlock(make.clients()[:4], "name", timeout=10)


@pytest.mark.parametrize(
    "use", [lambda lock: lock.extend(1), lambda lock: lock.reacquire(), lambda lock: lock.release()]
)
@in_loop
async def test_who_holds_nothing_is_told_so(make: _Make, use: Callable[[Redlock], Awaitable[object]]) -> None:
    lock = make()
    with pytest.raises(LockError):
        await use(lock)
    with pytest.raises(LockError):
        await in_task(lambda: use(lock))
