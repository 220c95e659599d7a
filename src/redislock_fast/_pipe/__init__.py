"""Bytes: RESP, sockets, and the matching of replies to callers. It knows no command and no lock.

May import helpers (`_util`) alone. `threads.pyx` is the compiled pipe of threads and `threads_py.py` its twin in
Python; `loop.pyx` and `loop_py.py` are those of event loops; `impl.py` chooses. Start at `base.py`, the contract of a
pipe, and `threads.pxd`, the rules of thread safety.
"""
