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

# The other way is tried so many times in a row that both are known, since a CPU that has just slept is slow to answer,
# however it is then waited for. It is tried again soon after a change of mind, which some moments' noise may have been
# the reason for, and half as often each time without.
cdef enum:
    SAMPLES = 16
    SOONEST = 64   # waits from one trial to the next
    LATEST = 1024


cdef struct Habit:       # how one kind of waiting is done; belongs to whoever waits
    int calls            # since the last trial began
    int period           # with so many, the next begins
    bint spins           # whether spinning was the faster way
    double spin_s        # how long a reply takes, spinning for it; 0 as long as that is not known
    double block_s       # and not


cdef inline void relax() noexcept nogil:
    """Between two looks at a socket."""
    cdef int _pause
    for _pause in range(8):
        redislock_relax()


cdef inline Habit new_habit() noexcept nogil:
    return Habit(calls=0, period=SOONEST, spins=True, spin_s=0, block_s=0)


cdef inline bint choose(Habit* habit, int spin_us) noexcept nogil:
    """Whether to spin for the next reply, for at most so many microseconds."""
    cdef bint spins
    habit.calls += 1
    if habit.calls <= SAMPLES:
        return not habit.spins
    spins = habit.spin_s < 1e-6 * spin_us and habit.spin_s < 1.1 * habit.block_s
    if spins != habit.spins:
        habit.spins = spins
        habit.calls = SAMPLES
        habit.period = SOONEST
    elif habit.calls >= habit.period:
        habit.calls = 0
        habit.period = min(2 * habit.period, LATEST)
    return spins


cdef inline void learn(Habit* habit, bint spun, double took_s) noexcept nogil:
    """Note how long a reply took."""
    if spun:
        habit.spin_s = smoothed(habit.spin_s, took_s)
    else:
        habit.block_s = smoothed(habit.block_s, took_s)


cdef inline double smoothed(double before_s, double took_s) noexcept nogil:
    """Over some eight calls; one outlier counts little."""
    return before_s + (min(took_s, 4 * before_s) - before_s) / 8 if before_s else took_s
