"""`linger` beside each other option and call: the holding has it, what lingers has not.

Rules: threads and tasks alike. Another client stands for another process.
"""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import LockError, LockNotOwnedError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import AdaptiveTTL, LossReason
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lingering.test_lingering import LINGERS, SOON_S
from tests.support.helpers import PATIENCE_S, pause, wait_until
from tests.support.holding import BRIEF_S, KEPT_S, Holders, Losses, until_passed
from tests.support.waiting import FAR_S, Callers, Contender

Settings = dict[str, Any]


def _use(lock: Contender, **arguments: Any) -> None:
    assert lock.call("acquire", **arguments) is True
    lock.release()


def _assert_lingers(lock: Contender, admin: Any) -> None:
    """Assert that the next holding of the lock needs no request, and has the same key."""
    token = admin.get("name")
    assert token is not None
    assert lock.call("acquire", blocking=False) is True
    assert admin.get("name") == token
    lock.release()
    assert admin.get("name") == token


class _Noted:
    """Metrics that note what is recorded."""

    def __init__(self) -> None:
        self.acquired = 0
        self.released: list[bool] = []
        self.lost: list[LossReason] = []

    def record_acquisition(self, name: Any, waited_s: float, attempts: int) -> None:
        self.acquired += 1

    def record_release(self, name: Any, held_s: float, released: bool) -> None:
        self.released.append(released)

    def record_loss(self, name: Any, held_s: float, reason: LossReason) -> None:
        self.lost.append(reason)


class _Breaker:
    """A breaker that counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def calling(self) -> Any:
        self.calls += 1
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


OPTIONS: list[Settings] = [
    {"auto_renew": True},
    {"auto_renew": True, "max_hold": 2 * FAR_S},
    {"on_lost": print},
    {"metrics": _Noted()},
    {"breaker": _Breaker()},
]


def _ids(settings: Settings) -> str:
    return " ".join(settings)


@pytest.mark.parametrize("settings", OPTIONS, ids=_ids)
def test_a_lock_with_other_options_lingers(
    holders: Holders, valkey: Server, connect: Connect, settings: Settings
) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, **LINGERS, **settings)
    _use(lock)
    for _ in range(2):
        _assert_lingers(lock, admin)
    waiter = holders.make(valkey.port, timeout=FAR_S, sleep=FAR_S)
    _use(waiter)
    assert admin.exists("name") == 0


def test_a_lock_that_was_entered_twice_lingers_after_the_second_release(valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    lock = redislock_fast.Lock(client, "name", **LINGERS, reentrant=True)
    other = redislock_fast.Lock(client, "name", **LINGERS)
    for _ in range(2):
        with lock:
            with lock:
                pass
            assert other.acquire(blocking=False) is False
        assert other.acquire(blocking=False) is True
        other.release()


@pytest.mark.slow
def test_a_holding_is_renewed_and_what_lingers_is_not(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, timeout=KEPT_S, linger=KEPT_S, sleep=FAR_S, auto_renew=True)
    other = holders.on(lock.lock.redis, timeout=KEPT_S, linger=KEPT_S, sleep=FAR_S)
    for holder in (lock, other, lock):
        assert holder.call("acquire") is True
        assert admin.pttl("name") / 1000 >= holder.lock.remaining()
        if holder is lock:
            until_passed(admin, 2.5 * KEPT_S)
            assert lock.call("owned") is True
        holder.release()
    wait_until(lambda: admin.exists("name") == 0, "it is given back, and not renewed", 2 * PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("linger", [SOON_S, FAR_S])
def test_each_holder_has_its_whole_timeout_after_one_that_was_renewed(
    holders: Holders, valkey: Server, connect: Connect, linger: float
) -> None:
    admin = connect(valkey.port)
    settings: Settings = {"timeout": KEPT_S, "linger": linger, "sleep": FAR_S}
    lock = holders.make(valkey.port, **settings, auto_renew=True)
    other = holders.on(lock.lock.redis, **settings)
    assert lock.call("acquire") is True
    for holder in (other, lock, other):
        waiting = holder.acquire()
        until_passed(admin, 0.5 * KEPT_S)
        (lock if holder is other else other).release()
        assert waiting.result(PATIENCE_S) is True
        remaining_s = holder.lock.remaining()
        assert 0.9 * KEPT_S < remaining_s <= admin.pttl("name") / 1000 + 0.01


def test_a_loss_of_the_holding_is_told(holders: Holders, valkey: Server, connect: Connect, losses: Losses) -> None:
    metrics = _Noted()
    lock = holders.make(
        valkey.port, timeout=5 * BRIEF_S, linger=FAR_S, auto_renew=True, on_lost=losses, metrics=metrics, sleep=FAR_S
    )
    _use(lock)
    assert lock.call("acquire") is True
    connect(valkey.port).delete("name")
    assert losses.until() == [LossReason.DELETED]
    with pytest.raises(LockNotOwnedError):
        lock.release()
    assert metrics.lost == [LossReason.DELETED]
    assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    assert lock.call("owned") is True
    lock.release()
    assert losses.reasons == [LossReason.DELETED]


def test_a_loss_while_the_key_lingers_is_not_told(
    holders: Holders, valkey: Server, connect: Connect, losses: Losses, caplog: pytest.LogCaptureFixture
) -> None:
    lock = holders.make(valkey.port, timeout=FAR_S, linger=SOON_S, on_lost=losses)
    admin = connect(valkey.port)

    def lose() -> Any:
        _use(lock)
        return admin.delete("name")

    wait_until(lose, "it was there still")  # on a busy machine it may have been given back before
    wait_until(lambda: caplog.records, "it is logged")
    assert losses.reasons == []


def test_metrics_count_local_holdings(holders: Holders, valkey: Server) -> None:
    metrics = _Noted()
    lock = holders.make(valkey.port, **LINGERS, metrics=metrics)
    other = holders.on(lock.lock.redis, **LINGERS, metrics=metrics)
    for count in range(1, 4):
        _use(lock)
        _use(other)
        assert (metrics.acquired, metrics.released, metrics.lost) == (2 * count, 2 * count * [True], [])


PROLONGING: list[tuple[str, tuple[Any, ...]]] = [
    ("extend", (FAR_S,)),
    ("extend", (1.0, True)),
    ("extend", (2 * FAR_S, True)),
    ("reacquire", ()),
    ("acquire_or_extend", ()),
]


@pytest.mark.parametrize("settings", [{}, {"on_lost": print}], ids=["usual", "on options"])
@pytest.mark.parametrize(("verb", "arguments"), PROLONGING, ids=str)
def test_the_next_local_holder_has_its_whole_timeout(
    holders: Holders, valkey: Server, connect: Connect, verb: str, arguments: tuple[Any, ...], settings: Settings
) -> None:
    admin = connect(valkey.port)
    lock = holders.make(valkey.port, **LINGERS, **settings)
    other = holders.on(lock.lock.redis, **LINGERS)
    for _ in range(2):
        assert lock.call("acquire") is True
        assert lock.call(verb, *arguments) is True
        ttl_s = admin.pttl("name") / 1000  # before: time may pass between the two
        assert lock.lock.remaining() <= ttl_s + 0.01
        lock.release()
        assert other.call("acquire", blocking=False) is True
        ttl_s = admin.pttl("name") / 1000  # before: time may pass between the two
        assert 0.95 * FAR_S < other.lock.remaining() <= ttl_s + 0.01
        other.release()


@pytest.mark.parametrize("settings", [{}, {"on_lost": print}], ids=["usual", "on options"])
def test_a_lock_that_was_lost_is_acquired_again(
    holders: Holders, valkey: Server, connect: Connect, settings: Settings
) -> None:
    admin = connect(valkey.port)
    lock = holders.hold(valkey.port, **LINGERS, **settings)
    admin.delete("name")
    assert lock.call("acquire_or_extend", blocking_timeout=PATIENCE_S) is True
    assert lock.call("owned") is True
    lock.release()
    _assert_lingers(lock, admin)


@pytest.mark.parametrize("settings", [{}, {"on_lost": print}], ids=["usual", "on options"])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_detached_lock_is_not_of_the_process_any_more(
    holders: Holders, valkey: Server, settings: Settings, is_elsewhere: bool
) -> None:
    lock = holders.hold(valkey.port, **LINGERS, **settings)
    local = holders.on(lock.lock.redis, **LINGERS)
    handle = lock.call("detach")
    assert lock.lock.remaining() == 0
    assert local.call("acquire", blocking=False) is False
    waiting = local.acquire()
    attached = holders.attach(valkey.port, handle, linger=FAR_S) if is_elsewhere else None
    if attached is None:
        pause()
        attached = holders.attach(valkey.port, handle)
    assert attached.call("owned") is True
    attached.release()
    assert waiting.result(PATIENCE_S) is True
    local.release()


@pytest.mark.parametrize("token", [None, b"another"])
def test_a_lock_whose_token_is_taken_out_is_not_of_the_process_any_more(
    holders: Holders, valkey: Server, token: bytes | None
) -> None:
    lock, heir = holders.hold(valkey.port, **LINGERS), holders.make(valkey.port, timeout=FAR_S)
    local = holders.on(lock.lock.redis, **LINGERS)
    heir.lock.local.token, lock.lock.local.token = lock.lock.local.token, token
    with pytest.raises(LockError):
        lock.release()
    assert (False, True) == (local.call("acquire", blocking=False), heir.call("owned"))
    heir.release()
    assert local.call("acquire", blocking_timeout=PATIENCE_S) is True


def test_an_adaptive_ttl(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    adaptive = AdaptiveTTL(KEPT_S)
    lock = holders.make(valkey.port, timeout=adaptive, linger=FAR_S, sleep=FAR_S)
    for _ in range(5):
        assert lock.call("acquire") is True
        ttl_s = admin.pttl("name") / 1000  # before: time may pass between the two
        assert 0.9 * lock.lock.timeout < lock.lock.remaining() <= ttl_s + 0.01
        lock.release()


def test_a_lock_of_a_locker(callers: Callers, valkey: Server, connect: Connect) -> None:
    client = callers.client(valkey.port)
    lock = callers._contender(callers.package.Locker(client).lock("name", thread_local=False, **LINGERS))
    _use(lock)
    _assert_lingers(lock, connect(valkey.port))


def test_a_lock_of_a_client(callers: Callers, valkey: Server, connect: Connect) -> None:
    client = callers.client(valkey.port)
    made = callers.package.Lock(client, "name", thread_local=False, **LINGERS)
    assert "linger" not in repr(made)
    lock = callers._contender(made)
    _use(lock)
    _assert_lingers(lock, connect(valkey.port))


def test_a_batch_beside_it_gets_the_key(holders: Holders, callers: Callers, valkey: Server) -> None:
    lock = holders.make(valkey.port, **LINGERS)
    _use(lock)
    locker = callers.package.Locker(callers.client(valkey.port))
    same = callers.package.Locker(lock.lock.redis)
    for one in (locker, same):
        batch = callers.run(
            lambda: one.acquire_many(  # noqa: B023
                ["name", "other"], timeout=FAR_S, blocking_timeout=PATIENCE_S, all_or_nothing=True
            )
        )
        assert lock.call("acquire", blocking=False) is False
        callers.run(batch.release)
        _use(lock, blocking_timeout=PATIENCE_S)


@pytest.mark.parametrize("fleet", ["valkey"], indirect=True)
def test_a_redlock_beside_it_gets_the_key(holders: Holders, callers: Callers, fleet: list[Server]) -> None:
    locks = [holders.make(server.port, timeout=FAR_S, linger=SOON_S) for server in fleet[:2]]  # a Redlock polls
    for lock in locks:
        _use(lock)
    redlock = callers.redlock([callers.client(server.port) for server in fleet[:3]], timeout=FAR_S)
    assert redlock.call("acquire", blocking_timeout=PATIENCE_S) is True
    redlock.release()
    for lock in locks:
        _use(lock, blocking_timeout=PATIENCE_S)


def test_a_batch_or_redlock_that_should_linger_is_refused(callers: Callers, valkey: Server) -> None:
    client = callers.client(valkey.port)
    with pytest.raises((TypeError, ValueError), match="linger"):
        callers.package.Redlock([client] * 3, "name", timeout=10, linger=1)
    with pytest.raises((TypeError, ValueError), match="linger"):
        callers.run(lambda: callers.package.Locker(client).acquire_many(["name"], timeout=10, linger=1))


def test_a_forgotten_holding_ends_with_its_lease(holders: Holders, valkey: Server) -> None:
    lock = holders.hold(valkey.port, timeout=BRIEF_S, linger=SOON_S, sleep=FAR_S)
    other = holders.on(lock.lock.redis, timeout=BRIEF_S, linger=SOON_S, sleep=SOON_S)
    assert other.call("acquire", blocking_timeout=PATIENCE_S) is True
    other.release()
    with pytest.raises(LockError):
        lock.release()
