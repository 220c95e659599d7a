"""The same names as in `redislock_fast`, for tasks: `Lock`, `Locker`, `Batch`, `Redlock`, `holders`, `once`.

May import what `redislock_fast` may. Start at `lock.py`.
"""

from typing import TYPE_CHECKING, Any

from redislock_fast.asyncio.lock import Lock
from redislock_fast.asyncio.locker import Batch, Locker

if TYPE_CHECKING:
    from redislock_fast.asyncio.inspection import holders
    from redislock_fast.asyncio.redlock import Redlock
    from redislock_fast.asyncio.single import once

__all__ = ["Batch", "Lock", "Locker", "Redlock", "holders", "once"]


def __getattr__(name: str) -> Any:
    """Import the names that few users need when they are used."""
    if name == "Redlock":
        from redislock_fast.asyncio.redlock import Redlock  # noqa: PLC0415  # as above

        return Redlock
    if name == "holders":
        from redislock_fast.asyncio.inspection import holders  # noqa: PLC0415  # as above

        return holders
    if name == "once":
        from redislock_fast.asyncio.single import once  # noqa: PLC0415  # as above

        return once
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, also those that have not been imported yet."""
    return __all__
