"""A Redlock while all its servers are well, for threads and for tasks.

Rules: five real servers, of one kind and of several.
"""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast import Redlock
from redislock_fast.server import Server
from tests.support.forks import InFork
from tests.support.helpers import pause, start, wait_until
from tests.support.interrupts import call_before_noting
from tests.support.redlock import Make, clients_of, delete, take, values, wait_until_free, wait_until_held
from tests.support.times import drift_s
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

Fleet = list[Server]


def _ttls_ms(fleet: Fleet) -> list[int]:
    return [client.pttl("name") for client in clients_of(fleet)]


# Acquire and release


def test_acquire_sets_one_token_everywhere_and_release_takes_it_away(fleet: Fleet, make: Make) -> None:
    lock = make(timeout=10)
    assert lock.acquire() is True
    wait_until_held(fleet)
    assert len(set(values(fleet))) == 1
    assert all(9000 < ttl_ms <= 10_000 for ttl_ms in _ttls_ms(fleet))
    lock.release()
    wait_until_free(fleet)


def test_held_lock_is_not_acquired_and_not_touched(fleet: Fleet, make: Make) -> None:
    holder, other = make(), make(sleep=0.01)
    assert holder.acquire()
    wait_until_held(fleet)
    before = values(fleet)
    assert other.acquire(blocking=False) is False
    assert other.acquire(blocking_timeout=0.05) is False
    assert values(fleet) == before
    holder.release()
    assert other.acquire(blocking=False) is True


def test_waiter_gets_it_after_the_release(world: World, make: Make) -> None:
    holder, waiter = make(), make(sleep=0.01, thread_local=False)
    holder.acquire()
    answer = world.start(waiter.acquire)
    wait_until(lambda: False in waiter.votes, "the waiter has tried")
    assert not answer.done()
    holder.release()
    assert answer.result(10) is True
    assert waiter.owned()


def test_a_majority_is_enough(fleet: Fleet, make: Make) -> None:
    take(fleet[3:])
    lock = make()
    assert lock.acquire(blocking=False) is True
    assert lock.votes[:3] == (True, True, True)
    lock.release()
    wait_until_free(fleet[:3])
    assert values(fleet[3:]) == [b"another's"] * 2


def test_a_minority_is_given_back(fleet: Fleet, make: Make) -> None:
    take(fleet[:3])
    lock = make()
    assert lock.acquire(blocking=False) is False
    assert lock.votes[:3] == (False, False, False)
    assert lock.remaining() == 0.0
    wait_until_free(fleet[3:])
    assert values(fleet[:3]) == [b"another's"] * 3


def test_votes_tell_which_servers_agreed(fleet: Fleet, make: Make) -> None:
    lock = make()
    assert lock.votes == (None,) * 5
    take(fleet[1:2])
    lock.acquire()
    lock.reacquire()
    lock.reacquire()
    assert lock.votes[1] is not True
    assert lock.votes.count(True) >= 3


def test_with_acquires_and_releases(fleet: Fleet, make: Make) -> None:
    lock = make()
    with lock as entered:
        assert entered is lock
        assert lock.owned() is True
    wait_until_free(fleet)


def test_with_raises_where_it_is_not_to_be_had(fleet: Fleet, make: Make) -> None:
    take(fleet)
    with pytest.raises(LockError, match="within the time specified"), make(blocking=False):
        pass


def test_with_keeps_the_exception_of_its_body(fleet: Fleet, make: Make) -> None:
    def body() -> None:
        with make():
            delete(fleet)
            raise KeyError

    with pytest.raises(KeyError):
        body()


@pytest.mark.parametrize("raises", [True, False])
def test_leaving_a_lost_lock_raises_or_logs(fleet: Fleet, make: Make, raises: bool) -> None:
    lock = make(raise_on_release_error=raises)
    lock.acquire()
    wait_until_held(fleet)
    delete(fleet)
    if raises:
        with pytest.raises(LockNotOwnedError):
            lock.__exit__(None, None, None)
    else:
        lock.__exit__(None, None, None)


@pytest.mark.parametrize("lost", [2, 3])
def test_release_of_what_a_minority_has_lost_is_a_success(fleet: Fleet, make: Make, lost: int) -> None:
    lock = make()
    lock.acquire()
    wait_until_held(fleet)
    delete(fleet[:lost])
    if lost == 2:
        lock.release()
    else:
        with pytest.raises(LockNotOwnedError):
            lock.release()
    with pytest.raises(LockError, match="not owned or is already unlocked"):
        lock.release()
    wait_until_free(fleet)


def test_locked_and_owned_go_by_the_majority(fleet: Fleet, make: Make) -> None:
    lock = make()
    assert (lock.locked(), lock.owned()) == (False, False)
    take(fleet[:2])
    assert lock.locked() is False
    lock.acquire()
    assert (lock.locked(), lock.owned()) == (True, True)
    wait_until_held(fleet)
    take(fleet[:3])
    assert (lock.locked(), lock.owned()) == (True, False)


# Leases


def test_remaining_is_the_ttl_less_what_clocks_may_drift(make: Make) -> None:
    lock = make(timeout=10)
    assert (lock.valid, lock.remaining()) == (False, 0.0)
    lock.acquire()
    assert lock.valid is True
    assert 9 < lock.remaining() <= 10 - drift_s(10)
    lock.release()
    assert (lock.valid, lock.remaining()) == (False, 0.0)


def test_a_lease_that_has_ended_is_not_valid(fleet: Fleet, make: Make) -> None:
    lock = make(timeout=0.8)
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
def test_prolonged_lease(
    fleet: Fleet, make: Make, prolong: Callable[[Redlock], bool], least_s: float, most_s: float
) -> None:
    lock = make(timeout=10)
    lock.acquire()
    wait_until_held(fleet)
    assert prolong(lock) is True
    assert least_s - drift_s(most_s) < lock.remaining() <= most_s - drift_s(most_s)
    wait_until(
        lambda: all(1000 * least_s < ttl_ms <= 1000 * most_s + 1 for ttl_ms in _ttls_ms(fleet)), "it is everywhere"
    )


def test_extend_reaches_servers_that_missed_an_earlier_one(fleet: Fleet, make: Make) -> None:
    lock = make(timeout=10)
    lock.acquire()
    wait_until_held(fleet)
    for client in clients_of(fleet[:2]):
        client.pexpire("name", 5000)
    lock.extend(10)
    wait_until(lambda: min(_ttls_ms(fleet)) > 19_000, "all servers have the same lease")


@pytest.mark.parametrize("verb", ["extend", "reacquire"])
def test_lost_lock_is_not_prolonged_and_its_rest_is_given_back(fleet: Fleet, make: Make, verb: str) -> None:
    lock = make()
    lock.acquire()
    wait_until_held(fleet)
    delete(fleet[:3])
    with pytest.raises(LockNotOwnedError, match=f"Cannot {verb}"):
        lock.extend(10) if verb == "extend" else lock.reacquire()
    assert lock.remaining() == 0.0
    wait_until_free(fleet)


@pytest.mark.parametrize("use", ["extend", "reacquire", "release"])
def test_lock_that_is_not_held_is_an_error(world: World, make: Make, use: str) -> None:
    lock = make()
    call = partial(lock.extend, 1) if use == "extend" else getattr(lock, use)
    for work in (call, lambda: world.beside(call)):
        with pytest.raises(LockError):
            work()


# Ownership


@IN_THREADS
def test_token_belongs_to_the_thread(world: World, make: Make) -> None:
    lock = make()
    lock.acquire()
    with pytest.raises(LockError):
        world.beside(lock.release)
    assert world.beside(lambda: (lock.owned(), lock.locked(), lock.remaining())) == (False, True, 0.0)
    lock.release()


@IN_THREADS
@pytest.mark.parametrize("options", [{}, {"auto_renew": True}], ids=["plain", "renewed"])
def test_lock_of_an_acquire_under_way_is_no_other_callers(fleet: Fleet, make: Make, options: dict[str, Any]) -> None:
    lock = make(thread_local=False, **options)

    def release_what_is_not_held() -> None:
        with pytest.raises(LockError, match="already unlocked"):
            lock.release()

    call_before_noting(lock, release_what_is_not_held)
    assert lock.acquire() is True
    assert (lock.owned(), lock.valid) == (True, True)
    lock.release()


def test_token_may_be_shared(world: World, make: Make) -> None:
    lock = make(thread_local=False)
    lock.acquire()
    assert world.beside(lock.owned) is True
    world.beside(lock.release)
    assert lock.remaining() == 0.0


@IN_THREADS
def test_forked_child_holds_nothing(in_fork: InFork, fleet: Fleet, make: Make) -> None:
    lock = make()
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


def test_token_is_shown_nowhere(fleet: Fleet, make: Make) -> None:
    lock = make()
    lock.acquire()
    token = next(filter(None, values(fleet))).decode()
    assert token not in repr(lock) + repr(vars(lock)) + repr(lock.votes)
    delete(fleet)
    with pytest.raises(LockNotOwnedError) as caught:
        lock.release()
    assert token not in str(caught.value)


def test_copy_shares_the_clients_and_the_ownership(fleet: Fleet, make: Make) -> None:
    lock = make()
    lock.acquire()
    wait_until_held(fleet)
    twin = copy.copy(lock)
    assert twin.servers is lock.servers
    assert twin.owned()
    twin.release()
    wait_until_free(fleet)
    assert lock.remaining() == 0.0


def test_lock_cannot_be_pickled(make: Make) -> None:
    with pytest.raises(TypeError, match="'name' cannot be pickled: make it anew"):
        pickle.dumps(make())


# Several at once


def test_contenders_never_hold_it_together(world: World, fleet: Fleet, make: Make) -> None:
    holders: list[int] = []

    def contend(number: int) -> None:
        lock = make(sleep=0.01)
        for _ in range(10):
            with lock:
                holders.append(number)
                pause(0)
                assert holders == [number]
                holders.remove(number)

    for answer in [world.start(partial(contend, number)) for number in range(4)]:
        answer.result(30)
    wait_until_free(fleet)


def test_callers_share_the_connections(world: World, fleet: Fleet, make: Make) -> None:
    clients, admins = make.clients(), clients_of(fleet)
    with make.on(clients, "warm-up"):
        pass

    def connections() -> list[int]:
        return [admin.info("clients")["connected_clients"] for admin in admins]

    before = connections()

    def work(number: int) -> None:
        for _ in range(20):
            with make.on(clients, f"name-{number}"):
                pass

    for answer in [world.start(partial(work, number)) for number in range(8)]:
        answer.result(30)
    assert all(after <= count for after, count in zip(connections(), before, strict=True))


@IN_THREADS
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


# Which servers are asked, and which first


@IN_THREADS
def test_it_is_noted_that_a_vote_was_not_needed(fleet: Fleet, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = make()
    with lock:
        wait_until_held(fleet)
    (slow,) = lock._quorum._transports[0].kept_by_wings.values()
    slow.note_wait(0.002)
    waits: list[float | None] = []
    monkeypatch.setattr(slow, "note_wait", waits.append)

    def noted() -> bool:
        with lock:
            return None in waits

    wait_until(noted, "the others suffice")
