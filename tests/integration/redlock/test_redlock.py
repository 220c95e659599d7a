"""What a Redlock does while all its servers are well.

Rules: five real servers, of one kind and of several.
"""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError
from redis.sentinel import Sentinel

import redislock_fast
from redislock_fast import Redlock
from redislock_fast._transport.health import ServerHealth
from redislock_fast.server import Server
from tests.support.helpers import in_fork, in_thread, start, wait_until
from tests.support.redlock import clients_of, make, take, values, wait_until_free, wait_until_held
from tests.support.times import drift_s

Fleet = list[Server]


def _ttls_ms(fleet: Fleet) -> list[int]:
    return [client.pttl("name") for client in clients_of(fleet)]


# Acquire and release


def test_acquire_sets_one_token_everywhere_and_release_takes_it_away(fleet: Fleet) -> None:
    lock = make(fleet, timeout=10)
    assert lock.acquire() is True
    wait_until_held(fleet)
    assert len(set(values(fleet))) == 1
    assert all(9000 < ttl_ms <= 10_000 for ttl_ms in _ttls_ms(fleet))
    lock.release()
    wait_until_free(fleet)


def test_what_is_held_cannot_be_had_and_is_not_touched(fleet: Fleet) -> None:
    holder, other = make(fleet), make(fleet)
    assert holder.acquire()
    wait_until_held(fleet)
    before = values(fleet)
    assert other.acquire(blocking=False) is False
    assert other.acquire(blocking_timeout=0.05, sleep=0.01) is False
    assert values(fleet) == before
    holder.release()
    assert other.acquire(blocking=False) is True


def test_waiter_gets_it_after_the_release(fleet: Fleet) -> None:
    holder, waiter = make(fleet), make(fleet, sleep=0.01, thread_local=False)
    holder.acquire()
    answer = start(waiter.acquire)
    wait_until(lambda: False in waiter.verdicts, "the waiter has tried")
    assert not answer.done()
    holder.release()
    assert answer.result(10) is True
    assert waiter.owned()


def test_a_majority_is_enough(fleet: Fleet) -> None:
    take(fleet[3:])
    lock = make(fleet)
    assert lock.acquire(blocking=False) is True
    assert lock.verdicts[:3] == (True, True, True)
    lock.release()
    wait_until_free(fleet[:3])
    assert values(fleet[3:]) == [b"another's"] * 2


def test_a_minority_is_given_back(fleet: Fleet) -> None:
    take(fleet[:3])
    lock = make(fleet)
    assert lock.acquire(blocking=False) is False
    assert lock.verdicts[:3] == (False, False, False)
    assert lock.remaining() == 0.0
    wait_until_free(fleet[3:])
    assert values(fleet[:3]) == [b"another's"] * 3


def test_votes_tell_who_agreed(fleet: Fleet) -> None:
    lock = make(fleet)
    assert lock.verdicts == (None,) * 5
    take(fleet[1:2])
    lock.acquire()
    lock.reacquire()
    lock.reacquire()
    assert lock.verdicts[1] is not True
    assert lock.verdicts.count(True) >= 3


def test_with_acquires_and_releases(fleet: Fleet) -> None:
    lock = make(fleet)
    with lock as entered:
        assert entered is lock
        assert lock.owned() is True
    wait_until_free(fleet)


def test_with_raises_where_it_is_not_to_be_had(fleet: Fleet) -> None:
    take(fleet)
    with pytest.raises(LockError, match="within the time specified"), make(fleet, blocking=False):
        pass


def test_with_keeps_the_exception_of_its_body(fleet: Fleet) -> None:
    def body() -> None:
        with make(fleet):
            for client in clients_of(fleet):
                client.delete("name")
            raise KeyError

    with pytest.raises(KeyError):
        body()


@pytest.mark.parametrize("raises", [True, False])
def test_leaving_a_lost_lock_raises_or_logs(fleet: Fleet, raises: bool) -> None:
    lock = make(fleet, raise_on_release_error=raises)
    lock.acquire()
    wait_until_held(fleet)
    for client in clients_of(fleet):
        client.delete("name")
    if raises:
        with pytest.raises(LockNotOwnedError):
            lock.__exit__(None, None, None)
    else:
        lock.__exit__(None, None, None)


@pytest.mark.parametrize("lost", [2, 3])
def test_release_of_what_a_minority_has_lost_is_a_success(fleet: Fleet, lost: int) -> None:
    lock = make(fleet)
    lock.acquire()
    wait_until_held(fleet)
    for client in clients_of(fleet[:lost]):
        client.delete("name")
    if lost == 2:
        lock.release()
    else:
        with pytest.raises(LockNotOwnedError):
            lock.release()
    with pytest.raises(LockError, match="not owned or is already unlocked"):
        lock.release()
    wait_until_free(fleet)


def test_locked_and_owned_go_by_the_majority(fleet: Fleet) -> None:
    lock = make(fleet)
    assert (lock.locked(), lock.owned()) == (False, False)
    take(fleet[:2])
    assert lock.locked() is False
    lock.acquire()
    assert (lock.locked(), lock.owned()) == (True, True)
    wait_until_held(fleet)
    take(fleet[:3])
    assert (lock.locked(), lock.owned()) == (True, False)


# Leases


def test_remaining_is_the_ttl_less_what_clocks_may_drift(fleet: Fleet) -> None:
    lock = make(fleet, timeout=10)
    assert (lock.valid, lock.remaining()) == (False, 0.0)
    lock.acquire()
    assert lock.valid is True
    assert 9 < lock.remaining() <= 10 - drift_s(10)
    lock.release()
    assert (lock.valid, lock.remaining()) == (False, 0.0)


def test_a_lease_that_has_ended_is_not_valid(fleet: Fleet) -> None:
    lock = make(fleet, timeout=0.8)
    lock.acquire()
    wait_until(lambda: not lock.valid, "the lease ends")
    with pytest.raises(LockNotOwnedError):
        lock.extend(10)
    with pytest.raises(LockError, match="unlocked"):
        lock.extend(10)
    wait_until_free(fleet)


@pytest.mark.parametrize(
    ("prolong", "least_s", "most_s"),
    [
        (lambda lock: lock.extend(20), 29, 30),
        (lambda lock: lock.extend(20, replace_ttl=True), 19, 20),
        (lambda lock: lock.extend(5, replace_ttl=True), 4, 5),
        (lambda lock: lock.extend(0), 9, 10),
        (lambda lock: lock.reacquire(), 9, 10),
    ],
    ids=["extend", "longer", "shorter", "nothing", "reacquire"],
)
def test_prolonged_lease(fleet: Fleet, prolong: Callable[[Redlock], bool], least_s: float, most_s: float) -> None:
    lock = make(fleet, timeout=10)
    lock.acquire()
    wait_until_held(fleet)
    assert prolong(lock) is True
    assert least_s - drift_s(most_s) < lock.remaining() <= most_s - drift_s(most_s)
    wait_until(
        lambda: all(1000 * least_s < ttl_ms <= 1000 * most_s + 1 for ttl_ms in _ttls_ms(fleet)), "it is everywhere"
    )


def test_extend_reaches_servers_that_missed_an_earlier_one(fleet: Fleet) -> None:
    lock = make(fleet, timeout=10)
    lock.acquire()
    wait_until_held(fleet)
    for client in clients_of(fleet[:2]):
        client.pexpire("name", 5000)
    lock.extend(10)
    wait_until(lambda: min(_ttls_ms(fleet)) > 19_000, "all servers have the same lease")


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_lost_lock_is_not_prolonged_and_its_rest_is_given_back(fleet: Fleet, verb: str) -> None:
    lock = make(fleet)
    lock.acquire()
    wait_until_held(fleet)
    for client in clients_of(fleet[:3]):
        client.delete("name")
    with pytest.raises(LockNotOwnedError, match=f"Cannot {verb}"):
        lock.extend(10) if verb == "extend" else lock.reacquire()
    assert lock.remaining() == 0.0
    wait_until_free(fleet)


@pytest.mark.parametrize("use", ["extend", "reacquire", "release"])
def test_who_holds_nothing_is_told_so(fleet: Fleet, use: str) -> None:
    lock = make(fleet)
    with pytest.raises(LockError):
        lock.extend(1) if use == "extend" else getattr(lock, use)()


# Whose it is


def test_token_belongs_to_the_thread(fleet: Fleet) -> None:
    lock = make(fleet)
    lock.acquire()
    with pytest.raises(LockError):
        in_thread(lock.release)
    assert in_thread(lock.owned) is False
    lock.release()


def test_token_may_be_shared_by_threads(fleet: Fleet) -> None:
    lock = make(fleet, thread_local=False)
    lock.acquire()
    assert in_thread(lock.owned) is True
    in_thread(lock.release)
    assert lock.remaining() == 0.0


def test_forked_child_holds_nothing(fleet: Fleet) -> None:
    lock = make(fleet)
    lock.acquire()
    wait_until_held(fleet)

    def child() -> str:
        assert lock.remaining() == 0.0
        assert lock.acquire(blocking=False) is False
        with pytest.raises(LockError):
            lock.release()
        return "done"

    assert in_fork(child) == "done"
    assert lock.owned() is True
    lock.release()
    wait_until_free(fleet)


def test_token_is_shown_nowhere(fleet: Fleet) -> None:
    lock = make(fleet)
    lock.acquire()
    token = next(filter(None, values(fleet))).decode()
    assert token not in repr(lock) + repr(vars(lock)) + repr(lock.verdicts)
    for client in clients_of(fleet):
        client.delete("name")
    with pytest.raises(LockNotOwnedError) as caught:
        lock.release()
    assert token not in str(caught.value)


def test_copy_shares_the_clients_and_the_ownership(fleet: Fleet) -> None:
    lock = make(fleet)
    lock.acquire()
    wait_until_held(fleet)
    twin = copy.copy(lock)
    assert twin.servers is lock.servers
    assert twin.owned()
    twin.release()
    wait_until_free(fleet)
    assert lock.remaining() == 0.0


def test_lock_cannot_be_pickled(fleet: Fleet) -> None:
    with pytest.raises(TypeError, match="'name' cannot be pickled: make it anew"):
        pickle.dumps(make(fleet))


# Several at once


@pytest.mark.slow
def test_contenders_never_hold_it_together(fleet: Fleet) -> None:
    holders: list[int] = []
    turns = 0
    deadline = time.monotonic() + 2

    def contend(number: int) -> int:
        nonlocal turns
        lock = make(fleet, sleep=0.01)
        own = 0
        while time.monotonic() < deadline:
            if lock.acquire(blocking_timeout=5):
                holders.append(number)
                assert holders == [number]
                turns += 1
                holders.remove(number)
                lock.release()
                own += 1
        return own

    answers = [start(lambda number=number: contend(number)) for number in range(4)]  # type: ignore[misc]
    assert sum(answer.result(30) for answer in answers) == turns > 0
    wait_until_free(fleet)


def test_threads_share_the_connections(fleet: Fleet) -> None:
    clients = clients_of(fleet)
    with Redlock(clients, "warm-up", timeout=30):
        pass

    def connections() -> list[int]:
        return [client.info("clients")["connected_clients"] for client in clients]

    before = connections()

    def work(number: int) -> None:
        for _ in range(20):
            with Redlock(clients, f"name-{number}", timeout=30, limit=60):
                pass

    for answer in [start(lambda number=number: work(number)) for number in range(8)]:  # type: ignore[misc]
        answer.result(30)
    assert all(after <= count for after, count in zip(connections(), before, strict=True))


def test_signal_handler_uses_the_same_clients(fleet: Fleet) -> None:
    clients = clients_of(fleet)
    inner, outer = (Redlock(clients, name, timeout=30, limit=5) for name in ("inner", "outer"))
    handled: list[bool] = []

    def handle(*_: Any) -> None:
        with inner:
            owned = inner.owned()
        handled.append(owned)

    def send() -> None:
        for count in range(1, 31):
            signal.pthread_kill(main, signal.SIGUSR1)
            wait_until(lambda: len(handled) >= count, "it is handled")  # noqa: B023  # called at once

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident or 0
    try:
        signals = start(send)
        while not signals.done():
            with outer:
                pass
        signals.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [True] * 30


# What cannot be one


@pytest.mark.parametrize(
    ("count", "why"), [(0, "3 servers at least"), (1, "3 servers"), (2, "3 servers"), (4, "odd number")]
)
def test_number_of_servers_without_a_use(count: int, why: str) -> None:
    clients = [redis.Redis(port=port) for port in range(1, count + 1)]
    with pytest.raises(ValueError, match=why):
        Redlock(clients, "name", timeout=10)


@pytest.mark.parametrize(
    "again",
    [
        lambda client: client,
        lambda _: redis.Redis(port=1),
        lambda _: redis.Redis(port=1, db=3),
        lambda _: redis.Redis(host="127.0.0.1", port=1),
        lambda client: redis.Redis(connection_pool=client.connection_pool),
    ],
    ids=["client", "address", "database", "host", "pool"],
)
def test_server_that_is_given_twice(again: Callable[[redis.Redis], redis.Redis]) -> None:
    first = redis.Redis(port=1)
    with pytest.raises(ValueError, match="more than once"):
        Redlock([first, redis.Redis(port=2), again(first)], "name", timeout=10)


def test_unix_socket_that_is_given_twice() -> None:
    clients = [redis.Redis(unix_socket_path=path) for path in ("/a", "/b", "/a")]
    with pytest.raises(ValueError, match="more than once"):
        Redlock(clients, "name", timeout=10)


@pytest.mark.parametrize(("sentinels", "is_one"), [((1, 2, 3), False), ((1, 2, 1), True)])
def test_service_of_one_name_at_other_sentinels_is_another_server(sentinels: tuple[int, ...], is_one: bool) -> None:
    clients = [Sentinel([("127.0.0.1", port)]).master_for("service") for port in sentinels]  # type: ignore[no-untyped-call]
    if is_one:
        with pytest.raises(ValueError, match="more than once"):
            Redlock(clients, "name", timeout=10)
    else:
        assert Redlock(clients, "name", timeout=10).servers == tuple(clients)


@pytest.mark.parametrize(
    "odd_one",
    [redis.asyncio.Redis(), redis.Redis().pipeline(), object(), redislock_fast.Lock],
    ids=["asyncio", "pipeline", "object", "class"],
)
def test_what_is_no_server(odd_one: Any) -> None:
    with pytest.raises(TypeError):
        Redlock([redis.Redis(port=1), redis.Redis(port=2), odd_one], "name", timeout=10)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 0.002])
def test_timeout_that_leaves_nothing(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Redlock([redis.Redis(port=port) for port in (1, 2, 3)], "name", timeout=timeout)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_limit_that_is_none(limit: float) -> None:
    with pytest.raises(ValueError, match="limit"):
        Redlock([redis.Redis(port=port) for port in (1, 2, 3)], "name", timeout=10, limit=limit)


@pytest.mark.parametrize("name", ["timeout", "limit"])
def test_time_that_is_no_number(name: str) -> None:
    times: dict[str, Any] = {"timeout": 10, name: None}
    with pytest.raises(TypeError, match=name):
        Redlock([redis.Redis(port=port) for port in (1, 2, 3)], "name", **times)


@pytest.mark.parametrize(
    "arguments", [{"sleep": -1}, {"sleep": float("nan")}, {"blocking_timeout": float("nan")}], ids=str
)
def test_bad_times_of_acquire_send_nothing(fleet: Fleet, arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        make(fleet).acquire(**arguments)  # type: ignore[arg-type]
    assert values(fleet) == [None] * 5


@pytest.mark.parametrize(("added", "replaces"), [(-1, False), (float("nan"), False), (0, True)])
def test_bad_times_of_extend_change_nothing(fleet: Fleet, added: float, replaces: bool) -> None:
    lock = make(fleet)
    lock.acquire()
    with pytest.raises(ValueError, match="additional_time"):
        lock.extend(added, replaces)
    assert lock.owned() is True


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"max_hold": 60}, ValueError, "needs auto_renew"),
        ({"max_hold": 5, "auto_renew": True}, ValueError, "shorter than the timeout"),
        ({"max_hold": float("nan"), "auto_renew": True}, ValueError, "max_hold"),
        ({"max_hold": "60", "auto_renew": True}, TypeError, "max_hold"),
        ({"on_lost": 5}, TypeError, "not callable"),
        ({"cancel_on_lost": True}, ValueError, "not an asyncio lock"),
        ({"fencing": True}, TypeError, "fencing"),
    ],
    ids=str,
)
def test_terms_that_cannot_be(options: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        Redlock([redis.Redis(port=port) for port in (1, 2, 3)], "name", timeout=10, **options)


# Who is asked, and who first


def test_server_that_is_away_for_long_is_still_tried_once_a_second() -> None:
    health = ServerHealth()
    for _ in range(1100):
        health.failed(redis.ConnectionError("away"), now=60.0)
    assert health.retry_at == 61.0


def test_who_has_made_a_round_wait_comes_last_until_that_is_forgotten() -> None:
    slow, soon = ServerHealth(), ServerHealth()
    slow.note_wait(0.001)
    soon.note_wait(0.0004)
    assert (2, 0) == (slow.slowness, soon.slowness)
    rounds = 0
    while slow.slowness:
        slow.note_wait(None)
        rounds += 1
    assert 100 < rounds < 1000


def test_it_is_noted_that_a_vote_was_not_needed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = make(fleet)
    with lock:
        wait_until_held(fleet)
    slow = lock._quorum._transports[0].health
    slow.note_wait(0.002)
    waits: list[float | None] = []
    monkeypatch.setattr(slow, "note_wait", waits.append)

    def noted() -> bool:
        with lock:
            return None in waits

    wait_until(noted, "the others suffice")
