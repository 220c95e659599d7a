"""How a lock with `linger` is acquired and released, step by step.

Rules: no server, no driver, and no time passes that the test does not let pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._procedures.steps import Enter
from redislock_fast._procedures.waiters import WaiterRegistry
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._transport.lingering import Lingering
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import TokenSource
from tests.support.bare_locks import KEY, TOKEN, BareLock, Kept, lease_of


class _Transport(Kept):
    """Has a connection whose registry has subscribed to nothing yet, and is that connection."""

    registry_of = Lingering.registry_of
    broken = False

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
    steps = BareLock(transport, KEY, timeout=10, linger=1)._is_heard(Limit(None))
    assert type(next(steps)) is Enter
    registry.note_subscription(registry.channel_for(KEY), allowed=True)
    assert _ended(steps, registry.take(KEY, b"", transport, transport, transport)) is True
    assert registry.on_wanted == transport.key_cache.hear_wanted


def test_connection_that_may_not_subscribe_keeps_no_key() -> None:
    transport: Any = _Transport()
    registry = transport.registry
    steps = BareLock(transport, KEY, timeout=10, linger=1)._is_heard(Limit(None))
    assert type(next(steps)) is Enter
    registry.note_subscription(registry.channel_for(KEY), allowed=False)
    assert _ended(steps, registry.take(KEY, b"", transport, transport, transport)) is False


def test_flag_of_a_key_is_not_taken_for_known_when_another_process_wants_it() -> None:
    transport: Any = Kept()
    now = clock()
    lock = BareLock(transport, KEY, timeout=10, linger=1)
    cached = transport.keep(lease_of(now - 2), now)
    assert cached.try_lock()
    cached.wanted_at = now  # said of an earlier token
    steps = lock._confirming_kept(cached, lock._mine(), Limit(None))
    step: Any = next(steps)
    assert step.operation.request(Capabilities([[b"delifeq"], None, [b"lmpop"]]), now)[2] == TOKEN
