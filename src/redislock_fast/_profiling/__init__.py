"""What a profile records of locks, within bounds, and how it is shown.

May import `_lease` and what is below it. Read `recorder.py` first.
"""
