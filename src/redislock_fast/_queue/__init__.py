"""Waiting at the server for a lock or a permit, in the order of arrival; and what is told of it. No I/O.

May import leases, the protocol, the pipe's types and helpers; not the procedures of locks, which wait by it. Start at
`waiting.py` (how a waiter gets what it waits for), then `waiters.py` (the waiters of one connection, and of one key);
`reporting.py` says who holds and who waits. The requests are in `_protocol/queue.py`.
"""
