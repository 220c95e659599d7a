"""Tokens: the right to release a lock.

128 random bits from the operating system, behind a marker by which a waiter can tell our holder from another client's.
Redis's own page on distributed locks asks for a value that is unique and cannot be guessed. A token never stands in a
repr, a log or an exception.

Shared state: `_stock` is used by `list.pop` and `list.extend` alone, each atomic with and without the GIL.
"""

from __future__ import annotations

import os

from redislock_fast._util import fork

__all__ = ["MARK", "MARKER", "TOKEN_BYTES", "is_held_with", "is_ours", "new_token"]

MARKER = b"rlf:"

MARK = b"+"
"""Behind the token at the lock's key while somebody waits in the queue. Only tokens made here are marked."""

_BYTES = 16

TOKEN_BYTES = len(MARKER) + 2 * _BYTES

_BLOCK = 256  # tokens drawn at once: a system call a token would cost as much as encoding the request

_stock: list[bytes] = []
fork.on_fork(_stock.clear)


def new_token() -> bytes:
    """A token that nobody has had: `MARKER` and 32 hexadecimal digits."""
    try:
        return _stock.pop()
    except IndexError:
        digits = os.urandom(_BYTES * _BLOCK).hex().encode()
        fresh = [MARKER + digits[at : at + 2 * _BYTES] for at in range(0, len(digits), 2 * _BYTES)]
        token = fresh.pop()
        _stock.extend(fresh)
        return token


def is_ours(token: bytes) -> bool:
    """Whether this library has made the token, so that its holder hands the lock over to who waits in the queue."""
    return len(token) == TOKEN_BYTES and token.startswith(MARKER)


def is_held_with(value: bytes | None, token: bytes) -> bool:
    """Whether a lock whose key has this value is held with this token. A caller's own token is never marked."""
    return value == token or (value == token + MARK and is_ours(token))
