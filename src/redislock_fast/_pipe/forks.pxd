"""How often this process and its parents were forked, as C code counts it: see `forks.pyx`."""

cdef long forks
