# cython: language_level=3, freethreading_compatible=True
"""RESP for the compiled pipes: writes requests into buffers, and reads the plainest replies without a parser."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_RawRealloc
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_CheckExact
from libc.string cimport memcmp, memcpy

from redislock_fast._pipe.base import Bulk

cdef enum:
    MOST_BYTES = 1 << 20  # a bulk string of this size or more is for the parser

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


# ---- requests ----

def encode(tuple args not None):
    """The bytes of one request; see `resp_py.encode`."""
    cdef Py_ssize_t size = request_size(args)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, size)
    write_request(PyBytes_AS_STRING(out), args)
    return out


cdef inline int digits(unsigned long long number) noexcept nogil:
    cdef int count = 1
    while number >= 10:
        number //= 10
        count += 1
    return count


cdef inline char* write_number(char* at, unsigned long long number) noexcept nogil:
    cdef int count = digits(number)
    cdef int place = count
    while place:
        place -= 1
        at[place] = <char>(48 + number % 10)
        number //= 10
    return at + count


cdef inline char* write_header(char* at, char kind, unsigned long long number) noexcept nogil:
    at[0] = kind
    at = write_number(at + 1, number)
    at[0] = 13
    at[1] = 10
    return at + 2


cdef inline unsigned long long magnitude(long long number) noexcept nogil:
    # Through unsigned arithmetic: the most negative number has no positive twin.
    return <unsigned long long>number if number >= 0 else 0 - <unsigned long long>number


cdef Py_ssize_t request_size(tuple args) except -1:
    """How many bytes write_request will write. Raises TypeError before anything is written."""
    return 3 + digits(PyTuple_GET_SIZE(args)) + words_size(args)


cdef Py_ssize_t words_size(tuple args) except -1:
    """How many bytes write_words will write. Raises TypeError before anything is written."""
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t length = 0
    cdef long long number
    cdef object word
    for i in range(PyTuple_GET_SIZE(args)):
        word = <object>PyTuple_GET_ITEM(args, i)
        if PyBytes_CheckExact(word):
            length = PyBytes_GET_SIZE(word)
        elif PyLong_CheckExact(word):
            number = word
            length = digits(magnitude(number)) + (number < 0)
        elif PyUnicode_CheckExact(word):
            PyUnicode_AsUTF8AndSize(word, &length)
        else:
            raise TypeError(f"a request is made of bytes, str and int, not {type(word).__name__}")
        size += 5 + digits(length) + length
    return size


cdef char* write_request(char* at, tuple args) except NULL:
    """Write the request; returns where it ends. The words have passed request_size."""
    return write_words(write_header(at, 42, PyTuple_GET_SIZE(args)), args)


cdef char* write_words(char* at, tuple args) except NULL:
    """Write the words as bulk strings; returns where they end. They have passed words_size."""
    cdef Py_ssize_t length = 0
    cdef long long number
    cdef const char* text
    cdef object word
    for i in range(PyTuple_GET_SIZE(args)):
        word = <object>PyTuple_GET_ITEM(args, i)
        if PyLong_CheckExact(word):
            number = word
            at = write_header(at, 36, digits(magnitude(number)) + (number < 0))
            if number < 0:
                at[0] = 45
                at += 1
            at = write_number(at, magnitude(number))
        else:
            if PyBytes_CheckExact(word):
                text = PyBytes_AS_STRING(word)
                length = PyBytes_GET_SIZE(word)
            else:
                text = PyUnicode_AsUTF8AndSize(word, &length)
            at = write_header(at, 36, length)
            memcpy(at, text, length)
            at += length
        at[0] = 13
        at[1] = 10
        at += 2
    return at


cdef Py_ssize_t requests_size(object requests, Py_ssize_t* count) except -1:
    """How many bytes write_requests will write. `count` gets the number of requests."""
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t length
    cdef tuple before
    cdef tuple after
    cdef list words
    cdef object args
    if type(requests) is Bulk:
        before, words, after = requests
        count[0] = len(words)
        if count[0] == 0:
            raise ValueError("no requests")
        size = 3 + digits(len(before) + 1 + len(after)) + words_size(before) + words_size(after)
        size *= count[0]
        for args in words:
            if not PyBytes_CheckExact(args):
                raise TypeError(f"a bulk's words are bytes, not {type(args).__name__}")
            length = PyBytes_GET_SIZE(args)
            size += 5 + digits(length) + length
        return size
    count[0] = len(requests)
    if count[0] == 0:
        raise ValueError("no requests")
    for args in requests:
        size += request_size(args)
    return size


cdef char* write_requests(char* at, object requests) except NULL:
    """Write one request after another; returns where they end."""
    cdef Py_ssize_t before_size
    cdef Py_ssize_t after_size
    cdef Py_ssize_t length
    cdef bytes head
    cdef bytes tail
    cdef tuple before
    cdef tuple after
    cdef list words
    cdef object args
    if type(requests) is not Bulk:
        for args in requests:
            at = write_request(at, args)
        return at
    # The common part of the requests is written once and copied: that takes two thirds of the CPU.
    before, words, after = requests
    head = PyBytes_FromStringAndSize(NULL, 3 + digits(len(before) + 1 + len(after)) + words_size(before))
    write_words(write_header(PyBytes_AS_STRING(head), 42, len(before) + 1 + len(after)), before)
    tail = PyBytes_FromStringAndSize(NULL, words_size(after))
    write_words(PyBytes_AS_STRING(tail), after)
    before_size = len(head)
    after_size = len(tail)
    for args in words:
        memcpy(at, PyBytes_AS_STRING(head), before_size)
        length = PyBytes_GET_SIZE(args)
        at = write_header(at + before_size, 36, length)
        memcpy(at, PyBytes_AS_STRING(args), length)
        at[length] = 13
        at[length + 1] = 10
        memcpy(at + length + 2, PyBytes_AS_STRING(tail), after_size)
        at += length + 2 + after_size
    return at


cdef bint may_subscribe(tuple args) except -1:
    """Whether the request's name is as long as that of a (S)SUBSCRIBE, so that `base.is_answer_to` must look at it."""
    cdef object name = args[0]
    return 9 <= len(name) <= 10


# ---- replies ----

cdef Plain plain_reply(const char* data, Py_ssize_t size, Py_ssize_t* length) noexcept nogil:
    """Which of the five replies to an uncontended lock's requests the data begins with, and its length.

    A shortcut for the hot path alone: two calls of hiredis less per reply.
    """
    if size >= 3 and memcmp(data, b"_\r\n", 3) == 0:
        length[0] = 3
        return NIL
    if size >= 4 and data[0] == 58 and data[2] == 13 and data[3] == 10 and (data[1] == 48 or data[1] == 49):
        length[0] = 4
        return ONE if data[1] == 49 else ZERO
    if size >= 5 and memcmp(data, b"$-1\r\n", 5) == 0:
        length[0] = 5
        return NIL
    if size >= 5 and memcmp(data, b"+OK\r\n", 5) == 0:
        length[0] = 5
        return OK
    return NOT_PLAIN


cdef object plain_object(Plain plain):
    """The reply as hiredis would parse it."""
    if plain == NIL:
        return None
    if plain == ZERO:
        return 0
    if plain == ONE:
        return 1
    return b"OK"


cdef Py_ssize_t bulk_size(const char* data, Py_ssize_t size, Py_ssize_t* at) noexcept nogil:
    """The size of the bulk string at `at`, which moves past it; -1 where there is none, or not all of it."""
    cdef Py_ssize_t place = at[0] + 1
    cdef Py_ssize_t found = 0
    if place > size or data[place - 1] != 36:  # "$"
        return -1
    while place < size and 48 <= data[place] <= 57 and found < MOST_BYTES:
        found = 10 * found + data[place] - 48
        place += 1
    if place == at[0] + 1 or found >= MOST_BYTES or size - place < found + 4:
        return -1
    if data[place] != 13 or data[place + 1] != 10 or (data[at[0] + 1] == 48 and place > at[0] + 2):
        return -1  # the parser refuses it, as it does a size that begins with 0
    at[0] = place + found + 4
    return found


cdef list message_push(const char* data, Py_ssize_t size, Py_ssize_t* length):
    """The message of a channel that the data begins with, as hiredis would parse it, and its length; None for none.

    A shortcut for the hot path alone, the message that grants a lock: hiredis takes a large part of the time from its
    arrival to the end of `acquire`.
    """
    cdef Py_ssize_t at = 17
    cdef Py_ssize_t found
    cdef object kind = b"message"
    cdef list push
    if size < 18 or memcmp(data, b">3\r\n$", 5) != 0:
        return None
    if memcmp(data + 5, b"8\r\nsmessage\r\n", 13) == 0:
        kind = b"smessage"
        at = 18
    elif memcmp(data + 5, b"7\r\nmessage\r\n", 12) != 0:
        return None
    push = [kind]
    for _ in range(2):
        found = bulk_size(data, size, &at)
        if found < 0:
            return None
        push.append(PyBytes_FromStringAndSize(data + at - 2 - found, found))
    length[0] = at
    return push


cdef bint is_answer(object push) except -1:
    """`base.is_answer` without a call of Python, in which a signal handler might run."""
    return len(push) > 0 and (push[0] == b"subscribe" or push[0] == b"ssubscribe")


cdef Py_ssize_t append_run(
    list replies, object reply, const char* data, Py_ssize_t size, Py_ssize_t length, Py_ssize_t most
) except -1:
    """Append the plain reply that the data begins with as often as it is repeated there; returns how often.

    A shortcut for batches alone, where nearly all replies are the same.

    Args:
        reply: as `plain_object` gives it.
        length: of the reply in the data.
        most: how often at most; at least one.
    """
    cdef Py_ssize_t end = min(size, length * most)
    cdef Py_ssize_t at = length
    while at < end and data[at] == data[at - length]:
        at += 1
    replies.extend([reply] * (at // length))
    return at // length


# ---- buffers ----

cdef int reserve(Buffer* buffer, Py_ssize_t more) noexcept nogil:
    """Make room for `more` bytes. Returns -1 when there is no memory."""
    cdef Py_ssize_t capacity = buffer.capacity
    cdef char* data
    if buffer.used + more <= capacity:
        return 0
    capacity = max(1024, 2 * capacity, buffer.used + more)
    data = <char*>PyMem_RawRealloc(buffer.data, capacity)
    if data == NULL:
        return -1
    buffer.data = data
    buffer.capacity = capacity
    return 0
