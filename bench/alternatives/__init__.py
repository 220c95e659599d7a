"""`python -m bench alternatives`: one acquire and release on Redis, beside the same on what one might use instead.

Layers, imports pointing down only: command -> systems -> valkey, postgresql, etcd, disk -> places, locks.

Rules: every system runs on this machine, on loopback TCP, with its data in one file system; what it promises for a
reply stands in its row; a system that is not installed is left out with the name of its Debian package.
"""
