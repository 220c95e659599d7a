"""The keys of a model of a server: values, sorted sets and hashes that end by a clock set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from redislock_fast._pipe.base import Reply


@dataclass(frozen=True)
class Entry:
    """The value at a key.

    Attributes:
        value: its string; None for a value of another type.
        ends_at_ms: the last millisecond at which it is there; None where it does not expire.
        items: the members of a sorted set by score, or the fields of a hash.
    """

    value: bytes | None
    ends_at_ms: int | None = None
    items: dict[bytes, Any] = field(default_factory=dict)


class Connection:
    """One client's connection.

    Attributes:
        denied: as `Model.denied`, for the user of this connection.
        number: the server's for it.
        inbox: the pushes that are on their way to the client, oldest first.
        channels: what it has subscribed to.
        deaf: whether all pushes are dropped on the way.
        resp3: whether it takes pushes between replies, once HELLO was answered.
    """

    def __init__(self, denied: frozenset[str], number: int = 0) -> None:
        self.denied = denied
        self.number = number
        self.inbox: list[list[Reply]] = []
        self.channels: set[object] = set()
        self.deaf = False
        self.resp3 = False
        self.tracking = False
        self.caching = False

    def push(self, message: list[Reply]) -> None:
        """Let a push leave."""
        if self.resp3 and not self.deaf:
            self.inbox.append(message)


class Keys:
    """The keys of one server.

    Attributes:
        now_us: the server's clock, set by hand.
        entries: its keys; those that have ended are removed when they are looked at.
    """

    def __init__(self) -> None:
        self.now_us = 0
        self.entries: dict[bytes, Entry] = {}
        self._tracked: dict[bytes, list[Connection]] = {}

    @property
    def now_ms(self) -> int:
        """Its clock in milliseconds, as keys expire by it."""
        return self.now_us // 1000

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self.now_us = now_ms * 1000

    def entry(self, key: object) -> Entry | None:
        """The entry at a key now."""
        assert isinstance(key, bytes)
        found = self.entries.get(key)
        if found is not None and found.ends_at_ms is not None and self.now_us // 1000 > found.ends_at_ms:
            self.remove(key)
            return None
        return found

    def put(self, key: bytes, value: bytes | None, ttl_ms: int | None = None) -> None:
        """Set a key to a value; None for a value that is no string."""
        self._write(key, Entry(value, None if ttl_ms is None else self.now_ms + ttl_ms))

    def remove(self, key: bytes) -> None:
        """Delete a key."""
        if self.entries.pop(key, None) is not None:
            self._changed(key)

    def _write(self, key: bytes, entry: Entry) -> None:
        self.entries[key] = entry
        self._changed(key)

    def _changed(self, key: bytes) -> None:
        for connection in self._tracked.pop(key, ()):
            connection.push([b"invalidate", [key]])

    def _items(self, key: bytes) -> dict[bytes, Any]:
        """The members of a sorted set, or the fields of a hash, to be read."""
        entry = self.entry(key)
        return {} if entry is None else entry.items

    def _items_to_fill(self, key: bytes) -> dict[bytes, Any]:
        entry = self.entry(key)
        if entry is None:
            entry = self.entries[key] = Entry(None)
        return entry.items

    def _keep(self, key: bytes, kept_ms: int) -> None:
        self.entries[key] = replace(self.entries[key], ends_at_ms=self.now_ms + kept_ms)

    def _remove_item(self, key: bytes, item: bytes) -> None:
        items = self._items(key)
        items.pop(item, None)
        if not items:
            self.entries.pop(key, None)

    def _pexpire(self, key: bytes, entry: Entry, ttl_ms: object) -> None:
        assert isinstance(ttl_ms, int)
        if ttl_ms > 0:
            self._write(key, replace(entry, ends_at_ms=self.now_ms + ttl_ms))
        else:
            self.remove(key)
