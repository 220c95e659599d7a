"""Waiting beside others: redis-py's own locks, tokens that callers choose, classes with scripts or hooks of their own.

A holder that does not hand the lock over is watched; a poller takes a free lock. Rules: a waiter that must be notified
has an interval longer than any test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import MethodType
from typing import Any

import pytest
import redis
import redis.asyncio.lock
import redis.lock
from redis.exceptions import LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.proxy import Proxy
from tests.support.scenes import Scene
from tests.support.waiting import (
    CALLERS,
    FAR_S,
    HEARD_S,
    LATE,
    Callers,
    Contender,
    Guard,
    Threads,
    hand_round,
    queue_up,
    sent_by,
)


@pytest.fixture
def theirs(client: redis.Redis) -> redis.lock.Lock:
    """A lock of redis-py."""
    return redis.lock.Lock(client, "name", timeout=FAR_S, thread_local=False)


def watched(admin: redis.Redis) -> bool:
    return bool(admin.info("stats")["tracking_total_keys"])


def queue_up_and_watch(contenders: list[Contender], admin: redis.Redis) -> list[Future[Any]]:
    """Let them wait for a lock whose holder will not hand it over."""
    answers = queue_up(contenders, admin)
    wait_until(lambda: watched(admin), "the key is watched")
    return answers


# Waiting for redis-py's lock


def test_redis_pys_release_wakes_a_waiter(scene: Scene, theirs: redis.lock.Lock) -> None:
    waiter = scene.contender()
    for _ in range(3):
        assert theirs.acquire()
        answers = queue_up_and_watch([waiter], scene.client)
        assert scene.client.get("name") == theirs.local.token
        theirs.release()
        hand_round([waiter], answers)
    assert scene.client.keys() == []


def test_redis_pys_extends_do_not_shake_a_waiter_off(scene: Scene, theirs: redis.lock.Lock) -> None:
    waiter = scene.contender(scene.connect(client_name="waiter"))
    assert theirs.acquire()
    answers = queue_up_and_watch([waiter], scene.client)
    extends: list[Callable[[], Any]] = [lambda: theirs.extend(1), theirs.reacquire]
    for extend in 2 * extends:
        assert extend()
        wait_until(lambda: watched(scene.client), "the key is watched again")
        assert not answers[0].done()
        assert theirs.owned()
    theirs.release()
    hand_round([waiter], answers)


def test_redis_pys_expiry_wakes_a_waiter(scene: Scene) -> None:
    waiter = scene.contender()
    assert redis.lock.Lock(scene.client, "name", timeout=0.3).acquire()
    answer = waiter.acquire()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


def test_redis_pys_lock_shortened_and_expired_wakes_a_waiter(scene: Scene, theirs: redis.lock.Lock) -> None:
    waiter = scene.contender()
    assert theirs.acquire()
    answers = queue_up_and_watch([waiter], scene.client)
    assert theirs.extend(0.1, replace_ttl=True)
    hand_round([waiter], answers)


def test_waiters_for_redis_pys_lock_get_it_in_order(scene: Scene, theirs: redis.lock.Lock) -> None:
    clients = [scene.connect() for _ in range(3)]
    waiters = [scene.contender(clients[number % 3]) for number in range(9)]
    for _ in range(2):
        assert theirs.acquire()
        answers = queue_up_and_watch(waiters, scene.client)
        theirs.release()
        hand_round(waiters, answers)
    assert scene.client.keys() == []


def test_many_waiters_for_redis_pys_lock_are_silent_while_nothing_changes(
    scene: Scene, theirs: redis.lock.Lock
) -> None:
    waiters = scene.contenders(20, scene.connect(client_name="waiter"))
    assert theirs.acquire()
    answers = queue_up_and_watch(waiters, scene.client)

    def silent() -> bool:
        with sent_by(scene.client, "waiter") as sent:
            for _ in range(50):
                assert theirs.owned()
        return not sent.commands

    wait_until(silent, "nothing is sent any more")
    theirs.release()
    hand_round(waiters, answers)


@pytest.mark.parametrize("digit", b"01p", ids=chr)
def test_attempt_that_does_not_wait_is_not_in_the_queue_while_redis_py_holds_the_lock(scene: Scene, digit: int) -> None:
    token = b"%032x" % 0  # as redis-py's, with each digit where ours say whether their holder listens
    scene.client.set("name", token[:15] + bytes([digit]) + token[16:])
    contender = scene.contender(scene.connect(client_name="contender"), timeout=FAR_S)
    assert contender.call("locked") is True  # connected
    with sent_by(scene.client, "contender") as sent:
        assert contender.call("acquire", blocking=False) is False
    assert set(sent.commands) <= {"SET", "GET"}  # the second one where SET cannot return the value


@pytest.mark.parametrize("number", [1, 20])
def test_one_of_many_waiters_watches_redis_pys_lock(scene: Scene, theirs: redis.lock.Lock, number: int) -> None:
    waiters = scene.contenders(number, scene.connect(client_name="waiter"))
    assert theirs.acquire()
    answers = queue_up_and_watch(waiters, scene.client)
    with sent_by(scene.client, "waiter") as sent:
        for _ in range(5):
            assert theirs.reacquire()
            wait_until(lambda: watched(scene.client), "the key is watched again")
    assert len(sent.commands) <= 2 * 5 * 4  # a request to wait and three to watch; twice, for late ones
    theirs.release()
    hand_round(waiters, answers)


def test_an_operators_key_without_a_ttl_is_waited_for(scene: Scene) -> None:
    waiters = scene.contenders(2)
    scene.client.set("name", "maintenance")
    answers = queue_up_and_watch(waiters, scene.client)
    scene.client.set("name", "still maintenance")
    wait_until(lambda: watched(scene.client), "the key is watched again")
    assert scene.client.get("name") == b"still maintenance"
    scene.client.delete("name")
    hand_round(waiters, answers)


# redis-py waits


def tries_of_all(admin: redis.Redis) -> int:
    calls: int = admin.info("commandstats")["cmdstat_set"]["calls"]
    return calls


def tries_more(admin: redis.Redis, enough: int) -> bool:
    return tries_of_all(admin) > enough


def test_redis_py_gets_the_lock_when_nobody_of_ours_waits(scene: Scene, connect: Connect) -> None:
    holder, *waiters = scene.contenders(6)
    polling = redis.lock.Lock(
        connect(scene.server.port, client_name="redis-py"), "name", sleep=0.001, thread_local=False
    )
    assert holder.call("acquire")
    answers = scene.queue_up(waiters)
    theirs = start(polling.acquire)
    for number, contender in enumerate([holder, *waiters]):
        if number:
            assert answers[number - 1].result(PATIENCE_S) is True
        with sent_by(scene.client, "redis-py") as sent:
            wait_until(partial(tries_more, scene.client, tries_of_all(scene.client) + 5), "redis-py tries")
        assert "SET" in sent.commands
        assert not theirs.done()
        contender.release()
    assert theirs.result(PATIENCE_S) is True
    assert scene.client.get("name") == polling.local.token
    polling.release()


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_redis_pys_locks_and_ours_exclude_each_other(server: Server, connect: Connect, kind: str) -> None:
    guard = Guard()
    ended = itertools.count()

    def work(lock: redis.lock.Lock) -> None:
        for _ in range(40):
            with lock, guard:
                next(ended)

    with CALLERS[kind]() as callers:
        clients = [callers.client(server.port) for _ in range(2)]
        ours = [callers.contender(clients[number % 2], timeout=10) for number in range(4)]
        theirs = [
            start(lambda: work(redis.lock.Lock(connect(server.port), "name", timeout=10, sleep=0.001)))
            for _ in range(4)
        ]
        for _ in range(40):
            for answer in [contender.use(guard) for contender in ours]:
                assert answer.result(PATIENCE_S) is True
        for worker in theirs:
            worker.result(2 * PATIENCE_S)
    assert guard.overlaps == 0
    assert guard.entries == 8 * 40


# Tokens that callers choose


def test_a_chosen_token_waits_in_the_queue_by_a_ticket(scene: Scene) -> None:
    holder, waiter = scene.contenders(2)
    for _ in range(2):
        assert holder.call("acquire")
        answer = waiter.acquire(token="chosen")
        wait_until(lambda: scene.queued() == 1, "its ticket is in the queue")
        holder.release()
        assert answer.result(PATIENCE_S) is True
        assert scene.client.get("name") == b"chosen"
        waiter.release()
    assert scene.client.keys() == []


@pytest.mark.parametrize("token", ["chosen", b"\x00\xff", "rlf:" + 32 * "0"], ids=ascii)
def test_a_chosen_token_has_its_turn_among_others(scene: Scene, token: str | bytes) -> None:
    holder, first, second, third = scene.holder_and(3)
    answers = []
    for number, (waiter, own) in enumerate([(first, None), (second, token), (third, None)], 1):
        answers.append(waiter.acquire() if own is None else waiter.acquire(token=own))
        wait_until(lambda: scene.queued() == number, "it is in the queue")  # noqa: B023
    for releasing, answer in zip((holder, first, second), answers, strict=True):
        assert not answer.done()
        releasing.release()
        assert answer.result(PATIENCE_S) is True
    third.release()
    assert scene.client.keys() == []


def test_a_ticket_is_given_up_with_its_waiter(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    assert waiter.call("acquire", token="chosen", blocking_timeout=HEARD_S) is False
    assert scene.queued() == 0
    holder.release()
    assert scene.client.keys() == []


def test_a_lock_on_its_way_to_a_waiter_is_not_taken_with_the_same_token(scene: Scene, proxy: Proxy) -> None:
    holder, sharer = scene.contenders(2)
    waiter = scene.contender(scene.connect(proxy.port))
    assert holder.call("acquire")
    answer = scene.wait(waiter, token="chosen")
    proxy.hold()
    holder.release()
    assert sharer.call("acquire", blocking=False, token="chosen") is False
    proxy.resume()
    assert answer.result(PATIENCE_S) is True
    assert sharer.call("acquire", blocking=False, token="chosen") is True
    waiter.release()
    assert scene.client.keys() == []


def test_a_lock_that_gets_the_chosen_token_meanwhile_is_taken_with_it(scene: Scene) -> None:
    _, waiter = scene.holder_and(1, timeout=FAR_S, sleep=0.02)
    answer = waiter.acquire(token="chosen")
    wait_until(lambda: scene.queued() == 1, "its ticket is in the queue")
    scene.client.set("name", "chosen")
    assert answer.result(PATIENCE_S) is True
    assert scene.queued() == 0
    waiter.release()
    assert scene.client.get("name") is None


def test_lock_that_was_taken_over_with_the_chosen_token_is_handed_over(scene: Scene) -> None:
    holder, patient = scene.contenders(2)
    waiter = scene.contender(timeout=FAR_S, sleep=0.02)
    assert holder.call("acquire")
    answer = scene.wait(patient)
    taken = waiter.acquire(token="chosen")
    scene.until_queued(2)
    scene.client.set("name", "chosen")
    assert taken.result(PATIENCE_S) is True
    waiter.release()
    assert answer.result(PATIENCE_S) is True
    patient.release()
    assert scene.client.keys() == []


@pytest.mark.parametrize("token", ["chosen", "rlf:" + 32 * "0", "chosen+", b"\x00\xff"], ids=ascii)
def test_acquire_with_the_token_that_holds_the_lock_succeeds(scene: Scene, token: str | bytes) -> None:
    first, second = scene.contenders(2)
    assert first.call("acquire", token=token)
    scene.client.pexpire("name", 1000)
    assert second.call("acquire", blocking=False, token=token) is True
    assert scene.client.pttl("name") > 1000
    second.release()
    assert scene.client.keys() == []


def test_acquire_with_the_token_of_a_contended_lock_succeeds(scene: Scene) -> None:
    holder, heir, waiter = scene.holder_and(2)
    token = holder.lock.local.token
    answer = scene.wait(waiter)
    assert heir.call("acquire", blocking=False, token=token) is True
    assert scene.client.get("name") == token + b"+"
    heir.release()
    assert answer.result(PATIENCE_S) is True


def test_holder_with_a_chosen_token_is_waited_for_in_the_queue(scene: Scene) -> None:
    holder, *waiters = scene.contenders(4)
    assert holder.call("acquire", token="chosen")
    answers = queue_up_and_watch(waiters, scene.client)
    assert scene.client.get("name") == b"chosen"
    assert holder.call("owned")
    assert holder.call("extend", 1)
    assert holder.call("reacquire")
    holder.release()
    hand_round(waiters, answers)
    assert scene.client.keys() == []


# Classes of users


def own_kind(callers: Callers, **members: Any) -> type[Any]:
    """A class derived from ours."""
    base: Any = redislock_fast.Lock if isinstance(callers, Threads) else redislock_fast.asyncio.Lock
    return type("Own", (base,), members)


def contender_of(callers: Callers, kind: type[Any], port: int, **settings: Any) -> Contender:
    """A contender whose lock is of this class."""
    contender = callers.contender(callers.client(port))
    contender.lock = kind(contender.lock.redis, "name", thread_local=False, **settings)
    return contender


SCRIPT = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


def test_a_class_with_a_script_of_its_own_is_never_marked(scene: Scene) -> None:
    kind = own_kind(scene.callers, LUA_RELEASE_SCRIPT=SCRIPT, lua_release=None)
    holder, waiter = (contender_of(scene.callers, kind, scene.server.port, **LATE) for _ in range(2))
    ours = scene.contender()
    assert holder.call("acquire")
    answer = waiter.acquire()
    wait_until(lambda: scene.queued() == 1, "its ticket is in the queue")
    assert scene.client.get("name") == holder.lock.local.token
    holder.release()
    assert answer.result(PATIENCE_S) is True
    answers = queue_up_and_watch([ours], scene.client)
    assert scene.client.get("name") == waiter.lock.local.token
    waiter.release()
    hand_round([ours], answers)
    assert scene.client.keys() == []


def comparing_hooks(callers: Callers, client: redis.Redis) -> dict[str, Any]:
    """The hooks of a class that compares tokens itself, each to what it does where they are the same."""

    def hook_of(act: Callable[..., object]) -> Any:
        def hook(self: Any, *args: Any) -> bool:
            if client.get(self.name) != self.local.token:
                raise LockNotOwnedError("the key does not hold the token", lock_name=self.name)
            act(self, *args)
            return True

        async def async_hook(self: Any, *args: Any) -> bool:
            return hook(self, *args)

        return hook if isinstance(callers, Threads) else async_hook

    return {
        "do_release": hook_of(lambda self, _: client.delete(self.name)),
        "do_extend": hook_of(lambda self, additional_time, _: client.expire(self.name, additional_time)),
        "do_reacquire": hook_of(lambda self: client.expire(self.name, self.timeout)),
    }


@pytest.mark.parametrize("overridden", ["do_release", "do_extend", "do_reacquire"])
@pytest.mark.parametrize("how", ["in a base class", "after the class statement", "on the lock"])
def test_a_lock_with_a_hook_that_compares_tokens_is_never_marked(scene: Scene, how: str, overridden: str) -> None:
    hook = comparing_hooks(scene.callers, scene.client)[overridden]
    kind = type("Derived", (own_kind(scene.callers, **({overridden: hook} if how == "in a base class" else {})),), {})
    holder = contender_of(scene.callers, kind, scene.server.port, timeout=int(FAR_S))
    if how == "after the class statement":
        setattr(kind, overridden, hook)
    elif how == "on the lock":
        setattr(holder.lock, overridden, MethodType(hook, holder.lock))
    assert holder.call("acquire")
    waiter = scene.contender()
    answers = queue_up_and_watch([waiter], scene.client)
    assert scene.client.get("name") == holder.lock.local.token
    assert holder.call("extend", 2 * int(FAR_S)) is True
    assert holder.call("reacquire") is True
    holder.release()
    hand_round([waiter], answers)
    assert scene.client.keys() == []


def test_a_class_with_a_do_acquire_of_its_own_polls_through_it(scene: Scene) -> None:
    tries = itertools.count()
    base: Any = redislock_fast.Lock if isinstance(scene.callers, Threads) else redislock_fast.asyncio.Lock

    def do_acquire(self: Any, token: Any) -> Any:
        next(tries)
        return base.do_acquire(self, token)

    kind = own_kind(scene.callers, do_acquire=do_acquire)
    holder = scene.contender()
    waiter = contender_of(scene.callers, kind, scene.server.port, timeout=FAR_S, sleep=0.002)
    assert holder.call("acquire")
    answer = waiter.acquire()
    wait_until(lambda: next(tries) > 20, "the waiter tries again and again")
    assert scene.client.keys() == [b"name"]
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


@pytest.mark.parametrize("verb", ["release", "reacquire", "extend", "owned"])
def test_callers_token_does_not_hold_what_holds_a_longer_one(scene: Scene, verb: str) -> None:
    client = scene.connect()
    holder, other = scene.contenders(2, client, timeout=60)
    assert holder.call("acquire", token="job+")
    assert other.call("acquire", token="job", blocking=False) is False
    other.lock.local.token = b"job"
    if verb == "owned":
        assert other.call("owned") is False
    else:
        with pytest.raises(LockNotOwnedError):
            other.call(verb, *((1,) if verb == "extend" else ()))
    assert holder.call("owned") is True
