"""The local lock of a cached key, and when a key is kept, passed on and given up.

Rules: no server, and a clock that the tests set. `test_key_cache_schedules.py` has what threads do at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, SupportsIndex, cast

import pytest

from redislock_fast._linger.key_cache import CachedKey, LocalWaiter
from redislock_fast._linger.procedures import release_here, take_at_once
from redislock_fast._util import times
from redislock_fast._util.times import drift_s
from tests.support.bare_locks import KEY, TOKEN, BareLock, Kept, Waiting, lease_of

TIMEOUT_S, LINGER_S = 10.0, 1.0


class _Clock:
    """The time, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """The clock of the keys."""
    fake = _Clock()
    monkeypatch.setattr("redislock_fast._linger.key_cache.clock", fake)
    return fake


@pytest.fixture
def kept() -> Kept:
    """The keys of a server."""
    return Kept()


def _lingering(kept: Kept, clock: _Clock) -> CachedKey:
    return kept.keep(lease_of(clock.now, TIMEOUT_S, LINGER_S), clock.now + LINGER_S)


def _held(kept: Kept, clock: _Clock) -> CachedKey:
    cached = _lingering(kept, clock)
    assert cached.try_lock((TOKEN, clock.now + TIMEOUT_S))
    return cached


def _joined(cached: CachedKey, count: int = 1) -> list[Waiting]:
    waiters = [Waiting() for _ in range(count)]
    for waiter in waiters:
        cached.join(waiter)
    return waiters


def _given(waiters: list[Waiting]) -> list[int]:
    return [number for number, waiter in enumerate(waiters) if waiter.is_given]


# ---- the local lock ----


def test_one_caller_has_the_local_lock(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    assert [cached.try_lock(), cached.try_lock()] == [True, False]
    cached.unlock()
    assert cached.try_lock() is True


def test_callers_with_equal_expiries_do_not_share_the_local_lock(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    expiries = [(TOKEN, float(end)) for end in ("7", "7")]
    assert [cached.try_lock(expiry) for expiry in expiries] == [True, False]


def test_waiters_get_the_local_lock_in_the_order_of_their_arrival(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    waiters = _joined(cached, 3)
    orders = []
    for _ in waiters:
        cached.unlock()
        orders.append(_given(waiters))
        assert not cached.try_lock()
    assert orders == [[0], [0, 1], [0, 1, 2]]
    assert [waiter.woken for waiter in waiters] == [1, 1, 1]


def test_waiter_of_a_free_local_lock_gets_it_at_once(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    (waiter,) = _joined(cached)
    assert waiter.is_given
    assert not cached.try_lock()


def test_waiter_that_gives_up_is_passed_over(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    waiters = _joined(cached, 3)
    assert cached.leave(waiters[0])
    assert waiters[1].give_up()  # and is about to leave
    cached.unlock()
    assert _given(waiters) == [2]
    cached.unlock()
    assert cached.try_lock()


def test_waiter_that_has_got_the_local_lock_cannot_give_it_up(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    (waiter,) = _joined(cached)
    assert not cached.leave(waiter)
    assert not cached.try_lock()


def test_waiter_that_has_given_up_gets_nothing(kept: Kept) -> None:
    waiter = Waiting()
    assert waiter.give_up()
    assert not waiter.give()
    assert (waiter.is_given, waiter.woken) == (False, 0)


class _Leaving(deque[LocalWaiter]):
    """Waiters, the first of which leaves whenever one is looked at."""

    def __getitem__(self, index: SupportsIndex) -> LocalWaiter:  # type: ignore[override]  # no slices
        waiter = super().__getitem__(index)
        if len(self) > 3:
            self.popleft()
        return waiter


def test_all_waiters_that_stay_are_found_while_others_leave(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    waiters = _joined(cached, 6)
    cached.waiters = _Leaving(waiters)
    found = cached.all_waiters()
    assert list(cached.waiters) == waiters[3:]
    assert set(waiters[3:]) <= set(found)


class _Changing(deque[LocalWaiter]):
    """Waiters that change as the first is to be removed: without the GIL, CPython may find that, and gives up."""

    has_changed = False

    def remove(self, value: LocalWaiter, /) -> None:
        if not self.has_changed:
            self.has_changed = True
            raise IndexError("deque mutated during iteration")
        super().remove(value)


def test_waiter_that_cannot_be_removed_just_now_has_the_local_lock_alone(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    waiters = _joined(cached, 3)
    cached.waiters = _Changing(waiters)
    cached.unlock()
    assert _given(waiters) == [0]
    cached.unlock()
    assert _given(waiters) == [0, 1]
    assert list(cached.waiters) == [waiters[2]]


class _Listening:
    """The lease of a lock whose holder is told when it is wanted."""

    key = KEY
    wanted = over = False
    cached = None


class _Raced(dict[bytes, Any]):
    """A dict whose next entry that is removed is removed only after other threads have done something."""

    def __init__(self, entries: dict[bytes, Any], before: Callable[[], object]) -> None:
        super().__init__(entries)
        self._before = before

    def pop(self, *arguments: Any) -> Any:
        before, self._before = self._before, lambda: None
        before()
        return super().pop(*arguments)


def test_key_that_is_made_while_two_threads_forget_the_last_one_is_not_kept(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    made: list[CachedKey] = []

    def replace_and_take() -> None:
        cached.replace()
        made.append(_lingering(kept, clock))

    kept.key_cache._keys = _Raced(kept.key_cache._keys, replace_and_take)
    cached.replace()
    assert (made[0].is_current, made[0].lease, len(kept.given_up)) == (False, None, 1)
    assert kept.key_cache.of(KEY) not in (cached, made[0])


@pytest.mark.parametrize("is_dropped", [False, True], ids=["released", "dropped"])
def test_next_holder_that_listens_as_the_last_one_is_forgotten_is_told(kept: Kept, is_dropped: bool) -> None:
    last, following, told = cast("Any", _Listening()), cast("Any", _Listening()), list[Any]()
    kept.key_cache.listen(last, told.append)
    kept.key_cache._listeners = _Raced(kept.key_cache._listeners, lambda: kept.key_cache.listen(following, told.append))
    if is_dropped:
        del last
        kept.key_cache.sweep(0.0)
    else:
        kept.key_cache.end_listening(last)
    kept.key_cache.take_wanted(KEY)
    assert told == [following]


# ---- wanted ----


def test_key_that_is_wanted_while_it_lingers_is_given_up_at_once(kept: Kept, clock: _Clock) -> None:
    cached = _lingering(kept, clock)
    kept.key_cache.take_wanted(KEY)
    assert [(lease.token, is_wanted) for lease, is_wanted in kept.given_up] == [(TOKEN, True)]
    assert (cached.lease, cached.wanted_at, cached.locked_by) == (None, None, {})


def test_key_that_is_wanted_while_it_is_held_is_given_up_by_its_release(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    kept.key_cache.take_wanted(KEY)
    assert kept.given_up == []
    cached.release(clock.now, LINGER_S)
    assert [is_wanted for _, is_wanted in kept.given_up] == [True]
    assert (cached.lease, cached.wanted_at, cached.locked_by) == (None, None, {})


def test_key_that_is_wanted_while_it_is_asked_for_is_given_up_by_its_release(kept: Kept, clock: _Clock) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    kept.key_cache.take_wanted(KEY)
    cached.lease = lease_of(clock.now)
    cached.release(clock.now, LINGER_S)
    assert [is_wanted for _, is_wanted in kept.given_up] == [True]


def test_key_that_is_not_here_cannot_be_wanted(kept: Kept) -> None:
    kept.key_cache.take_wanted(b"another")
    cached = kept.key_cache.of(KEY)
    kept.key_cache.take_wanted(KEY)
    assert (cached.wanted_at, kept.given_up) == (None, [])


def test_wanted_that_is_heard_twice_counts_from_the_first_time(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    kept.key_cache.take_wanted(KEY)
    began = clock.now
    clock.now += 0.003
    kept.key_cache.take_wanted(KEY)
    assert cached.wanted_at == began


def test_acquire_that_fails_leaves_no_wanted_behind(kept: Kept, clock: _Clock) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    kept.key_cache.take_wanted(KEY)
    cached.free()
    assert cached.wanted_at is None


def test_wanted_key_is_passed_on_sixteen_times(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    waiters = _joined(cached, 30)
    cached.release(clock.now, LINGER_S)  # before: does not count
    kept.key_cache.take_wanted(KEY)
    for _ in range(16):
        assert kept.given_up == []
        cached.release(clock.now, LINGER_S)
    assert _given(waiters) == list(range(17))
    cached.release(clock.now, LINGER_S)
    assert [is_wanted for _, is_wanted in kept.given_up] == [True]
    assert _given(waiters) == list(range(18))  # the next one asks the server
    assert (cached.lease, cached.passes, cached.wanted_at) == (None, 0, None)


@pytest.mark.parametrize(("after_s", "given_up"), [(0.0049, 0), (0.0051, 1)])
def test_wanted_key_is_passed_on_for_five_milliseconds(
    kept: Kept, clock: _Clock, after_s: float, given_up: int
) -> None:
    cached = _held(kept, clock)
    _joined(cached, 3)
    kept.key_cache.take_wanted(KEY)
    clock.now += after_s
    cached.release(clock.now, LINGER_S)
    assert len(kept.given_up) == given_up


def test_key_is_given_up_once_a_second_though_nobody_has_said_that_it_is_wanted(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    _joined(cached, 3)
    clock.now += 0.9
    cached.release(clock.now, LINGER_S)
    assert kept.given_up == []
    clock.now += 0.2
    cached.release(clock.now, LINGER_S)
    assert [is_wanted for _, is_wanted in kept.given_up] == [False]


# ---- where keeping a key does not pay ----


def _want_while_idle(kept: Kept, clock: _Clock) -> float:
    """Let a key linger and be wanted. Returns for how long it is not kept then, in seconds."""
    cached = _lingering(kept, clock)
    kept.key_cache.take_wanted(KEY)
    assert cached.lease is None
    return cached.keeps_from - clock.now


def _is_kept(kept: Kept, clock: _Clock) -> bool:
    cached = _held(kept, clock)
    cached.release(clock.now, LINGER_S)
    return cached.lease is not None


def test_key_that_was_wanted_while_it_lingered_is_not_kept_for_a_second(kept: Kept, clock: _Clock) -> None:
    assert _want_while_idle(kept, clock) == pytest.approx(1)
    clock.now += 0.99
    assert not _is_kept(kept, clock)
    clock.now += 0.02
    assert _is_kept(kept, clock)


def test_key_that_is_not_kept_is_passed_on_all_the_same(kept: Kept, clock: _Clock) -> None:
    _want_while_idle(kept, clock)
    cached = _held(kept, clock)
    (waiter,) = _joined(cached)
    cached.release(clock.now, LINGER_S)
    assert waiter.is_given
    assert cached.lease is not None


def test_key_that_was_wanted_while_it_was_held_is_kept_the_next_time(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    kept.key_cache.take_wanted(KEY)
    cached.release(clock.now, LINGER_S)
    assert _is_kept(kept, clock)


@pytest.mark.parametrize("sweeps", [False, True])
def test_time_for_which_a_key_is_not_kept_doubles_up_to_a_minute(kept: Kept, clock: _Clock, sweeps: bool) -> None:
    times = []
    for _ in range(8):
        times.append(round(_want_while_idle(kept, clock)))
        clock.now += times[-1] + 0.5
        if sweeps:
            kept.key_cache.sweep(clock.now)
    assert times == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("sweeps", [False, True])
def test_time_for_which_a_key_is_not_kept_begins_anew_after_a_quiet_time(
    kept: Kept, clock: _Clock, sweeps: bool
) -> None:
    for expected_s in (1, 2):
        assert _want_while_idle(kept, clock) == pytest.approx(expected_s)
        clock.now += expected_s
    clock.now += 2.1
    if sweeps:
        kept.key_cache.sweep(clock.now)
    assert _want_while_idle(kept, clock) == pytest.approx(1)


# ---- the sweep ----


def test_sweep_gives_up_all_that_has_lingered_for_long_enough_together() -> None:
    bursts: list[int] = []
    kept = Kept()
    kept.key_cache.give_up = lambda leases, _: bursts.append(len(leases))
    for name in (b"first", b"second", b"third"):
        cached = kept.key_cache.of(name)
        cached.lease, cached.idle_until = lease_of(1000.0), 1000.0 + (name == b"third")
    assert kept.key_cache.sweep(1000.0) is True
    assert bursts == [2]
    assert kept.key_cache.sweep(1001.0) is False
    assert bursts == [2, 1]


def test_sweep_leaves_a_held_key_alone(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    kept.key_cache.sweep(clock.now + 3600)
    assert kept.given_up == []
    assert cached.lease is not None


def test_sweep_forgets_a_key_that_is_not_used(kept: Kept, clock: _Clock) -> None:
    cached = _lingering(kept, clock)
    kept.key_cache.sweep(clock.now + LINGER_S)
    assert not cached.is_current
    assert kept.key_cache.of(KEY) is not cached


def test_sweep_keeps_on_while_a_caller_waits(kept: Kept, clock: _Clock) -> None:
    _joined(_held(kept, clock))
    assert kept.key_cache.sweep(clock.now) is True


# ---- what is let go ----


def test_keys_of_a_lost_connection_are_given_up_and_held_ones_by_their_release(kept: Kept, clock: _Clock) -> None:
    lingering = _lingering(kept, clock)
    held = kept.key_cache.of(b"held")
    held.lease = lease_of(clock.now)
    assert held.try_lock((TOKEN, clock.now + TIMEOUT_S))
    kept.key_cache.drop_all()
    assert lingering.lease is None
    assert len(kept.given_up) == 1
    waiters = _joined(held, 2)
    held.release(clock.now, LINGER_S)
    assert kept.key_cache.of(b"held").lease is None
    assert len(kept.given_up) == 2
    assert _given(waiters) == [0]


def test_keys_of_another_connection_are_given_up_alone(kept: Kept, clock: _Clock) -> None:
    mine = kept.key_cache.of(b"mine")
    mine.lease = lease_of(clock.now, registry="this one")
    cached = _lingering(kept, clock)
    kept.key_cache.drop_all("this one")
    assert (mine.lease is None, cached.lease is None) == (False, True)


def test_forked_child_has_no_keys(kept: Kept, clock: _Clock) -> None:
    cached = _lingering(kept, clock)
    kept.key_cache.forget()
    assert kept.key_cache.of(KEY) is not cached
    assert (kept.key_cache.is_watched, kept.given_up) == (False, [])


def test_key_that_no_registry_hears_of_is_not_kept(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    cached.lease = lease_of(clock.now, registry=None)
    cached.release(clock.now, LINGER_S)
    assert len(kept.given_up) == 1


# ---- a local lock that was forgotten ----


def test_local_lock_is_overdue_once_its_lease_is_certainly_over(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    assert cached.overdue_at() == pytest.approx(clock.now + TIMEOUT_S + LINGER_S + 0.005)
    asked_for = kept.key_cache.of(b"asked for")
    assert asked_for.try_lock()
    assert asked_for.overdue_at() == float("inf")


def test_waiters_of_an_overdue_local_lock_are_woken_and_begin_again(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    waiters = _joined(cached, 2)
    kept.key_cache.sweep(cached.overdue_at() - 0.001)
    assert [waiter.woken for waiter in waiters] == [0, 0]
    kept.key_cache.sweep(cached.overdue_at())
    assert [waiter.woken for waiter in waiters] == [1, 1]
    assert not cached.is_current
    assert kept.key_cache.of(KEY).try_lock()


def test_holder_of_a_replaced_local_lock_gives_the_key_up(kept: Kept, clock: _Clock) -> None:
    cached = _held(kept, clock)
    cached.replace()
    assert kept.given_up == []
    cached.release(clock.now, LINGER_S)
    assert len(kept.given_up) == 1
    assert cached.lease is None


# ---- the watching ----


def test_watching_ends_when_nothing_lingers_and_no_caller_waits(kept: Kept, clock: _Clock) -> None:
    cached = _lingering(kept, clock)
    assert kept.watches == 1
    assert (kept.key_cache.rests(), kept.key_cache.is_watched) == (False, True)
    assert cached.try_lock((TOKEN, clock.now + TIMEOUT_S))
    waiter = Waiting()
    cached.join(waiter)
    assert kept.key_cache.rests() is False
    assert cached.leave(waiter)
    assert kept.key_cache.rests() is False, "it is held"
    lease, cached.lease = cached.lease, None
    assert (kept.key_cache.rests(), kept.key_cache.is_watched) == (True, False)
    cached.lease = lease
    cached.release(clock.now, LINGER_S)
    assert (kept.watches, kept.key_cache.is_watched) == (2, True)


def test_release_beside_the_end_of_the_watching_has_the_key_watched(kept: Kept, clock: _Clock) -> None:
    cached = kept.key_cache.of(KEY)
    needs_watching = kept.key_cache._needs_watching

    def release_meanwhile() -> bool:
        kept.key_cache._needs_watching = needs_watching  # type: ignore[method-assign]
        _lingering(kept, clock)  # its release sees that the keys are not watched
        return needs_watching()

    kept.key_cache.watch()
    kept.key_cache._needs_watching = release_meanwhile  # type: ignore[method-assign]
    assert (kept.key_cache.rests(), kept.key_cache.is_watched, kept.watches) == (False, True, 2)
    assert cached.lease is not None


def test_release_has_a_key_watched_that_nothing_watches(kept: Kept, clock: _Clock) -> None:
    clock.now = times.clock()  # the lock's own clock
    cached = kept.keep(lease_of(clock.now), clock.now + LINGER_S)
    lock = BareLock(kept, KEY, timeout=10, linger=1)
    assert take_at_once(lock, cached, lock._mine())
    kept.key_cache.end_watching()
    release_here(lock, lock._mine(), cached)
    assert (kept.watches, kept.key_cache.is_watched) == (2, True)


def test_waiter_has_a_local_lock_watched_that_may_be_forgotten(kept: Kept) -> None:
    cached = kept.key_cache.of(KEY)
    assert cached.try_lock()
    _joined(cached)
    assert (kept.watches, kept.key_cache.is_watched) == (1, True)


# ---- how long a key may be taken ----


@pytest.mark.parametrize("linger_s", [0.0, 0.001, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("timeout_s", [0.04, 10.0, 3600.0])
def test_taken_key_outlives_the_whole_timeout_of_its_holder(timeout_s: float, linger_s: float) -> None:
    lease = lease_of(1000.0, timeout_s, linger_s)
    believed_end = lease.take_until + timeout_s - drift_s(timeout_s)
    assert believed_end <= lease.expires_at - drift_s(timeout_s + linger_s) + 1e-9
    assert lease.take_until <= 1000.0 + linger_s


def test_caller_with_a_longer_timeout_may_take_the_key_for_a_shorter_time() -> None:
    lease = lease_of(1000.0, TIMEOUT_S, LINGER_S)
    assert lease.take_until_for(2000) > lease.take_until > lease.take_until_for(11_000)
