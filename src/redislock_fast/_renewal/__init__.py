"""Renewal in the background, and the reports of the losses that it finds.

Uses the core: `_transport` and all below it. The core names nothing of it; the public classes make the renewers.
Read `schedule.py` first (which leases are due, and their renewal on one server), then `threads.py` or `loop.py`.
"""
