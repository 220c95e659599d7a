"""Tokens: the right to release a lock.

A token is a marker, by which a waiter tells our holder from another client's, an identifier, a kind, and 80 random bits
from the operating system (Redis's page on distributed locks asks for a value that is unique and cannot be guessed):

    rlf: | 11 hexadecimal digits: identifier | 1: kind | 20: random

The identifier names the connection on which the request for the lock leaves: its first 8 digits, the stem, are those of
all connections of one process to one server, one after the other. It is no secret; a token never appears in a repr, a
log or an exception.

Thread safety: any thread uses `TokenSource._stock`, by `list.pop` and `list.extend` alone, atomic with and without the
GIL. `TokenSource.identifier` changes in a forked child, before it draws a token, and while a connection is made.
"""

from __future__ import annotations

import hashlib
import os

from redislock_fast._util import fork

MARKER = b"rlf:"

CONTENDED_FLAG = b"+"
"""The contended flag: follows a token that was made here in the lock's value while a waiter is in the queue."""

IDENTIFIER_BYTES = 11

_STEM_BYTES = 8
_NUMBERS = 16 ** (IDENTIFIER_BYTES - _STEM_BYTES)

_RANDOM_BYTES = 10
_DIGITS = 2 * _RANDOM_BYTES

_KIND = slice(len(MARKER) + IDENTIFIER_BYTES, len(MARKER) + IDENTIFIER_BYTES + 1)

PLAIN = b"0"
"""The kind of a lock's token."""

LISTENS = b"1"
"""The kind of a lock's token whose holder gets the messages of waiters that want the lock."""

PERMIT = b"2"
"""The kind of the token of a semaphore's permit: by it, operations know that the key is no lock's."""

TOKEN_BYTES = _KIND.stop + _DIGITS

_ID_DIGITS = 12

_BLOCK = 256  # tokens drawn at once: a system call for each would cost as much as encoding a request


class TokenSource:
    """Makes the tokens of one connection.

    Args:
        is_of_connection: whether the identifier names a connection that its server lists, or is to name the next one.
            Else its first digit is 0.

    Attributes:
        identifier: 11 hexadecimal digits; no other source in any process has the same.
    """

    __slots__ = ("__weakref__", "_is_of_connection", "_stock", "identifier")

    def __init__(self, is_of_connection: bool = True) -> None:
        self._is_of_connection = is_of_connection
        self.forget()
        fork.forget_in_child(self)

    def new_token(self, kind: bytes = PLAIN) -> bytes:
        """A new token of this kind: `PLAIN`, `LISTENS` or `PERMIT`."""
        try:
            token = self._stock.pop()
        except IndexError:
            token = self._draw()
        return token if kind is PLAIN else token[: _KIND.start] + kind + token[_KIND.stop :]

    def _draw(self) -> bytes:
        stock = self._stock  # first: a signal handler may fork, and the child must not use what is drawn here
        digits = os.urandom(_RANDOM_BYTES * _BLOCK).hex().encode()
        begin = MARKER + self.identifier + PLAIN
        fresh = [begin + digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        token = fresh.pop()
        stock.extend(fresh)
        return token

    def disown(self) -> None:
        """Have an identifier that names no connection: the server of the connection does not list it."""
        self._is_of_connection = False
        self.forget()

    def successor(self) -> TokenSource:
        """The source of the next connection to the same server."""
        source = TokenSource(self._is_of_connection)
        number = (int(self.identifier[_STEM_BYTES:], 16) + 1) % _NUMBERS
        source.identifier = stem_of(self.identifier) + b"%03x" % number
        return source

    def forget(self) -> None:
        """In a forked child: leave tokens and identifier to the parent."""
        first = 1 + os.urandom(1)[0] % 15 if self._is_of_connection else 0
        self.identifier = b"%x" % first + os.urandom(IDENTIFIER_BYTES).hex().encode()[: IDENTIFIER_BYTES - 1]
        self._stock: list[bytes] = []


_of_process = TokenSource(is_of_connection=False)


def new_token() -> bytes:
    """A new token that names no connection."""
    return _of_process.new_token()


def identifier_of(token: bytes) -> bytes:
    """The identifier in a token that `is_ours`, or in a lock's value that begins with one."""
    return token[len(MARKER) : _KIND.start]


def stem_of(identifier: bytes) -> bytes:
    """What the identifiers of all connections of one process to one server have in common."""
    return identifier[:_STEM_BYTES]


def is_of_connection(identifier: bytes) -> bool:
    """Whether an identifier names a connection."""
    return not identifier.startswith(b"0")


def listens(token: bytes) -> bool:
    """Whether the token's holder listens for messages of waiters that want the lock."""
    return token[_KIND] == LISTENS and is_ours(token)


def is_permit(token: bytes) -> bool:
    """Whether it is the token of a semaphore's permit."""
    return token[_KIND] == PERMIT and is_ours(token)


def kind_of(token: bytes) -> bytes:
    """The kind of the token that takes the place of this one, which a waiter cannot use any more."""
    return PERMIT if is_permit(token) else PLAIN


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


def token_id_of(token: bytes) -> str:
    """A name for a token by which nobody can release: one for each holding, as the token itself."""
    return hashlib.sha256(token).hexdigest()[:_ID_DIGITS]
