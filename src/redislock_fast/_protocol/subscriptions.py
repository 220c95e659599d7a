"""On which channels one connection hears about locks, and whether it may."""

from __future__ import annotations

from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.keys import channel_beside

__all__ = ["MOST_KEYS", "Subscriptions"]

MOST_KEYS = 1000
"""For how many locks a connection remembers something: with more, all are forgotten."""


class Subscriptions:
    """The channels of one connection.

    Who may touch what: any thread, by atomic methods of dict and set alone.

    Args:
        dialect: what the server of the connection understands.
        listener: names the connection; no other connection to any server has the same.

    Attributes:
        publish: the command by which other connections send messages to this one.
        subscribe: the command by which this connection listens.
    """

    def __init__(self, dialect: Dialect, listener: bytes) -> None:
        self.publish = b"spublish" if dialect.sharded else b"publish"
        self.subscribe = b"SSUBSCRIBE" if dialect.sharded else b"SUBSCRIBE"
        self._listener = listener
        self._channel = None if dialect.sharded else b"rlf:" + listener
        self._subscribed: dict[bytes, bool] = {}  # by channel: whether that was allowed
        self._forbidden: set[bytes] = set()  # keys of locks whose queues this connection may not use

    def channel_for(self, key: bytes) -> bytes:
        """The channel of this connection's messages about this lock, once it has subscribed."""
        return self._channel or channel_beside(key, self._listener)

    def channel_of(self, key: bytes) -> bytes | None:
        """`channel_for`; None where the connection may not listen there, or not use the queue."""
        channel = self._channel or channel_beside(key, self._listener)
        return channel if self._subscribed.get(channel) and key not in self._forbidden else None

    def has_tried(self, key: bytes) -> bool:
        """Whether the connection has tried to subscribe to the lock's channel."""
        return (self._channel or channel_beside(key, self._listener)) in self._subscribed

    def note_subscription(self, channel: bytes, allowed: bool) -> None:
        """The connection has tried to subscribe."""
        self._subscribed[channel] = allowed

    def note_end(self, channel: bytes) -> None:
        """The server has ended the subscription."""
        self._subscribed.pop(channel, None)

    def forbid(self, key: bytes) -> None:
        """The connection may not use this lock's queue."""
        if len(self._forbidden) >= MOST_KEYS:
            self._forbidden.clear()
        self._forbidden.add(key)
