"""Types of the compiled tally: those of its twin."""

from redislock_fast._tally import PythonTally as Tally

__all__ = ["Tally"]
