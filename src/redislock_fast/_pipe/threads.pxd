"""Declarations of the compiled pipe of threads: one connection, many callers.

Beside each field stands who may touch it. "mutex" is Pipe.mutex. "reader" is the one thread for which Pipe.reading was
set (under the mutex); it alone drives the socket until it hands that right on. "owner" is the thread that called. The
rules are the same with and without the GIL: nothing relies on it, and reading, completing plain replies and handing on
are done without it. Under the mutex no Python object is touched, so its holder never waits for the GIL.

The right to send is separate from the right to read. A reader that blocks cannot send what callers queue meanwhile, and
its reply may be a round trip away, or never come where it waits for a message. So callers send for themselves then:

- Pipe.callers_send says that the reader blocks or is about to, and that callers send for themselves. It implies, under
  the mutex, that a thread reads, and that nothing is queued or leaving except what a sender is sending. The reader sets
  it in the section in which it finds nothing to send before it blocks, or hands reading on to a listener; it clears it
  at each turn and before it hands on.
- A "sender" is a thread for which Pipe.sending was set: a caller that queues a request while callers send and there is
  no sender. It sends until nothing is queued, and is not the reader. While there is a sender, leaving, left and sent
  are its own, and the reader only receives. A sender that finds no room clears callers_send: the reader sends the rest.
- Where the server is near (Pipe.far is not set) and a caller's request is under way, its reply is about to come:
  callers leave sending to the reader, so their requests leave together.

So every queued byte has a thread that sends it: a sender, which ends in the section in which it sees the queue empty;
else the reader, after its next reply, or before it blocks for one that may be far away, and within SIGNAL_CHECK_MS in
any case. Only while no thread reads do bytes wait for the next reader.

A forked child has one thread, and may have copied the mutex in its locked state. It never takes the mutex: it checks
Pipe.forked first.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_type_lock

from redislock_fast._pipe.resp cimport Buffer, Plain
from redislock_fast._pipe.spin cimport Spinner


cdef enum SlotState:
    WAITING = 0    # its reply has not come
    DONE = 1       # its reply is there
    LOST = 2       # the connection broke after its first byte may have left
    UNSENT = 3     # the connection broke before
    LEAD = 4       # still waiting, and its owner is to become the reader
    ABANDONED = 5  # no caller waits: the reply will be dropped, and the thread that unlinks the slot frees it


cdef enum Place:         # where a queued request stands
    REFUSED = 0          # the pipe is dead, or there is no memory
    FOLLOWING = 1        # another thread reads
    SENDING = 2          # as FOLLOWING, and the caller is a sender now, which must send first
    READING = 3          # the caller reads
    ALONE = 4            # as READING, and nothing else is under way
    BUSY = 5             # another thread waits for the mailbox


cdef enum Outcome:       # returned by _drive and _turn, besides a number of received bytes
    OUTCOME_EOF = 0
    OUTCOME_TIMEOUT = -1
    OUTCOME_SIGNAL = -2
    OUTCOME_ERROR = -3     # errno is in Pipe.error
    OUTCOME_COMPLETE = -4  # the slot is not WAITING any more, nor its owner the reader


cdef struct Slot:
    Slot* next                 # mutex; the link of the FIFO, then of the slots to be woken
    Slot* before               # mutex; the links of the listeners
    Slot* after
    Py_ssize_t messages        # mutex; of a mailbox: their number. The reader reads its own without it, as a hint
    PyObject* reply            # reader until state is DONE, then the owner; NULL unless plain is NOT_PLAIN
    PyObject* replies          # as reply: the list of many replies, as far as they have come; NULL where one is wanted
    PyObject* on_reply         # fixed once queued; called with the reply to a post; NULL for none
    Py_ssize_t wanted          # reader, once queued; the number of replies still to come, without the last one
    PyObject* subscription     # fixed once queued; the request, where that may be a (S)SUBSCRIBE; else NULL
    unsigned long long begins  # mutex; the offset of its first byte in all that was ever queued
    unsigned long long ends    # mutex; the offset behind its last byte
    SlotState state            # mutex; the reader reads its own slot's without, since it alone changes it
    Plain plain                # as reply
    # Made under the mutex when the slot is queued; from then on the owner's, and NULL while the owner reads. The thread
    # that takes the state away from WAITING (unless it is the owner) releases it once, after the mutex; the owner keeps
    # the slot until then.
    PyThread_type_lock wake


cdef struct Wait:        # one caller's way through the pipe, on its own stack
    Slot* slot
    double timeout_s     # below 0: for ever
    double deadline      # CLOCK_MONOTONIC, where there is a timeout
    double signals_at    # CLOCK_MONOTONIC; when the reader next lets signal handlers run; 0 before its first delivery
    Spinner* spinner     # the pipe's, of this kind of wait
    bint lead            # it is the reader
    bint sends           # and has bytes to send: else leaving and left may be a sender's
    bint woken           # it has taken the release of wake
    Py_ssize_t count     # how many replies it waits for, where no other caller waits; else 1


cdef class Pipe:
    cdef cython.pymutex mutex
    cdef object owner              # fixed; the redis-py connection, which closes the descriptor
    cdef object parser             # reader; hiredis.Reader
    cdef public object on_push     # set before the pipe is shared
    cdef int fd                    # fixed
    cdef bytearray inbox           # reader; what recv fills and the parser copies
    cdef char* landing             # fixed; the inbox's bytes (it is never resized)
    cdef Py_ssize_t landed         # reader; how many bytes of the inbox the last recv filled
    cdef Py_ssize_t consumed       # reader; how many of them are delivered
    cdef unsigned long long answerable  # reader; bytes that had left when it last received
    cdef bint between              # reader; the parser holds no part of a reply
    cdef Slot* filling             # reader; the oldest, while more of its many replies are to come; else NULL
    cdef Slot* head                # mutex; the oldest request without a reply
    cdef Slot* tail                # mutex
    cdef Slot* listeners           # mutex; slots of waiting mailboxes, oldest first
    cdef Slot* last_listener       # mutex
    cdef Slot* ready               # mutex; slots whose owners are to be woken, oldest first
    cdef Slot* ready_tail          # mutex
    cdef bint reading              # mutex; a thread is the reader
    cdef bint sending              # mutex; a thread is a sender
    cdef bint callers_send         # mutex; see above
    cdef bint dead                 # mutex; read without it as a hint
    cdef bint forked               # set once, in a forked child
    cdef object __weakref__
    cdef Buffer queued             # mutex, its size read without as a hint; requests that no thread has begun to send
    cdef Buffer leaving            # sender, else reader; requests that are being sent
    cdef Py_ssize_t left           # sender, else reader; how much of leaving is sent
    cdef unsigned long long accepted  # mutex; bytes ever queued
    cdef unsigned long long offered   # mutex; bytes that were ever made leaving
    cdef bint far                  # mutex; no reply has ever come within FAR_US
    cdef unsigned long long timed  # mutex; while far: the end of the request whose reply is timed; 0 for none
    cdef double timed_at           # mutex; CLOCK_MONOTONIC of when that was queued
    cdef unsigned long long sent   # sender, else reader; bytes ever sent
    cdef int spin_us               # fixed; the longest spin before blocking; 0 is off
    cdef Spinner calling           # reader; for waits for a reply, to a call or a post
    cdef Spinner listening         # reader; for waits for a message that another client is to send
    cdef int error                 # reader; errno of the last failed turn
    # CLOCK_MONOTONIC of the last byte received, or of the first request after none was under way. A hint: any thread
    # reads it; the reader sets it, or the thread that queues that request.
    cdef double heard

    cdef int _post(self, tuple args, object requests, object on_reply) except -1
    cdef Slot* _queue(
        self, tuple args, object requests, SlotState state, object on_reply, Place* place
    ) except NULL
    cdef Place _append(self, const char* data, Py_ssize_t size, Slot* slot) noexcept nogil
    cdef Place _listen(self, Slot* slot) noexcept nogil
    cdef object _wait(self, Slot* slot, Place place, double timeout_s)
    cdef int _attend(self, Wait* wait) except -1
    cdef int _check_forked(self) except -1
    cdef int _begin(self, Wait* wait) except -1
    cdef Py_ssize_t _drive(self, Wait* wait) noexcept nogil
    cdef Py_ssize_t _sleep(self, Wait* wait) noexcept nogil
    cdef bint _leave(self, Wait* wait) noexcept nogil
    cdef Py_ssize_t _look_at_clock(self, Wait* wait) noexcept nogil
    cdef bint _take_queue(self, Wait* wait) noexcept nogil
    cdef bint _may_block(self, Wait* wait) noexcept nogil
    cdef bint _is_idle(self) noexcept nogil
    cdef void _send_early(self, bint sends) noexcept nogil
    cdef bint _load(self) noexcept nogil
    cdef void _send_queue(self) noexcept nogil
    cdef Py_ssize_t _send(self) noexcept nogil
    cdef Py_ssize_t _receive(self) noexcept nogil
    cdef Py_ssize_t _spin(self, Wait* wait) noexcept nogil
    cdef Py_ssize_t _turn(self, Wait* wait) noexcept nogil
    cdef int _look_for_eof(self) except -1
    cdef void _deliver_plain(self, Py_ssize_t received) noexcept nogil
    cdef int _deliver_rest(self) except -1
    cdef int _deliver_unparsed(self) except -1
    cdef int _deliver_parsed(self) except -1
    cdef int _take_push(self, object push) except -1
    cdef int _complete(self, object reply) except -1
    cdef inline bint _has_left(self, Slot* slot) noexcept nogil
    cdef object _parse(self)
    cdef Slot* _oldest(self) except? NULL
    cdef Slot* _unlink_oldest(self) noexcept nogil
    cdef Slot* _unlink(self) noexcept nogil
    cdef void _make_ready(self, Slot* slot) noexcept nogil
    cdef Slot* _take_ready(self) noexcept nogil
    cdef void _wake_ready(self) noexcept nogil
    cdef void _hand_over(self) noexcept nogil
    cdef Slot* _caller(self) noexcept nogil
    cdef Slot* _listener(self) noexcept nogil
    cdef void _tell(self, Slot* slot) noexcept nogil
    cdef bint _take_message(self, Slot* slot) noexcept nogil
    cdef void _stop_listening(self, Slot* slot) noexcept nogil
    cdef void _stop_sending(self) noexcept nogil
    cdef int _fail(self, str cause) except -1
    cdef void _fail_slots(self) noexcept


cdef class Mailbox:
    cdef Pipe pipe                 # fixed
    cdef object messages           # a deque, added to before slot.messages is, taken from after
    cdef Slot slot                 # among the listeners while a thread waits, which is then its owner

    cdef int _wait(self, Place place, double timeout_s, bint soon) except -1


cdef Wait new_wait(Slot* slot, Place place, double timeout_s, Spinner* spinner) noexcept nogil
cdef bint make_wake(Slot* slot) noexcept nogil
cdef void wake_all(Slot* slot) noexcept nogil
cdef void free_slot(Slot* slot) noexcept nogil
cdef void drop_slot(Slot* slot) noexcept
cdef object take_reply(Slot* slot)
