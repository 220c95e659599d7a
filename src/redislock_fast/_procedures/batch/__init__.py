"""Many locks acquired, extended and released together, step by step, for threads and for asyncio.

Start with `acquisition.py` (how a batch gets its locks) and `held.py` (what can be done with them then).
"""

from redislock_fast._procedures.batch.acquisition import acquiring
from redislock_fast._procedures.batch.held import BatchBase
from redislock_fast._procedures.batch.plan import BatchLease, Name, Plan

__all__ = ["BatchBase", "BatchLease", "Name", "Plan", "acquiring"]
