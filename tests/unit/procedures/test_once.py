"""The end of a run of `once` whose renewal is under way. No server."""

from __future__ import annotations

import redis

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.owner import PendingOwner
from redislock_fast._procedures.release import ask_release
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._util.times import clock
from redislock_fast.single import once


def test_run_ends_behind_its_renewal() -> None:
    run = once(redis.Redis(), "nightly", timeout=60, at_least=600)
    owner = run._mine()
    pending = PendingOwner(owner)
    pending.token = b"token"
    pending.expiry = (b"token", clock() + 60)
    assert run._options is not None
    lease = run._begin(run._options, owner, pending)
    assert isinstance(lease, Lease)
    lease.renewing = True
    steps = ask_release(run, owner, b"token", None)
    assert [next(steps).method for _ in range(3)] == ["sleep"] * 3
    lease.renewing = False
    step = next(steps)
    assert step.method == "execute"
    assert isinstance(step.args[0], Reacquire)
    assert 60_000 < (step.args[0].ttl_ms or 0) <= 600_000
