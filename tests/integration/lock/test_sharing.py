"""One lock object that several callers use at once (`thread_local=False`): what one does is not done to another.

They share what is held, never the attempts and rounds under way. Rules: by threads and by tasks; the proxy and the
server make what fails.
"""

from __future__ import annotations

import asyncio
import functools
import pkgutil
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import LockLostError
from redislock_fast.server import Server
from tests.support.async_helpers import async_few
from tests.support.helpers import PATIENCE_S, few, start
from tests.support.proxy import Proxy
from tests.support.redlock import LIMIT_S, clients_of
from tests.support.scenes import Scene
from tests.support.transports import steps_until
from tests.support.waiting import FAR_S, Callers, Contender, Threads, transport_in_use, until_one_is_done
from tests.support.worlds import World, waited

SHARED: Any = {"timeout": FAR_S, "limit": LIMIT_S, "thread_local": False}
"""Settings of a Redlock."""

COMPLETE = "redislock_fast._procedures.acquire.complete_acquire"
"""Does what the options ask for, once the lock is held."""


def shared_lock(callers: Callers, proxy: Proxy, **settings: Any) -> Contender:
    """A lock whose calls may overlap; contenders share what they hold. Its connection stands."""
    retry = few() if isinstance(callers, Threads) else async_few()
    contender = callers.contender(callers.client(proxy.port, retry=retry), timeout=FAR_S, **settings)
    assert contender.lock.thread_local is False
    contender.call("locked")
    return contender


def test_attempt_that_is_being_undone_does_not_wait_under_its_token(
    scene: Scene, proxy: Proxy, undone: list[bytes]
) -> None:
    holder = redislock_fast.Lock(scene.client, "name", timeout=FAR_S)
    assert holder.acquire()
    shared = shared_lock(scene.callers, proxy, sleep=0.05)
    proxy.hold()
    known = proxy.requests["SET"]
    answers = [shared.acquire(blocking_timeout=PATIENCE_S) for _ in range(2)]
    proxy.wait_for_request("SET", known + 2)
    proxy.cut()
    proxy.resume()
    scene.until_queued(2)
    holder.release()
    while answers:
        until_one_is_done(answers)
        answers = [answer for answer in answers if not (answer.done() and answer.result())]
        assert shared.lock.local.token.removesuffix(b"+") not in undone
        assert shared.call("owned")
        shared.release()
    assert len(undone) == 2  # what was sent when the connection was cut


def test_acquire_that_fails_leaves_what_another_has_acquired(scene: Scene, proxy: Proxy, undone: list[bytes]) -> None:
    holder = redislock_fast.Lock(scene.client, "name", timeout=FAR_S)
    assert holder.acquire()
    shared = shared_lock(scene.callers, proxy, auto_renew=True)
    answers = [shared.acquire() for _ in range(2)]
    scene.until_queued(2)
    holder.release()
    until_one_is_done(answers)
    held = shared.lock.local.token
    proxy.refuse()
    proxy.cut()
    (failed,) = (answer for answer in answers if not answer.done())
    with pytest.raises(redis.ConnectionError):
        failed.result(PATIENCE_S)
    proxy.accept()
    assert held not in undone
    assert shared.call("owned") is True
    shared.release()


def interpose(
    contender: Contender, owner: Any, name: str, meanwhile: Callable[[], Future[Any]], error: Exception | None = None
) -> None:
    """In the contender's next call of a method, another caller does something before what else happens, or an error."""
    original = getattr(owner, name)

    def in_thread(*args: Any, **kwargs: Any) -> Any:
        delattr(owner, name)
        if name == "begin":
            args[0].begin()  # it is under way, though its request has not left
        meanwhile().result(PATIENCE_S)
        if error is not None:
            raise error
        return original(*args, **kwargs)

    async def in_task(*args: Any, **kwargs: Any) -> Any:
        delattr(owner, name)
        if name == "begin":
            args[0].begin()
        await asyncio.wrap_future(meanwhile())
        if error is not None:
            raise error
        return await original(*args, **kwargs)

    setattr(owner, name, in_thread if isinstance(contender.lock, redislock_fast.Lock) else in_task)


def test_lock_whose_acquire_is_not_complete_is_nobodys_to_give_away(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = scene.contender(timeout=FAR_S, fencing=True)
    complete = pkgutil.resolve_name(COMPLETE)

    def watched(lock: Any, *args: Any) -> Any:
        with pytest.raises(LockError, match="unlocked"):
            lock.detach()
        return complete(lock, *args)

    monkeypatch.setattr(COMPLETE, watched)
    assert shared.call("acquire") is True
    assert shared.call("owned") is True
    shared.release()


def test_acquire_that_is_not_completed_leaves_what_another_has_acquired(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = scene.contender(timeout=FAR_S, auto_renew=True)
    complete = pkgutil.resolve_name(COMPLETE)

    def overtaken(_: Any, *args: Any) -> Iterator[Any]:
        monkeypatch.setattr(COMPLETE, complete)
        scene.client.delete("name")
        other = shared.acquire()
        yield from steps_until(other.done)
        raise redis.ConnectionError("lost")

    monkeypatch.setattr(COMPLETE, overtaken)
    with pytest.raises(redis.ConnectionError):
        shared.call("acquire")
    assert shared.call("owned") is True
    shared.release()


def test_acquire_or_extend_of_what_was_lost_leaves_what_another_has_acquired(scene: Scene) -> None:
    shared = scene.contender(timeout=FAR_S)
    assert shared.call("acquire") is True

    def acquire_anew() -> Future[bool]:
        scene.client.delete("name")
        return shared.acquire()

    interpose(shared, shared.lock, "do_reacquire", acquire_anew, error=LockNotOwnedError("lost"))
    assert shared.call("acquire_or_extend", blocking=False) is False
    assert shared.call("owned") is True
    shared.release()


def test_overridden_attempt_knows_its_own_token_from_that_of_another(scene: Scene) -> None:
    shared = scene.contender(timeout=FAR_S)
    scene.client.set("name", b"mine", ex=1000)
    interpose(shared, shared.lock, "do_acquire", lambda: shared.acquire(blocking=False, token=b"another's"))
    assert shared.call("acquire", blocking=False, token=b"mine") is True  # it was found held by that, and reacquired
    shared.release()


def test_release_beside_another_that_is_under_way_finds_the_lock_unlocked(scene: Scene) -> None:
    losses: list[Any] = []
    shared = scene.contender(scene.connect(), timeout=FAR_S, on_lost=lambda _, reason: losses.append(reason))
    assert shared.call("acquire") is True
    errors: list[BaseException | None] = []

    def release_too() -> Future[None]:
        other = shared.ask("release")
        return start(lambda: errors.append(other.exception(PATIENCE_S)))

    interpose(shared, shared.lock, "do_release", release_too)
    shared.release()
    assert [type(error) for error in errors] == [LockError]
    assert losses == []


def test_prolonging_what_another_releases_meanwhile_is_no_loss(scene: Scene) -> None:
    losses: list[Any] = []
    shared = scene.contender(scene.connect(), timeout=FAR_S, on_lost=lambda _, reason: losses.append(reason))
    for verb, *args in (("extend", 1), ("reacquire",)):
        assert shared.call("acquire") is True
        interpose(shared, shared.lock, f"do_{verb}", lambda: shared.ask("release"), error=LockNotOwnedError("released"))
        with pytest.raises(LockNotOwnedError) as caught:
            shared.call(verb, *args)
        assert not isinstance(caught.value, LockLostError)
        assert losses == []


@pytest.mark.parametrize("settings", [{}, {"auto_renew": True}], ids=["plain", "on terms"])
def test_prolonging_what_another_has_released_says_that_it_is_unlocked(scene: Scene, settings: dict[str, Any]) -> None:
    shared = scene.contender(timeout=FAR_S, **settings)
    for verb, *args in (("extend", 1), ("reacquire",)):
        assert shared.call("acquire") is True
        interpose(shared, shared.lock, f"do_{verb}", lambda: shared.ask("release"))
        with pytest.raises(LockError, match="unlocked"):
            shared.call(verb, *args)


@pytest.mark.parametrize("settings", [{}, {"on_lost": print}], ids=["plain", "on terms"])
def test_lease_that_two_prolong_at_once_is_no_longer_than_the_servers(scene: Scene, settings: dict[str, Any]) -> None:
    shared = scene.contender(timeout=FAR_S, **settings)
    assert shared.call("acquire") is True
    sends = "execute" if settings else "begin"
    interpose(shared, transport_in_use(shared), sends, lambda: shared.ask("extend", 30, replace_ttl=True))
    shared.call("extend", 100)
    ttl_s = scene.client.pttl("name") / 1000  # before: time may pass between the two
    assert 0 < shared.lock.remaining() <= ttl_s
    shared.release()


def test_lease_that_two_set_anew_at_once_is_as_long_as_the_servers(scene: Scene) -> None:
    shared = scene.contender(timeout=FAR_S, on_lost=print)
    assert shared.call("acquire") is True
    shared.call("extend", FAR_S / 4, replace_ttl=True)
    interpose(shared, transport_in_use(shared), "execute", lambda: shared.ask("reacquire"))
    shared.call("reacquire")
    assert shared.lock.remaining() > FAR_S / 2
    shared.release()


def test_release_that_another_has_sent_and_not_heard_of_is_no_loss(callers: Callers, proxy: Proxy) -> None:
    shared = shared_lock(callers, proxy)
    shared.lock.do_release = functools.partial(shared.lock.do_release)  # overridden: its requests can be held up
    assert shared.call("acquire") is True
    shared.release()  # the server knows the script now, and executes it at once
    assert shared.call("acquire") is True

    def release_in_vain() -> Future[None]:
        proxy.refuse()
        proxy.drop_reply("DELIFEQ", "DELEX", "EVALSHA")
        other = shared.ask("release")
        return start(lambda: accept_after(other))

    def accept_after(other: Future[None]) -> None:
        assert isinstance(other.exception(PATIENCE_S), redis.ConnectionError)
        proxy.accept()

    interpose(shared, transport_in_use(shared), "execute", release_in_vain)
    shared.release()


def test_token_that_is_brought_again_is_held_though_its_last_release_was_not_heard_of(
    callers: Callers, proxy: Proxy
) -> None:
    shared = shared_lock(callers, proxy)
    assert shared.call("acquire", token=b"job") is True
    proxy.refuse()
    proxy.drop_reply("DELIFEQ", "DELEX", "EVALSHA")
    with pytest.raises(redis.ConnectionError):
        shared.release()
    proxy.accept()
    assert shared.call("acquire", token=b"job") is True
    assert shared.lock.remaining() > 0
    shared.release()


def test_waiting_with_a_brought_token_that_fails_leaves_what_another_holds_with_it(
    scene: Scene, proxy: Proxy, undone: list[bytes]
) -> None:
    scene.client.set("name", b"another's")
    shared = shared_lock(scene.callers, proxy)
    known = proxy.replies["GET"]
    answer = shared.acquire(token=b"job")
    proxy.wait_for_reply("GET", known + 1)
    proxy.hold()
    scene.client.set("name", b"job")
    proxy.refuse()
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        answer.result(PATIENCE_S)
    proxy.resume()
    proxy.accept()
    assert b"job" not in undone
    assert scene.client.get("name") == b"job"


def test_release_of_what_was_lost_leaves_what_another_has_acquired(
    world: World, our_lock: Any, client: redis.Redis
) -> None:
    class Overtaken(our_lock):  # type: ignore[misc]
        def do_release(self, expected_token: Any) -> None:
            if client.get("name") == expected_token:
                client.delete("name")
                assert world.beside(lambda: waited(self.acquire()))
            waited(super().do_release(expected_token))

    lock = Overtaken(client, "name", thread_local=False)
    assert lock.acquire()
    with pytest.raises(LockNotOwnedError):
        lock.release()
    assert lock.owned() is True


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
def test_redlock_whose_acquire_is_not_complete_is_nobodys_to_release(
    fleet: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = redislock_fast.Redlock(clients_of(fleet), "name", auto_renew=True, **SHARED)
    keep = redislock_fast.Redlock._keep
    refused: list[BaseException | None] = []

    def overtaken(self: redislock_fast.Redlock, lease: Any) -> None:
        refused.append(start(lock.release).exception(PATIENCE_S))
        keep(self, lease)

    monkeypatch.setattr(redislock_fast.Redlock, "_keep", overtaken)
    assert lock.acquire(blocking=False)
    assert [type(error) for error in refused] == [LockError]
    assert lock.owned() is True
    assert lock.valid
    lock.release()


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
@pytest.mark.parametrize("settings", [{}, {"on_lost": print}], ids=["plain", "on terms"])
def test_redlock_that_two_prolong_at_once_is_valid_no_longer_than_at_its_servers(
    fleet: list[Server], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    clients = clients_of(fleet)
    lock = redislock_fast.Redlock(clients, "name", **SHARED, **settings)
    assert lock.acquire(blocking=False)
    quorum_class: Any = type(lock._quorum)
    ask = quorum_class.ask

    def overtaken(self: Any, *rounds: Any) -> None:
        ask(self, *rounds)
        monkeypatch.setattr(quorum_class, "ask", ask)
        assert start(lambda: lock.extend(FAR_S, replace_ttl=True)).result(PATIENCE_S)

    monkeypatch.setattr(quorum_class, "ask", overtaken)
    lock.extend(2 * FAR_S, replace_ttl=True)
    ttl_s = max(client.pttl("name") for client in clients) / 1000  # before: time may pass between the two
    assert 0 < lock.remaining() <= ttl_s
    lock.release()


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
def test_interrupted_redlock_leaves_what_a_thread_has_acquired(
    fleet: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = redislock_fast.Redlock(clients_of(fleet), "name", **SHARED)
    quorum_class: Any = type(lock._quorum)
    drive = quorum_class.drive

    def interrupted(_: Any, steps: Any) -> Any:
        monkeypatch.setattr(quorum_class, "drive", drive)
        assert start(lock.acquire).result(PATIENCE_S)
        steps.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(quorum_class, "drive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire(blocking=False)
    assert lock.owned() is True


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
def test_interrupted_redlock_leaves_what_a_task_has_acquired(
    fleet: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clients = [redis.asyncio.Redis(port=server.port) for server in fleet]
        lock = redislock_fast.asyncio.Redlock(clients, "name", **SHARED)
        quorum_class: Any = type(lock._quorum)
        drive = quorum_class.drive

        async def interrupted(_: Any, steps: Any) -> Any:
            monkeypatch.setattr(quorum_class, "drive", drive)
            acquiring: Coroutine[Any, Any, bool] = lock.acquire()
            assert await asyncio.create_task(acquiring)
            steps.close()
            raise KeyboardInterrupt

        monkeypatch.setattr(quorum_class, "drive", interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                await lock.acquire(blocking=False)
            assert await lock.owned() is True
        finally:
            for client in clients:
                await client.aclose()

    asyncio.run(scenario())
