"""Many locks acquired, extended and released together, step by step, for threads and for asyncio.

Start with `acquisition.py` (how a batch gets its locks) and `held.py` (what can be done with them then); `watching.py`
has the leases of a batch that is renewed or watched.
"""

from redislock_fast._procedures.batch.acquisition import acquiring
from redislock_fast._procedures.batch.held import BatchBase
from redislock_fast._procedures.batch.plan import BatchLease, Name, Plan
from redislock_fast._procedures.batch.watching import BatchWatch, batch_options

__all__ = ["BatchBase", "BatchLease", "BatchWatch", "Name", "Plan", "acquiring", "batch_options"]
