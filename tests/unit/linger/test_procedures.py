"""How a lock with `linger` is acquired and released, step by step.

Rules: no server, no driver, and no time passes that the test does not let pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._linger import procedures
from redislock_fast._linger.procedures import Turn, acquire_in_memory, confirm_kept, keep_granted, listen_for_wanted
from redislock_fast._procedures.acquire import acquire_lock, new_call
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._queue.waiters import WaiterRegistry
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import LISTENS, TokenSource
from tests.support.bare_locks import KEY, TOKEN, BareLock, Kept, lease_of


def _turn_at(cached: Any) -> Turn:
    """The turn of an acquire that has the local lock."""
    turn = Turn()
    turn.begin(cached, b"")
    return turn


class _Transport(Kept):
    """Has a connection whose registry has subscribed to nothing yet, and is that connection."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = self.pipe = self
        self.registry = WaiterRegistry(Capabilities(), TokenSource())


def _ended(steps: Any, answer: object) -> Any:
    """What the steps return after this answer."""
    with pytest.raises(StopIteration) as end:
        steps.send(answer)
    return end.value.value


def test_wanted_is_heard_before_the_first_key_of_a_connection_is_asked_for() -> None:
    transport: Any = _Transport()
    registry = transport.registry
    steps = listen_for_wanted(BareLock(transport, KEY, timeout=10, linger=1), Limit(None))
    assert next(steps).method == "enter"
    registry.note_subscription(registry.channel_for(KEY), allowed=True)
    assert _ended(steps, registry.take(KEY, b"", transport, transport, transport)) is True
    assert registry.on_wanted == transport.key_cache.take_wanted


def test_connection_that_may_not_subscribe_keeps_no_key() -> None:
    transport: Any = _Transport()
    registry = transport.registry
    steps = listen_for_wanted(BareLock(transport, KEY, timeout=10, linger=1), Limit(None))
    assert next(steps).method == "enter"
    registry.note_subscription(registry.channel_for(KEY), allowed=False)
    assert _ended(steps, registry.take(KEY, b"", transport, transport, transport)) is False


def test_flag_of_a_key_is_not_taken_for_known_when_another_process_wants_it() -> None:
    transport: Any = Kept()
    now = clock()
    lock = BareLock(transport, KEY, timeout=10, linger=1)
    cached = transport.keep(lease_of(now - 2), now)
    assert cached.try_lock()
    cached.wanted_at = now  # said of an earlier token
    steps = confirm_kept(lock, _turn_at(cached), lock._mine(), Limit(None))
    step: Any = next(steps)
    assert step.args[0].request(Capabilities([[b"delifeq"], None, [b"lmpop"]]), now)[2] == TOKEN


def test_interrupted_acquire_lets_the_key_linger_that_it_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = Kept()
    lease = lease_of(clock())
    cached = kept.keep(lease, clock() + 1)
    lock = BareLock(kept, KEY, timeout=10, linger=1)
    hold = procedures.hold_cached

    def hold_and_interrupt(*args: Any) -> None:
        hold(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(procedures, "hold_cached", hold_and_interrupt)
    owner = lock._mine()
    call = new_call(lock, owner, None, None)
    with pytest.raises(KeyboardInterrupt):
        next(acquire_lock(lock, call))
    assert (owner.token, owner.cached) == (None, None)
    assert (cached.lease, cached.locked_by) == (lease, {})
    assert (kept.given_up, call.left) == ([], [])


def test_lock_with_an_overridden_hook_that_has_waited_in_memory_asks_the_server_without_the_local_lock() -> None:
    class Hooked(BareLock):
        def _has_own_hooks(self) -> bool:
            return False

    kept: Any = Kept()
    turn = _turn_at(cached := kept.key_cache.of(KEY))
    assert cached.try_lock(turn.waiter)
    lock = Hooked(kept, KEY, timeout=10, linger=1)
    steps = acquire_in_memory(lock, new_call(lock, lock._mine(), None, None), turn)
    step: Any = next(steps)
    assert (step.method, step.args[0].ttl_ms) == ("execute", 10_000)
    assert cached.locked_by == {}


def test_key_whose_token_names_another_connection_is_not_kept() -> None:
    kept: Any = Kept()
    lock = BareLock(kept, KEY, timeout=10, linger=1)
    registry = WaiterRegistry(Capabilities(), TokenSource())
    cached = kept.key_cache.of(KEY)
    for source, of_lease in ((registry, registry), (TokenSource(), None)):
        assert cached.try_lock()
        keep_granted(lock, _turn_at(cached), lock._mine(), source.new_token(LISTENS), clock() + 11, registry)
        assert cached.lease.registry is of_lease
        cached.release(clock(), 1.0)
        assert (cached.lease is not None) is (of_lease is registry)


@pytest.mark.parametrize(("age_s", "is_taken"), [(0.5, True), (2.0, False)])
def test_key_that_would_not_outlive_the_whole_timeout_is_confirmed_first(age_s: float, is_taken: bool) -> None:
    kept: Any = Kept()
    cached = kept.keep(lease_of(clock() - age_s), clock() + 1)
    lock = BareLock(kept, KEY, timeout=10, linger=1)
    steps = acquire_lock(lock, new_call(lock, lock._mine(), None, None))
    if is_taken:
        assert _ended(steps, None) is True
        assert lock._mine().expiry[1] == pytest.approx(clock() + 10)
        return
    step: Any = next(steps)
    confirm = step.args[0]
    assert (type(confirm), confirm.ttl_ms) == (Reacquire, 11_000)
    confirm.result, confirm.sent_at = True, clock() - 0.1
    assert _ended(steps, None) is True
    assert cached.lease.expires_at == confirm.sent_at + 11
