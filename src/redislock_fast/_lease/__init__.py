"""Leases: the locks that are held, their owners and options, and until when they are held. No I/O.

May import the protocol and all packages below it. Start at `owner.py` (the token and lease of a caller), then
`lease.py` (the lease of a lock that is held on options).
"""
