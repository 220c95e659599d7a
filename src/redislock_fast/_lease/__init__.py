"""Leases: the locks that are held, their owners and options, and until when they are held. No I/O.

May import the protocol and all packages below it. Start at `ownership.py` (the owner), then `lease.py` (what is known
of a lease that has options).
"""
