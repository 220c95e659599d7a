"""The metrics of waits and renewals: who waits, how, and by whom it is given the lock. Threads and tasks alike."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio

import redislock_fast.asyncio
from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser, Servers
from tests.integration.metrics.conftest import Exposed
from tests.support.helpers import PATIENCE_S, start
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, HEARD_S, LATE, Callers, until_queued


def test_a_wait_in_the_queue_ends_with_a_hand_over(
    exposed: Exposed, holders: Holders, valkey: Server, connect: Connect
) -> None:
    holder, waiter = holders.hold(valkey.port, **LATE), holders.make(valkey.port, **LATE)
    answer = waiter.acquire()
    until_queued(connect(valkey.port), "name", 1)
    assert (exposed.value("waiting"), exposed.held) == (1, 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert (exposed.value("waiting"), exposed.held) == (0, 1)
    assert exposed.value("waits_total", mode="queue") == 1
    assert exposed.value("handovers_total") == 1


def test_a_wait_that_is_in_vain_is_no_hand_over(exposed: Exposed, holders: Holders, valkey: Server) -> None:
    holders.hold(valkey.port, **LATE)
    assert holders.make(valkey.port, **LATE).call("acquire", blocking_timeout=HEARD_S) is False
    assert (exposed.value("waits_total", mode="queue"), exposed.value("handovers_total")) == (1, 0)
    assert (exposed.value("waiting"), exposed.acquired("not_acquired")) == (0, 1)


def test_a_try_is_no_wait(exposed: Exposed, holders: Holders, valkey: Server) -> None:
    holders.hold(valkey.port, **LATE)
    assert holders.make(valkey.port, **LATE).call("acquire", blocking=False) is False
    assert exposed.value("waits_total", mode="queue") == 0


@pytest.mark.parametrize("settings", [{"wait": "poll"}, {}], ids=["asked for", "no messages"])
def test_a_wait_by_polling(
    exposed: Exposed, callers: Callers, holders: Holders, valkey: Server, acl_user: MakeUser, settings: dict[str, str]
) -> None:
    holder = holders.hold(valkey.port, **LATE)
    options = {} if settings else acl_user(valkey, "-eval", "-evalsha", "-client|tracking").options()
    waiter = holders.on(callers.client(valkey.port, **options), timeout=FAR_S, sleep=0.01, **settings)
    answer = waiter.acquire()
    exposed.until("waiting", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert exposed.value("waits_total", mode="polling") == 1
    assert (exposed.value("waiting"), exposed.value("handovers_total")) == (0, 0)


def test_a_wait_by_tracking(
    exposed: Exposed, callers: Callers, holders: Holders, valkey: Server, acl_user: MakeUser
) -> None:
    holder = holders.hold(valkey.port, **LATE)
    options: dict[str, Any] = acl_user(valkey, "-eval", "-evalsha").options()
    answer = (waiter := callers.contender(callers.client(valkey.port, **options), **LATE)).acquire()
    exposed.until("waiting", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert exposed.value("waits_total", mode="tracking") == 1
    assert exposed.value("handovers_total") == 0
    waiter.lock.detach()  # which it may not release


def test_a_wait_for_another_caller_of_the_process(
    exposed: Exposed, callers: Callers, holders: Holders, valkey: Server
) -> None:
    client = callers.client(valkey.port)
    holder, waiter = (holders.on(client, linger=FAR_S, **LATE) for _ in range(2))
    assert holder.call("acquire")
    answer = waiter.acquire()
    exposed.until("waiting", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert exposed.value("waits_total", mode="local") == 1
    assert (exposed.value("handovers_total"), exposed.held) == (1, 1)


def test_a_wait_by_the_clients_own_methods(exposed: Exposed) -> None:
    client = fakeredis.FakeRedis()
    holder, waiter = Lock(client, "name"), Lock(client, "name", sleep=0.01)
    assert holder.acquire()
    assert waiter.acquire(blocking_timeout=HEARD_S) is False
    assert exposed.value("waits_total", mode="client") == 1


def test_a_task_that_is_cancelled_waits_no_more(exposed: Exposed, valkey: Server) -> None:
    async def work() -> None:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            lock = redislock_fast.asyncio.Lock(client, "name", timeout=FAR_S)
            assert await lock.acquire()
            waits = asyncio.create_task(redislock_fast.asyncio.Lock(client, "name", **LATE).acquire())
            while not exposed.value("waiting"):
                await asyncio.sleep(0)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            await lock.release()

    asyncio.run(work())
    assert (exposed.acquired("cancelled"), exposed.value("waiting"), exposed.held) == (1, 0, 0)


def test_a_redlock_waits_by_polling(exposed: Exposed, holders: Holders, servers: Servers) -> None:
    fleet = [servers.get("valkey", number) for number in range(3)]
    for server in fleet:
        with redis.Redis(port=server.port) as admin:
            admin.flushall()
    clients = holders.clients(fleet)
    holder = holders.hold_redlock(clients, timeout=FAR_S)
    waiter = start(lambda: holders.hold_redlock(clients, timeout=FAR_S, sleep=0.01))
    exposed.until("waiting", 1)
    holder.release()
    waiter.result(PATIENCE_S)
    assert (exposed.value("waits_total", mode="polling"), exposed.value("waiting")) == (1, 0)


def test_a_renewal_without_a_reply_is_counted(
    exposed: Exposed, holders: Holders, spare_server: Callable[..., Server]
) -> None:
    server = spare_server()
    holders.hold(server.port, timeout=0.5, auto_renew=True)
    server.signal(signal.SIGSTOP)
    exposed.until("lost_total", 1, reason="server_gone")
    server.signal(signal.SIGCONT)
    assert exposed.value("renewal_failures_total") > 0
    assert exposed.held == 0
