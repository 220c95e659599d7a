"""The shared structures of the compiled pipe of threads, and which thread may use them when.

Thread safety: a comment at each field, here and in `threads.pyx`, says which thread may use it. "mutex" is Pipe.mutex.
"reader" is the one thread for which Pipe.reading was set (under the mutex); it alone drives the socket until it hands
that right on. "owner" is the thread that called. Nothing relies on the GIL: reading, completing plain replies and
handing on are done without it. Under the mutex no Python object is used, so its holder never waits for the GIL.

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

Over TLS, callers never send: OpenSSL wants one thread at a time in the TLS object (Pipe.decrypt and Pipe.encrypt), and
that is the reader, always. So a sender never exists there. A caller that queues a request while `callers_send` is set
clears it, and rings for the reader: it writes a byte to Pipe.ringing, for which the reader looks when it blocks. The
reader takes the queue when it has heard that, or before it blocks.

The TLS object is used with the GIL, and Python runs signal handlers inside of it. So in the code without the GIL, a
handler may have run wherever the reader has received or sent over TLS, in the main thread alone:

- What it raises is kept in Pipe.struck, until its thread has ended its call's part as a reader and raises it. If it
  struck inside of the TLS object, nobody knows what that has read or sent, and it is never used again: the next use
  fails as on a broken connection. If it struck before, the thread raises it first of all, still the reader.
- It may have forked. So whoever has received or sent over TLS looks for that before it takes the mutex again.
- As in any other wait, the reader keeps the right to read meanwhile, and all callers wait for the handler.

Where a thousand callers are woken at once, they all wait for the GIL, and each of them wakes up every few milliseconds
to ask for it (`sys.getswitchinterval`). So only a few are woken at a time, in the order of their requests:

- A slot that is complete is put into Pipe.ready. The thread that takes it out to wake its owner sets Slot.enters, which
  Pipe.entering counts. The owner clears it as soon as it has the GIL (`_enter`).
- The reader wakes owners until MOST_ENTERING are entering. It needs no GIL for that, so this is the usual way. An owner
  that clears `enters` wakes others until FEWEST_ENTERING are entering: it holds the GIL, so it wakes few.
- While slots are ready, more callers than can run are to be woken. A reader that sent each of their requests at once
  would take the CPU from them, as would the server, and so find few requests the next time, too. So it gives them
  GATHER_US before it sends (`_gather`). It holds nothing meanwhile: not the mutex, not the GIL. No caller waits for
  what a reader does then, except for the bytes, which are late by GATHER_US at most.

So every ready slot has a thread that wakes its owner. The reader that fills Pipe.ready calls `_take_ready` before it
goes on, also after an error. That leaves slots only where MOST_ENTERING owners are entering. `entering` falls in
`_enter` alone, which takes a ready slot in the same section where it would fall to 0. So when a section ends with ready
slots, an owner is entering, or a reader is about to call `_take_ready`. An owner runs no Python code between its waking
and its `_enter`: no signal handler, no error and no fork comes between them. An owner that is not woken in time (by its
time limit, by a signal, or since other threads end with the interpreter before they have the GIL: the main thread looks
every SIGNAL_CHECK_MS) takes its slot out of Pipe.ready itself (`_has_ended`).

A forked child has one thread, and may have copied the mutex in its locked state. It never takes the mutex: it checks
Pipe._is_forked first.
"""

from cpython.object cimport PyObject
from cpython.pythread cimport PyThread_type_lock

from redislock_fast._pipe.resp cimport Plain
from redislock_fast._pipe.spin cimport Spinner


cdef enum SlotState:
    WAITING = 0    # its reply has not come
    DONE = 1       # its reply is there
    LOST = 2       # the connection broke after its first byte may have left
    UNSENT = 3     # the connection broke before
    LEAD = 4       # still waiting, and its owner is to become the reader
    ABANDONED = 5  # no caller waits: the reply will be dropped, and the thread that unlinks the slot frees it


cdef enum Place:         # the place of a queued request
    REFUSED = 0          # the pipe is dead, or there is no memory
    FOLLOWING = 1        # another thread reads
    SENDING = 2          # as FOLLOWING, and the caller is a sender now, which must send first
    READING = 3          # the caller reads
    ALONE = 4            # as READING, and nothing else is under way
    BUSY = 5             # another thread waits for the mailbox


cdef enum Outcome:       # returned by _drive and _turn, besides a number of received bytes
    OUTCOME_CLOSED = 0     # the server or the network has closed the connection
    OUTCOME_TIMEOUT = -1
    OUTCOME_SIGNAL = -2
    OUTCOME_COMPLETE = -3  # the slot is not WAITING any more, nor its owner the reader


cdef enum TlsState:      # whether the TLS object may be used
    SOUND = 0
    STRUCK = 1           # not before its thread has raised what a signal handler raised
    UNKNOWN = 2          # never again: a handler raised inside of it, so it is not known what was read or written
    FAILED = 3           # never again: TLS, the server or the network ended it


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
    unsigned long long ends    # mutex; the offset after its last byte
    SlotState state            # mutex; the reader reads its own slot's without, since it alone changes it
    Plain plain                # as reply
    bint enters                # mutex, until wake is released; then the owner. It is woken, and has not yet had the GIL
    # Made under the mutex when the slot is queued; from then on the owner's, and NULL while the owner reads. The thread
    # that takes the slot out of Pipe.ready, or takes the state away from WAITING without putting it there, releases it
    # once, after the mutex (unless it is the owner); the owner keeps the slot until then.
    PyThread_type_lock wake


cdef struct Wait:        # one call of one thread, on its own stack
    Slot* slot
    double timeout_s     # below 0: forever
    double deadline      # CLOCK_MONOTONIC, where there is a timeout
    double signals_at    # CLOCK_MONOTONIC; when the reader next lets signal handlers run; 0 before its first delivery
    Spinner* spinner     # the pipe's, of this kind of wait
    bint lead            # it is the reader
    bint sends           # and has bytes to send: else leaving and left may be a sender's
    bint woken           # it has taken the release of wake
    Py_ssize_t count     # how many replies it waits for, where no other caller waits; else 1
