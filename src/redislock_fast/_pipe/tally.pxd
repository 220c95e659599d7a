"""Table of contents of the compiled tally.

A tally belongs to the thread that asks. An answer is called by whoever reads its connection, once; what both touch is
touched in the answer's critical section, which the GIL is where there is one.
"""


cdef class Answer:
    cdef object reply      # MISSING until it has come, and once it was handed on
    cdef object on_reply   # who is given what comes from here on; None while somebody waits
    cdef object mailbox    # of the connection, while somebody waits for this one; else None

    cdef int hand_on(self, object on_reply) except -1


cdef class Tally:
    cdef list pipes
    cdef list answers
    cdef readonly list lost
    cdef readonly list waited_s
