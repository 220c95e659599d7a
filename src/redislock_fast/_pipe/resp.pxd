"""Declarations of RESP for the compiled pipes. No state: callers own their buffers."""


cdef enum Plain:         # the replies that need no parser
    NOT_PLAIN = 0
    NIL = 1
    ZERO = 2
    ONE = 3
    OK = 4


cdef struct Buffer:
    char* data
    Py_ssize_t used
    Py_ssize_t capacity


cdef Py_ssize_t request_size(tuple args) except -1
cdef char* write_request(char* at, tuple args) except NULL
cdef Py_ssize_t words_size(tuple args) except -1
cdef char* write_words(char* at, tuple args) except NULL
cdef Py_ssize_t requests_size(object requests, Py_ssize_t* count) except -1
cdef char* write_requests(char* at, object requests) except NULL
cdef bint may_subscribe(tuple args) except -1
cdef Plain plain_reply(const char* data, Py_ssize_t size, Py_ssize_t* length) noexcept nogil
cdef object plain_object(Plain plain)
cdef list message_push(const char* data, Py_ssize_t size, Py_ssize_t* length)
cdef bint is_answer(object push) except -1
cdef Py_ssize_t append_run(
    list replies, object reply, const char* data, Py_ssize_t size, Py_ssize_t length, Py_ssize_t most
) except -1
cdef int reserve(Buffer* buffer, Py_ssize_t more) noexcept nogil
