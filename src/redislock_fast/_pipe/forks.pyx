# cython: language_level=3, freethreading_compatible=True
"""The compiled `_util.fork.generation`: the number of forks between this process and the one that imported the package.

The system counts them, by `pthread_atfork`, also where C code forks without Python's knowledge. Its handler runs in the
child in the midst of `fork`, where other threads of the parent may have had any lock. So it adds 1, and no more.

Thread safety: `forks` changes only there, in a process with one thread. Any thread reads and sets `known`.
"""

cimport cython

from redislock_fast._util.fork import forget_parent
from redislock_fast._util.times import clock

cdef extern from "<pthread.h>":
    int pthread_atfork(void (*prepare)(), void (*in_parent)(), void (*in_child)() noexcept nogil) noexcept

cdef extern from *:
    """
    #define redislock_load(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
    #define redislock_store(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
    #if PY_VERSION_HEX >= 0x030E0000 && defined(Py_GIL_DISABLED)
    #define redislock_share(function) PyUnstable_Object_EnableDeferredRefcount(function)
    #else
    #define redislock_share(function) 0
    #endif
    """
    long load "redislock_load"(long* place) noexcept nogil
    void store "redislock_store"(long* place, long value) noexcept nogil
    int share "redislock_share"(object function) noexcept

cdef long known = 0  # the forks after which all was forgotten


cdef void count() noexcept nogil:
    global forks
    forks += 1


@cython.binding(False)  # a bound one takes longer
def generation():
    """See `_util.fork.generation`."""
    cdef long seen = load(&known)
    if seen != forks:
        seen = forks
        forget_parent(seen)
        store(&known, seen)
    return seen


if pthread_atfork(NULL, NULL, count) != 0:
    raise MemoryError

# All threads call these all the time. Without the GIL, two would contend for their reference counts, and a call of
# `generation` take 109 ns instead of 28, one of `clock` 115 instead of 59.
share(generation)
share(clock)
