# cython: language_level=3, freethreading_compatible=True
"""The compiled pipe of an event loop; `loop_py.py` has its contract and its readable twin.

It has six shortcuts for the hot path (figures: `python -m bench throughput --mode asyncio`):

- A task awaits a `Slot`: a future whose task is stepped as soon as the buffer is parsed, not by `call_soon` in the next
  iteration of the loop. That saves a handle for each reply and, for a lone task, one of two iterations with a system
  call. A task is stepped only while no other task runs, which is so when the loop calls a protocol. In a loop that
  `nest_asyncio` has patched, none is: a task may run the loop within its step, and wait there for what the pipe is to
  send or deliver after the step. In asyncio's debug mode, none is either: the loop names each slow task that it runs.
- Before Python 3.12, a task that is stepped so gets its loop from here: asyncio makes a system call for that, to see
  whether it is in a forked child. Where another loop runs within the step, asyncio says which one.
- The pipe spins for a lone caller's reply, in the iteration of the loop after its request, where `spin.pxd` finds that
  it pays: else the CPU would go to sleep twice for each lock. All else that is ready runs first, in every iteration.
- The requests of the stepped tasks leave in two writes: the server works on the first while tasks make the second.
- A task that was notified of a lock is stepped before the rest of the buffer is parsed, and what it sends leaves at
  once: mostly the release for which all others wait. The server then hands over while the others' requests are made.
- The pipe spins for the result of such a release, mostly the next hand-over, as for a lone caller's reply: so neither
  the client nor the server goes to sleep while tasks pass one lock on.

Thread safety: everything belongs to the loop's thread.
"""

cimport cython
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.contextvars cimport PyContext_Enter, PyContext_Exit
from cpython.mem cimport PyMem_RawFree
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.math cimport INFINITY

import asyncio

import hiredis

from redislock_fast._pipe.clock cimport monotonic
from redislock_fast._pipe.forks cimport forks
from redislock_fast._pipe.resp cimport (
    NOT_PLAIN,
    Buffer,
    Plain,
    append_run,
    is_answer,
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

from redislock_fast._pipe.base import (
    NOT_ENOUGH,
    SPIN_US,
    UNSENT_LIMIT_BYTES,
    UNSENT_SILENCE_S,
    ConnectionBroken,
    Forked,
    NoReply,
    is_answer_to,
    new_reader,
)

cdef enum:
    INBOX_BYTES = 65536
    FLUSH_BYTES = 4096  # requests of stepped tasks that are longer leave at once
    ALL = 0x7FFFFFFF

cdef extern from *:
    """
    static _Thread_local PyObject* redislock_stepping = NULL;
    static _Thread_local uint64_t redislock_stepping_in = 0;

    /* Another number whenever a loop begins or ends to run in this thread: asyncio notes that in the thread's dict,
       which has another version then. 0 from Python 3.12 on. */
    static uint64_t redislock_run_now(void) {
    #if PY_VERSION_HEX < 0x030C0000
        PyObject* of_thread = PyThreadState_GetDict();
        return of_thread == NULL ? 0 : ((PyDictObject*)of_thread)->ma_version_tag;
    #else
        return 0;
    #endif
    }
    """
    PyObject* stepping "redislock_stepping"  # the loop whose pipe now steps a task in this thread; NULL for none
    unsigned long long stepping_in "redislock_stepping_in"  # what `run_now` returned then
    unsigned long long run_now "redislock_run_now" ()

cdef extern from *:
    """
    static void redislock_set_am_send(PyObject* kind, sendfunc am_send) {
        ((PyTypeObject*)kind)->tp_as_async->am_send = am_send;  /* an __await__ has made room for it */
    }
    """
    ctypedef enum PySendResult:
        PYGEN_RETURN
        PYGEN_ERROR
        PYGEN_NEXT
    ctypedef PySendResult (*sendfunc)(PyObject* self, PyObject* value, PyObject** result) except PYGEN_ERROR
    void set_am_send "redislock_set_am_send"(object kind, sendfunc am_send)
    bint PyCFunction_Check(object callback)

cdef double NEVER = INFINITY
cdef Py_ssize_t unsent_limit_bytes = UNSENT_LIMIT_BYTES
cdef double unsent_silence_s = UNSENT_SILENCE_S
cdef object PushNotification = hiredis.PushNotification
cdef object current_task = asyncio.current_task
cdef object get_running_loop = asyncio.get_running_loop


def running_loop():
    """`asyncio.get_running_loop`, without its system call in a task that a pipe steps."""
    if stepping_in and run_now() == stepping_in:  # else another loop may run within the step
        return <object>stepping
    return get_running_loop()


def forget_stepping():
    """In a forked child: no loop steps a task. The parent's may have been in the middle of a step."""
    global stepping, stepping_in
    stepping = NULL
    stepping_in = 0


def _raise(error):
    raise error


cdef enum State:
    WAITING = 0
    DONE = 1       # outcome is the reply
    FAILED = 2     # outcome is the exception
    CANCELLED = 3  # outcome is the message, or None
    DROPPED = 4    # no caller ever waited; callback, if any, is called with the reply


@cython.final
@cython.freelist(256)
cdef class Slot:
    """The awaitable of one request: a future for one task, with as much of `asyncio.Future` as `asyncio.Task` uses."""

    cdef object loop
    cdef object callback           # the task's wake-up and its context; None before it waits
    cdef object context
    cdef object outcome
    cdef State state
    cdef list replies              # of many replies, those that have come; None where one is wanted
    cdef Py_ssize_t wanted         # the number of replies still to come, without the last one
    cdef tuple request             # of `call`
    cdef double deadline           # CLOCK_MONOTONIC; NEVER for none
    cdef Slot next
    cdef public bint _asyncio_future_blocking

    def __await__(self):
        return self

    __iter__ = __await__

    def __next__(self):  # called from Python; C calls `resume`
        if self.state == WAITING:
            self._asyncio_future_blocking = True
            return self
        raise StopIteration(self.result())

    def get_loop(self):
        return self.loop

    def add_done_callback(self, callback, *, context=None):
        """Note the wake-up of the task that waits."""
        self.callback = callback
        self.context = context
        if self.state != WAITING:
            self._schedule()

    def done(self):
        return self.state != WAITING

    def cancelled(self):
        return self.state == CANCELLED

    def cancel(self, msg=None):
        """End the wait. The reply will be dropped when it comes."""
        if self.state != WAITING:
            return False
        self._end(CANCELLED, msg)
        return True

    def result(self):
        """The reply.

        Raises:
            ConnectionBroken: or whatever else has ended the wait.
        """
        if self.state == DONE:
            return self.outcome
        if self.state == FAILED:
            raise self.outcome
        if self.state == CANCELLED:
            raise asyncio.CancelledError() if self.outcome is None else asyncio.CancelledError(self.outcome)
        raise asyncio.InvalidStateError("the reply has not come")

    cdef int _end(self, State state, object outcome) except -1:
        """End the wait; the task runs in the loop's next iteration."""
        self.state = state
        self.outcome = outcome
        self._schedule()
        return 0

    cdef int _schedule(self) except -1:
        callback, self.callback = self.callback, None
        context, self.context = self.context, None
        if callback is not None:
            self.loop.call_soon(callback, self, context=context)
        return 0


cdef PySendResult resume(PyObject* self, PyObject* value, PyObject** result) except PYGEN_ERROR:
    """`Slot.__next__` for C."""
    result[0] = NULL
    cdef Slot slot = <Slot>self
    cdef bint waits = slot.state == WAITING
    cdef object answer
    if waits:
        slot._asyncio_future_blocking = True
        answer = slot
    else:
        answer = slot.outcome if slot.state == DONE else slot.result()
    Py_INCREF(answer)
    result[0] = <PyObject*>answer
    return PYGEN_NEXT if waits else PYGEN_RETURN


set_am_send(Slot, resume)


cdef class LoopPipe:
    """One connection that many tasks call; `loop_py.Pipe` says what each method does.

    To be derived from, together with `asyncio.BufferedProtocol`.
    """

    cdef object __weakref__
    cdef readonly object transport
    cdef readonly object closed    # a future, done when the transport is gone
    cdef readonly bint broken
    cdef readonly bint closed_by_peer
    cdef long process              # fixed; the count of forks in the process that made it
    cdef object loop
    cdef object done               # a future that is done
    cdef object owner
    cdef object parser
    cdef public object on_push     # called with each push that answers no request, or None
    cdef bytearray inbox
    cdef object view               # a memoryview of the inbox
    cdef char* landing             # the inbox's bytes
    cdef bint between              # the parser holds no part of a reply
    cdef Slot head
    cdef Slot tail
    cdef Slot done_head            # completed, their tasks yet to run
    cdef Slot done_tail
    cdef Py_ssize_t done_count
    cdef bint receiving            # replies and pushes are being parsed
    cdef Slot ready_head            # listeners that have got a message, their tasks yet to run
    cdef Slot ready_tail
    cdef bint debugs               # the loop was in debug mode when the pipe was made
    cdef bint direct               # tasks may be stepped now: no task runs or nests the loop, and none has ended it
    cdef Py_ssize_t half           # how many requests of stepped tasks leave together
    cdef Buffer queued             # the bytes that leave with the next flush
    cdef Py_ssize_t queued_count   # how many of the last slots are in queued
    cdef Py_ssize_t just_sent      # how many slots' requests have left since bytes were received last
    cdef Py_ssize_t answerable     # how many slots' requests had left before: only these can have been answered
    cdef bint delivering           # tasks are being stepped: what they send leaves together
    cdef bint flushing             # a flush is scheduled
    cdef bint writing              # the transport is being called
    cdef bint paused               # the transport's buffer is full
    cdef int fd                    # of a plain socket; -1 where there is none, or no CPU to spin on
    cdef bint scheduled            # a spin is scheduled
    cdef Spinner calling           # of lone callers
    cdef Spinner handing           # of tasks that hand a lock on
    cdef Spinner* awaited          # the kind of wait to spin for; NULL for none
    cdef object timer
    cdef double timer_at           # its time; NEVER without
    cdef double heard              # when the last byte came

    def __cinit__(self, transport, owner, received=b""):
        self.transport = transport
        self.owner = owner
        self.process = forks
        self.loop = asyncio.get_running_loop()
        self.debugs = self.loop.get_debug()
        self.closed = self.loop.create_future()
        self.done = self.loop.create_future()
        self.done.set_result(None)
        self.parser = new_reader()
        self.inbox = bytearray(INBOX_BYTES)
        self.view = memoryview(self.inbox)
        self.landing = PyByteArray_AS_STRING(self.inbox)
        self.between = True
        self.timer_at = NEVER
        self.heard = monotonic()
        self.calling = self.handing = new_spinner()
        self.fd = -1
        sock = transport.get_extra_info("socket")
        if SPIN_US and sock is not None and transport.get_extra_info("ssl_object") is None:
            self.fd = sock.fileno()

    def __init__(self, transport, owner, received=b""):
        transport.set_protocol(self)
        if not transport.is_reading():
            transport.resume_reading()
        if received:
            self.between = False
            self.parser.feed(received)
            self._deliver(0)

    def __dealloc__(self):
        PyMem_RawFree(self.queued.data)

    @property
    def is_idle(self):
        return self.head is None

    @property
    def silence_s(self):
        return monotonic() - self.heard

    # ---- callers ----

    def call(self, tuple args not None, double timeout_s):
        cdef Slot slot = Slot.__new__(Slot)
        slot.request = args
        self._enlist(args, None, request_size(args), slot, timeout_s)
        return slot

    def call_many(self, requests, double timeout_s):
        cdef Slot slot = Slot.__new__(Slot)
        cdef Py_ssize_t size = requests_size(requests, &slot.wanted)
        slot.wanted -= 1
        slot.replies = []
        self._enlist(None, requests, size, slot, timeout_s)
        return slot

    def post(self, tuple args not None, on_reply=None):
        cdef Slot slot = Slot.__new__(Slot)
        slot.state = DROPPED
        slot.callback = on_reply
        self._enlist(args, None, request_size(args), slot, -1)
        if on_reply is None:
            self._write()

    def close(self):
        if not self.broken and self.process == forks:
            self.paused = False  # the transport takes it all now, and sends what it can
            self._write()
            self._fail("the connection was closed")
            self.transport.close()

    def listener(self):
        cdef Slot slot = Slot.__new__(Slot)
        slot.loop = self.loop
        return slot

    def put(self, Slot slot not None, message):
        if slot.state != WAITING:
            return
        if self.receiving:
            slot.state = DONE
            slot.outcome = message
            if self.ready_head is None:
                self.ready_head = slot
            else:
                self.ready_tail.next = slot
            self.ready_tail = slot
        else:
            slot._end(DONE, message)

    cdef int _enlist(self, tuple args, object requests, Py_ssize_t size, Slot slot, double timeout_s) except -1:
        """Queue one request (args), or many."""
        cdef double now = monotonic()
        if self.process != forks:
            raise Forked
        if self.broken:
            raise ConnectionBroken(False, "the connection is closed")
        if self.queued.used > unsent_limit_bytes and now - self.heard > unsent_silence_s:
            self._leave()
        slot.loop = self.loop
        slot.deadline = NEVER
        if timeout_s >= 0:
            slot.deadline = now + timeout_s
            if slot.deadline < self.timer_at:
                self._watch(slot.deadline)
                if self.broken:  # by what ran as the timer was set
                    raise ConnectionBroken(False, "the connection is closed")
        # Not before: to set a timer runs Python code, and a signal handler or finalizer in it may post.
        if reserve(&self.queued, size) < 0:
            raise MemoryError
        if requests is None:
            write_request(self.queued.data + self.queued.used, args)
        else:
            write_requests(self.queued.data + self.queued.used, requests)
        self.queued.used += size
        self.queued_count += 1
        if self.tail is None:
            self.head = self.tail = slot
            self.heard = now
            if self.delivering and self._nests():  # since this step
                self.delivering = self.direct = False
                self.transport.pause_reading()   # the handle of the present call cannot be run within itself
                self.transport.resume_reading()
                self._step()
            if not self.delivering:
                self._write()
        else:
            self.tail.next = slot
            self.tail = slot
            if self.delivering:
                if self.queued_count >= self.half or self.queued.used >= FLUSH_BYTES:
                    self._write()
            elif not self.flushing:
                self.flushing = True
                self.loop.call_soon(self._flush)
        return 0

    def _flush(self):
        self.flushing = False
        self._write()

    cdef int _write(self) except -1:
        """Send what is queued, unless the transport's buffer is full."""
        cdef object data
        if self.writing:  # a finalizer or a signal handler posts: that follows
            return 0
        self.writing = True
        try:
            while self.queued.used and not self.paused and not self.broken:
                data = PyBytes_FromStringAndSize(self.queued.data, self.queued.used)
                self.queued.used = 0
                self.just_sent += self.queued_count
                self.queued_count = 0
                self.transport.write(data)
                if self.head is self.tail:
                    self._await(&self.calling)
        finally:
            self.writing = False
        return 0

    # ---- spinning ----

    cdef int _await(self, Spinner* spinner) except -1:
        """A task waits for a reply or message: spin for it in the next iteration of the loop, where that pays."""
        if self.fd < 0 or not may_spin(spinner):
            return 0
        self.awaited = spinner
        if not self.scheduled:
            self.scheduled = True
            self.loop.call_soon(self._spin)
        return 0

    def _spin(self):
        cdef double give_up = monotonic() + 1e-6 * <int>SPIN_US
        cdef Py_ssize_t got
        self.scheduled = False
        if self.broken or self.head is None or self.head.replies is not None:
            return
        if self.head is not self.tail and self.awaited is &self.calling:
            return
        while self.awaited is not NULL and not self.scheduled and not self.broken:  # else the next spin receives
            with nogil:
                got = spin(self.awaited, self.fd, self.landing, INBOX_BYTES, 0, give_up)
            if got <= 0:  # the transport receives the rest
                return
            self.buffer_updated(got)

    # ---- time ----

    cdef int _watch(self, double deadline) except -1:
        if self.timer is not None:
            self.timer.cancel()
        self.timer_at = deadline
        self.timer = self.loop.call_later(max(deadline - monotonic(), 0), self._on_timer)
        return 0

    def _on_timer(self):
        """End the waits whose time is up, and set the timer for the next. The slots stay for their replies."""
        cdef double now = monotonic()
        cdef double next_deadline = NEVER
        cdef Slot slot = self.head
        self.timer = None
        self.timer_at = NEVER
        while slot is not None:
            if slot.state == WAITING:
                if slot.deadline <= now:
                    slot._end(FAILED, NoReply("no reply in time"))
                elif slot.deadline < next_deadline:
                    next_deadline = slot.deadline
            slot = slot.next
        if next_deadline < NEVER:
            self._watch(next_deadline)

    # ---- the transport's calls ----

    def get_buffer(self, sizehint):
        return self.view

    def buffer_updated(self, Py_ssize_t received):
        """Complete the slots whose replies have come; then their tasks run."""
        if self.broken:
            return
        self.heard = monotonic()
        self.answerable += self.just_sent
        self.just_sent = 0
        if self.awaited is &self.calling:
            self.awaited = NULL
        self.direct = not self.debugs and current_task(self.loop) is None and not self._nests()
        self.receiving = True
        try:
            self._deliver(received)
            if self.ready_head is not None:  # by a reply
                self._step_ready()
        finally:
            self.receiving = False
        self.delivering = True
        try:
            self._step()
        finally:
            self.delivering = False
            self._write()

    cdef int _deliver(self, Py_ssize_t received) except -1:
        """Complete the slots whose replies are in the inbox, and deliver its pushes."""
        cdef Py_ssize_t at = 0
        try:
            if self.between:
                at = self._deliver_unparsed(received)
            if not self.broken:
                self._deliver_parsed(at, received)
        except hiredis.ProtocolError as error:
            self._fail(f"the server broke the protocol: {error}")
            self.transport.abort()
        except BaseException as error:
            self._fail("a push could not be delivered")
            self.transport.abort()
            self.loop.call_soon(_raise, error)  # from the loop itself, since uvloop lets a protocol raise nothing
        return 0

    cdef Py_ssize_t _deliver_unparsed(self, Py_ssize_t received) except -1:
        """Deliver plain replies and messages, up to the first that is for the parser. Returns where that begins."""
        cdef object reply
        cdef list push
        cdef Slot slot
        cdef Plain plain
        cdef Py_ssize_t length = 0
        cdef Py_ssize_t count
        cdef Py_ssize_t at = 0
        while at < received:
            plain = plain_reply(self.landing + at, received - at, &length)
            if plain == NOT_PLAIN:
                push = message_push(self.landing + at, received - at, &length)
                if push is None:
                    break
                at += length
                self._take(push)
                if self.broken:
                    break
                continue
            reply = plain_object(plain)
            slot = self.head
            if self.answerable and slot.replies is not None and slot.wanted:
                count = append_run(slot.replies, reply, self.landing + at, received - at, length, slot.wanted)
                slot.wanted -= count
                at += count * length
            else:
                at += length
                self._complete(reply)
        return at

    cdef int _deliver_parsed(self, Py_ssize_t at, Py_ssize_t received) except -1:
        """Let the parser take the bytes from `at` on, and deliver its replies and pushes."""
        cdef object reply
        if at < received:
            self.parser.feed(self.inbox, at, received - at)
            # Only a reply with nothing after it leaves the parser between replies: a parser that has taken in the
            # header of an array has no data left either.
            self.between = False
        while not self.between:
            reply = self._parse()
            if reply is NOT_ENOUGH:
                return 0
            if type(reply) is not PushNotification:
                self._complete(reply)
            elif is_answer(reply):
                if self.head is None or not is_answer_to(reply, self.head.request):
                    raise hiredis.ProtocolError("a subscription that was not asked for")
                self._complete(reply)
            else:
                self._take(reply)
                if self.broken:
                    return 0
            self.between = not self.parser.has_data()
        return 0

    cdef int _take(self, object push) except -1:
        """Deliver a push that answers no request."""
        if self.on_push is not None:
            self.on_push(push)
            if self.ready_head is not None:
                self._step_ready()
        return 0

    cdef object _parse(self):
        """The next reply or push; NOT_ENOUGH for none."""
        try:
            return self.parser.gets()
        except Exception as error:  # TypeError for a map whose key is a list, MemoryError for an array of billions
            raise hiredis.ProtocolError(str(error)) from None

    cdef int _complete(self, object reply) except -1:
        """Give the oldest slot its reply, or one of its replies."""
        cdef Slot slot = self.head
        if not self.answerable:
            if self.broken:  # by a callback for an earlier reply
                return 0
            raise hiredis.ProtocolError("a reply without a request")
        if slot.replies is not None:
            slot.replies.append(reply)
            if slot.wanted:
                slot.wanted -= 1
                return 0
            reply = slot.replies
        self.answerable -= 1
        self.head = slot.next
        if self.head is None:
            self.tail = None
        slot.next = None
        if slot.state == WAITING:
            slot.state = DONE
            slot.outcome = reply
            self._make_done(slot)
        elif slot.state == DROPPED and slot.callback is not None:
            slot.callback(reply)
        return 0

    cdef int _nests(self) except -1:
        """Whether a task may run the loop within its step."""
        return hasattr(self.loop, "_nest_patched")

    cdef int _make_done(self, Slot slot) except -1:
        """Note that the slot's task is to be stepped."""
        if self.done_head is None:
            self.done_head = slot
        else:
            self.done_tail.next = slot
        self.done_tail = slot
        self.done_count += 1
        return 0

    cdef int _step_ready(self) except -1:
        """Step the tasks that have got a message, before the rest of the buffer is parsed."""
        cdef Slot slot
        if self.awaited is &self.handing:
            self.awaited = NULL
        self.receiving = False
        self.delivering = True
        self.half = ALL
        try:
            while self.ready_head is not None:
                slot = self.ready_head
                self.ready_head = slot.next
                self._step_one(slot)
            if self.queued.used:
                self._write()
                self._await(&self.handing)
        finally:
            self.delivering = False
            self.receiving = True
        return 0

    cdef int _step(self) except -1:
        """Step the tasks of completed slots: now or, where not `direct`, in the loop's next iteration."""
        cdef Slot slot
        self.half = (self.done_count + 1) // 2
        self.done_count = 0
        while self.done_head is not None:
            slot = self.done_head
            self.done_head = slot.next
            self._step_one(slot)
        return 0

    cdef int _step_one(self, Slot slot) except -1:
        global stepping, stepping_in
        cdef object callback
        cdef object context
        cdef PyObject* before = stepping
        cdef unsigned long long before_in = stepping_in
        slot.next = None
        if not self.direct or slot.context is None:
            slot._schedule()
            return 0
        callback, slot.callback = slot.callback, None
        context, slot.context = slot.context, None
        PyContext_Enter(context)
        stepping = <PyObject*>self.loop
        stepping_in = run_now()
        try:
            callback(self.done if PyCFunction_Check(callback) else slot)  # a wake-up in C is asyncio.Task's
        except BaseException as error:
            # SystemExit or KeyboardInterrupt, which end the loop.
            self.loop.call_soon(_raise, error)
            self.direct = False
        finally:
            stepping = before
            stepping_in = before_in
            PyContext_Exit(context)
        return 0

    def eof_received(self):
        """Nothing: the transport closes itself."""

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused = False
        self._write()

    def connection_lost(self, error):
        """Fail every slot."""
        self.closed_by_peer = not self.broken
        self._fail("the connection broke" if error is None else str(error))
        self.owner = None
        if not self.closed.done():
            self.closed.set_result(None)

    cdef int _fail(self, str cause) except -1:
        """Fail every slot with what is known of it."""
        cdef Slot slot = self.head
        cdef Slot following
        cdef Py_ssize_t count = 0
        if self.broken:
            return 0
        self.broken = True
        self.answerable = 0
        self.head = self.tail = None
        if self.timer is not None:
            self.timer.cancel()
        following = slot
        while following is not None:
            count += 1
            following = following.next
        while slot is not None:
            if slot.state == WAITING:
                slot._end(FAILED, ConnectionBroken(count > self.queued_count, cause))
            count -= 1
            following = slot.next
            slot.next = None
            slot = following
        return 0

    cdef int _leave(self) except -1:
        """Break the pipe: the server is silent, and too much waits to be sent."""
        self._fail("the server is silent, and too much waits to be sent")
        self.transport.abort()
        raise ConnectionBroken(False, "the connection is closed")
