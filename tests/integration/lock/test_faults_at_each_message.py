"""Locks whose connection breaks at any message: before, in the middle of and behind each request and reply.

A fault strikes once, at the n-th message of a new client; connecting is part of it. One fault is what every client
tries again after, so all must come out as if nothing had happened. Where it strikes all servers of a Redlock, an
operation may fail as documented, and succeeds when it is called again.

Rules: faults are real, made by a proxy; n grows until nothing is left to strike.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.redlock import wait_until_free
from tests.support.waiting import FAR_S, LATE, Callers, Guard, Threads, queued

Fault = Callable[[Proxy, int], None]
Result = TypeVar("Result")

FAULTS: dict[str, Fault] = {
    "request lost": lambda proxy, nth: proxy.drop_request(nth=nth),
    "request torn": lambda proxy, nth: proxy.drop_request(nth=nth, share=0.5),
    "reply not waited for": lambda proxy, nth: proxy.drop_request(nth=nth, share=1),
    "reply lost": lambda proxy, nth: proxy.drop_reply(nth=nth),
    "reply torn": lambda proxy, nth: proxy.drop_reply(nth=nth, share=0.5),
    "closed behind the reply": lambda proxy, nth: proxy.drop_reply(nth=nth, share=1),
    "message lost": lambda proxy, nth: proxy.drop_message(nth=nth),
    "message torn": lambda proxy, nth: proxy.drop_message(nth=nth, share=0.5),
    "closed behind the message": lambda proxy, nth: proxy.drop_message(nth=nth, share=1),
}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    """Each kind of fault in turn."""
    return FAULTS[request.param]


@pytest.fixture(autouse=True)
def _nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No error is left to the handler of an event loop; pytest sees to those of threads and finalizers."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


def few(callers: Callers) -> Any:
    """A retry policy for their clients that soon gives up."""
    return (Retry if isinstance(callers, Threads) else AsyncRetry)(ConstantBackoff(0.01), 3)


def insisting(call: Callable[[], Result]) -> Result:
    """Its last result. Before, it may raise the documented errors of broken connections."""
    for _ in range(20):
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            return call()
    return call()


def test_holder_notices_nothing(callers: Callers, server: Server, client: redis.Redis, fault: Fault) -> None:
    for nth in itertools.count(1):
        with Proxy(server.port) as proxy:
            fault(proxy, nth)
            lock = callers.contender(callers.client(proxy.port, retry=few(callers)), timeout=FAR_S)
            assert lock.call("acquire", blocking=False) is True
            assert lock.call("extend", 10) is True
            assert lock.call("reacquire") is True
            assert (lock.call("locked"), lock.call("owned")) == (True, True)
            lock.release()
            assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
            lock.release()
            wait_until(lambda: client.keys() == [], "nothing is left")
            if not proxy.dropped.is_set():
                return


def test_waiters_get_the_lock(callers: Callers, server: Server, client: redis.Redis, fault: Fault) -> None:
    holder = callers.contender(callers.client(server.port), **LATE)
    for nth in itertools.count(1):
        guard = Guard()
        with Proxy(server.port) as proxy:
            fault(proxy, nth)
            assert holder.call("acquire") is True
            waiters = callers.contenders(2, callers.client(proxy.port, retry=few(callers)), **LATE)
            answers = [waiter.use(guard) for waiter in waiters]
            wait_until(lambda: queued(client, "name") >= 2, "they wait")
            holder.release()
            assert [answer.result(PATIENCE_S) for answer in answers] == [True, True]
            assert (guard.entries, guard.overlaps) == (2, 0)
            wait_until(lambda: client.keys() == [], "nothing is left")
            if not proxy.dropped.is_set():
                return


@pytest.mark.slow
@pytest.mark.parametrize("fleet", ["mixed"], indirect=True)
def test_redlock_with_a_fault_at_each_server(callers: Callers, fleet: list[Server], fault: Fault) -> None:
    servers = fleet[:3]
    for nth in itertools.count(1):
        with contextlib.ExitStack() as stack:
            proxies = [stack.enter_context(Proxy(server.port)) for server in servers]
            for proxy in proxies:
                fault(proxy, nth)
            clients = [callers.client(proxy.port, retry=few(callers)) for proxy in proxies]
            lock, rival = (callers.redlock(clients, timeout=FAR_S, sleep=0.01) for _ in range(2))
            assert insisting(lambda: lock.call("acquire", blocking_timeout=PATIENCE_S)) is True  # noqa: B023
            for verb, *arguments in (("extend", 10), ("reacquire",), ("locked",), ("owned",)):
                assert insisting(lambda: lock.call(verb, *arguments)) is True  # noqa: B023
            assert insisting(lambda: rival.call("acquire", blocking=False)) is False  # noqa: B023
            insisting(lock.release)
            wait_until_free(servers)
            if not any(proxy.dropped.is_set() for proxy in proxies):
                return
