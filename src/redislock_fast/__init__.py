"""Distributed locks on Redis and Valkey: redis-py's Lock, on a compiled core.

    from redislock_fast import Lock              # was: from redis.lock import Lock
    client.lock("name", timeout=10, lock_class=Lock)

or, without a change to the callers, `redislock_fast.patch()`. For asyncio, `redislock_fast.asyncio` has the same names.
`Semaphore` lets several callers hold one name, `Election` has one process lead. `Locker` acquires many locks in one
round, `Redlock` one lock on several independent servers.

`implementation` is "compiled" where the compiled core is at work, "python" where its pure-Python twin is.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._patch import patch, unpatch
from redislock_fast._pipe.impl import implementation
from redislock_fast._util.errors import LockLostError, LossReason, NotReplicatedError
from redislock_fast._version import __version__
from redislock_fast.lock import Lock

if TYPE_CHECKING:
    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.handle import Handle
    from redislock_fast._lease.metrics import FailureMetrics, Metrics
    from redislock_fast._queue.reporting import log_waits
    from redislock_fast.election import Election, Leader, Term
    from redislock_fast.inspection import LockReport, holders
    from redislock_fast.locker import Batch, Locker
    from redislock_fast.profiling import profile
    from redislock_fast.redlock import Redlock
    from redislock_fast.semaphore import Permit, Semaphore, SemaphoreReport, limited
    from redislock_fast.single import Skipped, once

_WHEN_ASKED_FOR = {
    "AdaptiveTTL": "_lease.adaptive",
    "Batch": "locker",
    "Election": "election",
    "FailureMetrics": "_lease.metrics",
    "Handle": "_lease.handle",
    "Leader": "election",
    "LockReport": "inspection",
    "Locker": "locker",
    "Metrics": "_lease.metrics",
    "Permit": "semaphore",
    "Redlock": "redlock",
    "Semaphore": "semaphore",
    "SemaphoreReport": "semaphore",
    "Skipped": "single",
    "Term": "election",
    "holders": "inspection",
    "limited": "semaphore",
    "log_waits": "_queue.reporting",
    "once": "single",
    "profile": "profiling",
}

__all__ = [
    "AdaptiveTTL",
    "Batch",
    "Election",
    "FailureMetrics",
    "Handle",
    "Leader",
    "Lock",
    "LockError",
    "LockLostError",
    "LockNotOwnedError",
    "LockReport",
    "Locker",
    "LossReason",
    "Metrics",
    "NotReplicatedError",
    "Permit",
    "Redlock",
    "Semaphore",
    "SemaphoreReport",
    "Skipped",
    "Term",
    "__version__",
    "holders",
    "implementation",
    "limited",
    "log_waits",
    "once",
    "patch",
    "profile",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """Import the names that few users need when they are used: together they are a third of the import time."""
    if name in _WHEN_ASKED_FOR:
        return getattr(importlib.import_module(f"redislock_fast.{_WHEN_ASKED_FOR[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that have not been imported yet."""
    return __all__


if (_profiled := os.environ.get("REDISLOCK_PROFILE", "")) not in {"", "0"}:
    importlib.import_module("redislock_fast.profiling").profile_process(_profiled)
