"""`redislock_fast.testing` and the pytest plugin, for those who test code that holds locks."""
