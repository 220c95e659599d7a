"""Table of contents of the compiled pipe of threads: one connection, many callers.

Who may touch what is written beside each field. "mutex" is Pipe.mutex; "reader" is the one thread for which
Pipe.reading was set (under the mutex) and which alone drives the socket until it hands that right on; "owner" is the
thread that called. The rules are the same with and without the GIL: nothing here relies on it, and reading, completing
plain replies and handing over are done without it. So under the mutex nothing of Python's is touched: its holder never
waits for the GIL.

A reader may be a listener: it waits for a message, not for a reply, and so perhaps for ever. Then who queues a request
must send it himself, or nobody would. So the right to send is not the right to read:

- A "sender" is a thread for which Pipe.sending was set: it sends until nothing is queued, and is not the reader. While
  there is one, leaving, left and sent are its own, and the reader only receives.
- Pipe.dozing tells who queues a request to become a sender. It implies, under the mutex, that somebody reads, nobody
  sends, nothing is queued or leaving, and no caller's request is under way. Posts may be: who releases a lock must not
  wait for the reply to what another has posted to wait for it. The reader sets it by what it sees in one section before
  it blocks, or hands reading on to a listener, and the sender as its last act, since the reply may have come, and the
  reader have blocked, before that. Who queues a request clears it, and so does the reader at each turn and before it
  hands on, so it is never left standing.

So every byte that is queued has somebody who sends it: a sender, who ends in the section in which it sees the queue
empty; else the reader, before it blocks again. What keeps the reader blocked meanwhile is a request under way, whose
reply wakes it, or, after a sender found no room, SIGNAL_CHECK_MS. Only with no reader do bytes wait for the next one.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_type_lock

from redislock_fast._core_resp cimport Buffer, Plain
from redislock_fast._core_spin cimport Spinner


cdef enum SlotState:
    WAITING = 0    # its reply has not come
    DONE = 1       # its reply is there
    LOST = 2       # the connection broke after its first byte may have left
    UNSENT = 3     # the connection broke before
    LEAD = 4       # still waiting, and its owner is to become the reader
    ABANDONED = 5  # nobody waits: the reply will be dropped, and the slot freed by who unlinks it


cdef enum Place:         # what became of a request
    REFUSED = 0          # the pipe is dead, or there is no memory
    FOLLOWING = 1        # somebody else reads
    SENDING = 2          # and the caller is a sender now, who is to send before anything else
    READING = 3          # the caller reads
    ALONE = 4            # and nothing else is under way
    BUSY = 5             # somebody else waits for the mailbox


cdef enum Outcome:       # what _drive and _turn return besides a number of received bytes
    OUTCOME_EOF = 0
    OUTCOME_TIMEOUT = -1
    OUTCOME_SIGNAL = -2
    OUTCOME_ERROR = -3     # errno is in Pipe.error
    OUTCOME_COMPLETE = -4  # the slot is neither WAITING nor its owner the reader any more


cdef struct Slot:
    Slot* next                 # mutex; the link of the FIFO, then of the slots to be woken
    Slot* before               # mutex; the links of the listeners
    Slot* after
    Py_ssize_t messages        # mutex; of a mailbox: how many it has. The reader reads its own without it, as a hint
    PyObject* reply            # reader until state is DONE, then the owner; NULL unless plain is NOT_PLAIN
    PyObject* replies          # likewise: the list of what has come of many replies; NULL where one is wanted
    PyObject* on_reply         # fixed once queued; who is given what a post is answered; NULL for nobody
    Py_ssize_t wanted          # reader, once queued: how many replies are still to come, the last one not counted
    unsigned long long begins  # mutex; the offset of its first byte in all that was ever queued
    SlotState state            # mutex; the reader reads its own slot's without, since it alone changes that
    Plain plain                # as reply
    # Made under the mutex when the slot is queued; the owner's from then on, NULL while it reads. Who takes the state
    # away from WAITING (the owner itself aside) releases it once, after the mutex; the owner lets go of the slot only
    # when that has come.
    PyThread_type_lock wake


cdef struct Wait:        # one caller's way through the pipe, on its own stack
    Slot* slot
    double timeout_s     # below 0: for ever
    double deadline      # CLOCK_MONOTONIC; 0: not looked at the clock yet
    Spinner* spinner     # the pipe's, of this kind of wait
    bint lead            # it is the reader
    bint sends           # and has bytes to send: else it looks at neither leaving nor left, which may be a sender's
    bint woken           # it has taken what wake was released for
    Py_ssize_t count     # how many replies it waits for, if nobody else does for any; else 1


cdef class Pipe:
    cdef cython.pymutex mutex
    cdef object owner              # fixed; the redis-py connection, which closes the descriptor
    cdef object parser             # reader; hiredis.Reader
    cdef public object on_push     # set before the pipe is shared
    cdef int fd                    # fixed
    cdef bytearray inbox           # reader; what recv fills and the parser copies
    cdef char* landing             # fixed; the inbox's bytes (it is never resized)
    cdef Py_ssize_t landed         # reader; how many bytes of the inbox the last recv filled
    cdef Py_ssize_t consumed       # reader; and how many of them were plain replies
    cdef bint between              # reader; the parser holds no part of a reply
    cdef Slot* filling             # reader; the oldest, while more of its many replies are to come; else NULL
    cdef Slot* head                # mutex; the oldest request without a reply
    cdef Slot* tail                # mutex
    cdef Slot* listeners           # mutex; mailboxes that are waited for, the oldest wait first
    cdef Slot* last_listener       # mutex
    cdef Slot* ready               # mutex; slots whose owners are to be woken, oldest first
    cdef Slot* ready_tail          # mutex
    cdef bint reading              # mutex; somebody is the reader
    cdef bint sending              # mutex; somebody is a sender
    cdef bint dozing               # mutex; see above
    cdef bint dead                 # mutex; read without it as a hint
    cdef Buffer queued             # mutex; requests that nobody has begun to send
    cdef Buffer leaving            # sender, else reader; requests that are being sent
    cdef Py_ssize_t left           # likewise; how much of leaving is sent
    cdef unsigned long long accepted  # mutex; bytes ever queued
    cdef unsigned long long sent   # likewise; bytes ever sent
    cdef int spin_us               # fixed; the longest spin before blocking; 0 is off
    cdef Spinner calling           # reader; of who waits for a reply, his own or to what he has posted
    cdef Spinner listening         # reader; of who waits for a message that another is to send
    cdef int error                 # reader; errno of the last failed turn
    # CLOCK_MONOTONIC of the last byte received, or of the first request after none was under way. A hint: read by
    # anybody, set by the reader or by who queues that request.
    cdef double heard

    cdef int _post(self, tuple args, object requests, object on_reply) except -1
    cdef Slot* _queue(
        self, tuple args, object requests, SlotState state, object on_reply, Place* place
    ) except NULL
    cdef Place _append(self, const char* data, Py_ssize_t size, Slot* slot) noexcept nogil
    cdef Place _listen(self, Slot* slot) noexcept nogil
    cdef object _wait(self, Slot* slot, Place place, double timeout_s)
    cdef int _attend(self, Wait* wait) except -1
    cdef int _begin(self, Wait* wait) except -1
    cdef Py_ssize_t _drive(self, Wait* wait) noexcept nogil
    cdef Py_ssize_t _sleep(self, Wait* wait) noexcept nogil
    cdef bint _leave(self, Wait* wait) noexcept nogil
    cdef bint _take_queue(self, Wait* wait) noexcept nogil
    cdef void _send_early(self) noexcept nogil
    cdef bint _load(self) noexcept nogil
    cdef void _send_queue(self) noexcept nogil
    cdef Py_ssize_t _send(self) noexcept nogil
    cdef Py_ssize_t _receive(self) noexcept nogil
    cdef Py_ssize_t _spin(self, Wait* wait) noexcept nogil
    cdef Py_ssize_t _turn(self, Wait* wait) noexcept nogil
    cdef int _look_for_eof(self) except -1
    cdef void _deliver_plain(self, Py_ssize_t received) noexcept nogil
    cdef int _deliver_rest(self) except -1
    cdef int _complete(self, object reply) except -1
    cdef Slot* _oldest(self) noexcept nogil
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
    cdef Slot slot                 # among the listeners while somebody waits, who is then its owner

    cdef int _wait(self, Place place, double timeout_s, bint soon) except -1


cdef Wait new_wait(Slot* slot, Place place, double timeout_s, Spinner* spinner) noexcept nogil
cdef bint make_wake(Slot* slot) noexcept nogil
cdef void wake_all(Slot* slot) noexcept nogil
cdef void free_slot(Slot* slot) noexcept nogil
cdef void drop_slot(Slot* slot) noexcept
cdef object take_reply(Slot* slot)
