"""Servers and clusters: connections, retries, cleanup, and drivers of the procedures.

`threads/` and `loop/` have the same file names, once for threads and once for event loops; what both share stands
here. May import the procedures and all packages below them, not the public face. Start at `base.Channel`, then
`threads/server.py`.
"""
