"""Types of RESP for the compiled pipes."""

from redislock_fast._pipe.base import Args

def encode(args: Args) -> bytes: ...
