"""Parity with redis-py's Lock: one suite on both classes, hooks, and redis-py's bugs."""
