"""The records of a profile of locks, within bounds, and how they are shown.

May import `_lease` and what is below it. Read `recorder.py` first.
"""
