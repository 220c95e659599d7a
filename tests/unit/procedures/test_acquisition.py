"""How an acquire ends when its limit is over.

Rules: no server, and no time passes: the deadline of an acquire is put into the past.
"""

from __future__ import annotations

import pytest

from redislock_fast._lease.owner import SharedOwner
from redislock_fast._procedures.acquire import acquire_until, new_call
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._util.times import Limit, clock
from tests.support.bare_locks import KEY, BareLock, Kept


def test_acquire_that_is_refused_after_its_deadline_asks_no_more() -> None:
    lock = BareLock(Kept(), KEY, timeout=10)
    call = new_call(lock, SharedOwner(), None, None)
    call.limit = limit = Limit(60.0)
    steps = acquire_until(lock, call)
    attempt = next(steps)
    assert attempt.method == "execute"
    assert not attempt.args[0].feed(None, Capabilities())
    assert attempt.args[0].feed(b"another's", Capabilities())
    limit.deadline = clock() - 0.001
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value is False
