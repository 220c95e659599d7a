"""An interrupt at any line of what is done with a cached key: its local lock is free afterwards.

Rules: no server. What the public calls do of an interrupt stands in tests/integration/lingering.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from redislock_fast._lease.owner import SharedOwner
from redislock_fast._linger.key_cache import KeyLease
from redislock_fast._linger.procedures import Turn, release_here, take_at_once
from redislock_fast._util.times import clock
from tests.support.bare_locks import KEY, TOKEN, BareLock, Kept, Waiting, lease_of
from tests.support.interrupts import INTERRUPTS, each_line, interrupt_kind

__all__ = ["interrupt_kind"]

pytestmark = pytest.mark.usefixtures("interrupt_kind")

_FILES = ("_linger/key_cache.py", "_linger/procedures.py")


class _GivenUp(KeyLease):
    """A lease that is given up while a caller looks at it."""

    kept: Kept
    until: float

    @property
    def take_until(self) -> float:
        self.kept.key_cache.of(KEY).lease = None
        return self.until

    @take_until.setter
    def take_until(self, until: float) -> None:
        self.until = until


def _wait_in_turn(kept: Kept) -> None:
    turn = Turn()
    owner = SharedOwner()
    turn.begin(kept.key_cache.of(KEY), Waiting())
    try:
        turn.join()
        assert turn.leave()
        turn.end(owner)
    except INTERRUPTS:
        turn.end(owner)
        raise


def _hear_wanted(kept: Kept) -> None:
    kept.keep(lease_of(clock()), clock() + 1)
    kept.key_cache.take_wanted(KEY)


def _drop_all(kept: Kept) -> None:
    kept.keep(lease_of(clock()), clock() + 1)
    kept.key_cache.drop_all()


def _replace(kept: Kept) -> None:
    kept.keep(lease_of(clock()), clock() + 1).replace()


def _tidy(kept: Kept) -> None:
    kept.keep(lease_of(clock()), clock() + 1).tidy(object())


def _take_at_once(kept: Any) -> None:
    lease = _GivenUp(KEY, TOKEN, clock() + 11, 10_000, 1000, "registry", clock())
    lease.kept = kept
    cached = kept.keep(lease, clock() + 1)
    assert take_at_once(BareLock(kept, KEY, timeout=10, linger=1), cached, SharedOwner()) is False


@pytest.mark.parametrize("work", [_wait_in_turn, _hear_wanted, _drop_all, _replace, _tidy, _take_at_once])
def test_interrupt_at_any_line_leaves_the_local_lock_free(work: Callable[[Kept], None]) -> None:
    for strike in each_line(10):
        kept = Kept()
        cached = kept.key_cache.of(KEY)
        place = strike(partial(work, kept), *_FILES)
        assert " raises " not in place
        assert cached.locked_by == {}, place


def test_interrupted_release_of_a_key_that_is_not_kept_leaves_nothing_to_take() -> None:
    for strike in each_line(10):
        kept = Kept()
        lease = lease_of(clock())
        cached = kept.keep(lease, clock() + 1)
        lock = BareLock(kept, KEY, timeout=10, linger=1)
        owner = lock._mine()
        assert take_at_once(lock, cached, owner)
        lease.let_go()
        place = strike(partial(release_here, lock, owner, cached), *_FILES)
        if kept.given_up:
            assert not take_at_once(lock, cached, owner), f"a key is taken that is given back: {place}"
            assert cached.lease is None, place


def test_interrupted_sweep_gives_back_what_it_has_taken_out() -> None:
    for strike in each_line(10):
        kept = Kept()
        cached = kept.keep(lease_of(clock()), clock() - 1)
        place = strike(partial(kept.key_cache.sweep, clock()), *_FILES)
        kept.key_cache.sweep(clock())
        assert {given_up.token for given_up, _ in kept.given_up} == {TOKEN}, place
        assert (cached.lease, cached.locked_by) == (None, {}), place


def test_second_release_by_an_interrupted_sweep_may_find_the_first() -> None:
    kept, lease = Kept(), lease_of(clock())
    kept.keep(lease, clock() - 1)
    interrupts = [KeyboardInterrupt()]

    def interrupt_once(_: object) -> None:
        if interrupts:
            raise interrupts.pop()

    kept.when_given_up = interrupt_once
    with pytest.raises(KeyboardInterrupt):
        kept.key_cache.sweep(clock())
    assert [(given_up is lease, given_up.releases) for given_up, _ in kept.given_up] == [(True, 2)] * 2
