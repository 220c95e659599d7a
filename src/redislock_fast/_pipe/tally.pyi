"""Types of the compiled tally: those of its twin."""

from redislock_fast._pipe.tally_py import PythonTally as Tally

__all__ = ["Tally"]
