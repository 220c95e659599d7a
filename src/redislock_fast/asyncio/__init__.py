"""The same names as in `redislock_fast`, for tasks: `Lock`, `Locker`, `Batch`, `Redlock`, `holders`.

May import what `redislock_fast` may. Start at `lock.py`.
"""

from typing import TYPE_CHECKING, Any

from redislock_fast.asyncio.lock import Lock
from redislock_fast.asyncio.locker import Batch, Locker

if TYPE_CHECKING:
    from redislock_fast.asyncio.inspection import holders
    from redislock_fast.asyncio.redlock import Redlock

__all__ = ["Batch", "Lock", "Locker", "Redlock", "holders"]


def __getattr__(name: str) -> Any:
    """Import the names that few users need when they are used."""
    if name == "Redlock":
        from redislock_fast.asyncio.redlock import Redlock  # noqa: PLC0415  # as above

        return Redlock
    if name == "holders":
        from redislock_fast.asyncio.inspection import holders  # noqa: PLC0415  # as above

        return holders
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
