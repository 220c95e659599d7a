"""An asyncio lock whose server, connection or scripts go away under many tasks of its loop.

What threads and tasks share is in test_faults. Rules: as there; where bytes must be spoiled, a `Relay` stands between.
All on ours.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast import LossReason
from redislock_fast.asyncio import Lock
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.lock.test_faults import USES
from tests.support.async_helpers import AsyncClients, async_few, async_once, eventually, in_loop, settle
from tests.support.helpers import PATIENCE_S
from tests.support.proxy import Proxy
from tests.support.relay import Relay

StartServer = Callable[..., Server]


@pytest.fixture
def loop_kind(each_loop_kind: str) -> str:
    return each_loop_kind


async def warm_up(client: redis.asyncio.Redis) -> None:
    """Connect, and let the server know all scripts."""
    async with Lock(client, "warm-up", timeout=10) as lock:
        await lock.extend(10)
        await lock.reacquire()


async def all_of(*work: Awaitable[Any]) -> list[Any]:
    """The result or error of each; none hangs."""
    return await asyncio.wait_for(asyncio.gather(*work, return_exceptions=True), PATIENCE_S)


# Connections


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@in_loop
async def test_connection_that_ends_as_soon_as_it_is_made_is_made_again(
    spare_server: StartServer, async_connect: AsyncClients, is_reset: bool
) -> None:
    server = spare_server()
    made: list[Any] = []

    class Ending(redis.asyncio.Connection):
        async def connect(self) -> None:
            await super().connect()  # type: ignore[no-untyped-call]
            made.append(self)
            if len(made) == 1:
                writer: Any = self._writer
                reader: Any = self._reader
                if is_reset:  # as by a server that dies before it has read everything
                    server.signal(signal.SIGSTOP)
                    writer.write(b"PING\r\n")
                server.kill()
                await eventually(lambda: reader.at_eof() or writer.transport.is_closing(), "it has ended")
                await settle()
                server.start()

    pool = redis.asyncio.ConnectionPool(connection_class=Ending, port=server.port)
    lock = Lock(async_connect.keep(redis.asyncio.Redis(connection_pool=pool)), "name", timeout=10)
    assert await asyncio.wait_for(lock.acquire(), PATIENCE_S) is True
    await lock.release()
    assert len(made) == 2
    await pool.disconnect()


@in_loop
async def test_connection_that_ends_between_the_requests_of_redis_py_is_made_again(
    server: Server, async_connect: AsyncClients
) -> None:
    made: list[Any] = []

    async def greet(connection: Any) -> None:
        made.append(connection)
        if len(made) == 1:
            connection._writer.transport.abort()
            await settle()
        await connection.on_connect()

    lock = Lock(async_connect(server.port, redis_connect_func=greet), "name", timeout=10)
    assert await asyncio.wait_for(lock.acquire(), PATIENCE_S) is True
    await lock.release()
    assert len(made) == 2


@pytest.mark.parametrize("fault", ["drop_request", "drop_reply"])
@in_loop
async def test_connection_that_breaks_while_it_is_made_is_an_error_for_each_waiting_task(
    proxy: Proxy, client: redis.Redis, async_connect: AsyncClients, fault: str
) -> None:
    proxied = async_connect(proxy.port, retry=async_once())
    for command in 2 * ("COMMAND", "COMMAND", "PING"):  # each of two attempts asks twice, and then tries without that
        getattr(proxy, fault)(command)
    errors = await all_of(*[asyncio.create_task(Lock(proxied, f"name-{number}").acquire()) for number in range(3)])
    assert [type(error) for error in errors] == 3 * [redis.ConnectionError]
    assert len(set(map(id, errors))) == 3
    assert await Lock(proxied, "other", timeout=10).acquire()
    assert [b"other"] == client.keys()
    assert proxy.requests["SET"] == 1, "nothing was sent that had to be undone"


@in_loop
async def test_replies_that_come_byte_by_byte(server: Server, async_connect: AsyncClients) -> None:
    async with Relay.before(server) as relay:
        relay.chunk = 1
        relayed = async_connect(relay.port)
        await warm_up(relayed)
        answers = await all_of(*[USES["locked"](Lock(relayed, f"name-{number}")) for number in range(20)])
        assert [False] * 20 == answers
        assert relay.connections == 1
        await async_connect.aclose()


@pytest.mark.parametrize("garbage", [b"?garbage\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$what\r\n"], ids=str)
@in_loop
async def test_garbage_breaks_the_connection_and_loses_no_result(
    server: Server, client: redis.Redis, async_connect: AsyncClients, garbage: bytes
) -> None:
    async with Relay.before(server) as relay:
        relayed = async_connect(relay.port)
        await warm_up(relayed)
        locks = [Lock(relayed, f"name-{number}", timeout=10, thread_local=False) for number in range(10)]
        for use in ("acquire", "extend", "release"):
            relay.spoil = lambda _: garbage
            assert all(answer in (True, None) for answer in await all_of(*[USES[use](lock) for lock in locks]))
            keys = {name: client.get(name) for name in client.scan_iter()}
            assert {lock.name.encode(): lock.local.token for lock in locks if lock.local.token} == keys
        assert relay.connections == 4
        await async_connect.aclose()


@pytest.mark.parametrize("unasked", [b"+OK\r\n", b"?", b":1\r\n:1\r\n"], ids=str)
@in_loop
async def test_reply_without_a_request_is_dropped(server: Server, async_connect: AsyncClients, unasked: bytes) -> None:
    async with Relay.before(server) as relay:
        relayed = async_connect(relay.port)
        await warm_up(relayed)
        relay.inject(unasked)
        await eventually(lambda: not relay.writers, "the connection is left")
        for _ in range(5):
            lock = Lock(relayed, "name", timeout=10)
            assert await lock.acquire(blocking=False)
            assert await lock.owned()
            await lock.release()
            await asyncio.sleep(0.001)
        assert relay.connections == 2
        await async_connect.aclose()


# Servers


@in_loop
async def test_answers_that_say_later_are_asked_again(server: Server, async_connect: AsyncClients) -> None:
    async with Relay.before(server) as relay:
        relayed = async_connect(relay.port, retry=async_few())
        await warm_up(relayed)
        for code in ("LOADING Redis is loading", "BUSY running a script", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"):
            relay.spoil = lambda _: f"-{code}\r\n".encode()  # noqa: B023 - called within this round
            assert await Lock(relayed, "name").locked() is False
        assert relay.connections == 1
        await async_connect.aclose()


# Rights

NO_SCRIPTS = ("-eval", "-evalsha", "-script")


@pytest.mark.parametrize("rules", [("-delifeq",), NO_SCRIPTS], ids=str)
@in_loop
async def test_cancelled_acquire_is_undone_whatever_is_forbidden(
    valkey: Server, connect: Connect, async_connect: AsyncClients, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    client = connect(valkey.port)
    locks = async_connect(valkey.port, **acl_user(valkey, *rules).options())
    assert await Lock(locks, "warm-up").locked() is False
    client.script_flush()
    for _ in range(5):
        tasks = [asyncio.create_task(Lock(locks, f"name-{number}").acquire()) for number in range(10)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(isinstance(end, asyncio.CancelledError) for end in await all_of(*tasks))
        await Lock(locks, "name").locked()
        await eventually(lambda: not client.keys(), "all attempts are undone")


# Losses


@pytest.mark.parametrize("verb", ["extend", "reacquire", "release"])
@in_loop
async def test_call_that_is_cancelled_while_it_finds_out_why_the_lock_was_lost_reports_the_loss(
    valkey: Server, valkey_client: redis.Redis, async_connect: AsyncClients, verb: str
) -> None:
    losses: list[Any] = []
    with Proxy(valkey.port) as proxy:
        lock = Lock(
            async_connect(proxy.port), "name", 60, auto_renew=True, on_lost=lambda _, reason: losses.append(reason)
        )
        await lock.acquire()
        valkey_client.set("name", "another's")
        proxy.hold_from("GET")
        call = asyncio.ensure_future(getattr(lock, verb)(*[60] if verb == "extend" else []))
        await eventually(lambda: proxy.requests["GET"], "it finds out why")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (losses, lock.valid) == ([LossReason.SERVER_GONE], False)
