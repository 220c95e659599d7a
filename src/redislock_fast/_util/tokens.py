"""Tokens: the right to release a lock.

A token is 128 random bits from the operating system (Redis's page on distributed locks asks for a value that is unique
and cannot be guessed), behind a marker by which a waiter tells our holder from another client's. A token never appears
in a repr, a log or an exception.

Thread safety: any thread uses `_stock`, by `list.pop` and `list.extend` alone, atomic with and without the GIL.
"""

from __future__ import annotations

import os

from redislock_fast._util import fork

__all__ = ["CONTENDED_FLAG", "MARKER", "TOKEN_BYTES", "is_held_with", "is_ours", "new_token", "without_flag"]

MARKER = b"rlf:"

CONTENDED_FLAG = b"+"
"""The contended flag: follows a token that was made here in the lock's value while a waiter is in the queue."""

_BYTES = 16

TOKEN_BYTES = len(MARKER) + 2 * _BYTES

_BLOCK = 256  # tokens drawn at once: a system call for each would cost as much as encoding a request

_stock: list[bytes] = []
fork.on_fork(_stock.clear)


def new_token() -> bytes:
    """A new token: `MARKER` and 32 hexadecimal digits."""
    try:
        return _stock.pop()
    except IndexError:
        digits = os.urandom(_BYTES * _BLOCK).hex().encode()
        fresh = [MARKER + digits[at : at + 2 * _BYTES] for at in range(0, len(digits), 2 * _BYTES)]
        token = fresh.pop()
        _stock.extend(fresh)
        return token


def is_ours(token: bytes) -> bool:
    """Whether this library has made the token: then its holder hands the lock over to the first waiter."""
    return len(token) == TOKEN_BYTES and token.startswith(MARKER)


def is_held_with(value: bytes | None, token: bytes) -> bool:
    """Whether a lock with this value is held with this token. A caller's own token never gets the contended flag."""
    return value == token or (value == token + CONTENDED_FLAG and is_ours(token))


def without_flag(value: bytes) -> bytes:
    """The token in a lock's value."""
    token = value[:TOKEN_BYTES]
    return token if value == token + CONTENDED_FLAG and is_ours(token) else value
