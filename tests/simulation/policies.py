"""What the model's scripts of the key queue ask about the key: of a lock, or of a semaphore.

`lua/lock_policy.lua`, `lua/permits.lua` and `lua/permit_policy.lua`, written a second time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from redislock_fast._protocol.queue import WANTED
from redislock_fast._util.tokens import identifier_of, is_held_with, is_ours, listens
from tests.simulation.keyspace import Entry

if TYPE_CHECKING:
    from tests.simulation.model import Model

_MOST_PURGED = 50


class WrongType(Exception):
    """The key is of another kind."""


class LockPolicy:
    """A lock, while one script runs.

    Args:
        server: the model.
        key: the lock.
        value: its value; None: it is free.
    """

    def __init__(self, server: Model, key: bytes, value: bytes | None) -> None:
        self.server = server
        self.key = key
        self.value = value
        self.room = 1

    def held(self, token: bytes) -> bytes | None:
        """What a holder with this token is told; None for none."""
        return self.value if self.value is not None and is_held_with(self.value, token) else None

    def holds_beside(self, token: bytes) -> bool:  # of a lock, the value says that
        """Whether a waiter that is not in the queue holds nonetheless."""
        return False

    def is_free(self, terms: Any) -> bool:  # on any terms
        """Whether the caller can hold if nobody waits before it."""
        return self.value is None

    has_ended = is_free

    def admit(self, token: bytes, terms: Any) -> bytes | None:
        """Have a waiter hold. Returns what it is told; None where it may not."""
        self.room = 0
        self.value = token + b"+"
        self.server.put(self.key, self.value, terms or None)
        return self.value

    def begin_release(self, token: bytes) -> None:
        """Begin a release that hands over."""

    def remove(self, token: bytes) -> int:  # whoever holds
        """End the holding without a hand-over."""
        self.value, self.room = None, 1
        self.server.remove(self.key)
        return 1

    def set_free(self) -> None:
        """Note that nobody waits for what is free."""
        self.server.remove(self.key)

    def next_end_ms(self) -> int:
        """In how many milliseconds it is free at the latest; below 0: never."""
        entry = self.server.entry(self.key)
        assert entry is not None
        return -1 if entry.ends_at_ms is None else entry.ends_at_ms - self.server.now_ms

    def refuse(self, publish: bytes, channel: bytes, tells: bool) -> tuple[int, bytes]:
        """Have the holder hand over. Returns the verdict of wait.lua and the lock's value."""
        server, value = self.server, self.value
        assert value is not None
        holder = value.removesuffix(b"+")
        if not is_ours(holder):
            return 2, value
        flagged = holder + b"+"
        if value != flagged:
            server._write(self.key, replace(server.entries[self.key], value=flagged))
        if tells and listens(holder) and "PUBLISH" not in server._client.denied:
            identifier = identifier_of(holder)
            server._publish(publish, channel[: -len(identifier)] + identifier, WANTED + self.key)
        return 0, flagged


class PermitPolicy:
    """The permits of a semaphore, while one script runs.

    Args:
        server: the model.
        key: the semaphore: its permits by token, each with its end in the server's milliseconds.
        limit: the key of the operator's limit.
    """

    def __init__(self, server: Model, key: bytes, limit: bytes) -> None:
        self.server = server
        self.key = key
        self.room: float = 0
        self._limit = limit

    @property
    def permits(self) -> dict[bytes, int]:
        """The permits, to be read.

        Raises:
            WrongType: the key is no semaphore's.
        """
        self.check_kind()
        return self.server._items(self.key)

    def check_kind(self) -> None:
        """Look at the kind of the key.

        Raises:
            WrongType: it is no semaphore's.
        """
        entry = self.server.entry(self.key)
        if entry is not None and (entry.value is not None or not entry.items):
            raise WrongType

    @property
    def is_resized(self) -> bool:
        """Whether an operator has set the limit."""
        return self.server.entry(self._limit) is not None

    def limit_for(self, own: int) -> int:
        """The operator's limit, or else the caller's."""
        entry = self.server.entry(self._limit)
        return own if entry is None or entry.value is None else int(entry.value)

    def set_limit(self, limit: int | None) -> None:
        """Set or remove the operator's limit."""
        if limit is None:
            self.server.remove(self._limit)
        else:
            self.server.put(self._limit, b"%d" % limit)

    def count_room(self, most: int) -> int:
        """Count how many more may hold where so many may."""
        permits, now_ms = self.permits, self.server.now_ms
        if len(permits) >= most:
            ended = sorted((ends_at, token) for token, ends_at in permits.items() if ends_at < now_ms)
            for _, token in ended[:_MOST_PURGED]:
                self.server._remove_item(self.key, token)
            if len(ended) >= _MOST_PURGED:
                return most - sum(ends_at >= now_ms for ends_at in self.permits.values())
        return most - len(self.permits)

    def set_end(self, token: bytes, ttl_ms: int) -> None:
        """Set the end of a permit, unless that is later."""
        entry = self.server.entry(self.key) or Entry(None)
        ends_at = max(self.server.now_ms + ttl_ms, entry.items.get(token, 0))
        last = max(ends_at, entry.ends_at_ms or 0)
        self.server._write(self.key, Entry(None, last, {**entry.items, token: ends_at}))

    def held(self, token: bytes) -> bytes | None:
        """What a holder with this token is told; None for none."""
        return token + b"+" if self.permits.get(token, 0) >= self.server.now_ms else None

    def holds_beside(self, token: bytes) -> bool:
        """Whether a waiter that is not in the queue holds nonetheless."""
        return self.held(token) is not None

    def is_free(self, terms: bytes) -> bool:
        """Whether the caller can hold if nobody waits before it."""
        self.room = self.count_room(self.limit_for(self._words(terms)[1]))
        return self.room > 0

    def has_ended(self, terms: bytes) -> bool:
        """The same, for a caller that only wants to leave."""
        try:
            return self.is_free(terms)
        except WrongType:
            return False

    @staticmethod
    def _words(terms: bytes) -> tuple[int, int]:
        ttl_ms, own = terms.split(b"/")
        return int(ttl_ms), int(own)

    def admit(self, token: bytes, terms: bytes) -> bytes | None:
        """Have a waiter hold. Returns what it is told; None where its limit is reached."""
        ttl_ms, own = self._words(terms)
        if self.count_room(self.limit_for(own)) <= 0:
            self.room = 0
            return None
        self.set_end(token, ttl_ms)
        self.room -= 1
        return token + b"+"

    def remove(self, token: bytes) -> int:
        """End the holding without a hand-over. Returns how many permits there were."""
        removed = int(token in self.permits)
        self.server._remove_item(self.key, token)
        self.room += removed
        return removed

    begin_release = remove

    def set_free(self) -> None:
        """Note that nobody waits for what is free."""

    def make_room(self) -> None:
        """Let each waiter's limit say how many more may hold."""
        self.room = math.inf

    def next_end_ms(self) -> int:
        """In how many milliseconds the next permit ends; below 0: none does."""
        permits = self.permits
        return max(min(permits.values()) - self.server.now_ms, 0) if permits else -1

    def refuse(self, *_: object) -> tuple[int, bytes]:
        """Returns the verdict of wait.lua, and a value of no meaning."""
        return 0, b""


Policy: TypeAlias = LockPolicy | PermitPolicy
