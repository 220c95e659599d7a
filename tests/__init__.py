"""The tests of redislock_fast, in packages whose docstrings say what stands where."""
