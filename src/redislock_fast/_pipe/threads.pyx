# cython: language_level=3, freethreading_compatible=True
"""The compiled pipe of threads: requests sent from one buffer, replies matched to callers first in, first out.

One `Pipe` drives one TCP or unix socket, plain or with TLS, for many threads, without a thread of its own:

1. A caller queues its request and a slot. If no thread reads, it becomes the reader; else it sleeps on its slot.
2. The reader sends what is queued, reads what comes and completes the slots in order, for all callers. Requests that
   are queued while it spins or delivers leave in one write. While it blocks, callers send for themselves: no request
   waits for the round trip of another.
3. When its own slot is complete, the reader hands reading to the oldest caller that still waits.
4. A caller that stops waiting abandons its slot. The slot still consumes its reply, so no caller gets another's.
5. A thread that waits for a `Mailbox` is a listener: it becomes the reader as a caller does, but after all callers.

The reader works without the GIL, from its waking to its handing on: the callers that it wakes want the GIL, and would
compete for it with the reader while the server waits. It takes the GIL only for what hiredis must parse, pushes
included, and when a wait ends otherwise than by its reply. Errors and signals: `base.py`. Thread safety: `threads.pxd`.
The readable twin: `threads_py.py`.

Over TLS, all this is the same, except that Python's TLS object receives and sends the bytes (`_read_tls`,
`_write_tls`). It needs the GIL, and the socket tells without it when there is something to read. OpenSSL never keeps
bytes that the socket does not show: it reads record by record, and the inbox takes a whole one.
"""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc
from cpython.object cimport PyObject
from cpython.pythread cimport (
    PY_LOCK_ACQUIRED,
    PY_LOCK_INTR,
    NOWAIT_LOCK,
    PyLockStatus,
    PyThread_type_lock,
    WAIT_LOCK,
)
from cpython.ref cimport Py_INCREF, Py_XDECREF
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, EIO, errno
from libc.string cimport memcpy, strerror
from posix.fcntl cimport F_GETFL, F_SETFL, O_NONBLOCK, fcntl
from posix.time cimport timeval
from posix.unistd cimport close as c_close, read as c_read, write as c_write

import os
import threading
from collections import deque
from ssl import SSLWantReadError, SSLWantWriteError
from sys import is_finalizing

import hiredis

from redislock_fast._pipe.clock cimport monotonic
from redislock_fast._pipe.forks cimport forks
from redislock_fast._pipe.resp cimport (
    NOT_PLAIN,
    Buffer,
    Plain,
    append_run,
    is_answer,
    may_subscribe,
    message_push,
    plain_object,
    plain_reply,
    request_size,
    requests_size,
    reserve,
    write_request,
    write_requests,
)
from redislock_fast._pipe.spin cimport Spinner, may_spin, new_spinner, spin

from redislock_fast._util.fork import forget_in_child, on_fork
from redislock_fast._pipe.base import (
    NOT_ASKED,
    NOT_ENOUGH,
    READER_HAS_ENDED,
    Forked,
    UNSENT_LIMIT_BYTES,
    UNSENT_SILENCE_S,
    ConnectionBroken,
    NoReply,
    is_answer_to,
    new_reader,
)

cdef extern from "pythread.h":
    ctypedef long long PY_TIMEOUT_T
    PyLockStatus PyThread_acquire_lock_timed(
        PyThread_type_lock lock, PY_TIMEOUT_T microseconds, int intr_flag
    ) noexcept nogil
    PyThread_type_lock PyThread_allocate_lock() noexcept nogil
    int PyThread_acquire_lock(PyThread_type_lock lock, int mode) noexcept nogil
    void PyThread_release_lock(PyThread_type_lock lock) noexcept nogil
    void PyThread_free_lock(PyThread_type_lock lock) noexcept nogil
    unsigned long PyThread_get_thread_ident() noexcept nogil

cdef extern from "<sys/socket.h>" nogil:
    const int MSG_DONTWAIT
    const int MSG_NOSIGNAL
    const int MSG_PEEK
    const int SHUT_RDWR
    const int SOL_SOCKET
    const int SO_RCVTIMEO
    Py_ssize_t c_send "send"(int fd, const void* data, size_t size, int flags) noexcept
    Py_ssize_t c_recv "recv"(int fd, void* data, size_t size, int flags) noexcept
    int c_setsockopt "setsockopt"(int fd, int level, int name, const void* value, unsigned int size) noexcept
    int c_shutdown "shutdown"(int fd, int how) noexcept

cdef extern from "<poll.h>" nogil:
    cdef struct pollfd:
        int fd
        short events
        short revents
    const short POLLIN
    const short POLLOUT
    int c_poll "poll"(pollfd* fds, unsigned long count, int timeout_ms) noexcept

cdef extern from "<sched.h>" nogil:
    int sched_yield() noexcept

cdef extern from *:
    """
    #ifndef MSG_NOSIGNAL   /* macOS: Python ignores SIGPIPE for the whole process */
    #define MSG_NOSIGNAL 0
    #endif

    #ifdef Py_GIL_DISABLED /* woken callers run at once */
    #define MOST_ENTERING PY_SSIZE_T_MAX
    #else
    #define MOST_ENTERING 16
    #endif

    #include <errno.h>

    static inline Py_ssize_t as_system_call(Py_ssize_t got)
    {
        if (got >= 0)
            return got;
        errno = (int)-got;
        return -1;
    }
    """
    const Py_ssize_t MOST_ENTERING  # callers that a reader has woken and that wait for the GIL, see threads.pxd
    Py_ssize_t as_system_call(Py_ssize_t got) noexcept nogil  # -1 and errno for -errno

cdef enum:
    INBOX_BYTES = 65536
    SCRATCH_BYTES = 512       # requests up to this size are encoded on the stack
    SIGNAL_CHECK_MS = 50      # a signal that came just before a blocking call does not end it
    EACH_US = 2               # the server's time for each of many requests
    MOST_SPUN_FOR = 128       # the largest batch to spin for: with more, spinning would take too much CPU
    FEWEST_ENTERING = 2       # with fewer, a caller that gets the GIL wakes the next ones itself
    FAR_US = 150              # a server that has never replied within this is far away
    STALE_AFTER_MS = 1        # after so long idle, look for a closed connection before sending
    GATHER_US = 200           # let a crowd's callers run for so long at most before sending
    RECORD_BYTES = 16384      # the most that a record of TLS carries; the inbox is larger

cdef Py_ssize_t UNSENT_LIMIT = UNSENT_LIMIT_BYTES
cdef double UNSENT_SILENCE = UNSENT_SILENCE_S

cdef object PushNotification = hiredis.PushNotification

cdef unsigned long main_thread  # the thread that runs signal handlers, whichever thread a signal interrupts


def _note_main_thread():
    global main_thread
    main_thread = threading.main_thread().ident


_note_main_thread()
on_fork(_note_main_thread)


# ---- the pipe ----

@cython.final
cdef class Pipe:
    """One connection that many threads call at once; see `base.Pipe` for the contract of each method.

    Args:
        owner: what owns the descriptor: its `disconnect()` closes it.
        fd: a connected stream socket.
        spin_us: spin for at most so many microseconds before a blocking read; 0 for never.
        tls: the same socket as Python's `ssl.SSLSocket`; None for a plain one.
    """

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
    cdef Py_ssize_t entering       # mutex; how many slots have `enters` set
    cdef bint reading              # mutex; a thread is the reader
    cdef bint sending              # mutex; a thread is a sender
    cdef bint callers_send         # mutex; see threads.pxd
    cdef bint dead                 # mutex; read without it as a hint
    cdef readonly bint closed_by_peer  # set by the reader before dead
    cdef long process              # fixed; the count of forks in the process that made it; -1 once it has forgotten
    cdef object __weakref__
    cdef Buffer queued             # mutex, its size read without as a hint; requests that no thread has begun to send
    cdef Buffer leaving            # sender, else reader; requests that are being sent
    cdef Py_ssize_t left           # sender, else reader; how much of leaving is sent
    cdef unsigned long long accepted  # mutex; bytes ever queued
    cdef unsigned long long offered   # mutex; bytes ever moved into leaving
    cdef bint far                  # mutex; no reply has ever come within FAR_US
    cdef unsigned long long timed  # mutex; while far: the end of the request whose reply is timed; 0 for none
    cdef double timed_at           # mutex; CLOCK_MONOTONIC at which that was queued
    cdef unsigned long long sent   # sender, else reader; bytes ever sent
    cdef int spin_us               # fixed; the longest spin before blocking; 0 is off
    cdef Spinner calling           # reader; for waits for a reply, to a call or a post
    cdef Spinner listening         # reader; for waits for a message that another client is to send
    # CLOCK_MONOTONIC of the last byte received, or of the first request after none was under way. A hint: any thread
    # reads it; the reader sets it, or the thread that queues that request.
    cdef double heard
    # Of a connection with TLS. What reads and writes is Python's TLS object, which the reader alone uses.
    cdef object decrypt            # fixed; its `read`; None for a plain socket
    cdef object encrypt            # fixed; its `write`
    cdef int flags                 # fixed; more flags for recv: over TLS, it looks whether anything has come
    cdef Py_ssize_t most           # fixed; for how many bytes recv asks: over TLS, for one
    cdef short read_event          # reader; the event that lets the TLS object read on
    cdef short write_event         # reader; the event that lets it write on
    cdef TlsState tls_state        # reader
    cdef object struck             # the thread `struck_in`; what a signal handler raised in here, until it is raised
    cdef unsigned long struck_in   # as struck; 0 for none
    cdef int bell                  # fixed; a pipe's end that wakes the reader, see threads.pxd
    cdef int ringing               # fixed; its other end

    def __cinit__(self, object owner, int fd, int spin_us=0, object tls=None):
        self.bell = self.ringing = -1
        self.owner = owner
        self.fd = fd
        self.spin_us = spin_us
        self.parser = new_reader()
        self.inbox = bytearray(INBOX_BYTES)
        self.landing = PyByteArray_AS_STRING(self.inbox)
        self.heard = monotonic()
        self.calling = self.listening = new_spinner()
        self.between = self.far = True
        self.most = INBOX_BYTES
        if tls is None:
            self._set_up_plain()
        else:
            self._set_up_tls(tls)
        self.process = forks
        forget_in_child(self)

    cdef int _set_up_plain(self) except -1:
        cdef timeval check
        check.tv_sec = 0
        check.tv_usec = 1000 * SIGNAL_CHECK_MS
        if (
            fcntl(self.fd, F_SETFL, fcntl(self.fd, F_GETFL) & ~O_NONBLOCK) < 0
            or c_setsockopt(self.fd, SOL_SOCKET, SO_RCVTIMEO, &check, sizeof(check)) < 0
        ):
            raise OSError(errno, strerror(errno).decode())
        return 0

    cdef int _set_up_tls(self, object tls) except -1:
        tls.settimeout(0)
        # The socket's own methods are functions of Python, in which signal handlers run, and which hide where an error
        # comes from: see `_trouble`.
        self.decrypt = tls._sslobj.read
        self.encrypt = tls._sslobj.write
        self.flags = MSG_PEEK
        self.most = 1
        self.read_event = POLLIN
        self.write_event = POLLOUT
        self.bell, self.ringing = os.pipe()
        for end in (self.bell, self.ringing):
            os.set_blocking(end, False)
        return 0

    def forget(self):
        """In a forked child: refuse every call. The connection, and each call under way, is the parent's."""
        self.process = -1
        self.dead = True

    def __dealloc__(self):
        cdef Slot* slot = self.head
        cdef Slot* next_slot
        while slot != NULL:  # all are abandoned: a caller keeps the pipe alive
            next_slot = slot.next
            drop_slot(slot)
            slot = next_slot
        PyMem_RawFree(self.queued.data)
        PyMem_RawFree(self.leaving.data)
        if self.bell >= 0:
            c_close(self.bell)
            c_close(self.ringing)

    @property
    def broken(self):
        return self.dead or self._is_forked()

    @property
    def silence_s(self):
        return monotonic() - self.heard

    def call(self, tuple args not None, double timeout_s):
        cdef Place place
        cdef Slot* slot = self._queue(args, None, WAITING, None, &place)
        return self._wait(slot, place, timeout_s)

    def ask(self, tuple args not None, double timeout_s, set inside not None):
        cdef Place place
        cdef Slot* slot
        cdef object thread = PyThread_get_thread_ident()
        if thread in inside:
            return NOT_ASKED
        inside.add(thread)
        try:
            slot = self._queue(args, None, WAITING, None, &place)
            return self._wait(slot, place, timeout_s)
        finally:
            inside.discard(thread)

    def call_many(self, requests, double timeout_s):
        cdef Place place
        cdef Slot* slot = self._queue(None, requests, WAITING, None, &place)
        return self._wait(slot, place, timeout_s)

    def post(self, tuple args not None, on_reply=None):
        self._post(args, None, on_reply)

    def post_many(self, requests, on_replies not None):
        self._post(None, requests, on_replies)

    def close(self):
        cdef bint idle
        if self._is_forked():
            return
        with nogil, self.mutex:
            idle = not self.reading and not self.dead
            if idle:
                self.reading = True
            elif not self.dead:
                c_shutdown(self.fd, SHUT_RDWR)  # wakes the reader, which fails every slot
        if idle:
            self._fail(False)
            with nogil, self.mutex:
                self.reading = False

    def close_idle(self):
        cdef bint idle
        if self._is_forked():
            return False
        with nogil, self.mutex:
            idle = not self.reading and not self.dead and self.head == NULL
            if idle:
                self.reading = True
        if idle:
            self._fail(False)
            with nogil, self.mutex:
                self.reading = False
        return idle

    def mailbox(self):
        return Mailbox(self)

    cdef int _post(self, tuple args, object requests, object on_reply) except -1:
        cdef Place place
        self._queue(args, requests, ABANDONED, on_reply, &place)
        if place == SENDING:
            self._send_queue()
        elif place != FOLLOWING:
            self._hand_over()
            if self.decrypt is not None:
                self._raise_struck()
        return 0

    cdef Slot* _queue(
        self, tuple args, object requests, SlotState state, object on_reply, Place* place
    ) except NULL:
        """Queue one request (args), or many. The slot of a post belongs to the pipe at once."""
        cdef char scratch[SCRATCH_BYTES]
        cdef char* data = scratch
        cdef Py_ssize_t size
        cdef object replies
        cdef Slot* slot
        self._check_forked()
        if self.queued.used > UNSENT_LIMIT and monotonic() - self.heard > UNSENT_SILENCE:
            self.close()
            raise ConnectionBroken(False, "the server is silent, and too much waits to be sent")
        slot = <Slot*>PyMem_RawCalloc(1, sizeof(Slot))
        if slot == NULL:
            raise MemoryError
        slot.state = state
        if on_reply is not None:
            Py_INCREF(on_reply)
            slot.on_reply = <PyObject*>on_reply
        place[0] = REFUSED
        try:
            if args is None:
                replies = []
                Py_INCREF(replies)
                slot.replies = <PyObject*>replies
                size = requests_size(requests, &slot.wanted)
                slot.wanted -= 1
            else:
                size = request_size(args)
                if may_subscribe(args):
                    Py_INCREF(args)
                    slot.subscription = <PyObject*>args
            if size > SCRATCH_BYTES:
                data = <char*>PyMem_RawMalloc(size)
                if data == NULL:
                    raise MemoryError
            if args is None:
                write_requests(data, requests)
            else:
                write_request(data, args)
            place[0] = self._append(data, size, slot)
            if place[0] == REFUSED:
                if self.dead:
                    raise ConnectionBroken(False, "the connection is closed")
                raise MemoryError
        finally:
            if data != scratch:
                PyMem_RawFree(data)
            if place[0] == REFUSED:
                drop_slot(slot)
        return slot

    cdef Place _append(self, const char* data, Py_ssize_t size, Slot* slot) noexcept nogil:
        """Queue an encoded request."""
        cdef Place place
        cdef bint rings = False
        with self.mutex:
            if self.dead or reserve(&self.queued, size) < 0:
                return REFUSED
            if self.reading:
                place = FOLLOWING
                if slot.state == WAITING and not make_wake(slot):
                    return REFUSED
                if self.head == NULL:
                    self.heard = monotonic()
                if self.callers_send and not self.sending:
                    if self.decrypt is None:
                        self.sending = True
                        place = SENDING
                    else:
                        rings = True
                        self.callers_send = False
            else:
                self.reading = True
                place = ALONE if self.head == NULL else READING
                if place == ALONE and slot.state == ABANDONED:  # a caller that waits first needs the idle time
                    self.heard = monotonic()
            memcpy(self.queued.data + self.queued.used, data, size)
            self.queued.used += size
            slot.begins = self.accepted
            self.accepted += size
            slot.ends = self.accepted
            if self.far and self.timed == 0 and slot.replies == NULL:
                self.timed = slot.ends
                self.timed_at = monotonic()
            if self.tail == NULL:
                self.head = slot
            else:
                self.tail.next = slot
            self.tail = slot
        if rings:
            c_write(self.ringing, b"", 1)  # no room: it has rung often enough
        return place

    cdef Place _listen(self, Slot* slot) noexcept nogil:
        """Begin to wait for a mailbox. REFUSED: it has a message, or the pipe is dead, or there is no memory."""
        with self.mutex:
            if slot.before != NULL or self.listeners == slot:
                return BUSY
            if slot.messages or self.dead:
                return REFUSED
            if self.reading and not make_wake(slot):
                return REFUSED
            slot.state = WAITING
            slot.before = self.last_listener
            slot.after = NULL
            if self.last_listener == NULL:
                self.listeners = slot
            else:
                self.last_listener.after = slot
            self.last_listener = slot
            if self.reading:
                return FOLLOWING
            self.reading = True
        return READING

    cdef object _wait(self, Slot* slot, Place place, double timeout_s):
        """Wait for the reply."""
        cdef Wait wait = new_wait(slot, place, timeout_s, &self.calling)
        cdef bint complete = False
        try:
            if place == ALONE:
                self._begin(&wait)
            elif place == SENDING:
                self._send_queue()  # with the GIL: to release it first would take as long as the send
            self._attend(&wait)
            complete = True
            if slot.state != DONE:
                raise ConnectionBroken(slot.state == LOST, "the connection broke")
            return take_reply(slot)
        finally:
            if complete or not self._leave(&wait):
                drop_slot(slot)
            if self.decrypt is not None:
                self._raise_struck()

    cdef int _attend(self, Wait* wait) except -1:
        """Wait until the slot is complete, and drive the socket whenever this caller is the reader."""
        cdef Py_ssize_t outcome
        while True:
            with nogil:
                outcome = self._drive(wait)
            if wait.woken and wait.slot.enters:
                self._enter(wait.slot)
            if outcome == OUTCOME_COMPLETE:
                return 0
            if outcome > 0:
                self._deliver_rest()
                self._check_forked()
                if wait.slot.state != WAITING or wait.slot.messages:
                    self._drive(wait)  # with the GIL, which the callers that it has woken would take first
                    return 0
            elif outcome == OUTCOME_SIGNAL:
                self._raise_struck()
                PyErr_CheckSignals()
                self._check_forked()
                if not wait.lead and is_finalizing():
                    raise ConnectionBroken(True, READER_HAS_ENDED)
            elif outcome == OUTCOME_TIMEOUT:
                raise NoReply(f"nothing came within {wait.timeout_s:g} s")
            else:  # OUTCOME_CLOSED
                self._fail(True)

    cdef inline bint _is_forked(self) noexcept nogil:
        """Whether this is a forked child: all here is the parent's."""
        return self.process != forks

    cdef int _check_forked(self) except -1:
        """Raise `Forked` in a forked child. Called wherever a signal handler may have run: its call is the parent's."""
        if self._is_forked():
            raise Forked
        return 0

    cdef int _raise_struck(self) except -1:
        """Raise what a signal handler raised while this thread was in the TLS object; `Forked` in a child."""
        cdef object error
        self._check_forked()
        if self.struck_in != 0 and self.struck_in == PyThread_get_thread_ident():
            error = self.struck
            self.struck = None
            self.struck_in = 0
            if self.tls_state == STRUCK:  # then this thread is still the reader
                self.tls_state = SOUND
            raise error
        return 0

    cdef int _begin(self, Wait* wait) except -1:
        """Reader, with nothing under way but its own request, which is not sent yet: look for a closed connection."""
        cdef double now = monotonic()
        wait.count = wait.slot.wanted + 1
        if now - self.heard > 1e-3 * STALE_AFTER_MS:
            self._look_for_eof()
            self._raise_struck()
        self.heard = now
        return 0

    cdef Py_ssize_t _drive(self, Wait* wait) noexcept nogil:
        """Wait for the reply without the GIL, as a follower or as the reader.

        Returns OUTCOME_COMPLETE when the slot is complete and reading handed on; a number of bytes when some of them
        are for the parser; or the outcome that keeps the caller from waiting on.
        """
        cdef Py_ssize_t got
        if not wait.lead:
            got = self._sleep(wait)
            if not wait.lead:
                return got
        while wait.slot.state == WAITING:
            if not self._take_queue(wait):
                break
            got = self._look_at_clock(wait)
            if got != 0:
                return got
            got = self._turn(wait)
            if got <= 0:
                return got
            if self.decrypt is None:
                self._send_early(not wait.sends)
            self._deliver_plain(got)
            if wait.signals_at == 0:
                wait.signals_at = self.heard + 1e-3 * SIGNAL_CHECK_MS
            if self.consumed < got:
                return got
        wait.lead = False
        self._hand_over()
        return OUTCOME_COMPLETE

    cdef Py_ssize_t _sleep(self, Wait* wait) noexcept nogil:
        """Follower: sleep until the slot is complete, or this caller is to read."""
        cdef PY_TIMEOUT_T wait_us = -1
        cdef Outcome lapsed = OUTCOME_TIMEOUT
        cdef PyThread_type_lock wake = NULL
        cdef double left_s
        cdef PyLockStatus status
        if wait.timeout_s >= 0:
            left_s = wait.deadline - monotonic()
            wait_us = <PY_TIMEOUT_T>(left_s * 1e6) + 1 if left_s > 0 else 0
        if PyThread_get_thread_ident() == main_thread and not 0 <= wait_us <= 1000 * SIGNAL_CHECK_MS:
            wait_us = 1000 * SIGNAL_CHECK_MS
            lapsed = OUTCOME_SIGNAL
        status = PyThread_acquire_lock_timed(wait.slot.wake, wait_us, 1)
        if status == PY_LOCK_INTR:
            return OUTCOME_SIGNAL
        if status != PY_LOCK_ACQUIRED and not self._has_ended(wait.slot):
            return lapsed
        wait.woken = True
        with self.mutex:
            if wait.slot.state == LEAD:
                wait.slot.state = WAITING
                wait.lead = True
                wake = wait.slot.wake
                wait.slot.wake = NULL
        if wake != NULL:
            PyThread_free_lock(wake)
        return OUTCOME_COMPLETE

    cdef bint _leave(self, Wait* wait) noexcept nogil:
        """End a caller's wait. Returns whether its slot is abandoned, and no longer its own."""
        cdef SlotState state
        if self._is_forked():  # the slot's wake and neighbours are the parent's to deal with
            return True
        with self.mutex:
            state = wait.slot.state
            if state == WAITING:
                wait.slot.state = ABANDONED
        if state != WAITING and not wait.woken:
            self._has_ended(wait.slot)
            if wait.slot.enters:
                self._enter(wait.slot)
        if state == LEAD:
            wait.lead = True
            with self.mutex:
                wait.slot.state = ABANDONED
        if wait.lead:
            self._hand_over()
        return state == WAITING or state == LEAD

    cdef Py_ssize_t _look_at_clock(self, Wait* wait) noexcept nogil:
        """Reader, before each turn: whether its time is up, or signal handlers are due, though replies keep coming.

        Returns an Outcome, or 0. Before the first delivery, the turn itself checks that.
        """
        if wait.signals_at != 0:
            if wait.timeout_s >= 0 and self.heard >= wait.deadline:
                return OUTCOME_TIMEOUT
            if self.heard < wait.signals_at:
                return 0
            wait.signals_at = self.heard + 1e-3 * SIGNAL_CHECK_MS
            return OUTCOME_SIGNAL
        return 0

    cdef bint _take_queue(self, Wait* wait) noexcept nogil:
        """Reader: load what is queued for sending. Returns False when a message has come for this listener."""
        with self.mutex:
            self.callers_send = False
            if wait.slot.messages:
                wait.slot.state = DONE
                return False
            wait.sends = not self.sending and self._load()
            self.callers_send = not wait.sends and self._is_idle()
        return True

    cdef bint _may_block(self, Wait* wait) noexcept nogil:
        """Reader, with nothing leaving: let callers send for themselves. Returns False when it has more to send first.

        Where a near server's reply is about to come, the queued requests leave in one write after it: a write for each
        would cost throughput, with many threads. With a far server, waiting for the reply would cost throughput.
        """
        cdef Slot* oldest
        cdef bint idle
        with self.mutex:
            oldest = self._caller()
            idle = self.far or oldest == NULL or oldest.ends > self.offered  # not sent: no reply will come
            wait.sends = idle and not self.sending and self._load()
            self.callers_send = idle and not wait.sends
        return not wait.sends

    cdef bint _is_idle(self) noexcept nogil:
        """Under the mutex: whether no reply is expected soon."""
        return self.far or self._caller() == NULL

    cdef void _send_early(self, bint sends) noexcept nogil:
        """Reader, before it delivers: note which requests the received bytes can answer, and send what is queued.

        So the server wakes up while this thread wakes its callers. Without room, or after an error, the bytes wait for
        the next turn.
        """
        with self.mutex:
            self.answerable = self.offered if self.sending else self.sent  # a sender counts what it sends later
            sends = sends and not self.sending and self._load()
        if sends:
            self._send()

    cdef inline bint _load(self) noexcept nogil:
        """Sender, else reader; under the mutex: move what is queued into leaving. Returns whether anything is there.

        Over TLS, it is moved once the reader has the GIL: what others queue until then leaves in the same record.
        """
        if self.decrypt is None:
            self._move()
        return self.left < self.leaving.used or self.queued.used > 0

    cdef inline void _move(self) noexcept nogil:
        cdef Buffer spare
        if self.queued.used and self.left == self.leaving.used:
            spare = self.leaving
            self.leaving = self.queued
            self.left = 0
            self.offered = self.accepted
            spare.used = 0
            self.queued = spare

    cdef void _send_queue(self) noexcept nogil:
        """Sender: send until nothing is queued. Without room, or after an error, the reader sends the rest."""
        cdef bint stuck = False
        while True:
            with self.mutex:
                if stuck or self.dead or not self._load():
                    self.sending = False
                    self.callers_send = self.callers_send and not stuck and self._is_idle()
                    return
            stuck = self._send() < 0

    cdef Py_ssize_t _turn(self, Wait* wait) noexcept nogil:
        """Reader: send what is leaving, then receive once. Returns the bytes received, or an Outcome."""
        cdef Py_ssize_t got
        cdef double left_s = 1e9
        while True:
            if wait.sends:
                self._gather()
                if self._send() < 0 and errno != EAGAIN and errno != EINTR:
                    return OUTCOME_CLOSED
                wait.sends = self.left < self.leaving.used
            got = self._spin(wait)
            if got < 0:
                if self.tls_state != SOUND:
                    return OUTCOME_SIGNAL if self.tls_state == STRUCK else OUTCOME_CLOSED
                if not wait.sends and not self._may_block(wait):
                    continue
                if wait.timeout_s >= 0:
                    left_s = wait.deadline - monotonic()
                if self.decrypt is None and not wait.sends and left_s > 1e-3 * (SIGNAL_CHECK_MS - 1):
                    # One call where poll and recv would be two. The socket's own timeout ends it.
                    got = c_recv(self.fd, self.landing, INBOX_BYTES, 0)
                    if got < 0 and errno == EAGAIN:
                        return OUTCOME_SIGNAL
                else:
                    got = self._poll(wait, left_s)
                    if got < 0:
                        return got
                    got = self._receive(not wait.sends)
            if got >= 0:
                return got
            if errno == EINTR:
                return OUTCOME_SIGNAL
            if errno != EAGAIN:
                return OUTCOME_CLOSED

    cdef void _gather(self) noexcept nogil:
        """Reader, before it sends: let a crowd's callers run, whose next requests then leave together.

        Else it would take the CPU from them for requests of a few: see threads.pxd. Over TLS, it lets any woken callers
        run: they need the GIL, as the TLS object does, and a record for each would cost more than a pause.
        """
        cdef double until = 0
        cdef bint waits
        while True:
            with self.mutex:
                waits = self.ready != NULL or (self.entering > 0 and self.decrypt is not None)
            if not waits or 0 < until < monotonic():
                return
            if until == 0:
                until = monotonic() + 1e-6 * GATHER_US
            sched_yield()

    cdef Py_ssize_t _poll(self, Wait* wait, double left_s) noexcept nogil:
        """Reader: block until the socket may be ready. Returns 0 then, or the Outcome that keeps it from waiting on."""
        cdef pollfd watched[2]
        cdef char heard[64]
        cdef int ready
        cdef int wait_ms = SIGNAL_CHECK_MS
        if left_s <= 0:
            wait_ms = 0
        elif left_s < 1e-3 * SIGNAL_CHECK_MS:
            wait_ms = <int>(left_s * 1000 + 0.999)  # rounded up, but 1.0000001 is 1
        watched[0].fd = self.fd
        watched[0].events = POLLIN | POLLOUT if wait.sends else POLLIN
        if self.decrypt is not None:
            watched[0].events = self.read_event | (self.write_event if wait.sends else 0)
        watched[1].fd = self.bell  # poll passes over one that is -1
        watched[1].events = POLLIN
        watched[0].revents = watched[1].revents = 0
        ready = c_poll(watched, 2 if self.bell >= 0 else 1, wait_ms)
        if ready > 0 and watched[1].revents != 0:
            c_read(self.bell, heard, sizeof(heard))
            ready -= 1
        if ready <= 0:
            return OUTCOME_TIMEOUT if ready == 0 and left_s <= 0 else OUTCOME_SIGNAL
        return 0

    cdef Py_ssize_t _send(self) noexcept nogil:
        """Sender, else reader: send what is leaving, as far as there is room. Returns -1 with errno without any."""
        cdef Py_ssize_t got
        if self.decrypt is not None:
            return as_system_call(self._write_tls())
        got = c_send(
            self.fd,
            self.leaving.data + self.left,
            self.leaving.used - self.left,
            MSG_DONTWAIT | MSG_NOSIGNAL,
        )
        if got > 0:
            self.left += got
            self.sent += got
        return got

    cdef inline Py_ssize_t _receive(self, bint sends) noexcept nogil:
        """Reader: receive without blocking. `sends`: as for `_landed`."""
        return self._landed(c_recv(self.fd, self.landing, self.most, MSG_DONTWAIT | self.flags), sends)

    cdef inline Py_ssize_t _landed(self, Py_ssize_t got, bint sends) noexcept nogil:
        """Reader, after recv: the bytes in the inbox. Over TLS, it has only looked: what it saw is read now.

        `sends`: whether to send early over TLS then: to get the GIL again for that may take long.
        """
        if self.decrypt is None or (got < 0 and errno == EAGAIN and self.read_event == POLLIN):
            return got
        return as_system_call(self._read_tls(sends))

    cdef Py_ssize_t _spin(self, Wait* wait) noexcept nogil:
        """Reader: spin, that is receive without blocking, for a while; -1 when nothing came, or spinning does not pay.

        For a batch of up to MOST_SPUN_FOR requests it spins until the server has executed all: their replies come at
        once. With more, the spin would take too much CPU.
        """
        cdef double spin_us = self.spin_us
        cdef double until
        if spin_us == 0 or 0 <= wait.timeout_s < 1e-3 or not may_spin(wait.spinner):
            return -1
        if 1 < wait.count <= MOST_SPUN_FOR:
            spin_us += EACH_US * wait.count
        until = monotonic() + 1e-6 * spin_us
        return self._landed(spin(wait.spinner, self.fd, self.landing, self.most, self.flags, until), not wait.sends)

    cdef Py_ssize_t _read_tls(self, bint sends) noexcept with gil:
        """Reader: have the TLS object read the records that have come, and send early. Returns the bytes, or -errno.

        What a signal handler raises before that harms nobody. Where it does so inside of the TLS object, nobody knows
        what was read, so the pipe breaks.
        """
        cdef Py_ssize_t came = 0
        cdef Py_ssize_t got = self._may_use_tls()
        if got == 0:
            try:
                PyErr_CheckSignals()
            except BaseException as error:
                self._strike(error, STRUCK)
            got = self._may_use_tls()
        while got == 0:
            self.read_event = POLLIN
            try:
                got = self.decrypt(RECORD_BYTES, self.inbox if came == 0 else memoryview(self.inbox)[came:])
            except BaseException as error:
                got = self._trouble(error, &self.read_event)
            if got <= 0:
                break
            came += got
            got = self._may_use_tls() if self._has_more(came) else -EAGAIN
        if self._is_forked():
            return -EIO
        if came > 0:
            self._send_early(sends)
            return -EIO if self._is_forked() else came
        return got

    cdef bint _has_more(self, Py_ssize_t came) noexcept nogil:
        """Reader over TLS: whether another record has come, and the inbox has room for it."""
        cdef char seen
        return came <= INBOX_BYTES - RECORD_BYTES and c_recv(self.fd, &seen, 1, MSG_DONTWAIT | MSG_PEEK) > 0

    cdef Py_ssize_t _write_tls(self) noexcept with gil:
        """Reader: have the TLS object write what is leaving. Returns 0 when all has left, or -errno."""
        cdef Py_ssize_t size
        cdef Py_ssize_t got = self._may_use_tls()
        if got == 0:
            with self.mutex:
                self._move()
        while got == 0 and self.left < self.leaving.used:
            # From now on, the record may have left. Without room, it may have left in part, and is given again.
            size = min(self.leaving.used - self.left, RECORD_BYTES)
            self.sent = self.offered - (self.leaving.used - self.left) + size
            self.write_event = POLLOUT
            try:
                self.encrypt(PyBytes_FromStringAndSize(self.leaving.data + self.left, size))
                self.left += size
                got = self._may_use_tls()
            except BaseException as error:
                got = self._trouble(error, &self.write_event)
        return -EIO if self._is_forked() else got

    cdef inline Py_ssize_t _may_use_tls(self) noexcept:
        """Reader: 0 if it may use the TLS object, or -errno."""
        if self.tls_state == SOUND and not self._is_forked():
            return 0
        return -EINTR if self.tls_state == STRUCK else -EIO

    cdef Py_ssize_t _trouble(self, object error, short* event) noexcept:
        """Reader: deal with what a use of the TLS object raised. Returns -errno.

        Sets `event` where it can go on after that event.

        Python runs signal handlers in there. What one of them raises may be of any class, but passed through a function
        of Python; the TLS object's own errors did not.
        """
        cdef object trace = error.__traceback__  # its first entry is of this module
        if isinstance(error, OSError) and (trace is None or trace.tb_next is None):
            if isinstance(error, (SSLWantReadError, SSLWantWriteError)):
                event[0] = POLLIN if isinstance(error, SSLWantReadError) else POLLOUT
                return -EAGAIN
            self.tls_state = FAILED
        else:
            self._strike(error, UNKNOWN)
        return -EIO

    cdef void _strike(self, object error, TlsState state) noexcept:
        """Reader: keep what a signal handler raised until this thread raises it; the TLS object is not used before."""
        self.tls_state = state
        self.struck = error
        self.struck_in = PyThread_get_thread_ident()

    cdef int _look_for_eof(self) except -1:
        """Reader: look for a close before sending after a pause: a connection closed meanwhile executes nothing."""
        cdef Py_ssize_t got = self._receive(False)
        if got > 0:
            self._send_early(False)
            self._deliver_plain(got)
            self._deliver_rest()
        elif got == 0 or (errno != EAGAIN and errno != EINTR):
            self._fail(True)
        return 0

    cdef void _deliver_plain(self, Py_ssize_t received) noexcept nogil:
        """Reader: complete the slots whose replies have come, up to the first reply that is for the parser.

        An uncontended lock gets plain replies only, so its threads are served without the GIL, for which they would
        compete with the reader.
        """
        cdef Plain plain
        cdef Py_ssize_t length = 0
        cdef Slot* dropped
        cdef Slot* ready
        self.heard = monotonic()
        self.landed = received
        self.consumed = 0
        if not self.between:
            return
        with self.mutex:
            while self.consumed < received and self.head != NULL and self.head.replies == NULL:
                if self.head.on_reply != NULL or self.head.subscription != NULL or not self._has_left(self.head):
                    break
                plain = plain_reply(self.landing + self.consumed, received - self.consumed, &length)
                if plain == NOT_PLAIN:
                    break
                self.consumed += length
                self.head.plain = plain
                dropped = self._unlink()
                if dropped != NULL:
                    free_slot(dropped)  # it holds no objects
            if self.timed != 0 and (self.head == NULL or self.head.begins >= self.timed):
                self.far = self.heard - self.timed_at > 1e-6 * FAR_US
                self.timed = 0
            ready = self._take_ready(MOST_ENTERING)
        wake_all(ready)

    cdef int _deliver_rest(self) except -1:
        """Reader: complete the slots whose replies are in the rest of the inbox, and deliver its pushes."""
        if self.consumed == self.landed:
            return 0
        try:
            if self.between:
                self._deliver_unparsed()
            if self.consumed < self.landed:
                self._deliver_parsed()
        except hiredis.ProtocolError:
            self._fail(False)
        except BaseException:
            self._fail(False)
            raise
        finally:
            if not self._is_forked():
                self._wake_ready()
        return 0

    cdef int _deliver_unparsed(self) except -1:
        """Reader: deliver plain replies and messages, up to the first reply or push that is for the parser."""
        cdef object reply
        cdef list push
        cdef Plain plain
        cdef Py_ssize_t length = 0
        cdef Py_ssize_t count
        cdef const char* data
        while self.consumed < self.landed:
            data = self.landing + self.consumed
            plain = plain_reply(data, self.landed - self.consumed, &length)
            if plain == NOT_PLAIN:
                push = message_push(data, self.landed - self.consumed, &length)
                if push is None:
                    return 0
                self.consumed += length
                if self.on_push is not None:
                    self.on_push(push)
                    self._check_forked()
                continue
            reply = plain_object(plain)
            if self.filling != NULL and self.filling.wanted:
                count = append_run(
                    <list>self.filling.replies,
                    reply,
                    data,
                    self.landed - self.consumed,
                    length,
                    self.filling.wanted,
                )
                self.filling.wanted -= count
                self.consumed += count * length
            else:
                self.consumed += length
                self._complete(reply)
        return 0

    cdef int _deliver_parsed(self) except -1:
        """Reader: let the parser take the rest of the inbox, and deliver its replies and pushes."""
        cdef object reply
        self.parser.feed(self.inbox, self.consumed, self.landed - self.consumed)
        self.consumed = self.landed
        # Only a reply with nothing after it leaves the parser between replies: a parser that has taken in the header of
        # an array has no data left either.
        self.between = False
        while not self.between:
            reply = self._parse()
            if reply is NOT_ENOUGH:
                return 0
            if type(reply) is PushNotification:
                self._take_push(reply)
            else:
                self._complete(reply)
            self.between = not self.parser.has_data()
        return 0

    cdef int _take_push(self, object push) except -1:
        """Reader: take a push: the reply to the oldest request if that is its subscription, else for `on_push`."""
        cdef Slot* slot
        if not is_answer(push):
            if self.on_push is not None:
                self.on_push(push)
                self._check_forked()
            return 0
        slot = self._oldest()
        if slot == NULL or slot.subscription == NULL or not is_answer_to(push, <object>slot.subscription):
            raise hiredis.ProtocolError("a subscription that was not asked for")
        return self._complete(push)

    cdef object _parse(self):
        """The next reply or push; NOT_ENOUGH for none."""
        try:
            return self.parser.gets()
        except Exception as error:  # TypeError for a map whose key is a list, MemoryError for an array of billions
            raise hiredis.ProtocolError(str(error)) from None

    cdef int _complete(self, object reply) except -1:
        """Reader: give the oldest slot its reply, or one of its replies."""
        cdef Slot* slot = self.filling
        if slot == NULL:
            slot = self._oldest()
            if slot == NULL:
                raise hiredis.ProtocolError("a reply without a request")
        if slot.replies != NULL:
            (<list>slot.replies).append(reply)
            if slot.wanted:
                slot.wanted -= 1
                self.filling = slot
                return 0
            self.filling = NULL
        else:
            Py_INCREF(reply)
            slot.reply = <PyObject*>reply
        slot = self._unlink_oldest()
        if slot != NULL:
            on_reply = None if slot.on_reply == NULL else <object>slot.on_reply
            if slot.replies != NULL:
                reply = <object>slot.replies
            drop_slot(slot)
            if on_reply is not None:
                on_reply(reply)
                self._check_forked()
        return 0

    cdef inline bint _has_left(self, Slot* slot) noexcept nogil:
        """Reader: whether what was received last may answer this request; for many, the first of them."""
        return slot.ends <= self.answerable if slot.replies == NULL else slot.begins < self.answerable

    cdef Slot* _oldest(self) except? NULL:
        """Reader: the slot that the next reply is for; NULL for none."""
        cdef Slot* slot
        cdef bint too_early
        with nogil, self.mutex:
            slot = self.head
            too_early = slot != NULL and not self._has_left(slot)
        if too_early:
            raise hiredis.ProtocolError("a reply before its request has left")
        return slot

    cdef Slot* _unlink_oldest(self) noexcept nogil:
        with self.mutex:
            return self._unlink()

    cdef Slot* _unlink(self) noexcept nogil:
        """Reader, under the mutex: unlink the oldest slot, which has its reply. Returns it when it is abandoned."""
        cdef Slot* slot = self.head
        self.head = slot.next
        if self.head == NULL:
            self.tail = NULL
        slot.next = NULL
        if slot.state == ABANDONED:
            return slot
        slot.state = DONE
        self._make_ready(slot)
        return NULL

    cdef void _make_ready(self, Slot* slot) noexcept nogil:
        """Reader, under the mutex: note that the slot's owner, if another thread, is to be woken."""
        if slot.wake != NULL:
            if self.ready == NULL:
                self.ready = slot
            else:
                self.ready_tail.next = slot
            self.ready_tail = slot

    cdef Slot* _take_ready(self, Py_ssize_t most) noexcept nogil:
        """Under the mutex: the slots that the caller now has to wake, so that at most so many owners are entering."""
        cdef Slot* first = self.ready
        cdef Slot* last = NULL
        while self.ready != NULL and self.entering < most:
            last = self.ready
            last.enters = True
            self.entering += 1
            self.ready = last.next
        if last == NULL:
            return NULL
        last.next = NULL
        return first

    cdef void _enter(self, Slot* slot) noexcept nogil:
        """Owner, woken and with the GIL: it is not entering any more. Wake the next ones if no other owner will."""
        cdef Slot* ready
        with self.mutex:
            slot.enters = False
            self.entering -= 1
            ready = self._take_ready(FEWEST_ENTERING)
        wake_all(ready)

    cdef bint _has_ended(self, Slot* slot) noexcept nogil:
        """Owner, which was not woken: whether its wait has ended all the same. Then nothing releases wake any more."""
        cdef Slot* before = NULL
        cdef Slot* other
        with self.mutex:
            if slot.state == WAITING:
                return False
            other = self.ready
            while other != NULL and other != slot:
                before = other
                other = other.next
            if other != NULL:
                if before == NULL:
                    self.ready = slot.next
                else:
                    before.next = slot.next
                if self.ready_tail == slot:
                    self.ready_tail = before
                return True
        PyThread_acquire_lock(slot.wake, WAIT_LOCK)  # a thread is about to release it, and does not need the GIL for it
        return True

    cdef void _wake_ready(self) noexcept nogil:
        """Reader, after it has made slots ready: wake their owners, as many as may be entering."""
        cdef Slot* ready
        with self.mutex:
            ready = self._take_ready(MOST_ENTERING)
        wake_all(ready)

    cdef void _hand_over(self) noexcept nogil:
        """Reader: hand reading on to the oldest caller that waits, else to a listener.

        Queued requests are sent first, unless a caller of a near server becomes the reader, which sends them at once.
        """
        cdef Slot* slot
        cdef bint stuck = False
        cdef bint sends
        cdef PyThread_type_lock wake = NULL
        while True:
            with self.mutex:
                self.callers_send = False
                slot = self._caller()
                sends = self._is_idle() and not (stuck or self.dead or self.sending) and self._load()
                if not sends:
                    if slot == NULL:
                        slot = self._listener()
                    if slot == NULL:
                        self.reading = False
                        return
                    self.callers_send = self._is_idle() and not stuck  # until the new reader has woken up
                    slot.state = LEAD
                    wake = slot.wake
            if not sends:
                PyThread_release_lock(wake)
                return
            # Without room (or after an error, which the next reader will meet) the bytes wait for the next reader.
            stuck = self._send() < 0
            if self._is_forked():
                return

    cdef Slot* _caller(self) noexcept nogil:
        """Under the mutex: the oldest caller that waits."""
        cdef Slot* slot = self.head
        while slot != NULL and slot.state != WAITING:
            slot = slot.next
        return slot

    cdef Slot* _listener(self) noexcept nogil:
        """Under the mutex: the oldest listener."""
        cdef Slot* slot = self.listeners
        while slot != NULL and slot.state != WAITING:
            slot = slot.after
        return slot

    cdef void _put(self, Slot* slot) noexcept nogil:
        """Count a message that was put into a mailbox, and wake its waiting thread, unless that reads: it sees it."""
        cdef PyThread_type_lock wake = NULL
        with self.mutex:
            slot.messages += 1
            if slot.state == WAITING and slot.wake != NULL:
                slot.state = DONE
                wake = slot.wake
        if wake != NULL:
            PyThread_release_lock(wake)

    cdef bint _take_message(self, Slot* slot) noexcept nogil:
        """Whether a mailbox has a message, which is then the caller's."""
        with self.mutex:
            if slot.messages:
                slot.messages -= 1
                return True
        return False

    cdef void _stop_listening(self, Slot* slot) noexcept nogil:
        """Listener: leave the list at the end of its wait."""
        if self._is_forked():
            return
        with self.mutex:
            if slot.before == NULL:
                self.listeners = slot.after
            else:
                slot.before.after = slot.after
            if slot.after == NULL:
                self.last_listener = slot.before
            else:
                slot.after.before = slot.before
            slot.before = NULL
        if slot.wake != NULL:
            PyThread_free_lock(slot.wake)
            slot.wake = NULL

    cdef int _fail(self, bint by_peer) except -1:
        """Reader: break the pipe and fail every slot with what is known of it. Not in a forked child."""
        self._check_forked()
        self.closed_by_peer = by_peer and self.tls_state != UNKNOWN
        with nogil:
            self._stop_sending()
        self._fail_slots()
        self.owner.disconnect()
        self._check_forked()
        return 0

    cdef void _stop_sending(self) noexcept nogil:
        """Reader: end all queueing and sending. Then it is known what is sent, and the descriptor may be closed."""
        cdef bint sending
        with self.mutex:
            self.dead = True
            sending = self.sending
        while sending:  # briefly: a sender's call does not block
            sched_yield()
            with self.mutex:
                sending = self.sending

    cdef void _fail_slots(self) noexcept:
        cdef Slot* slot
        cdef Slot* next_slot
        cdef Slot* dropped = NULL
        with nogil, self.mutex:
            slot = self.head
            self.head = NULL
            self.tail = NULL
            self.filling = NULL
            while slot != NULL:
                next_slot = slot.next
                slot.next = NULL
                if slot.state == WAITING:
                    slot.state = LOST if slot.begins < self.sent else UNSENT
                    self._make_ready(slot)
                else:
                    slot.next = dropped
                    dropped = slot
                slot = next_slot
            slot = self.listeners
            while slot != NULL:
                if slot.state == WAITING:
                    slot.state = UNSENT
                    slot.next = NULL
                    self._make_ready(slot)
                slot = slot.after
        self._wake_ready()
        while dropped != NULL:
            next_slot = dropped.next
            drop_slot(dropped)
            dropped = next_slot


@cython.final
cdef class Mailbox:
    """Where one thread waits for the messages that a pipe's `on_push` puts in; see `base.Mailbox`."""

    cdef Pipe pipe                 # fixed
    cdef object messages           # a deque, added to before slot.messages is, taken from after
    cdef Slot slot                 # among the listeners while a thread waits, which is then its owner

    def __cinit__(self, Pipe pipe not None):
        self.pipe = pipe
        self.messages = deque()
        self.slot.state = DONE

    def put(self, object message):
        self.messages.append(message)
        if not self.pipe._is_forked():
            self.pipe._put(&self.slot)

    def wait(self, double timeout_s, bint soon=False):
        cdef Place place
        self.pipe._check_forked()
        place = self.pipe._listen(&self.slot)
        if place == BUSY:
            raise RuntimeError("another thread waits for this mailbox")
        if place != REFUSED:
            self._wait(place, timeout_s, soon)
        if self.pipe._take_message(&self.slot):
            try:
                PyErr_CheckSignals()  # else Python would raise as soon as the caller had the message
            except BaseException:
                if not self.pipe._is_forked():
                    self.pipe._put(&self.slot)  # it stays
                raise
            self.pipe._check_forked()
            return self.messages.popleft()
        if self.pipe.dead:
            raise ConnectionBroken(False, "the connection broke")
        raise MemoryError

    cdef int _wait(self, Place place, double timeout_s, bint soon) except -1:
        cdef Spinner* spinner = &self.pipe.calling if soon else &self.pipe.listening
        cdef Wait wait = new_wait(&self.slot, place, timeout_s, spinner)
        cdef bint complete = False
        try:
            self.pipe._attend(&wait)
            complete = True
        finally:
            if not complete:
                self.pipe._leave(&wait)
            self.pipe._stop_listening(&self.slot)
            if self.pipe.decrypt is not None:
                self.pipe._raise_struck()
        return 0


cdef Wait new_wait(Slot* slot, Place place, double timeout_s, Spinner* spinner) noexcept nogil:
    cdef Wait wait
    wait.slot = slot
    wait.timeout_s = timeout_s
    wait.deadline = monotonic() + timeout_s if timeout_s >= 0 else 0
    wait.signals_at = 0
    wait.spinner = spinner
    wait.lead = wait.woken = place == READING or place == ALONE
    wait.sends = False
    wait.count = 1
    return wait


cdef bint make_wake(Slot* slot) noexcept nogil:
    """Give a follower's slot the lock on which its owner will sleep. Returns False without memory for it."""
    slot.wake = PyThread_allocate_lock()
    if slot.wake == NULL:
        return False
    PyThread_acquire_lock(slot.wake, NOWAIT_LOCK)
    return True


cdef void wake_all(Slot* slot) noexcept nogil:
    """Wake the slots' owners. Called after the mutex is released, which they take first."""
    cdef PyThread_type_lock wake
    while slot != NULL:
        wake = slot.wake
        slot = slot.next  # before its owner, awake, frees it
        PyThread_release_lock(wake)


cdef void free_slot(Slot* slot) noexcept nogil:
    """Free a slot that holds no objects."""
    if slot.wake != NULL:
        PyThread_free_lock(slot.wake)
    PyMem_RawFree(slot)


cdef void drop_slot(Slot* slot) noexcept:
    Py_XDECREF(slot.reply)
    Py_XDECREF(slot.replies)
    Py_XDECREF(slot.on_reply)
    Py_XDECREF(slot.subscription)
    free_slot(slot)


cdef object take_reply(Slot* slot):
    """The reply of a slot that is DONE."""
    if slot.plain != NOT_PLAIN:
        return plain_object(slot.plain)
    return <object>slot.reply if slot.replies == NULL else <object>slot.replies
