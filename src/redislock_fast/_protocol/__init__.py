"""Requests to the server and the meaning of their replies. No I/O, no clock, no randomness.

May import the pipe's types (`_pipe.base`) and helpers. Start at `operation.py` (the rules) and `commands.py` (acquire,
release, extend, reacquire), then `queue.py` with `lua/wait.lua` and `lua/hand_over.lua` (waiting), `capabilities.py`
(what a server understands).
"""
