"""The procedures of a lock, written once as generators of steps for threads and tasks. No I/O.

May import leases, the protocol, the pipe's types and helpers; not the transports, which drive the generators. Start at
`steps.py`, then `lock.py` and `acquisition.py` (a lock; its lease is in `lease.py`, its attributes and hooks are in
`settings.py`), `waiting.py` and `waiters.py` (waiting for a contended lock), `loss.py`.
"""
