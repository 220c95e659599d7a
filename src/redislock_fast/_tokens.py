"""Tokens: the right to release a lock.

128 random bits from the operating system, behind a marker by which a waiter can tell our holder from another client's.
Redis's own page on distributed locks asks for a value that is unique and cannot be guessed. A token never stands in a
repr, a log or an exception.

Shared state: `_stock` is used by `list.pop` and `list.extend` alone, each atomic with and without the GIL.
"""

from __future__ import annotations

import os

from redislock_fast import _process

__all__ = ["MARKER", "new_token"]

MARKER = b"rlf:"

_BYTES = 16
_BLOCK = 256  # tokens drawn at once: a system call a token would cost as much as encoding the request

_stock: list[bytes] = []
_process.on_fork(_stock.clear)


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
