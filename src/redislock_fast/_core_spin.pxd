"""Spinning for a reply instead of sleeping until it comes, in both compiled pipes: whether that pays is measured.

With a near server and a CPU to spare, the reply comes before a blocking read would have gone to sleep: 1.3 times the
pairs/s on loopback. With the CPUs busy, spinning takes what the server needs: 0.7 times. A far server makes no
difference. So both are tried, and what is measured decides; with a near server and no difference, for spinning, since
single samples of blocking profit from the spins around them.

Must not know: sockets, pipes.
"""

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__i386__)
    #define redislock_relax() __builtin_ia32_pause()
    #elif defined(__aarch64__)
    #define redislock_relax() __asm__ __volatile__("yield")
    #else
    #define redislock_relax() ((void)0)
    #endif
    """
    void redislock_relax() noexcept nogil

cdef enum:
    SAMPLE_EVERY = 1024  # waits, of which the first SAMPLES are done the other way, so that both are known.
    SAMPLES = 16         # In a row: a CPU that has just slept is slow to answer, however it is then waited for.


cdef struct Habit:       # how one kind of waiting is done; belongs to whoever waits
    int calls            # modulo SAMPLE_EVERY
    bint spins           # whether spinning was the faster way
    double spin_s        # how long a reply takes, spinning for it
    double block_s       # and not


cdef inline void relax() noexcept nogil:
    """Between two looks at a socket."""
    cdef int _pause
    for _pause in range(8):
        redislock_relax()


cdef inline Habit new_habit() noexcept nogil:
    return Habit(calls=0, spins=True, spin_s=1e-3, block_s=1e-3)


cdef inline bint choose(Habit* habit, int spin_us) noexcept nogil:
    """Whether to spin for the next reply, for at most so many microseconds."""
    habit.calls = (habit.calls + 1) % SAMPLE_EVERY
    if habit.calls < SAMPLES:
        return not habit.spins
    habit.spins = habit.spin_s < 1e-6 * spin_us and habit.spin_s < 1.1 * habit.block_s
    return habit.spins


cdef inline void learn(Habit* habit, bint spun, double took_s) noexcept nogil:
    """Note how long a reply took, smoothed over some eight calls; one outlier counts little."""
    if spun:
        habit.spin_s += (min(took_s, 4 * habit.spin_s) - habit.spin_s) / 8
    else:
        habit.block_s += (min(took_s, 4 * habit.block_s) - habit.block_s) / 8
