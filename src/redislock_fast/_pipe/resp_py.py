"""RESP for the pipes in Python, the readable twin of `resp.pyx`: encodes requests, and has hiredis parse replies."""

from __future__ import annotations

from typing import Any

import hiredis

from redislock_fast._pipe.base import Args, Bulk


def encode(args: Args) -> bytes:
    """The bytes of one request.

    Args:
        args: the command's words: bytes, str (sent as UTF-8) or int (sent in decimal).

    Returns:
        A RESP array of bulk strings.

    Raises:
        TypeError: for a word of another type.
        OverflowError: for an int beyond 64 bits.
    """
    parts = [b"*%d\r\n" % len(args)]
    for word in args:
        if type(word) is bytes:
            text = word
        elif type(word) is int:
            if not -(1 << 63) <= word < 1 << 63:
                raise OverflowError("an int in a request has at most 64 bits")
            text = b"%d" % word
        elif type(word) is str:
            text = word.encode()
        else:
            raise TypeError(f"a request is made of bytes, str and int, not {type(word).__name__}")
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


def joined(requests: list[Args] | Bulk) -> tuple[bytes, int]:
    """The bytes of many requests, and their number."""
    one_by_one = requests.requests() if isinstance(requests, Bulk) else requests
    if not one_by_one:
        raise ValueError("no requests")
    return b"".join(map(encode, one_by_one)), len(one_by_one)


def next_reply(parser: hiredis.Reader) -> Any:
    """The next reply or push that the parser has; NOT_ENOUGH for none.

    Raises:
        hiredis.ProtocolError: the bytes are not RESP, or a reply that Python cannot hold.
    """
    try:
        return parser.gets()
    except Exception as error:  # TypeError for a map whose key is a list, MemoryError for an array of billions
        raise hiredis.ProtocolError(str(error)) from None
