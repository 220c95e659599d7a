"""An acquire has one deadline for all its steps, and a lock that the server has called another's is refused at its end.

Rules: a silent server is a frozen one or a proxy that holds replies back; the pool's own limits lie beyond a test's
patience, so that whatever they decide fails.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pybreaker
import pytest
import redis

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.support.async_helpers import async_once
from tests.support.helpers import PATIENCE_S, once, wait_until
from tests.support.proxy import Proxy
from tests.support.scenes import Scene
from tests.support.times import clock
from tests.support.waiting import FAR_S, LATE, Callers, Contender, Threads

PATIENT: dict[str, Any] = {"socket_timeout": FAR_S, "socket_connect_timeout": FAR_S}
"""Settings of a client whose own limits are beyond any test's patience."""

FAR_AWAY_S = 0.15
"""A round trip that is longer than what an acquire grants a request that is under way at its end."""

SHORT_S = 0.05

MOST_ASKED = 50
"""How often a server that says "later" may be asked within four times that."""
LONG_S = 1.0


def connected(scene: Scene, port: int, **settings: Any) -> Contender:
    """A contender whose connection stands and listens for messages."""
    client = scene.connect(port, **PATIENT)
    held = scene.holder(client, "warm-up")
    assert scene.contender(client, "warm-up").call("acquire", blocking_timeout=SHORT_S) is False
    held.release()
    return scene.contender(client, **{**LATE, **settings})


def until_free(client: redis.Redis) -> None:
    """Return once nothing is left of the lock. The counter of its fences stays."""
    keys: Any = client.keys
    wait_until(lambda: not [key for key in keys() if not key.endswith(b":fence")], "nothing is left")


# ---- a server far away ----


@pytest.mark.slow
def test_lock_of_another_is_refused_over_a_network_slower_than_the_grace(
    scene: Scene, proxy: Proxy, holder: redislock_fast.Lock
) -> None:
    waiter = connected(scene, proxy.port)
    proxy.delay_s = FAR_AWAY_S
    assert waiter.call("acquire", blocking_timeout=4 * FAR_AWAY_S) is False
    scene.until_queued(0)
    assert holder.owned()
    holder.release()
    until_free(scene.client)


@pytest.mark.slow
def test_refusal_over_a_slow_network_is_no_failure_to_a_breaker(
    scene: Scene, proxy: Proxy, holder: redislock_fast.Lock
) -> None:
    breaker = pybreaker.CircuitBreaker(fail_max=1, reset_timeout=FAR_S)
    waiter = connected(scene, proxy.port, breaker=breaker, fencing=True)
    proxy.delay_s = FAR_AWAY_S
    assert waiter.call("acquire", blocking_timeout=4 * FAR_AWAY_S) is False
    assert breaker.fail_counter == 0
    assert holder.owned()


@pytest.mark.slow
@pytest.mark.parametrize("wait", ["push", "poll"])
def test_server_that_falls_silent_after_its_verdict_has_refused(
    scene: Scene, proxy: Proxy, holder: redislock_fast.Lock, wait: str
) -> None:
    waiter = connected(scene, proxy.port, wait=wait, sleep=0.2)
    sets = proxy.replies["SET"]
    answer = waiter.acquire(blocking_timeout=LONG_S)
    proxy.wait_for_reply("SET", sets + 1)
    proxy.wait_for_quiet()
    proxy.hold()
    assert answer.result(PATIENCE_S) is False
    proxy.resume()
    assert holder.owned()
    holder.release()
    until_free(scene.client)


@pytest.mark.slow
def test_lock_that_is_granted_while_its_waiter_gives_up_unheard_is_passed_on(
    scene: Scene, proxy: Proxy, holder: redislock_fast.Lock
) -> None:
    waiter = connected(scene, proxy.port)
    answer = scene.wait(waiter, blocking_timeout=LONG_S)
    proxy.wait_for_quiet()
    proxy.hold()
    holder.release()
    assert scene.client.exists("name")
    assert answer.result(PATIENCE_S) is False
    until_free(scene.client)
    assert waiter.lock.local.token is None


def test_without_any_verdict_an_acquire_times_out(scene: Scene, proxy: Proxy, holder: redislock_fast.Lock) -> None:
    waiter = connected(scene, proxy.port)
    proxy.delay_s = FAR_S
    with pytest.raises(redis.TimeoutError):
        waiter.call("acquire", blocking_timeout=SHORT_S)
    assert holder.owned()
    scene.until_queued(0)


# ---- one deadline ----


@pytest.mark.parametrize("blocking_timeout", [-1, 0, 0.001])
@pytest.mark.parametrize("is_connected", [False, True])
def test_frozen_server_is_waited_for_no_longer_than_the_deadline(
    callers: Callers, spare_server: Callable[..., Server], blocking_timeout: float, is_connected: bool
) -> None:
    server = spare_server()
    client = callers.client(server.port, **PATIENT)
    hasty = callers.contender(client, **LATE)
    if is_connected:
        assert hasty.call("locked") is False
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(redis.TimeoutError):
            hasty.call("acquire", blocking_timeout=blocking_timeout)
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("settings", [{}, {"fencing": True}], ids=["plain", "fencing"])
def test_connection_that_was_closed_while_idle_costs_no_acquire_without_time(
    scene: Scene, settings: dict[str, Any]
) -> None:
    hasty = scene.contender(scene.connect(**PATIENT), **LATE, **settings)
    for _ in range(3):
        assert hasty.call("acquire", blocking_timeout=0) is True
        hasty.release()
        for kind in ("normal", "pubsub"):
            scene.client.client_kill_filter(_type=kind, skipme=True)


def test_second_request_of_an_acquire_has_the_rest_of_its_time(scene: Scene, proxy: Proxy) -> None:
    hasty = connected(scene, proxy.port)
    scene.client.set("name", "mine")
    proxy.delay_s = 5 * SHORT_S
    try:  # the first reply comes in time; the next one would, within as much time again
        acquired = hasty.call("acquire", blocking_timeout=6 * SHORT_S, token="mine")
    except redis.TimeoutError:
        acquired = False
    assert acquired is False
    assert b"mine" == scene.client.get("name")


@pytest.mark.slow
def test_callers_that_connect_at_once_wait_for_each_other_and_the_server_until_their_deadline(
    callers: Callers, spare_server: Callable[..., Server]
) -> None:
    server = spare_server()
    contenders = callers.contenders(4, callers.client(server.port, **PATIENT), **LATE)
    server.signal(signal.SIGSTOP)
    try:
        began_at = clock()
        answers = [contender.acquire(blocking_timeout=2 * LONG_S) for contender in contenders]
        for answer in answers:
            with pytest.raises(redis.TimeoutError):
                answer.result(PATIENCE_S)
        assert clock() - began_at < 3.5 * LONG_S
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.slow
def test_number_of_a_lock_that_was_handed_over_is_waited_for_until_the_deadline(
    scene: Scene, proxy: Proxy, holder: redislock_fast.Lock
) -> None:
    waiter = connected(scene, proxy.port, fencing=True)
    answer = scene.wait(waiter, blocking_timeout=LONG_S)
    proxy.wait_for_quiet()
    proxy.hold(messages_pass=True)
    holder.release()
    assert answer.result(PATIENCE_S) is False
    proxy.resume()
    until_free(scene.client)
    assert waiter.lock.local.token is None


class TakenByHook(redislock_fast.Lock):
    """A lock whose hook takes it by the client's own command."""

    def do_acquire(self, token: Any) -> bool:
        """Take it."""
        return bool(self.redis.set(self.name, token, nx=True))


class TakenByAsyncHook(redislock_fast.asyncio.Lock):
    """The same for asyncio."""

    async def do_acquire(self, token: Any) -> bool:
        """Take it."""
        return bool(await self.redis.set(self.name, token, nx=True))


class CallsTheOriginal(redislock_fast.Lock):
    """A lock whose hook calls the original."""

    def do_acquire(self, token: Any) -> bool:
        """Take it."""
        return super().do_acquire(token)


class CallsTheAsyncOriginal(redislock_fast.asyncio.Lock):
    """The same for asyncio."""

    async def do_acquire(self, token: Any) -> bool:
        """Take it."""
        return await super().do_acquire(token)


def hooked(waiter: Contender, threads_class: type, tasks_class: type) -> Contender:
    """The contender, of one of these classes."""
    waiter.lock.__class__ = tasks_class if isinstance(waiter.lock, redislock_fast.asyncio.Lock) else threads_class
    return waiter


@pytest.mark.parametrize("code", ["LOADING", "READONLY", "BUSY"])
def test_server_that_says_later_is_not_flooded_until_the_deadline(scene: Scene, proxy: Proxy, code: str) -> None:
    retry = once() if isinstance(scene.callers, Threads) else async_once()  # without a pause
    waiter = scene.contender(scene.connect(proxy.port, **PATIENT, retry=retry), **LATE)
    assert waiter.call("locked") is False
    proxy.answer(f"-{code} for now\r\n".encode(), "SET")
    known = proxy.requests["SET"]
    with pytest.raises((redis.TimeoutError, redis.ResponseError, redis.ConnectionError)):
        waiter.call("acquire", blocking_timeout=4 * SHORT_S)
    assert proxy.requests["SET"] - known <= MOST_ASKED


def test_server_that_says_later_while_it_is_connected_to_is_asked_again_what_it_understands(
    scene: Scene, proxy: Proxy
) -> None:
    locks = scene.connect(proxy.port, **PATIENT)
    proxy.answer(b"-BUSY running a script\r\n", "COMMAND", "CLIENT")
    lock = scene.contender(locks, **LATE)
    answer = lock.acquire(blocking_timeout=FAR_S)
    proxy.wait_for_reply("COMMAND", 2)
    assert not answer.done()
    proxy.disarm()
    assert answer.result(PATIENCE_S) is True
    holder = redislock_fast.holders(scene.client, "name").holder
    assert holder is not None
    assert holder.process is not None
    lock.release()
    assert proxy.requests["DELIFEQ"] == (1 if scene.server.kind == "valkey" else 0)


def test_lease_of_a_lock_that_a_hook_took_is_confirmed_until_the_deadline(scene: Scene, proxy: Proxy) -> None:
    taken = hooked(connected(scene, proxy.port, auto_renew=True), TakenByHook, TakenByAsyncHook)
    hooks_client = scene.connect(scene.client.connection_pool.connection_kwargs["port"])
    taken.lock._redis, taken.lock._pool = hooks_client, hooks_client.connection_pool  # the hook's alone
    proxy.hold()
    with pytest.raises(redis.TimeoutError):
        taken.call("acquire", blocking_timeout=SHORT_S)
    proxy.resume()
    until_free(scene.client)


def test_attempt_of_a_hook_that_calls_the_original_ends_with_the_deadline(scene: Scene, proxy: Proxy) -> None:
    waiter = hooked(connected(scene, proxy.port), CallsTheOriginal, CallsTheAsyncOriginal)
    proxy.hold()
    with pytest.raises(redis.TimeoutError):
        waiter.call("acquire", blocking_timeout=SHORT_S)
    proxy.resume()
    until_free(scene.client)


@pytest.mark.parametrize("blocking_timeout", [0, SHORT_S])
def test_replicas_are_waited_for_until_the_deadline(scene: Scene, blocking_timeout: float) -> None:
    waiter = connected(scene, scene.server.port, wait_replicas=1, wait_timeout=FAR_S / 2)
    with pytest.raises(redislock_fast.NotReplicatedError):
        waiter.call("acquire", blocking_timeout=blocking_timeout)
    until_free(scene.client)


# ---- a lock that is free ----


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("sleeps", [(0.05, FAR_S), (FAR_S, 0.05)])
def test_shortest_interval_among_the_waiters_of_a_process_counts(
    scene: Scene, holder: redislock_fast.Lock, sleeps: tuple[float, float]
) -> None:
    locks = scene.connect()
    first, second = (scene.contender(locks, timeout=FAR_S, sleep=sleep) for sleep in sleeps)
    answers = [first.acquire()]
    scene.until_queued(1)
    answers.append(second.acquire())
    scene.until_queued(2)
    assert holder.owned()
    scene.client.delete("name")
    assert answers[0].result(PATIENCE_S) is True
    first.release()
    assert answers[1].result(PATIENCE_S) is True


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize(
    ("lose", "settings", "pttl_ms"),
    [
        (lambda client: client.delete("name"), LATE, range(1, 1000 * round(FAR_S) + 1)),
        (lambda client: client.flushall(), {"sleep": FAR_S}, [-1]),
    ],
    ids=["DEL", "FLUSHALL, no ttl"],
)
def test_lock_whose_key_is_gone_is_taken_at_the_deadline(
    scene: Scene,
    holder: redislock_fast.Lock,
    lose: Callable[[redis.Redis], object],
    settings: dict[str, Any],
    pttl_ms: Any,
) -> None:
    waiter = scene.contender(**settings)
    answer = scene.wait(waiter, blocking_timeout=LONG_S)
    assert holder.owned()
    lose(scene.client)
    assert answer.result(PATIENCE_S) is True
    assert waiter.call("owned")
    assert scene.client.pttl("name") in pttl_ms
    waiter.release()
    assert scene.client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_lock_whose_key_is_gone_is_given_to_the_first_in_the_queue_at_the_deadline_of_another(
    scene: Scene, holder: redislock_fast.Lock
) -> None:
    patient, hasty = (scene.contender() for _ in range(2))
    waits = scene.wait(patient)
    gives_up = hasty.acquire(blocking_timeout=LONG_S)
    scene.until_queued(2)
    assert holder.owned()
    scene.client.delete("name")
    assert gives_up.result(PATIENCE_S) is False
    assert waits.result(PATIENCE_S) is True
    patient.release()
    assert scene.client.keys() == []


@pytest.mark.slow
@pytest.mark.usefixtures("unhurried")
def test_queue_of_a_lock_whose_key_is_no_string_is_left_at_the_deadline(
    scene: Scene, holder: redislock_fast.Lock
) -> None:
    waiter = scene.contender()
    answer = scene.wait(waiter, blocking_timeout=LONG_S)
    assert holder.owned()
    scene.client.delete("name")
    scene.client.rpush("name", "no lock")
    assert answer.result(PATIENCE_S) is False
    scene.until_queued(0)
