"""The clock of the compiled core, without the GIL. It measures waits, as an event loop's does, never leases."""

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec


cdef inline double monotonic() noexcept nogil:
    """CLOCK_MONOTONIC, in seconds."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <double>now.tv_sec + 1e-9 * <double>now.tv_nsec
