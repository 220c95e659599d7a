"""A holding, between its owner and the renewer, which may look at any moment of a release.

Rules: no server, and no renewer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast._lease import holding as holding_module
from redislock_fast._lease.holding import Held, Holding
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._renewal.schedule import Schedule
from redislock_fast._util.times import clock

TOKEN = b"token"
TTL_MS = 60_000


class Lock:
    """A lock that can be referred to weakly."""


class Renewer:
    """The renewer that a dropped holding calls.

    Attributes:
        dropped: the entries of the locks that were dropped.
    """

    def __init__(self) -> None:
        self.dropped: list[Any] = []

    def drop(self, key: bytes, token: bytes, entry: Any) -> None:
        """Note a lock whose object was dropped."""
        assert entry[0] == key
        self.dropped.append(entry)


_lock = Lock()


def held_with(token: bytes = TOKEN) -> Held:
    """A lock that is held from now on."""
    now = clock()
    return (b"name", token, TTL_MS, now + TTL_MS / 1000, Options(auto_renew=True), now)


@pytest.fixture
def holding() -> Holding:
    """The holding of an owner that holds a lock."""
    made = Holding(weakref.ref(_lock))
    made.held = held_with()
    return made


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have the owner do something while the next lease is made."""

    def plan(act: Callable[[], object]) -> None:
        def make(*args: Any) -> Lease:
            monkeypatch.setattr(holding_module, "Lease", Lease)
            act()
            return Lease(*args)

        monkeypatch.setattr(holding_module, "Lease", make)

    return plan


def test_lease_is_that_of_the_acquire(holding: Holding) -> None:
    lease = holding.lease_for_owner()
    assert lease is not None
    assert (lease.lock(), lease.key, lease.token, lease.ttl_ms) == (_lock, b"name", TOKEN, TTL_MS)
    assert holding.held is not None
    assert (lease.expires_at, lease.acquired_at, lease.over) == (holding.held[3], holding.held[5], False)


def test_owner_and_renewer_have_the_same_lease(holding: Holding) -> None:
    lease = holding.lease_to_renew()
    assert lease is not None
    assert holding.lease_for_owner() is lease
    assert holding.lease_to_renew() is lease


def test_what_was_released_before_the_look_gets_no_lease(holding: Holding) -> None:
    assert holding.begin_release(TOKEN) is True
    assert holding.lease_to_renew() is None
    holding.held = None
    assert (holding.lease_to_renew(), holding.lease_for_owner(), holding.lease) == (None, None, None)


def test_release_goes_by_a_lease_that_was_made(holding: Holding) -> None:
    holding.lease_to_renew()
    assert holding.begin_release(TOKEN) is False


def test_release_of_another_token_ends_nothing(holding: Holding) -> None:
    assert holding.begin_release(b"of the user's own") is False
    assert (holding.lease_to_renew() is None, holding.over) == (False, False)


def test_renewer_takes_back_the_lease_of_what_is_released_meanwhile(
    holding: Holding, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    begun: list[bool] = []
    meanwhile(lambda: begun.append(holding.begin_release(TOKEN)))
    assert holding.lease_to_renew() is None
    assert (begun, holding.lease) == ([True], None)


def test_renewer_takes_back_the_lease_of_an_earlier_holding(
    holding: Holding, meanwhile: Callable[[Callable[[], object]], None]
) -> None:
    def release_and_acquire() -> None:
        assert holding.begin_release(TOKEN)
        holding.over, holding.held = False, held_with(b"the next one")

    meanwhile(release_and_acquire)
    assert holding.lease_to_renew() is None
    lease = holding.lease_to_renew()
    assert lease is not None
    assert lease.token == b"the next one"


def test_lease_that_a_release_needs_is_over_from_the_start(holding: Holding) -> None:
    holding.begin_release(TOKEN)
    lease = holding.lease_for_owner()
    assert lease is not None
    assert (lease.over, lease.begin_renewal(clock())) == (True, None)


@pytest.mark.parametrize(
    "state", ["held", "lease made", "never held", "release begun", "released", "lease lost", "forked"]
)
def test_only_what_is_held_is_released_when_it_is_dropped(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renewer = Renewer()
    holding = Holding(weakref.ref(_lock))
    holding.renewer = renewer
    holding.held = None if state == "never held" else held_with()
    if state in ("lease made", "lease lost"):
        lease = holding.lease_for_owner()
        assert lease is not None
        lease.over = state == "lease lost"
    if state in ("release begun", "released"):
        holding.begin_release(TOKEN)
    if state == "released":
        holding.held = None
    if state == "forked":
        holding._pid = os.getppid()
    del holding
    assert renewer.dropped == ([(b"name", TOKEN)] if state in ("held", "lease made") else [])


def test_renewer_is_told_to_look_before_a_lease_is_due_and_when_there_are_many(holding: Holding) -> None:
    schedule = Schedule()
    assert schedule.list_holding(holding, 100.0) == 100.0
    schedule.looks_at = 90.0
    assert schedule.list_holding(holding, 100.0) is None
    assert schedule.list_holding(holding, 80.0) == 80.0
    schedule.looks_at = clock() + 60
    told = [schedule.list_holding(holding, schedule.looks_at + 1) is not None for _ in range(2000)]
    assert (told[0], told[-1]) == (False, True)


def test_looking_takes_each_holding_once(holding: Holding) -> None:
    schedule = Schedule()
    released = Holding(weakref.ref(_lock))
    dropped = Holding(weakref.ref(_lock))
    dropped.held = held_with()
    for one in (holding, released, dropped, holding):
        one.listed_ms = TTL_MS
        schedule.list_holding(one, 0.0)
    gone = weakref.ref(dropped)
    del dropped, one
    assert gone() is None
    leases = [lease for lease, _ in schedule.take_listed()]
    assert [lease.token for lease in leases[:1]] == [TOKEN]
    assert {id(lease) for lease in leases} == {id(holding.lease)}
    assert (schedule.has_listed, holding.listed_ms, released.listed_ms) == (False, 0, 0)
