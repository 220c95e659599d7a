"""Table of contents of the compiled core: one connection, many callers.

Who may touch what is written beside each field. "mutex" is Pipe.mutex; "reader" is the one thread for which
Pipe.reading was set (under the mutex) and which alone drives the socket until it hands that right on. The rules are
the same with and without the GIL: nothing here relies on it.
"""

cimport cython
from cpython.pythread cimport PyThread_type_lock


cdef enum SlotState:
    WAITING = 0    # its reply has not come
    DONE = 1       # reply is set
    LOST = 2       # the connection broke after its first byte may have left
    UNSENT = 3     # the connection broke before
    LEAD = 4       # still waiting, and its owner is to become the reader
    ABANDONED = 5  # nobody waits: the reply will be dropped


cdef enum Turn:          # what _turn returns besides a number of received bytes
    TURN_EOF = 0
    TURN_TIMEOUT = -1
    TURN_SIGNAL = -2
    TURN_ERROR = -3      # errno is in Pipe.error


cdef class Slot:
    cdef Slot next                 # mutex; the FIFO's link
    cdef object reply              # reader until state is DONE, then the slot's owner
    cdef list replies              # likewise: what has come of many replies; None where one is wanted
    cdef Py_ssize_t wanted         # reader, once queued: how many replies are still to come, the last one not counted
    cdef SlotState state           # mutex
    cdef PyThread_type_lock wake   # made by the owner before the slot is queued; released to wake the owner
    cdef unsigned long long begins  # mutex; the offset of its first byte in all that was ever queued


cdef struct Buffer:
    char* data
    Py_ssize_t used
    Py_ssize_t room


cdef class Pipe:
    cdef cython.pymutex mutex
    cdef object owner              # fixed; the redis-py connection, which closes the descriptor
    cdef object parser             # reader; hiredis.Reader
    cdef int fd                    # fixed
    cdef bytearray inbox           # reader; what recv fills and the parser copies
    cdef char* landing             # fixed; the inbox's bytes (it is never resized)
    cdef bint between              # reader; the parser holds no part of a reply
    cdef Slot head                 # mutex; the oldest request without a reply
    cdef Slot tail                 # mutex
    cdef bint reading              # mutex; somebody is the reader
    cdef bint dead                 # mutex; read without it as a hint
    cdef Buffer queued             # mutex; requests that nobody has begun to send
    cdef Buffer leaving            # reader; requests that are being sent
    cdef Py_ssize_t left           # reader; how much of leaving is sent
    cdef unsigned long long accepted  # mutex; bytes ever queued
    cdef unsigned long long sent   # reader; bytes ever sent. Read by fail(), which the reader alone runs
    cdef int spin_us               # fixed; the longest spin before blocking; 0 is off
    cdef double spin_s             # reader; how long a lone caller's reply takes, spinning for it
    cdef double block_s            # reader; and blocking at once
    cdef int calls                 # reader; lone calls, modulo SAMPLE_EVERY
    cdef bint preferred            # reader; whether spinning was the faster way
    cdef bint spinning             # reader; which way the current lone call waits
    cdef int error                 # reader; errno of the last failed turn
    cdef double heard              # reader; CLOCK_MONOTONIC of the last byte received; read by anybody as a hint

    cdef bint _queue(self, tuple args, object requests, Py_ssize_t size, Slot slot) except -1
    cdef object _lead(self, Slot slot, double timeout_s)
    cdef object _follow(self, Slot slot, double timeout_s)
    cdef bint _choose_to_spin(self) noexcept
    cdef void _learn(self, double took_s) noexcept
    cdef int _take_queue(self) noexcept
    cdef Py_ssize_t _send(self) noexcept nogil
    cdef Py_ssize_t _receive(self) noexcept nogil
    cdef Py_ssize_t _spin(self) noexcept nogil
    cdef Py_ssize_t _turn(self, double* deadline, double timeout_s, bint spin) noexcept nogil
    cdef int _look_for_eof(self) except -1
    cdef int _deliver(self, Py_ssize_t received) except -1
    cdef int _complete(self, object reply) except -1
    cdef int _give_up(self, Slot slot) except -1
    cdef int _hand_over(self) except -1
    cdef int _fail(self, str cause) except -1


cdef object plain_reply(const char* data, Py_ssize_t size, Py_ssize_t* used)
cdef int reserve(Buffer* buffer, Py_ssize_t more) noexcept
cdef Py_ssize_t request_size(tuple args) except -1
cdef Py_ssize_t requests_size(object requests, Py_ssize_t* count) except -1
cdef char* write_request(char* at, tuple args) except NULL
cdef char* write_requests(char* at, object requests) except NULL
cdef Py_ssize_t words_size(tuple args) except -1
cdef char* write_words(char* at, tuple args) except NULL
