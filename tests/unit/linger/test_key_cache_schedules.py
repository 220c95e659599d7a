"""What threads do with one cached key at the same time, line by line: each order with a switch or two, and random ones.

Rules: no server. A scene says what its threads do and what must be so afterwards.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.owner import Owner
from redislock_fast._linger.key_cache import CachedKey
from redislock_fast._linger.procedures import Turn, release_here, take_at_once
from tests.support.bare_locks import KEY, TOKEN, BareLock, Kept, Waiting, lease_of
from tests.support.helpers import PATIENCE_S
from tests.support.schedules import play_all, play_some
from tests.support.selection import in_two_runs

_FILES = ("_linger/key_cache.py", "_linger/procedures.py")
_NOW = 1000.0

_ONE_IN = int(os.environ.get("SCHEDULES_ONE_IN", "5"))
"""Of the orders with two switches, one in so many is played; `make simulate` plays each."""


class _Scene:
    """A key that lingers, and threads that use it. Each scene adds actors.

    Attributes:
        holder: who has taken the key in memory and not yet released it.
    """

    def __init__(self, linger_s: float = 1.0) -> None:
        self.kept = Kept()
        self.kept.when_given_up = self._note_given_up
        self.cached = self.kept.keep(lease_of(_NOW, linger_s=linger_s), _NOW + linger_s)
        self.actors: list[Callable[[], object]] = []
        self.waiting: list[Waiting] = []
        self.holder: object = None
        self.rests = False
        self.watches = 0
        self.has_heard = False
        self.must_be_gone = False
        self.is_broken = self.was_broken = False

    # ---- what threads do ----

    def _note_given_up(self, lease: object) -> None:
        assert self.holder is None or self.is_broken, "the key was given up while it was held"

    def held(self) -> BareLock:
        """A lock that holds the key."""
        lock = BareLock(self.kept, KEY, timeout=10, linger=1)
        assert take_at_once(lock, self.cached, lock._mine())
        self.holder = lock
        return lock

    def let_go(self, lock: BareLock) -> None:
        """Release."""
        owner: Owner = lock._mine()
        assert self.holder is lock
        self.holder = None
        cached: Any = owner.cached
        with contextlib.suppress(LockNotOwnedError):
            release_here(lock, owner, cached)

    def take_and_let_go(self) -> None:
        """Take the key in memory where that is possible, and release it."""
        lock, was_broken = BareLock(self.kept, KEY, timeout=10, linger=1), self.was_broken
        if take_at_once(lock, self.cached, lock._mine()):
            assert not was_broken, "a key is taken that was taken from its holder"
            assert self.holder is None, "two hold the key"
            self.holder = lock
            self.let_go(lock)

    def take(self) -> None:
        """Take the key in memory where that is possible."""
        lock = BareLock(self.kept, KEY, timeout=10, linger=1)
        if take_at_once(lock, self.kept.key_cache.of(KEY), lock._mine()):
            self.holder = lock

    def join(self) -> None:
        """Wait for the local lock."""
        waiter = Waiting()
        self.waiting.append(waiter)
        self.cached.join(waiter)

    def join_and_leave(self) -> None:
        """Wait for the local lock, and give up at once."""
        waiter = Waiting()
        self.cached.join(waiter)
        if not self.cached.leave(waiter):
            self.cached.free()

    def hear(self) -> None:
        """Hear that another process wants the key."""
        self.has_heard = True
        self.kept.key_cache.take_wanted(KEY)

    def sweep(self, after_s: float = 60.0) -> None:
        """Look after the keys, some time later."""
        self.kept.key_cache.sweep(_NOW + after_s)

    def drop_all(self) -> None:
        """The connection is lost."""
        self.must_be_gone = True
        self.kept.key_cache.drop_all()

    def rest(self) -> None:
        """End the watching if that is possible."""
        self.watches = self.kept.watches
        self.rests = self.kept.key_cache.rests()

    def replace(self) -> None:
        """Give the local lock up as forgotten."""
        self.must_be_gone = True
        self.cached.replace()

    def take_from_holder(self) -> None:
        """An operator takes the key from its holder."""
        self.must_be_gone = self.is_broken = True
        self.kept.key_cache.take_give_up(KEY, TOKEN)
        self.was_broken = True

    # ---- what must be so ----

    def _waits_for_ever(self, waiter: Waiting) -> bool:
        return not waiter.is_given and self.cached.is_current

    def check(self) -> None:
        """Let the waiters have their turns, and look."""
        cached = self.cached
        turns = 0
        while any(waiter.is_given for waiter in self.waiting):
            given = [waiter for waiter in self.waiting if waiter.is_given]
            assert len(given) == 1, "two have the local lock"
            assert cached.locked_by.get(0) is given[0]
            self.waiting.remove(given[0])
            turns += 1
            cached.free()
        assert not any(self._waits_for_ever(waiter) for waiter in self.waiting), "a waiter was forgotten"
        assert all(waiter.woken for waiter in self.waiting), "a waiter was not woken"
        if self.holder is None:
            assert cached.locked_by == {}, "the local lock is left behind"
            lingers = cached.lease is not None
            assert not (lingers and (self.has_heard or self.must_be_gone)), "the key lingers, and must not"
            if lingers:
                is_watched = self.kept.key_cache.is_watched
                assert is_watched, "the key lingers, and is not watched"
                assert not self.rests or self.kept.watches > self.watches, "the watching has ended"
        if self.is_broken:  # given up by the operator's message, and perhaps by the holder
            return
        tokens = [lease.token for lease, _ in self.kept.given_up]
        assert tokens in ([], [TOKEN]), "the key was given up twice"
        assert (tokens == []) is (cached.lease is not None), "the key was lost"


def _releasing(*others: str, linger_s: float = 1.0) -> _Scene:
    """A holder releases, while other threads do something."""
    scene = _Scene(linger_s)
    lock = scene.held()
    scene.actors = [partial(scene.let_go, lock), *(getattr(scene, other) for other in others)]
    return scene


def _idle(*others: str) -> _Scene:
    """The key lingers, while threads do something."""
    scene = _Scene()
    scene.actors = [getattr(scene, other) for other in others]
    return scene


def _freeing(*others: str) -> _Scene:
    """A caller that has the local lock frees it, while threads do something."""
    scene = _idle(*others)
    assert scene.cached.try_lock()
    scene.actors.insert(0, scene.cached.free)
    return scene


_SCENES: dict[str, Callable[[], _Scene]] = {
    "free and join": partial(_freeing, "join"),
    "free and wanted": partial(_freeing, "hear"),
    "release and wanted": partial(_releasing, "hear"),
    "release and join": partial(_releasing, "join"),
    "release and join and leave": partial(_releasing, "join_and_leave"),
    "release and the end of the watching": partial(_releasing, "rest"),
    "release and a lost connection": partial(_releasing, "drop_all"),
    "release and a replacement": partial(_releasing, "replace"),
    "release and an operator": partial(_releasing, "take_from_holder"),
    "release and sweep": partial(_releasing, "sweep"),
    "release and take": partial(_releasing, "take_and_let_go"),
    "take and take": partial(_idle, "take_and_let_go", "take_and_let_go"),
    "take and wanted": partial(_idle, "take_and_let_go", "hear"),
    "take and an operator": partial(_idle, "take_and_let_go", "take_from_holder"),
    "take and sweep": partial(_idle, "take_and_let_go", "sweep"),
    "take for good and wanted": partial(_idle, "take", "hear"),
    "take for good and sweep": partial(_idle, "take", "sweep"),
    "take and the end of the watching": partial(_idle, "take_and_let_go", "rest"),
    "take and a lost connection": partial(_idle, "take_and_let_go", "drop_all"),
    "join and sweep": partial(_idle, "join", "sweep"),
    "join and wanted": partial(_idle, "join", "hear"),
    "join and join": partial(_idle, "join", "join"),
    "wanted and sweep": partial(_idle, "hear", "sweep"),
    "wanted and wanted": partial(_idle, "hear", "hear"),
}

_SCENES_OF_THREE: dict[str, Callable[[], _Scene]] = {
    "release, take and an operator": partial(_releasing, "take_and_let_go", "take_from_holder"),
    "release, join and wanted": partial(_releasing, "join", "hear"),
    "release, join and join": partial(_releasing, "join", "join"),
    "release, join, and join and leave": partial(_releasing, "join", "join_and_leave"),
    "release, join and sweep": partial(_releasing, "join", "sweep"),
    "release, join and a replacement": partial(_releasing, "join", "replace"),
    "release, wanted and the end of the watching": partial(_releasing, "hear", "rest"),
    "release, wanted and take": partial(_releasing, "hear", "take_and_let_go"),
    "take, wanted and sweep": partial(_idle, "take_and_let_go", "hear", "sweep"),
}


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("_linger.key_cache", "_linger.procedures"):
        monkeypatch.setattr(f"redislock_fast.{module}.clock", lambda: _NOW)


@pytest.mark.parametrize("make", _SCENES.values(), ids=_SCENES)
def test_two_threads_may_meet_between_any_two_lines(make: Callable[[], _Scene]) -> None:
    assert play_all(make, 1, *_FILES) > 20


@pytest.mark.slow
@pytest.mark.parametrize("make", _SCENES.values(), ids=_SCENES)
def test_two_threads_may_meet_twice_between_any_two_lines(make: Callable[[], _Scene]) -> None:
    assert play_all(make, 2, *_FILES, one_in=_ONE_IN) > 20


@pytest.mark.parametrize("make", _SCENES_OF_THREE.values(), ids=_SCENES_OF_THREE)
def test_three_threads_may_meet_between_any_two_lines(make: Callable[[], _Scene]) -> None:
    assert play_all(make, 1, *_FILES) > 100


@pytest.mark.parametrize("make", [*_SCENES.values(), *_SCENES_OF_THREE.values()], ids=[*_SCENES, *_SCENES_OF_THREE])
@in_two_runs(range(400), 20)
def test_threads_may_meet_between_any_two_instructions(make: Callable[[], _Scene], seeds: range) -> None:
    play_some(make, seeds, *_FILES)


class _EndOfATurn:
    """A caller that has not got the local lock ends its turn, while another one takes the local lock."""

    def __init__(self) -> None:
        kept = Kept()
        self._cached = kept.key_cache.of(KEY)
        self._turn = Turn()
        self._turn.begin(self._cached, b"a new token")
        self._other = object()
        self.actors: list[Callable[[], object]] = [partial(self._turn.end, Owner()), self._lock]

    def _lock(self) -> None:
        assert self._cached.try_lock(self._other)

    def check(self) -> None:
        """The other caller has the local lock."""
        assert self._cached.locked_by.get(0) is self._other


def test_end_of_a_turn_frees_the_local_lock_of_no_other_caller() -> None:
    assert play_all(_EndOfATurn, 2, *_FILES) > 20


class _ThreadWaiter(Waiting):
    def __init__(self) -> None:
        super().__init__()
        self._event = threading.Event()

    def wake(self) -> None:
        self._event.set()

    def is_woken(self) -> bool:
        """Wait until it is woken, and begin anew. Returns whether that was soon."""
        woken = self._event.wait(PATIENCE_S)
        self._event.clear()
        return woken


class _Stress:
    """What each of many threads does with one key, at random."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.faults: list[str] = []
        self._holders: list[object] = []

    def live(self, seed: int) -> None:
        """Do 2,500 things."""
        rng = random.Random(seed)
        cache = self.kept.key_cache
        steps = [
            (0.3, self._try),
            (0.5, self._wait),
            (0.1, self._leave),
            (0.05, lambda: cache.take_wanted(KEY)),
            (0.045, lambda: cache.sweep(_NOW + 0.5)),
            (0.005, cache.drop_all),
        ]
        weights = [weight for weight, _ in steps]
        for _ in range(2500):
            rng.choices(steps, weights)[0][1]()

    def _try(self) -> None:
        cached = self.kept.key_cache.of(KEY)
        if cached.try_lock():
            self._use(cached)

    def _wait(self) -> None:
        cached, waiter = self.kept.key_cache.of(KEY), _ThreadWaiter()
        cached.join(waiter)
        while not waiter.is_given and cached.is_current:
            if not waiter.is_woken():
                self.faults.append("a waiter was forgotten")
                break
        if not cached.leave(waiter):
            self._use(cached)

    def _leave(self) -> None:
        cached, waiter = self.kept.key_cache.of(KEY), _ThreadWaiter()
        cached.join(waiter)
        if not cached.leave(waiter):
            self._use(cached)

    def _use(self, cached: CachedKey) -> None:
        if cached.is_current:  # else another object may be locked, too, and the server decides
            me = object()
            self._holders.append(me)
            if self._holders != [me]:
                self.faults.append("two have the local lock")
            if cached.lease is None:
                cached.lease = lease_of(_NOW)
            self._holders.remove(me)
        cached.release(_NOW, 1.0 if cached.passes else 0.0)


@pytest.mark.timeout(60)
def test_threads_never_share_the_local_lock_and_forget_no_waiter(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    stress = _Stress()
    threads = [threading.Thread(target=stress.live, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stress.faults == []
    stress.kept.key_cache.drop_all()
    cached = stress.kept.key_cache.of(KEY)
    assert (cached.locked_by, list(cached.waiters), cached.lease) == ({}, [], None)
