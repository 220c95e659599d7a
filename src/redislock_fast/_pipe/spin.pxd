"""Spinning for a reply instead of sleeping until it comes, in both compiled pipes.

A CPU that falls asleep between a request and its reply takes longer to wake up than a near server takes to reply. So a
reader receives again and again for a while, without blocking. In between it yields the CPU to any thread that is ready:
one that a reply has just woken, the server, another spinner.

A spin fails where a busy process keeps the CPU for milliseconds after a yield, and where the reply of a far server or
the message of another client comes too late. After failures, the `Spinner` blocks in a number of waits, which grows
while spins keep failing.
"""

from libc.errno cimport EAGAIN, errno

from redislock_fast._pipe.clock cimport monotonic

cdef extern from "<sys/socket.h>" nogil:
    const int MSG_DONTWAIT
    ssize_t c_recv "recv"(int fd, void* buffer, size_t size, int flags)

cdef extern from "<sched.h>" nogil:
    int sched_yield() noexcept

# A failed spin costs milliseconds (behind a busy process), a successful one saves microseconds. So the more failures
# follow one another, the more waits block in between.
cdef enum:
    LATE_US = 1000   # a yield that takes longer gave the CPU to a busy process
    FUTILE = 8       # spins without a reply, less those with one, that count as a failure
    FEWEST = 64      # waits that block after the first failure; each further failure doubles it
    MOST = 16384     # the most waits that block after a failure
    PROBATION = 8    # after this many times `penalty` spins without a failure, `penalty` is halved


cdef struct Spinner:     # of one kind of wait; belongs to the thread that receives
    int blocks           # how many of the next waits block
    int penalty          # how many waits will block after the next failure
    int spins            # since penalty was last changed
    int futile           # spins without a reply, less those with one, but not below 0


cdef inline Spinner new_spinner() noexcept nogil:
    return Spinner(blocks=0, penalty=FEWEST, spins=0, futile=0)


cdef inline bint may_spin(Spinner* spinner) noexcept nogil:
    """Whether to spin in the next wait."""
    if spinner.blocks == 0:
        return True
    spinner.blocks -= 1
    return False


cdef inline Py_ssize_t spin(
    Spinner* spinner, int fd, char* into, Py_ssize_t size, int flags, double give_up
) noexcept nogil:
    """Receive without blocking until CLOCK_MONOTONIC reaches `give_up`; -1 with errno when nothing came.

    `flags` are more flags for recv.
    """
    cdef bint late = False
    cdef double now
    cdef Py_ssize_t got
    while True:
        got = c_recv(fd, into, size, MSG_DONTWAIT | flags)
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
