"""Types of RESP for the compiled pipes."""

from redislock_fast._wire import Args

def encode(args: Args) -> bytes: ...
