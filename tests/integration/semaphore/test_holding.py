"""Permits that are held: renewal, losses, interrupts and cancels of an acquire or a release.

Rules: what passes by time passes by the server's clock, or by `BRIEF_S`; nothing else does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError, ResponseError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import LockLostError, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import eventually
from tests.support.helpers import PATIENCE_S, once, wait_until
from tests.support.holding import BRIEF_S, KEPT_S, LONG_S, Losses, until_passed
from tests.support.permits import QUEUE, ends_of, held, new_tokens, queue_up, run_acquire, take
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import World, waited

pytestmark = pytest.mark.usefixtures("world")


def renewed(admin: redis.Redis) -> None:
    """Return once the only permit was renewed."""
    (end,) = ends_of(admin).values()
    wait_until(lambda: list(ends_of(admin).values()) > [end], "it is renewed")


# ---- renewal ----


def test_permits_are_renewed_by_default(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), timeout=KEPT_S)
    permit = semaphore.acquire()
    renewed(client)
    assert client.pttl("name") > 1000 * KEPT_S / 2
    assert permit.remaining() <= KEPT_S
    permit.release()
    assert client.keys() == []


@pytest.mark.slow
def test_a_renewed_permit_outlives_its_ttl(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=KEPT_S)
    with semaphore as permit:
        until_passed(client, LONG_S)
        assert (permit.valid, permit.lost, held(client)) == (True, False, 1)
        assert semaphore.acquire(blocking=False) is None
    assert client.exists("name", QUEUE) == 0


@pytest.mark.slow
def test_each_permit_of_one_object_is_renewed(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 20, timeout=KEPT_S)
    semaphore.acquire().release()
    permits = [semaphore.acquire() for _ in range(20)]
    for permit in permits[::2]:
        permit.release()
    until_passed(valkey_client, LONG_S)
    assert [permit.valid for permit in permits] == [False, True] * 10
    assert held(valkey_client) == 10
    for permit in permits[1::2]:
        permit.release()


@pytest.mark.slow
def test_a_permit_that_was_waited_for_is_renewed(world: World, server: Server, client: redis.Redis) -> None:
    holder = world.semaphore(world.connect(server.port), 1, **LATE).acquire()
    semaphore = world.semaphore(world.connect(server.port), 1, timeout=KEPT_S, sleep=FAR_S)
    (answer,) = queue_up(world, [semaphore], client)
    holder.release()
    permit = take(answer)
    until_passed(client, LONG_S)
    assert (permit.valid, held(client)) == (True, 1)
    permit.release()


def test_without_renewal_a_permit_ends(world: World, server: Server, client: redis.Redis, losses: Losses) -> None:
    semaphore = world.semaphore(
        world.connect(server.port), timeout=BRIEF_S, auto_renew=False, on_lost=world.callback(losses)
    )
    permit = semaphore.acquire()
    assert losses.until() == [LossReason.EXPIRED]
    wait_until(lambda: client.keys() == [], "it has ended")
    assert (permit.valid, permit.lost, permit.remaining()) == (False, True, 0.0)
    with pytest.raises(LockLostError, match="permit of the semaphore 'name'"):
        permit.release()


def test_a_permit_is_renewed_until_max_hold(
    world: World, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    semaphore = world.semaphore(
        world.connect(valkey.port), timeout=BRIEF_S, max_hold=2 * BRIEF_S, on_lost=world.callback(losses)
    )
    permit = semaphore.acquire()
    assert losses.until() == [LossReason.EXPIRED]
    with pytest.raises(LockLostError):
        permit.release()


# ---- losses ----


@pytest.mark.parametrize("how", ["permit deleted", "key deleted", "flushed", "another's"])
def test_a_lost_permit_is_told_once_with_its_reason(
    world: World, server: Server, client: redis.Redis, losses: Losses, how: str
) -> None:
    told = []
    losses._then = lambda permit: told.append((permit.name, permit.lost, permit.valid))
    semaphore = world.semaphore(world.connect(server.port), timeout=KEPT_S, on_lost=world.callback(losses))
    (other,) = new_tokens(1)
    permit = semaphore.acquire()
    run_acquire(client, other)
    if how == "permit deleted":
        client.zrem("name", *(token for token in ends_of(client) if token != other))
    elif how == "key deleted":
        client.delete("name")
    elif how == "flushed":
        client.flushall()
    else:
        client.set("name", "another's")
    reason = LossReason.DELETED
    assert losses.until() == [reason]
    wait_until(lambda: told == [("name", True, False)], "it was told of the permit")
    for call in (permit.ensure_held, permit.detach, permit.release):
        with pytest.raises(LockLostError, match="permit of the semaphore 'name'") as caught:
            call()
        assert caught.value.reason is reason
    with pytest.raises(LockError, match="was released"):
        permit.release()
    assert losses.reasons == [reason]
    assert list(client.zrange("name", 0, -1) if how == "permit deleted" else []) == (
        [other] if how == "permit deleted" else []
    )
    client.delete("name")
    semaphore.acquire(blocking=False).release()


def test_a_loss_that_the_release_finds_out_is_raised(world: World, server: Server, client: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(server.port), **LATE)
    permit = semaphore.acquire()
    client.delete("name")
    with pytest.raises(LockLostError, match="permit of the semaphore 'name'") as caught:
        permit.release()
    assert caught.value.reason is LossReason.DELETED
    plain = world.semaphore(world.connect(server.port), auto_renew=False, **LATE).acquire()
    client.delete("name")
    with pytest.raises(LockNotOwnedError, match="permit"):
        plain.release()


def test_a_loss_without_a_callback_is_logged(
    world: World, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    permit = world.semaphore(world.connect(valkey.port), timeout=KEPT_S).acquire()
    valkey_client.delete("name")
    text = "The permit of the semaphore 'name' was lost: deleted."
    wait_until(lambda: text in caplog.messages, "the renewal finds it out")
    with pytest.raises(LockLostError):
        permit.release()


def test_a_server_that_is_gone_loses_the_permit(world: World, valkey: Server, connect: Connect, losses: Losses) -> None:
    with Proxy(valkey.port) as proxy:
        client = world.client(connect(proxy.port, retry=once()))
        semaphore = world.semaphore(client, timeout=BRIEF_S, on_lost=world.callback(losses))
        permit = semaphore.acquire()
        proxy.refuse()
        proxy.cut()
        assert losses.until() == [LossReason.SERVER_GONE]
        assert (permit.lost, permit.valid) == (True, False)
        with pytest.raises(LockLostError) as caught:
            permit.release()
        assert caught.value.reason is LossReason.SERVER_GONE


def test_a_release_that_has_failed_can_be_repeated(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect
) -> None:
    with Proxy(valkey.port) as proxy:
        semaphore = world.semaphore(world.client(connect(proxy.port, retry=once())), **LATE)
        permit = semaphore.acquire()
        proxy.refuse()
        proxy.cut()
        for release in (permit.release, semaphore.release):
            with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
                release()
        proxy.accept()
        wait_until(lambda: _released(permit), "the server is back")
        assert valkey_client.keys() == []


def _released(permit: Any) -> bool:
    try:
        permit.release()
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


def test_an_error_at_the_end_of_a_block_that_has_raised_is_logged(
    world: World, valkey: Server, valkey_client: redis.Redis, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(valkey.port) as proxy:
        semaphore = world.semaphore(world.client(connect(proxy.port, retry=once())), **LATE)
        permit = semaphore.acquire()
        proxy.refuse()
        proxy.cut()
        with pytest.raises(ZeroDivisionError), permit:
            raise ZeroDivisionError
        texts = [text for text in caplog.messages if "permit" in text]
        assert [text.partition(": ")[0] for text in texts] == ["A permit of 'name' could not be released"]
        proxy.accept()
        wait_until(lambda: valkey_client.keys() == [], "it is released in the background")
        with pytest.raises(LockError, match="was released"):
            permit.release()


# ---- cancels ----


@pytest.mark.parametrize("world", ["asyncio"], indirect=True)
def test_a_timeout_around_acquire_gives_up(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    client = world.connect(valkey.port)

    async def scenario() -> None:
        semaphore = redislock_fast.asyncio.Semaphore(client, "name", 1, **LATE)
        async with semaphore:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(semaphore.acquire(), 0.05)
            await eventually(lambda: valkey_client.zcard(QUEUE) == 0, "it has left the queue")
        await eventually(lambda: valkey_client.keys() == [], "nothing is left")
        shielded = await asyncio.shield(semaphore.acquire())
        assert shielded is not None
        permits = await asyncio.gather(*(semaphore.acquire(blocking=False) for _ in range(3)))
        assert permits == [None] * 3
        await shielded.release()

    waited(scenario())


@pytest.mark.parametrize("world", ["asyncio"], indirect=True)
def test_the_task_of_a_lost_permit_is_cancelled(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    client = world.connect(valkey.port)

    async def scenario() -> None:
        semaphore = redislock_fast.asyncio.Semaphore(client, "name", 2, timeout=KEPT_S, cancel_on_lost=True)
        entered = asyncio.Event()

        async def work() -> None:
            async with semaphore:
                entered.set()
                await asyncio.sleep(FAR_S)

        task = asyncio.ensure_future(work())
        await entered.wait()
        valkey_client.delete("name")
        with pytest.raises((asyncio.CancelledError, LockLostError)) as caught:
            await asyncio.wait_for(task, PATIENCE_S)
        error: BaseException = caught.value
        assert "permit of the semaphore 'name'" in str(error.args[0])

    waited(scenario())


def test_scripts_that_fail_are_raised_with_the_name(
    world: World, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    valkey_client.set("name", "text")
    semaphore = world.semaphore(world.connect(valkey.port), **LATE)
    with caplog.at_level(logging.WARNING), pytest.raises(ResponseError, match="WRONGTYPE") as caught:
        semaphore.acquire()
    assert getattr(caught.value, "__notes__", ["of the semaphore 'name'"]) == ["of the semaphore 'name'"]
    with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
        semaphore.status()
    assert getattr(caught.value, "__notes__", ["of the semaphore 'name'"]) == ["of the semaphore 'name'"]
