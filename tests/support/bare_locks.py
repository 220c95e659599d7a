"""A lock that has steps and settings alone: the test drives it, on a transport of its own.

Rules: no server, no client, and no driver. Nothing here asserts what a lock should do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redislock_fast._lease.owner import SharedOwner
from redislock_fast._linger.key_cache import CachedKey, KeyCache, KeyLease, LocalWaiter
from redislock_fast._linger.procedures import Linger
from redislock_fast._linger.threads import ThreadLingering
from redislock_fast._procedures.lock import LockBase

KEY = b"name"
TOKEN = b"rlf:" + b"7" * 32


class BareLock(LockBase):
    """A lock whose client is its transport, and which has one owner. No hook is overridden."""

    _report_loss = _report_former_loss = _renewer = _on_wanted_caller = _class_hooks = None  # type: ignore[assignment]  # of locks with other options

    _linger = Linger(ThreadLingering)

    @staticmethod
    def _transport_of(client: Any) -> Any:
        return client

    def _new_owner(self) -> Any:
        return SharedOwner()

    def _has_own_hooks(self) -> bool:
        return True

    def _is_overridden(self, name: str) -> bool:
        return False


class Waiting(LocalWaiter):
    """A local waiter that counts how often it is woken."""

    def __init__(self) -> None:
        super().__init__()
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Kept:
    """The keys of one server, as a transport has them: nothing is sent.

    Attributes:
        given_up: the leases that were given up, in order, each with whether it is known to be wanted.
        watches: how often the keys began to be watched.
        when_given_up: called with each lease that is given up.
    """

    def __init__(self) -> None:
        self.key_cache = KeyCache(self._give_up, self._watch, Waiting)
        self.lingering = self.connection = self.pipe = self
        self.registry: Any = self
        self.given_up: list[tuple[KeyLease, bool]] = []
        self.watches = 0
        self.when_given_up: Callable[[KeyLease], object] = lambda _: None

    def _give_up(self, leases: list[KeyLease], is_wanted: bool) -> None:
        for lease in leases:
            self.given_up.append((lease, is_wanted))
            self.when_given_up(lease)

    def _watch(self) -> None:
        self.watches += 1

    broken = False
    on_wanted: Any = None
    on_give_up: Any = None

    def server_of(self, _: bytes) -> Kept:
        """The transport of the server that has this key."""
        return self

    def channel_of(self, _: bytes) -> bytes:
        """Where the connection hears of this key."""
        return b"channel"

    @property
    def encoding(self) -> Any:
        """What makes the keys."""
        return self

    def key_of(self, name: Any) -> bytes:
        """The key of a lock's name."""
        return name if isinstance(name, bytes) else str(name).encode()

    def is_contended(self, _key: bytes, _is_patient: bool) -> bool:
        """Nobody is known to wait."""
        return False

    def new_token(self, _key: bytes, _kind: bytes) -> bytes:
        """The one token."""
        return TOKEN

    def keep(self, lease: KeyLease, idle_until: float) -> CachedKey:
        """Let a key linger that the server has granted. Returns it."""
        cached = self.key_cache.of(lease.key)
        cached.lease = lease
        cached.idle_until = idle_until
        if not self.key_cache.is_watched:
            self.key_cache.watch()
        return cached


def lease_of(
    now: float, timeout_s: float = 10.0, linger_s: float = 1.0, registry: object = "registry", token: bytes = TOKEN
) -> KeyLease:
    """What the server has granted in reply to a request that left now."""
    ttl_ms, linger_ms = round(1000 * timeout_s), round(1000 * linger_s)
    return KeyLease(KEY, token, now + timeout_s + linger_s, ttl_ms, linger_ms, registry, now)
