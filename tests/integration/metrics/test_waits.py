"""Waits and renewals in metrics and the log: who waits, how, by whom it is given the lock. Threads and tasks alike."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import fakeredis
import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import Lock
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser, Servers
from tests.integration.metrics.conftest import Exposed
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.holding import Holders
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, HEARD_S, LATE, Callers, Contender, until_queued


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
    exposed: Exposed, valkey_scene: Scene, holders: Holders, acl_user: MakeUser, settings: dict[str, str]
) -> None:
    holder = holders.hold(valkey_scene.server.port, **LATE)
    options = {} if settings else acl_user(valkey_scene.server, "-eval", "-evalsha", "-client|tracking").options()
    waiter = holders.on(valkey_scene.connect(**options), timeout=FAR_S, sleep=0.01, **settings)
    answer = waiter.acquire()
    exposed.until("waiting", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert exposed.value("waits_total", mode="polling") == 1
    assert (exposed.value("waiting"), exposed.value("handovers_total")) == (0, 0)


def test_a_wait_by_tracking(exposed: Exposed, valkey_scene: Scene, holders: Holders, acl_user: MakeUser) -> None:
    holder = holders.hold(valkey_scene.server.port, **LATE)
    options: dict[str, Any] = acl_user(valkey_scene.server, "-eval", "-evalsha").options()
    answer = (waiter := valkey_scene.contender(valkey_scene.connect(**options))).acquire()
    exposed.until("waiting", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert exposed.value("waits_total", mode="tracking") == 1
    assert exposed.value("handovers_total") == 0
    waiter.lock.detach()  # which it may not release


def test_a_wait_for_another_caller_of_the_process(exposed: Exposed, valkey_scene: Scene, holders: Holders) -> None:
    client = valkey_scene.connect()
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


# The log of long waits: once for each, with the process that holds the lock


HERE = rf"process {os.getpid()} \(.*\) on .*"
UNKNOWN = "an unknown process"


class Logged:
    """The log of waits.

    Args:
        caplog: pytest's.
    """

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def texts(self) -> list[str]:
        """What was logged."""
        return [record.getMessage() for record in self._caplog.records if record.name == "redislock_fast.waiting"]

    def until_told(self, holder: str, name: str = "lock 'name'") -> None:
        """Return once one wait was logged, for a lock that this process holds."""
        wait_until(lambda: self.texts, "a wait is logged")
        (text,) = self.texts
        pattern = rf"The {name} has been waited for since \d+\.\d s\. It is held by {holder}\."
        assert re.fullmatch(pattern, text), text


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    return Logged(caplog)


@pytest.fixture
def at_once() -> Iterator[None]:
    """Has each wait be logged at once."""
    redislock_fast.log_waits(0)
    yield
    redislock_fast.log_waits()


def _gets_it(waiter: Contender, holder: Contender, logged: Logged, told: str = HERE) -> None:
    """The waiter's wait is logged, and goes on."""
    answer = waiter.acquire()
    logged.until_told(told)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert len(logged.texts) == 1


WAYS: list[dict[str, Any]] = [{}, {"wait": "poll", "sleep": 0.01}, {"auto_renew": True}]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_long_wait_is_logged_with_the_holder(
    logged: Logged, holders: Holders, valkey: Server, settings: dict[str, Any]
) -> None:
    holder = holders.hold(valkey.port, **LATE)
    _gets_it(holders.make(valkey.port, **{**LATE, **settings}), holder, logged)


@pytest.mark.usefixtures("at_once")
def test_a_long_wait_by_tracking_is_logged(
    logged: Logged, valkey_scene: Scene, holders: Holders, acl_user: MakeUser
) -> None:
    options: dict[str, Any] = acl_user(valkey_scene.server, "-eval", "-evalsha").options()
    waiter = valkey_scene.contender(valkey_scene.connect(**options))
    _gets_it(waiter, holders.hold(valkey_scene.server.port, **LATE), logged)
    waiter.lock.detach()  # which it may not release


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("options", [{}, {"auto_renew": True}], ids=str)
def test_a_long_wait_for_a_caller_of_this_process_is_logged(
    logged: Logged, valkey_scene: Scene, holders: Holders, options: dict[str, Any]
) -> None:
    client = valkey_scene.connect()
    holder, waiter = (holders.on(client, linger=0.02, **options, **LATE) for _ in range(2))
    assert holder.call("acquire")
    _gets_it(waiter, holder, logged, "another caller of this process")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("all_or_nothing", [True, False])
@pytest.mark.parametrize("denied", [[], ["-eval", "-evalsha"]], ids=["queue", "no queue"])
def test_a_long_wait_of_a_batch_is_logged(
    logged: Logged, valkey_scene: Scene, holders: Holders, acl_user: MakeUser, all_or_nothing: bool, denied: list[str]
) -> None:
    options: dict[str, Any] = acl_user(valkey_scene.server, *denied).options()
    holder = holders.hold(valkey_scene.server.port, **LATE)
    locker = valkey_scene.callers.package.Locker(valkey_scene.connect(**options))
    wait: dict[str, Any] = {"blocking_timeout": FAR_S, "sleep": 0.01, "all_or_nothing": all_or_nothing}
    acquired = valkey_scene.callers.begin(lambda: locker.acquire_many(["free", "name"], FAR_S, **wait))
    logged.until_told(HERE)
    holder.release()
    assert acquired.result(PATIENCE_S).acquired == ["free", "name"]
    assert len(logged.texts) == 1


def test_a_long_wait_for_a_redlock_is_logged(
    logged: Logged, callers: Callers, holders: Holders, fleet: list[Server], request: pytest.FixtureRequest
) -> None:
    holder = holders.hold_redlock(holders.clients(fleet), timeout=FAR_S)
    request.getfixturevalue("at_once")  # only now: on a busy machine, the holder may need a second attempt
    waiter = callers.redlock(holders.clients(fleet), timeout=FAR_S)
    _gets_it(waiter, holder, logged, "another owner")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("limit", "more"), [(1, ""), (3, ""), (5, " and 2 more")])
@pytest.mark.parametrize("denied", [[], ["-subscribe"]], ids=["queue", "no queue"])
def test_a_long_wait_for_a_permit_is_logged_with_some_holders(
    logged: Logged, valkey_scene: Scene, acl_user: MakeUser, limit: int, more: str, denied: list[str]
) -> None:
    client = valkey_scene.connect(**acl_user(valkey_scene.server, *denied).options())
    semaphore = valkey_scene.callers.package.Semaphore(client, "name", limit, timeout=FAR_S, sleep=0.02)
    permits = [valkey_scene.callers.run(semaphore.acquire) for _ in range(limit)]
    answer = valkey_scene.callers.begin(semaphore.acquire)
    logged.until_told(", ".join([HERE] * min(limit, 3)) + more, "semaphore 'name'")
    valkey_scene.callers.run(permits.pop().release)
    for permit in [*permits, answer.result(PATIENCE_S)]:
        valkey_scene.callers.run(permit.release)
    assert len(logged.texts) == 1


@pytest.mark.usefixtures("at_once")
def test_a_token_is_never_logged(logged: Logged, holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    admin.set("name", "a secret")
    answer = holders.make(valkey.port, timeout=FAR_S, sleep=0.01).acquire()
    logged.until_told(UNKNOWN)
    admin.delete("name")
    assert answer.result(PATIENCE_S) is True


@pytest.mark.usefixtures("at_once")
def test_a_holder_that_may_not_be_listed_costs_no_wait(
    logged: Logged, valkey_scene: Scene, holders: Holders, acl_user: MakeUser
) -> None:
    options: dict[str, Any] = acl_user(valkey_scene.server, "-client|list").options()
    holder = holders.hold(valkey_scene.server.port, **LATE)
    _gets_it(holders.on(valkey_scene.connect(**options), **LATE), holder, logged, UNKNOWN)


@pytest.mark.usefixtures("at_once", "unhurried")
def test_a_wait_in_vain_ends_in_time(logged: Logged, holders: Holders, valkey: Server) -> None:
    holders.hold(valkey.port, **LATE)
    assert holders.make(valkey.port, **LATE).call("acquire", blocking_timeout=0.1) is False
    assert len(logged.texts) <= 1  # on a busy machine, the time may be up before it listens


@pytest.mark.usefixtures("unhurried")
def test_a_short_wait_is_not_logged(logged: Logged, holders: Holders, valkey: Server) -> None:
    redislock_fast.log_waits(FAR_S)
    holders.hold(valkey.port, **LATE)
    assert holders.make(valkey.port, **LATE).call("acquire", blocking_timeout=0.01) is False
    redislock_fast.log_waits()
    assert logged.texts == []


@pytest.mark.usefixtures("at_once", "unhurried")
def test_the_log_may_be_switched_off(logged: Logged, holders: Holders, valkey: Server, connect: Connect) -> None:
    redislock_fast.log_waits(None)
    holders.hold(valkey.port, **LATE)
    assert holders.make(valkey.port, **LATE).call("acquire", blocking_timeout=0.01) is False
    redislock_fast.log_waits(0)
    logging.getLogger("redislock_fast.waiting").setLevel(logging.ERROR)
    admin = connect(valkey.port)
    listed = admin.info("commandstats").get("cmdstat_client|list", {})
    assert holders.make(valkey.port, **LATE).call("acquire", blocking_timeout=0.01) is False
    assert admin.info("commandstats").get("cmdstat_client|list", {}) == listed
    logging.getLogger("redislock_fast.waiting").setLevel(logging.NOTSET)
    assert logged.texts == []


@pytest.mark.parametrize(("after_s", "error"), [(-1, ValueError), (float("nan"), ValueError), ("5", TypeError)])
def test_an_impossible_time_is_refused(after_s: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        redislock_fast.log_waits(after_s)
