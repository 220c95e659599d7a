"""Requests to the server and what their replies mean. No I/O, no clock, no randomness.

May import the pipe's types (`_pipe.base`) and helpers. Start at `commands.py` (acquire, release, extend, reacquire),
then `queue.py` with `lua/wait.lua` and `lua/hand_over.lua` (waiting), `capabilities.py` (what a server understands).
"""
