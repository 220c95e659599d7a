"""Declarations of the compiled pipe of an event loop.

Everything here belongs to the loop's thread: no field is shared.
"""

from redislock_fast._pipe.resp cimport Buffer
from redislock_fast._pipe.spin cimport Spinner


cdef enum State:
    WAITING = 0
    DONE = 1       # outcome is the reply
    FAILED = 2     # outcome is the exception
    CANCELLED = 3  # outcome is the message, or None
    DROPPED = 4    # no caller ever waited; callback, if any, is called with the reply


cdef class Slot:
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

    cdef int _schedule(self) except -1
    cdef int _end(self, State state, object outcome) except -1


cdef class LoopPipe:
    cdef object __weakref__
    cdef readonly object transport
    cdef readonly object closed    # a future, done when the transport is gone
    cdef readonly bint broken
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
    cdef Slot done_head          # completed, their tasks yet to run
    cdef Slot done_tail
    cdef Py_ssize_t done_count
    cdef bint receiving            # replies and pushes are being parsed
    cdef Slot told_head          # listeners that have got a message, their tasks yet to run
    cdef Slot told_tail
    cdef bint direct               # tasks may be stepped now: no task runs, and none has ended the loop
    cdef Py_ssize_t half           # how many requests of stepped tasks leave together
    cdef Buffer queued             # the bytes that leave with the next flush
    cdef Py_ssize_t queued_count   # how many of the last slots are in queued
    cdef Py_ssize_t just_sent      # how many slots' requests have left since bytes were received last
    cdef Py_ssize_t answerable     # how many slots' requests had left before: only these can have been answered
    cdef bint delivering           # tasks are being stepped: what they send leaves together
    cdef bint flushing             # a flush is scheduled
    cdef bint paused               # the transport has enough to send
    cdef int fd                    # of a plain socket; -1 where there is none, or no CPU to spin on
    cdef bint scheduled            # a spin is
    cdef Spinner calling           # of lone callers
    cdef Spinner handing           # of tasks that hand a lock on
    cdef Spinner* awaited          # the kind of wait to spin for; NULL for none
    cdef object timer
    cdef double timer_at           # its time; NEVER without
    cdef double heard              # when the last byte came

    cdef int _enlist(self, tuple args, object requests, Py_ssize_t size, Slot slot, double timeout_s) except -1
    cdef int _watch(self, double deadline) except -1
    cdef int _write(self) except -1
    cdef int _await(self, Spinner* spinner) except -1
    cdef int _deliver(self, Py_ssize_t received) except -1
    cdef Py_ssize_t _deliver_unparsed(self, Py_ssize_t received) except -1
    cdef int _deliver_parsed(self, Py_ssize_t at, Py_ssize_t received) except -1
    cdef int _take(self, object push) except -1
    cdef object _parse(self)
    cdef int _complete(self, object reply) except -1
    cdef int _make_done(self, Slot slot) except -1
    cdef int _step_told(self) except -1
    cdef int _step(self) except -1
    cdef int _step_one(self, Slot slot) except -1
    cdef int _fail(self, str cause) except -1
    cdef int _leave(self) except -1
