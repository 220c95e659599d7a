"""What elections need beside their lock: how a leader's body is run and ended, for threads and for tasks.

Uses the core: `_procedures` and all below it, and the threads that `_transport` starts. The core names nothing of it;
the public classes, in `asyncio/election.py`, are the first to read.
"""
