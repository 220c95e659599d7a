"""What is held, whose it is, on which options, and until when. No I/O.

May import the protocol and all packages below it. Start at `ownership.py` (whose), then `tenure.py` (what is known of a
lease that has options).
"""
