"""Spinning for a reply instead of sleeping until it comes, in both compiled pipes, and when not to.

A CPU that falls asleep between a request and its reply takes 30 to 60 us to wake up, where a near server needs 20 for
the reply. So who reads looks again and again for a while. Between two looks he gives the CPU to whoever is ready for
it: a thread that a reply has just woken, the server, another who spins. Without giving way, it was no faster than
blocking where several threads call, and kept several processes from their replies (docs/performance.md).

A busy program that is given the CPU keeps it for milliseconds. And a reply from afar, or a message that nobody may send
for long, comes after the spin. Where that is so, spinning is left off, and tried again ever more seldom.
"""

from libc.errno cimport EAGAIN, errno

from redislock_fast._pipe.clock cimport monotonic

cdef extern from "<sys/socket.h>" nogil:
    const int MSG_DONTWAIT
    ssize_t c_recv "recv"(int fd, void* buffer, size_t size, int flags)

cdef extern from "<sched.h>" nogil:
    int sched_yield() noexcept

# What a spin that went wrong costs, some 3 ms behind a busy program, must be little to what is gained between two of
# them, some 10 us a wait: so the more of them follow one another, the more waits are blocked for in between.
cdef enum:
    LATE_US = 1000   # a busy program keeps the CPU for longer; threads that were woken need some 50 us each
    FUTILE = 8       # so many spins without a reply, less those with one, are as bad
    FEWEST = 64      # so many waits are blocked for then, the next time twice as many
    MOST = 16384     # up to that
    PROBATION = 8    # half as many again after so many times as many spins without harm


cdef struct Spinner:     # one kind of wait; belongs to whoever receives
    int blocks           # so many of the next waits are not to be spun for
    int penalty          # so many it will be
    int spins            # since it was last changed
    int futile           # spins without a reply, less those with one, but not below 0


cdef inline Spinner new_spinner() noexcept nogil:
    return Spinner(blocks=0, penalty=FEWEST, spins=0, futile=0)


cdef inline bint may_spin(Spinner* spinner) noexcept nogil:
    """Whether to spin for what is waited for next."""
    if spinner.blocks == 0:
        return True
    spinner.blocks -= 1
    return False


cdef inline Py_ssize_t spin(Spinner* spinner, int fd, char* into, Py_ssize_t size, double give_up) noexcept nogil:
    """Receive without blocking until CLOCK_MONOTONIC reaches so much; -1 with errno when nothing came."""
    cdef bint late = False
    cdef double now
    cdef Py_ssize_t got
    while True:
        got = c_recv(fd, into, size, MSG_DONTWAIT)
        now = monotonic()
        if got >= 0 or errno != EAGAIN or late or now >= give_up:
            break
        sched_yield()
        late = monotonic() - now > 1e-6 * LATE_US
    judge(spinner, late, got >= 0)
    return got


cdef inline void judge(Spinner* spinner, bint late, bint received) noexcept nogil:
    """Note how a spin has ended."""
    spinner.spins += 1
    if not received:
        spinner.futile += 1
    elif spinner.futile > 0:
        spinner.futile -= 1
    if late or spinner.futile == FUTILE:
        spinner.blocks = spinner.penalty
        spinner.penalty = min(2 * spinner.penalty, MOST)
        spinner.spins = spinner.futile = 0
    elif spinner.spins == PROBATION * spinner.penalty:
        spinner.penalty = max(spinner.penalty // 2, FEWEST)
        spinner.spins = 0
