"""The procedures of a lock, written once as generators of steps for threads and tasks. No I/O.

May import the queue, leases, the protocol, the pipe's types and helpers; not the transports, which drive the
generators. The steps are in `_protocol/steps.py`. Start at `lock.py` and `acquire.py` (a lock; its lease is in
`lease.py`), then `release.py`, `prolong.py` and `loss.py`. How a contended lock is waited for is in `_queue/`.
"""
