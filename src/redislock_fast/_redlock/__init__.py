"""One lock over several independent servers, granted by a majority of them. All of it except its public classes.

Uses the core: `_transport` and all below it. The core names nothing of it; `redlock.py` and `asyncio/redlock.py` do.
Read `rounds.py` first: a majority round is one operation at all servers. Then `procedures.py` (acquire, release,
extend), `quorum.py` (how the servers are asked; `threads.py` and `loop.py` wait for them) and `lease.py`, which has the
renewal.
"""
