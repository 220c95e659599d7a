"""Locks by their token or a handle: acquired again, prolonged, detached, attached; and tokens that are never shown.

Rules: on ours alone, real servers, threads and tasks alike; the proxy keeps replies back or loses them.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import logging
import math
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import Handle, LockLostError, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import async_once, eventually
from tests.support.helpers import PATIENCE_S, RELEASE_COMMANDS, once, run_script, wait_until
from tests.support.holding import (
    BRIEF_S,
    KEPT_S,
    LONG_S,
    RENEWED,
    Holders,
    Losses,
    assert_believes_no_more_than_is_true,
    until_passed,
)
from tests.support.proxy import Proxy
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, Callers, Contender, Threads
from tests.support.worlds import IN_THREADS, World

IN_BOTH = pytest.mark.usefixtures("world")
CANARY = "canary-token"
OTHER = "canary of another"
TOKENS = pytest.mark.parametrize("token", [CANARY, CANARY.encode()], ids=["str", "bytes"])


# acquire(token=...)


@pytest.mark.slow
@TOKENS
def test_acquire_by_the_token_that_holds_is_the_holders(
    holders: Holders, server: Server, connect: Connect, token: str | bytes
) -> None:
    admin = connect(server.port)
    first = holders.make(server.port, timeout=FAR_S)
    again = holders.make(server.port, **RENEWED)
    assert first.call("acquire", token=token)
    assert again.call("acquire", token=token)
    assert admin.get("name") == CANARY.encode()
    until_passed(admin, LONG_S)
    assert (again.lock.valid, again.call("owned")) == (True, True)
    again.release()
    assert not admin.exists("name")


@pytest.mark.usefixtures("unhurried")
def test_token_of_another_waits(holders: Holders, valkey: Server) -> None:
    holder = holders.make(valkey.port, timeout=FAR_S)
    assert holder.call("acquire", token=CANARY)
    other = holders.make(valkey.port, timeout=FAR_S)
    assert other.call("acquire", token=CANARY + "+", blocking_timeout=0.05) is False
    answer = other.acquire(token=CANARY + "+")
    holder.release()
    assert answer.result(PATIENCE_S) is True


@pytest.mark.slow
def test_holding_acquired_again_by_its_token_is_one_holding(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.make(valkey.port, on_lost=losses, **RENEWED)
    assert [holder.call("acquire", token=CANARY) for _ in range(3)] == [True] * 3
    valkey_client.delete("name")
    assert losses.until() == [LossReason.DELETED]
    until_passed(valkey_client, KEPT_S)
    assert losses.reasons == [LossReason.DELETED]


# acquire_or_extend, try_acquire, try_extend


def test_acquire_or_extend_acquires_and_then_prolongs(holders: Holders, server: Server, connect: Connect) -> None:
    admin = connect(server.port)
    holder = holders.make(server.port, timeout=FAR_S)
    assert holder.call("acquire_or_extend")
    token = admin.get("name")
    admin.pexpire("name", 1000)
    assert holder.call("acquire_or_extend")
    assert admin.get("name") == token
    assert 1000 < admin.pttl("name") <= 1000 * FAR_S


@TOKENS
def test_acquire_or_extend_knows_its_own_token(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, token: str | bytes
) -> None:
    holder = holders.make(valkey.port, timeout=FAR_S, fencing=True)
    assert holder.call("acquire_or_extend", token=token)
    fence = holder.lock.fence
    valkey_client.pexpire("name", 1000)
    assert holder.call("acquire_or_extend", token=token)
    assert (holder.lock.fence, valkey_client.pttl("name") > 1000) == (fence, True)


@pytest.mark.parametrize("lost_by", ["a delete", "the time"])
def test_acquire_or_extend_acquires_anew_what_was_lost(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses, lost_by: str
) -> None:
    holder = holders.make(valkey.port, timeout=BRIEF_S, fencing=True, on_lost=losses)
    assert holder.call("acquire_or_extend")
    fence = holder.lock.fence
    if lost_by == "a delete":
        valkey_client.delete("name")
    else:
        wait_until(lambda: not holder.lock.valid, "the lease ends")
    assert holder.call("acquire_or_extend")
    assert holder.lock.fence > fence
    gc.collect()  # what was lost is not taken for dropped
    reason = LossReason.DELETED if lost_by == "a delete" else LossReason.EXPIRED
    assert losses.until()[0] == reason


@pytest.mark.parametrize("blocking", [True, False])
def test_acquire_or_extend_of_a_lock_without_a_ttl(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses, blocking: bool
) -> None:
    holder = holders.make(valkey.port, timeout=None, on_lost=losses)
    assert holder.call("acquire_or_extend")
    token = valkey_client.get("name")
    assert holder.call("acquire_or_extend", blocking=blocking) is True
    assert (valkey_client.get("name"), losses.reasons) == (token, [])
    valkey_client.delete("name")
    assert holder.call("acquire_or_extend", blocking=blocking) is True
    assert losses.until() == [LossReason.DELETED]
    assert valkey_client.get("name") == holder.lock.local.token != token


def test_acquire_or_extend_does_not_take_anothers(holders: Holders, valkey: Server, valkey_client: redis.Redis) -> None:
    holder = holders.make(valkey.port, timeout=FAR_S)
    holder.call("acquire")
    valkey_client.set("name", "another's")
    assert holder.call("acquire_or_extend", blocking=False) is False
    assert (holder.lock.local.token, valkey_client.get("name")) == (None, b"another's")


def test_try_acquire_makes_one_attempt(holders: Holders, valkey: Server) -> None:
    holder, other = (holders.make(valkey.port, timeout=FAR_S) for _ in range(2))
    assert (holder.call("try_acquire"), other.call("try_acquire")) == (True, False)
    holder.release()
    assert other.call("try_acquire", CANARY) is True
    assert other.lock.local.token == CANARY.encode()


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=["plain", "on terms"])
def test_try_extend_is_false_once_the_lock_is_lost(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, settings: dict[str, Any]
) -> None:
    holder = holders.hold(valkey.port, timeout=FAR_S, **settings)
    assert holder.call("try_extend", FAR_S) is True
    assert valkey_client.pttl("name") > 1000 * FAR_S
    with pytest.raises(ValueError, match="additional_time"):
        holder.call("try_extend", -1)
    valkey_client.delete("name")
    assert holder.call("try_extend", FAR_S) is False


def test_try_extend_of_a_lock_that_is_not_held_is_an_error(holders: Holders, valkey: Server) -> None:
    with pytest.raises(LockError, match="unlocked"):
        holders.make(valkey.port, timeout=FAR_S).call("try_extend", 1)


# Reentrance


@IN_BOTH
@TOKENS
def test_reentered_lock_is_released_by_the_last_release(
    our_lock: Any, valkey_client: redis.Redis, token: str | bytes
) -> None:
    lock = our_lock(valkey_client, "name", reentrant=True, **RENEWED)
    assert [lock.acquire(token=token), lock.acquire(), lock.acquire(token=token)] == [True] * 3
    assert lock.acquire(token="another", blocking=False) is False
    for _ in range(2):
        lock.release()
        assert lock.owned()
    lock.release()
    assert (valkey_client.exists("name"), lock.local.token) == (0, None)
    with pytest.raises(LockError, match="unlocked"):
        lock.release()


def test_reentrance_is_each_threads_and_tasks_own(world: World, our_lock: Any, valkey_client: redis.Redis) -> None:
    lock = our_lock(valkey_client, "name", timeout=FAR_S, reentrant=True)
    with lock:
        assert world.beside(lock.try_acquire) is False
        with lock:
            pass
        assert lock.owned()
    assert not valkey_client.exists("name")


@IN_THREADS
def test_reentrant_lock_is_not_released_by_another_thread(
    world: World, our_lock: Any, valkey_client: redis.Redis
) -> None:
    lock = our_lock(valkey_client, "name", timeout=FAR_S, reentrant=True)
    with lock:
        with pytest.raises(LockError, match="not owned"):
            world.beside(lock.release)
        assert lock.owned()


@IN_BOTH
def test_lost_lock_is_not_reentered(our_lock: Any, valkey_client: redis.Redis, losses: Losses) -> None:
    lock = our_lock(valkey_client, "name", reentrant=True, on_lost=losses, **RENEWED)
    lock.acquire()
    lock.acquire()
    valkey_client.delete("name")
    losses.until()
    with pytest.raises(LockLostError, match="reenter"):
        lock.acquire()
    assert not valkey_client.exists("name")
    lock.release()
    with pytest.raises(LockLostError):
        lock.release()


@IN_BOTH
def test_lock_whose_release_was_not_heard_of_is_not_reentered(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    retry = once() if world.in_threads else async_once()
    with Proxy(valkey.port) as proxy:
        lock = world.lock(world.connect(proxy.port, retry=retry), timeout=FAR_S, reentrant=True)
        lock.acquire()
        proxy.refuse()
        proxy.drop_reply(*RELEASE_COMMANDS)
        with pytest.raises(redis.ConnectionError):
            lock.release()
        proxy.accept()
        assert valkey_client.get("name") is None
        assert lock.acquire() is True
        assert (valkey_client.get("name"), lock.valid) == (lock.local.token, True)
        lock.release()
    assert valkey_client.get("name") is None


@IN_BOTH
def test_lock_that_was_reentered_is_not_detached(our_lock: Any, valkey_client: redis.Redis) -> None:
    lock = our_lock(valkey_client, "name", timeout=FAR_S, reentrant=True)
    with lock, lock:
        with pytest.raises(LockError, match="more than once"):
            lock.detach()
        assert lock.owned()


# detach, attach


def carried(handle: Handle) -> Handle:
    return Handle.from_dict(json.loads(json.dumps(handle.to_dict())))


@pytest.mark.slow
@pytest.mark.parametrize("carry", [lambda handle: pickle.loads(pickle.dumps(handle)), carried], ids=["pickle", "JSON"])
@pytest.mark.parametrize("name", ["name", b"\xff\x00"], ids=repr)
def test_detached_lock_is_held_by_the_lock_that_attaches_it(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, carry: Callable[[Handle], Handle], name: str | bytes
) -> None:
    holder = holders.hold(valkey.port, name, fencing=True, **RENEWED)
    fence = holder.lock.fence
    handle = carry(holder.call("detach"))
    assert (holder.lock.valid, holder.lock.lost, holder.lock.fence) == (False, False, None)
    with pytest.raises(LockError, match="unlocked"):
        holder.release()
    holder = holders.attach(valkey.port, handle, auto_renew=True, fencing=True)
    assert (holder.lock.valid, holder.lock.fence, holder.lock.name) == (True, fence, name)
    assert_believes_no_more_than_is_true(holder.lock, valkey_client)
    until_passed(valkey_client, LONG_S)
    assert holder.call("owned")
    holder.release()
    assert not valkey_client.exists(name)


def test_lock_whose_token_was_put_into_local_as_text_is_detached(holders: Holders, valkey: Server) -> None:
    holder, heir = holders.hold(valkey.port, timeout=FAR_S), holders.make(valkey.port, timeout=FAR_S)
    heir.lock.local.token = holder.lock.local.token.decode()
    attached = holders.attach(valkey.port, heir.call("detach"))
    assert (None, True) == (heir.lock.local.token, attached.call("owned"))


def test_handle_is_attached_in_another_process(holders: Holders, valkey: Server, valkey_client: redis.Redis) -> None:
    script = """if True:
        import json, sys
        import redis
        from redislock_fast import Handle, Lock

        with redis.Redis(port=int(sys.argv[1])) as client:
            lock = Lock.attach(client, Handle.from_dict(json.loads(sys.argv[2])), auto_renew=True)
            print(lock.valid, lock.owned(), lock.reacquire(), lock.release())
    """
    handle = holders.hold(valkey.port, timeout=FAR_S).call("detach")
    assert run_script(script, valkey.port, json.dumps(handle.to_dict())).stdout == "True True True None\n"
    assert not valkey_client.exists("name")


@pytest.mark.slow
def test_nothing_is_renewed_between_detach_and_attach(
    holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    holders.hold(valkey.port, **RENEWED).call("detach")
    wait_until(lambda: not valkey_client.exists("name"), "the ttl passes")


def test_handle_whose_lease_has_ended_is_lost_on_arrival(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    handle = holders.hold(valkey.port, timeout=BRIEF_S).call("detach")
    wait_until(lambda: not valkey_client.exists("name"), "the ttl passes")
    attached = holders.attach(valkey.port, handle, auto_renew=True, on_lost=losses)
    assert losses.until() == [LossReason.EXPIRED]
    assert (attached.lock.valid, attached.lock.lost) == (False, True)
    assert not valkey_client.exists("name")


def test_handle_that_says_nothing_of_its_lease_is_not_believed(
    holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    valkey_client.set("name", CANARY, px=60_000)
    attached = holders.attach(valkey.port, Handle("name", CANARY.encode(), FAR_S, None))
    assert attached.lock.remaining() == 0.0
    assert attached.call("reacquire")
    assert attached.lock.valid


def in_block(holder: Contender, body: Callable[[], object]) -> None:
    """Run the body in a `with` or `async with` block of the lock."""
    lock = holder.lock

    def block() -> None:
        with lock:
            body()

    async def async_block() -> None:
        async with lock:
            body()

    lock.in_block = block if hasattr(lock, "__enter__") else async_block
    holder.call("in_block")


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True, "fencing": True}], ids=["plain", "on terms"])
def test_block_takes_what_was_attached(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, settings: dict[str, Any]
) -> None:
    handle = holders.hold(valkey.port, timeout=FAR_S, fencing=True).call("detach")
    attached = holders.attach(valkey.port, handle, blocking=False, **settings)
    inside: list[object] = []
    in_block(attached, lambda: inside.extend((valkey_client.get("name"), attached.lock.valid, attached.lock.fence)))
    assert inside == [handle.token, True, handle.fence]
    assert not valkey_client.exists("name")
    in_block(attached, lambda: inside.append(valkey_client.get("name")))
    assert inside[-1] not in (None, handle.token)


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=["plain", "on terms"])
def test_block_of_a_lock_that_arrived_lost_raises(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, settings: dict[str, Any]
) -> None:
    handle = holders.hold(valkey.port, timeout=BRIEF_S).call("detach")
    wait_until(lambda: not valkey_client.exists("name"), "the ttl passes")
    attached = holders.attach(valkey.port, handle, **settings)
    for _ in range(2):
        with pytest.raises(LockLostError, match="enter"):
            in_block(attached, lambda: None)
        assert not valkey_client.exists("name")


def test_block_after_a_release_of_what_was_attached_acquires(
    holders: Holders, valkey: Server, valkey_client: redis.Redis
) -> None:
    handle = holders.hold(valkey.port, timeout=FAR_S).call("detach")
    attached = holders.attach(valkey.port, handle, blocking=False)
    attached.release()
    valkey_client.set("name", OTHER)
    with pytest.raises(LockError, match="Unable to acquire"):
        in_block(attached, lambda: None)
    assert valkey_client.get("name") == OTHER.encode()


@pytest.mark.parametrize("is_held", [False, True], ids=["free", "held"])
def test_lock_refuses_to_be_pickled(holders: Holders, valkey: Server, is_held: bool) -> None:
    holder = (holders.hold if is_held else holders.make)(valkey.port, timeout=FAR_S)
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=r"'name'.*detach\(\)"):
            attempt(holder.lock)
    if is_held:
        holder.release()


def test_handle_of_a_lock_that_does_not_expire(holders: Holders, valkey: Server) -> None:
    handle = holders.hold(valkey.port).call("detach")
    attached = holders.attach(valkey.port, handle)
    assert attached.lock.remaining() == math.inf
    attached.release()


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True, "fencing": True}], ids=["plain", "on terms"])
def test_lock_that_is_not_held_is_not_detached(holders: Holders, valkey: Server, settings: dict[str, Any]) -> None:
    with pytest.raises(LockError, match="detach an unlocked lock"):
        holders.make(valkey.port, timeout=FAR_S, **settings).call("detach")


def test_lost_lock_is_not_detached(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(valkey.port, on_lost=losses, **RENEWED)
    valkey_client.delete("name")
    losses.until()
    with pytest.raises(LockLostError, match="detach"):
        holder.call("detach")


# Tokens are secret


def test_no_token_is_shown(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []

    def fail(lock: Any) -> None:
        shown.append(repr(lock))
        raise RuntimeError("the callback's own")

    def fails(call: Callable[..., object], *args: Any) -> None:
        with pytest.raises((LockError, ValueError)) as caught:
            call(*args)
        shown.extend(traceback.format_exception(caught.value))

    losses = Losses(fail)
    settings: dict[str, Any] = {"fencing": True, "auto_renew": True, "on_lost": losses}
    holder = holders.make(valkey.port, timeout=FAR_S, **settings)
    assert holder.call("acquire", token=CANARY)
    handle = holder.call("detach")
    fails(Handle.from_dict, handle.to_dict() | {"token_hex": handle.token.hex() + "x"})
    holder = holders.attach(valkey.port, handle, **settings)
    for what in (handle, holder.lock, holder.lock.local, holder.lock._held().lease):
        shown += [repr(what), str(what)]
    valkey_client.set("name", OTHER)
    for verb, arguments in (("extend", (1,)), ("detach", ()), ("release", ())):
        fails(holder.call, verb, *arguments)
    assert (losses.reasons, "on_lost failed" in caplog.text) == ([LossReason.TAKEN], True)
    told = "\n".join([*shown, caplog.text])
    for token in (CANARY, OTHER):
        assert token not in told
        assert token.encode().hex() not in told


# An acquire by the caller's own token that fails: what it leaves of a lock that is held with that token


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
    scene: Scene, fail: Fail, proxy: Proxy, undone: list[bytes], settings: dict[str, Any]
) -> None:
    holder = scene.contender(timeout=FAR_S)
    assert holder.call("acquire", token=TOKEN) is True
    contender = connected(scene.callers, proxy, **settings)
    fail(contender, proxy)
    proxy.resume()
    until_heard(contender)
    assert undone == []
    assert holder.call("owned") is True


# Nobody holds the lock, and the attempt takes it


@SETTINGS
@pytest.mark.parametrize(("callers", "fail"), GIVEN_UP, indirect=["callers"])
def test_acquire_that_is_given_up_gives_back_what_it_has_taken(
    scene: Scene, fail: Fail, proxy: Proxy, settings: dict[str, Any]
) -> None:
    contender = connected(scene.callers, proxy, **settings)
    fail(contender, proxy)
    assert scene.client.get("name") == TOKEN
    proxy.resume()
    wait_until(lambda: not scene.client.exists("name"), "it is undone")
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
    scene: Scene, proxy: Proxy, undone: list[bytes]
) -> None:
    contender = connected(scene.callers, proxy)
    by_lost_reply(contender, proxy)
    until_heard(contender)
    assert undone == []
    assert scene.client.get("name") == TOKEN
    assert contender.call("acquire", token=TOKEN, blocking=False) is True
    contender.release()
    assert not scene.client.exists("name")


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
    scene: Scene, proxy: Proxy, settings: dict[str, Any]
) -> None:
    given_up = connected(scene.callers, proxy, **settings)
    others = scene.contenders(2, given_up.lock.redis, timeout=FAR_S, **settings)
    for contender in (given_up, *others):
        by_time(contender, proxy)
    assert scene.client.get("name") == TOKEN
    proxy.resume()
    wait_until(lambda: not scene.client.exists("name"), "it is undone")


@pytest.mark.parametrize(
    ("callers", "limit_s"), [pytest.param("threads", 3, marks=pytest.mark.slow), ("tasks", FAR_S)], indirect=["callers"]
)
def test_what_an_attempt_takes_after_another_has_released_is_undone(scene: Scene, limit_s: float, proxy: Proxy) -> None:
    given_up = connected(scene.callers, proxy)
    other = scene.contender(given_up.lock.redis, timeout=FAR_S, fencing=True)  # whose request is no SET
    proxy.answer(b"-LOADING the data\r\n", "SET")
    known = proxy.requests["SET"]
    answer = given_up.acquire(token=TOKEN, blocking_timeout=limit_s)
    wait_until(lambda: proxy.requests["SET"] > known, "it is under way")
    assert other.call("acquire", token=TOKEN) is True
    other.release()
    proxy.hold(answers_pass=True)
    proxy.disarm()
    wait_until(lambda: scene.client.get("name") == TOKEN, "it has taken the lock")
    if limit_s == FAR_S:
        answer.cancel()
    with pytest.raises((redis.TimeoutError, CancelledError)):
        answer.result(PATIENCE_S)
    given_up.call("remaining")  # the loop does one after the other
    proxy.resume()
    wait_until(lambda: not scene.client.exists("name"), "it is undone")


# The lock is had, and the acquire fails


UNREPLICATED: dict[str, Any] = {"wait_replicas": 1, "wait_timeout": 0.01}


def test_acquire_that_fails_after_it_found_the_lock_leaves_it(scene: Scene, undone: list[bytes]) -> None:
    client = scene.connect()
    holder = scene.contender(client, timeout=FAR_S)
    assert holder.call("acquire", token=TOKEN) is True
    contender = scene.contender(client, timeout=FAR_S, **UNREPLICATED)
    with pytest.raises(redislock_fast.NotReplicatedError):
        contender.call("acquire", token=TOKEN)
    assert undone == []
    assert contender.lock.local.token is None
    assert holder.call("owned") is True


def test_acquire_that_fails_after_it_took_the_lock_gives_it_back(scene: Scene) -> None:
    contender = scene.contender(timeout=FAR_S, **UNREPLICATED)
    with pytest.raises(redislock_fast.NotReplicatedError):
        contender.call("acquire", token=TOKEN)
    wait_until(lambda: not scene.client.exists("name"), "it is undone")
