"""The same names as in `redislock_fast`, for tasks.

May import what `redislock_fast` may. Start at `lock.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from redislock_fast.asyncio.lock import Lock
from redislock_fast.asyncio.locker import Batch, Locker

if TYPE_CHECKING:
    from redislock_fast.asyncio.election import Election, Leader, Term
    from redislock_fast.asyncio.inspection import holders
    from redislock_fast.asyncio.redlock import Redlock
    from redislock_fast.asyncio.semaphore import Permit, Semaphore, SemaphoreReport, limited
    from redislock_fast.asyncio.single import once

_WHEN_ASKED_FOR = {
    "Election": "election",
    "Leader": "election",
    "Permit": "semaphore",
    "Redlock": "redlock",
    "Semaphore": "semaphore",
    "SemaphoreReport": "semaphore",
    "Term": "election",
    "holders": "inspection",
    "limited": "semaphore",
    "once": "single",
}

__all__ = [
    "Batch",
    "Election",
    "Leader",
    "Lock",
    "Locker",
    "Permit",
    "Redlock",
    "Semaphore",
    "SemaphoreReport",
    "Term",
    "holders",
    "limited",
    "once",
]


def __getattr__(name: str) -> Any:
    """Import the names that few users need when they are used."""
    if name in _WHEN_ASKED_FOR:
        return getattr(importlib.import_module(f"redislock_fast.asyncio.{_WHEN_ASKED_FOR[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that have not been imported yet."""
    return __all__
