# cython: language_level=3, freethreading_compatible=True
"""The compiled tally: `tally_py.PythonTally`, which is its readable twin, says what each method does.

Worth its place by a tenth of the CPU of a Redlock's acquire and release: ten replies for which no Python runs.
"""

cimport cython

from redislock_fast._pipe.clock cimport monotonic

from redislock_fast._pipe.base import MISSING as _MISSING, Lost, NoReply

cdef object MISSING = _MISSING


@cython.final
cdef class Answer:
    """What a reply is given to."""

    def __cinit__(self):
        self.reply = MISSING

    def __call__(self, reply):
        cdef object on_reply
        cdef object mailbox
        with cython.critical_section(self):
            on_reply = self.on_reply
            mailbox = self.mailbox
            if on_reply is None:
                self.reply = reply
        if on_reply is not None:
            on_reply(reply)
        elif mailbox is not None:
            mailbox.tell(None)

    cdef int hand_on(self, object on_reply) except -1:
        cdef object reply
        with cython.critical_section(self):
            self.on_reply = on_reply
            self.mailbox = None
            reply = self.reply
            self.reply = MISSING
        if reply is not MISSING:
            on_reply(reply)
        return 0


@cython.final
cdef class Tally:
    """One request on each of several pipes, and their replies."""

    def __cinit__(self, list pipes not None):
        self.pipes = pipes
        self.answers = []
        self.lost = [None] * len(pipes)
        self.waited_s = [None] * len(pipes)

    def ask(self, list requests not None):
        """Send the requests."""
        cdef Answer answer
        cdef Py_ssize_t index
        for index in range(len(self.pipes)):
            answer = Answer.__new__(Answer)
            self.answers.append(answer)
            try:
                self.pipes[index].post(requests[index], answer)
            except Lost as lost:
                self.lost[index] = lost

    def wait(self, Py_ssize_t enough, double slice_s, double limit_s):
        """Wait until so many have answered."""
        cdef Answer answer
        cdef Py_ssize_t index
        cdef double now = monotonic()
        cdef double deadline = now + limit_s
        cdef double began
        for index in range(len(self.answers)):
            answer = self.answers[index]
            if answer.reply is MISSING and self.lost[index] is None:
                answer.mailbox = mailbox = self.pipes[index].mailbox()
                if answer.reply is MISSING:
                    began = now
                    try:
                        mailbox.wait(max(min(slice_s, deadline - began), 0.0), soon=True)
                    except (NoReply, Lost):
                        pass
                    now = monotonic()
                    self.waited_s[index] = now - began
            if answer.reply is not MISSING:
                enough -= 1
                if enough <= 0:
                    return

    def replies(self):
        """What has come."""
        cdef Answer answer
        return [answer.reply for answer in self.answers]

    def hand_on(self, Py_ssize_t index, on_reply not None):
        """Have a reply given to somebody else."""
        (<Answer>self.answers[index]).hand_on(on_reply)
