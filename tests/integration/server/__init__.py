"""`redislock_fast.server`."""
