"""Asyncio locks, permits, terms and batches are renewed off their event loop, while that runs or is only busy.

Rules: a loop is busy by `time.sleep` or by a synchronous client. What is kept has a ttl of `KEPT_S` or, where a test
takes many ttls, of `TTL_S`: its renewals may come late by more than the stall after which a test is run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any, Literal

import fakeredis
import pytest
import redis
import redis.asyncio
from redis.asyncio.connection import Connection

from redislock_fast import LockLostError, LossReason
from redislock_fast.asyncio import Election, Lock, Locker, Semaphore
from redislock_fast.server import Server
from tests.conftest import TlsServer
from tests.support.async_helpers import AsyncClients, eventually, in_loop, run_in_loop
from tests.support.helpers import PATIENCE_S, REDIS_PY, no_threads
from tests.support.holding import BRIEF_S, KEPT_S, RENEWED, Losses, renewed, renewed_in_busy_loop, until_in_busy_loop

TTL_S = 1.0
COUNT = 100
NAMES = [f"name-{number}" for number in range(COUNT)]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


def renewers() -> set[threading.Thread]:
    """The threads of this process that renew."""
    return {thread for thread in threading.enumerate() if thread.name == "redislock_fast-renewal"}


async def release_all(locks: list[Any]) -> list[LossReason]:
    """Release them. Returns why those were lost that were."""
    reasons: list[LossReason] = []
    for lock in locks:
        try:
            await lock.release()
        except LockLostError as error:
            reasons.append(error.reason)
    return reasons


# ---- a loop that is busy ----


async def stalled_for(client: redis.asyncio.Redis, ttls: int, ttl_s: float, **settings: Any) -> list[LossReason]:
    """Hold locks while the loop is busy for so many ttls. Returns the losses that are told, which releases confirm."""
    losses = Losses()
    locks = [Lock(client, name, timeout=ttl_s, auto_renew=True, on_lost=losses, **settings) for name in NAMES]
    for lock in locks:
        assert await lock.acquire(blocking=False)
    time.sleep(ttls * ttl_s)
    count = sum(lock.lost for lock in locks)
    await eventually(lambda: len(losses.reasons) >= count, "each loss is told")
    assert await release_all(locks) == losses.reasons
    assert await client.dbsize() == 0
    return losses.reasons


@in_loop
async def test_loop_that_is_busy_for_two_ttls_keeps_its_locks(async_valkey_client: redis.asyncio.Redis) -> None:
    assert await stalled_for(async_valkey_client, 2, KEPT_S) == []


@pytest.mark.slow
@pytest.mark.parametrize(("ttls", "lost"), [(2, 0), (5, 0), (20, COUNT)])
def test_locks_outlive_each_stall_below_a_max_stall_of_ten_ttls(valkey: Server, ttls: int, lost: int) -> None:
    async def scenario() -> None:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            reasons = await stalled_for(client, ttls, TTL_S, max_stall=10 * TTL_S)
        assert reasons == [LossReason.STALLED] * lost

    asyncio.run(scenario())


@in_loop
async def test_loop_that_hangs_for_max_stall_has_lost_its_lock(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    losses = Losses()
    lock = Lock(
        async_valkey_client, "name", TTL_S, auto_renew=True, max_stall=TTL_S, on_lost=losses, cancel_on_lost=True
    )
    held = asyncio.Event()

    async def work() -> Any:
        try:
            async with lock:
                held.set()
                await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            return error.__cause__

    task = asyncio.create_task(work())
    await asyncio.wait_for(held.wait(), PATIENCE_S)
    until_in_busy_loop(lambda: lock.lost, "the lock is given up")
    assert (valkey_client.exists("name"), losses.reasons) == (1, [])  # the key ends by its ttl, which protects the work
    until_in_busy_loop(lambda: not valkey_client.exists("name"), "it ends")
    cause = await asyncio.wait_for(task, PATIENCE_S)
    assert (losses.reasons, type(cause), cause.reason) == ([LossReason.STALLED], LockLostError, LossReason.STALLED)
    assert await lock.acquire(blocking=False)  # the loop runs again
    await lock.release()


@in_loop
async def test_loop_that_answers_late_keeps_its_lock(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    losses = Losses()
    lock = Lock(async_valkey_client, "name", TTL_S, auto_renew=True, max_stall=TTL_S, on_lost=losses)
    async with lock:
        for _ in range(4):  # longer than max_stall, all together
            until_in_busy_loop(renewed(lambda: int(valkey_client.pttl("name"))), "it is renewed")
            await asyncio.sleep(0.01)
    assert losses.reasons == []


# ---- what is renewed so, and how a thread connects ----


@in_loop
async def test_permits_terms_and_batches_are_renewed_beside_a_busy_loop(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    client = async_valkey_client

    def end_ms() -> int:
        (entry,) = valkey_client.zrange("permits", 0, 0, withscores=True)
        return int(entry[1])

    async with (
        Semaphore(client, "permits", 3, timeout=KEPT_S),
        Election(client, "term", timeout=KEPT_S).term(),
        Locker(client).acquire_many(["one", "two"], KEPT_S, auto_renew=True),
    ):
        for name in ("term", "one", "two"):
            until_in_busy_loop(renewed(lambda name=name: valkey_client.pttl(name)), f"{name} is renewed")  # type: ignore[misc]
        until_in_busy_loop(renewed(end_ms), "the permit is renewed")
    assert await client.exists("term", "one", "two", "permits") == 0


@in_loop
async def test_thread_connects_by_tls(async_connect: AsyncClients, tls_server: TlsServer) -> None:
    settings: dict[str, Any] = {"ssl": True, "ssl_ca_certs": tls_server.ca_path}
    with redis.Redis("127.0.0.1", tls_server.port, **settings) as admin:
        await renewed_in_busy_loop(async_connect(tls_server.port, host="127.0.0.1", **settings), admin)


@in_loop
async def test_thread_connects_by_a_unix_socket_and_by_url(
    async_connect: AsyncClients, valkey: Server, valkey_client: redis.Redis
) -> None:
    for url in (f"unix://{valkey.unix_path}", f"redis://127.0.0.1:{valkey.port}?protocol=2"):
        client: redis.asyncio.Redis = async_connect.keep(redis.asyncio.Redis.from_url(url))
        await renewed_in_busy_loop(client, valkey_client)


# ---- renewal in the loop ----


@in_loop
async def test_loop_renews_by_itself_where_it_is_told_to(
    async_valkey_client: redis.asyncio.Redis, valkey_client: redis.Redis
) -> None:
    losses = Losses()
    before = renewers()
    lock = Lock(async_valkey_client, "name", KEPT_S, auto_renew="loop", on_lost=losses)
    async with lock:
        await eventually(renewed(lambda: int(valkey_client.pttl("name"))), "it is renewed")
        assert renewers() <= before
    permits = Semaphore(async_valkey_client, "permits", 1, timeout=BRIEF_S, auto_renew="loop")
    permit = await permits.acquire()
    assert permit is not None
    time.sleep(2 * BRIEF_S)
    assert permit.lost
    with pytest.raises(LockLostError) as caught:
        await permit.release()
    assert (caught.value.reason, losses.reasons) == (LossReason.EXPIRED, [])


@pytest.mark.parametrize("why", ["fake", "unknown connections", "no threads"])
@in_loop
async def test_loop_renews_where_no_thread_can(
    async_connect: AsyncClients, valkey: Server, why: Literal["fake", "unknown connections", "no threads"]
) -> None:
    class Own(Connection):
        """One that only a user knows how to make for threads."""

    client: Any
    if why == "fake":
        pytest.importorskip("lupa")  # for the scripts of fakeredis
        client = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer())
    elif why == "unknown connections":
        pool = redis.asyncio.ConnectionPool(connection_class=Own, host="127.0.0.1", port=valkey.port)
        client = redis.asyncio.Redis.from_pool(pool)
    else:
        client = redis.asyncio.Redis(host="127.0.0.1", port=valkey.port)
    async_connect.keep(client)
    before = renewers()
    lock = Lock(client, "name", **RENEWED)
    assert not await lock.locked()  # connects: asyncio looks a host up in a thread
    with no_threads() if why == "no threads" else contextlib.nullcontext():
        assert await lock.acquire(blocking=False)
        rests = [await client.pttl("name")]

        async def is_renewed() -> bool:
            rests.append(await client.pttl("name"))
            return bool(rests[-1] > rests[-2])

        await eventually(is_renewed, "it is renewed")
        assert renewers() <= before
    await lock.release()
    assert not await client.exists("name")


@pytest.mark.skipif(REDIS_PY < (5, 1), reason="credential providers serve threads and event loops by one method")
@in_loop
async def test_loop_renews_where_the_thread_cannot_connect(
    async_connect: AsyncClients, valkey: Server, valkey_client: redis.Redis
) -> None:
    class Provider(redis.CredentialProvider):
        """Has a password for event loops alone, and does not say so."""

        def get_credentials(self) -> Any:
            raise RuntimeError("not in a thread")

        async def get_credentials_async(self) -> Any:
            return ("default", "any")

    client = async_connect(valkey.port, credential_provider=Provider())
    async with Lock(client, "name", **RENEWED):
        await eventually(renewed(lambda: int(valkey_client.pttl("name"))), "it is renewed")


# ---- a loop that ends ----


def test_what_a_closed_loop_has_held_is_renewed_no_more(
    each_loop_kind: str, valkey: Server, valkey_client: redis.Redis
) -> None:
    kept: list[Any] = []

    async def leave() -> None:
        client = redis.asyncio.Redis(port=valkey.port)
        lock = Lock(client, "name", **RENEWED)
        kept.extend((client, lock))
        await lock.acquire()
        until_in_busy_loop(renewed(lambda: int(valkey_client.pttl("name"))), "it is renewed")

    run_in_loop(each_loop_kind, leave())
    left_ms = int(valkey_client.pttl("name"))
    assert left_ms <= 1000 * KEPT_S
    is_longer = renewed(lambda: int(valkey_client.pttl("name")))
    until_in_busy_loop(lambda: is_longer() or not valkey_client.exists("name"), "it ends, or is renewed")
    assert valkey_client.exists("name") == 0
    until_in_busy_loop(lambda: kept[1].lost, "the lock object knows")


def test_what_a_closed_loop_has_held_is_renewed_in_the_loop_that_prolongs_it(
    each_loop_kind: str, valkey: Server, valkey_client: redis.Redis
) -> None:
    losses = Losses()
    client = redis.asyncio.Redis(port=valkey.port)
    lock = Lock(client, "name", on_lost=losses, **RENEWED)

    def left_ms() -> int:
        return int(valkey_client.pttl("name"))

    async def leave() -> None:
        await lock.acquire()
        await eventually(renewed(left_ms), "it is renewed")

    async def go_on() -> None:
        assert await lock.reacquire()
        await eventually(renewed(left_ms), "it is renewed")
        valkey_client.delete("name")
        await eventually(lambda: losses.reasons, "the loss is told")
        await client.aclose()

    run_in_loop(each_loop_kind, leave())
    run_in_loop(each_loop_kind, go_on())
    assert losses.reasons == [LossReason.DELETED]


def test_stopped_loop_renews_nothing_until_it_runs_again(valkey: Server, valkey_client: redis.Redis) -> None:
    losses = Losses()
    loop = asyncio.new_event_loop()
    client = redis.asyncio.Redis(port=valkey.port)
    lock = Lock(client, "name", on_lost=losses, **RENEWED)
    loop.run_until_complete(lock.acquire())
    until_in_busy_loop(lambda: not valkey_client.exists("name"), "it ends")
    loop.run_until_complete(eventually(lambda: losses.reasons, "the loss is told"))
    with pytest.raises(LockLostError):
        loop.run_until_complete(lock.release())
    assert losses.reasons == [LossReason.EXPIRED]
    loop.run_until_complete(client.aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


@in_loop
async def test_connection_of_the_thread_ends_with_the_client(
    async_connect: AsyncClients, valkey: Server, valkey_client: redis.Redis
) -> None:
    def connections() -> int:
        return sum(one["name"] == "thread" or one["user"] == "thread" for one in valkey_client.client_list())

    valkey_client.acl_setuser("thread", enabled=True, nopass=True, keys=["*"], channels=["*"], categories=["+@all"])
    try:
        client = async_connect(valkey.port, username="thread", password="any")
        await renewed_in_busy_loop(client, valkey_client)
        assert connections() > 1
        await client.aclose()
        await eventually(lambda: connections() == 0, "all connections end")
    finally:
        valkey_client.acl_deluser("thread")
