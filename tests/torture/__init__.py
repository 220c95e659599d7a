"""Locks of many processes on real servers, while faults are made all the time; the history is checked afterwards.

`README.md` beside this file says how to run it. Read `history.py` first: what is noted; then `safety.py` and
`progress.py`: what must hold; then `checker.py`: what a fault may break.
"""
