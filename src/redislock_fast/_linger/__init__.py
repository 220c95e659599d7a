"""The option `linger`, for threads and for tasks: released keys stay in this process. All of it.

It also tells holders that their locks are wanted, for the option `on_wanted`. Uses the core: `_transport` and all below
it. The core names nothing of it: `lock.py` and `asyncio/lock.py` hand a `Linger` to their locks (`Lingers` in
`_procedures/lock.py`), which makes a part of each server transport (`KeptKeys` in `_transport/base.py`), and what an
owner has of a key is a `KeptKey` (`_lease/kept.py`).

Read `key_cache.py` first (the keys of one server, who may use them, and how they go back), then `procedures.py`
(acquire and release) and `threads.py` or `loop.py` (the usual acquire, without steps, and the watching).
"""
