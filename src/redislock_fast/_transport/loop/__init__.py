"""The transport of event loops: coroutines on pipes that all tasks of a loop share.

The files have the names of `threads/`. Start at `server.py`.
"""
