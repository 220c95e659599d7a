"""An acquire by the caller's own token that fails: what it leaves of a lock that is held with that token.

Rules: on ours alone, by threads and by tasks, on real servers; the proxy keeps replies back or loses them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.support.async_helpers import async_once, eventually
from tests.support.helpers import PATIENCE_S, once, wait_until
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, Callers, Contender, Threads

TOKEN = b"job-17"

SETTINGS = pytest.mark.parametrize("settings", [{}, {"fencing": True}], ids=["plain", "fenced"])


def connected(callers: Callers, proxy: Proxy, **settings: Any) -> Contender:
    """A lock on a client of its own, which connects through the proxy and does not retry.

    Its connection stands, and the server knows all scripts.
    """
    client = callers.client(proxy.port, retry=once() if isinstance(callers, Threads) else async_once())
    warm_up = callers.contender(client, "warm-up", timeout=FAR_S, **settings)
    warm_up.call("acquire", token=TOKEN)
    warm_up.release()
    return callers.contender(client, timeout=FAR_S, **settings)


def by_time(contender: Contender, proxy: Proxy) -> None:
    """Its time is up before the reply is there, which the proxy keeps back."""
    proxy.hold()
    with pytest.raises(redis.TimeoutError):
        contender.call("acquire", token=TOKEN, blocking_timeout=0.01)


def by_cancel(contender: Contender, proxy: Proxy) -> None:
    """It is cancelled before the reply is there, which the proxy keeps back."""
    proxy.hold()
    known = proxy.requests.total()
    answer = contender.acquire(token=TOKEN)
    wait_until(lambda: proxy.requests.total() > known, "it is under way")
    answer.cancel()
    contender.call("remaining")  # the loop does one after the other


def by_lost_reply(contender: Contender, proxy: Proxy) -> None:
    """The attempt is executed, and its connection breaks before the reply is there."""
    proxy.drop_reply("SET", "EVALSHA", "EVAL")
    proxy.refuse()
    with pytest.raises(redis.ConnectionError):
        contender.call("acquire", token=TOKEN, blocking=False)
    proxy.accept()


Fail = Callable[[Contender, Proxy], None]
GIVEN_UP: list[tuple[str, Fail]] = [("threads", by_time), ("tasks", by_time), ("tasks", by_cancel)]
BROKEN: list[tuple[str, Fail]] = [("threads", by_lost_reply), ("tasks", by_lost_reply)]


def until_heard(contender: Contender) -> None:
    """All replies of the contender's connection have come: they come in order."""
    contender.call("locked")


@SETTINGS
@pytest.mark.parametrize(("callers", "fail"), GIVEN_UP + BROKEN, indirect=["callers"])
def test_acquire_that_fails_leaves_the_lock_of_another_with_the_token(
    callers: Callers, fail: Fail, server: Server, proxy: Proxy, undone: list[bytes], settings: dict[str, Any]
) -> None:
    holder = callers.contender(callers.client(server.port), timeout=FAR_S)
    assert holder.call("acquire", token=TOKEN) is True
    contender = connected(callers, proxy, **settings)
    fail(contender, proxy)
    proxy.resume()
    until_heard(contender)
    assert undone == []
    assert holder.call("owned") is True


# Nobody holds the lock, and the attempt takes it


@SETTINGS
@pytest.mark.parametrize(("callers", "fail"), GIVEN_UP, indirect=["callers"])
def test_acquire_that_is_given_up_gives_back_what_it_has_taken(
    callers: Callers, fail: Fail, proxy: Proxy, client: redis.Redis, settings: dict[str, Any]
) -> None:
    contender = connected(callers, proxy, **settings)
    fail(contender, proxy)
    assert client.get("name") == TOKEN
    proxy.resume()
    wait_until(lambda: not client.exists("name"), "it is undone")
    assert contender.call("acquire", token=TOKEN, blocking=False) is True


def test_acquire_by_tasks_cancelled_at_any_iteration_takes_nothing_and_deletes_nothing(
    server: Server, client: redis.Redis
) -> None:
    async def cancelled_after(lock: redislock_fast.asyncio.Lock, iterations: int) -> bool:
        task = asyncio.ensure_future(lock.acquire(token=TOKEN))
        for _ in range(iterations):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    async def scenario() -> None:
        async with redis.asyncio.Redis(port=server.port) as async_client:
            free, held = (redislock_fast.asyncio.Lock(async_client, name, timeout=FAR_S) for name in ("free", "held"))
            client.set("held", TOKEN)
            for iterations in (*range(20), *range(20, 300, 20)):
                await cancelled_after(held, iterations)
                assert client.get("held") == TOKEN
                if not await cancelled_after(free, iterations):
                    await free.release()
                await eventually(lambda: not client.exists("free"), f"it is undone after {iterations} iterations")
            await held.locked()
        assert client.get("held") == TOKEN

    asyncio.run(scenario())


def test_acquire_whose_connection_breaks_leaves_what_it_has_taken_to_its_ttl(
    callers: Callers, proxy: Proxy, client: redis.Redis, undone: list[bytes]
) -> None:
    contender = connected(callers, proxy)
    by_lost_reply(contender, proxy)
    until_heard(contender)
    assert undone == []
    assert client.get("name") == TOKEN
    assert contender.call("acquire", token=TOKEN, blocking=False) is True
    contender.release()
    assert not client.exists("name")


# Two callers of one process bring the token at once


@SETTINGS
def test_what_an_attempt_took_is_left_to_another_that_has_found_it(
    callers: Callers, proxy: Proxy, undone: list[bytes], settings: dict[str, Any]
) -> None:
    given_up = connected(callers, proxy, **settings)
    other = callers.contender(given_up.lock.redis, timeout=FAR_S, **settings)
    proxy.hold()
    known = proxy.requests.total()
    first = given_up.acquire(token=TOKEN, blocking_timeout=0.5)
    wait_until(lambda: proxy.requests.total() > known, "the first is under way")
    second = other.acquire(token=TOKEN)
    wait_until(lambda: proxy.requests.total() > known + 1, "the second is under way")
    with pytest.raises(redis.TimeoutError):
        first.result(PATIENCE_S)
    proxy.resume()
    assert second.result(PATIENCE_S) is True
    until_heard(other)
    assert undone == []
    assert other.call("owned") is True


@SETTINGS
def test_what_an_attempt_took_is_undone_when_none_of_them_holds_it(
    callers: Callers, proxy: Proxy, client: redis.Redis, settings: dict[str, Any]
) -> None:
    given_up = connected(callers, proxy, **settings)
    others = callers.contenders(2, given_up.lock.redis, timeout=FAR_S, **settings)
    for contender in (given_up, *others):
        by_time(contender, proxy)
    assert client.get("name") == TOKEN
    proxy.resume()
    wait_until(lambda: not client.exists("name"), "it is undone")


@pytest.mark.parametrize(
    ("callers", "limit_s"), [pytest.param("threads", 3, marks=pytest.mark.slow), ("tasks", FAR_S)], indirect=["callers"]
)
def test_what_an_attempt_takes_after_another_has_released_is_undone(
    callers: Callers, limit_s: float, proxy: Proxy, client: redis.Redis
) -> None:
    given_up = connected(callers, proxy)
    other = callers.contender(given_up.lock.redis, timeout=FAR_S, fencing=True)  # whose request is no SET
    proxy.answer(b"-LOADING the data\r\n", "SET")
    known = proxy.requests["SET"]
    answer = given_up.acquire(token=TOKEN, blocking_timeout=limit_s)
    wait_until(lambda: proxy.requests["SET"] > known, "it is under way")
    assert other.call("acquire", token=TOKEN) is True
    other.release()
    proxy.hold(answers_pass=True)
    proxy.disarm()
    wait_until(lambda: client.get("name") == TOKEN, "it has taken the lock")
    if limit_s == FAR_S:
        answer.cancel()
    with pytest.raises((redis.TimeoutError, CancelledError)):
        answer.result(PATIENCE_S)
    given_up.call("remaining")  # the loop does one after the other
    proxy.resume()
    wait_until(lambda: not client.exists("name"), "it is undone")


# The lock is had, and the acquire fails


UNREPLICATED: dict[str, Any] = {"wait_replicas": 1, "wait_timeout": 0.01}


def test_acquire_that_fails_after_it_found_the_lock_leaves_it(
    callers: Callers, server: Server, undone: list[bytes]
) -> None:
    client = callers.client(server.port)
    holder = callers.contender(client, timeout=FAR_S)
    assert holder.call("acquire", token=TOKEN) is True
    contender = callers.contender(client, timeout=FAR_S, **UNREPLICATED)
    with pytest.raises(redislock_fast.NotReplicatedError):
        contender.call("acquire", token=TOKEN)
    assert undone == []
    assert contender.lock.local.token is None
    assert holder.call("owned") is True


def test_acquire_that_fails_after_it_took_the_lock_gives_it_back(
    callers: Callers, server: Server, client: redis.Redis
) -> None:
    contender = callers.contender(callers.client(server.port), timeout=FAR_S, **UNREPLICATED)
    with pytest.raises(redislock_fast.NotReplicatedError):
        contender.call("acquire", token=TOKEN)
    wait_until(lambda: not client.exists("name"), "it is undone")
