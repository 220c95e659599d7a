"""Many locks acquired, extended and released together, for threads and for tasks. All of it except its public classes.

Uses the core: `_transport` and all below it. The core names nothing of it; `locker.py` and `asyncio/locker.py` do.
Start with `acquisition.py` (how a batch gets its locks) and `held.py` (what can be done with them then); `watching.py`
has the leases of a batch that is renewed or watched.
"""

from redislock_fast._batch.acquisition import acquire_locks
from redislock_fast._batch.held import BatchBase
from redislock_fast._batch.locker import LockerBase
from redislock_fast._batch.plan import BatchLease, Name, Plan
from redislock_fast._batch.watching import BatchWatch, batch_options

__all__ = ["BatchBase", "BatchLease", "BatchWatch", "LockerBase", "Name", "Plan", "acquire_locks", "batch_options"]
