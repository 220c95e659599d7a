"""The transport of threads: blocking calls on pipes that all threads of a process share.

Start at `server.py` (one server), `cluster.py` (many nodes) and `driver.py`, which drives the procedures.
"""
