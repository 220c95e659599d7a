"""Servers and clusters: connections, retries, cleanup, and the drivers of the procedures.

`threads/` and `loop/` have the same file names, once for threads and once for event loops; the code that both share is
here. What a server transport has beside its connection are its parts: `encoding` and `cleanup`. May import the
procedures and all packages below them, not the public face. Start at `base.ServerTransport`, then `threads/server.py`.
"""
