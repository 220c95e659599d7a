"""The tests of redislock_fast: a package, so that they share `tests.helpers` and `tests.proxy`."""
