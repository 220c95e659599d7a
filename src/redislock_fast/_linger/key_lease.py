"""What a cached key consists of: the lease that the server has granted, and the callers that wait for the local lock.

See `key_cache.py`. Thread safety: the caller that has the local lock of its key changes a `KeyLease`; any thread calls
`close` and `let_go`. A `LocalWaiter` is decided once, by one atomic method of a dict: it gets the local lock, or it
gives up.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from redislock_fast._lease.metrics import report
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.times import clock, drift_s

if TYPE_CHECKING:
    from redislock_fast._lease.metrics import Metrics

__all__ = ["LONGEST_KEPT_S", "KeyLease", "LocalWaiter"]

logger = logging.getLogger(__name__)

LONGEST_KEPT_S = 1.0
"""After how long a key is given up though no caller was heard to want it: pollers cannot say so."""


def _lead_s(ttl_ms: int) -> float:
    """How long before the end of a key, less its margin, a caller with this ttl may take it.

    Its lease, less the margin for drifting clocks, ends before the key does, less the key's own margin.
    """
    ttl_s = ttl_ms / 1000
    return ttl_s - drift_s(ttl_s)


class KeyLease:
    """A key that the server has granted to this process.

    Args:
        key: the lock's name on the wire.
        token: the key's token.
        expires_at: when the key expires on the server at the earliest, in the clock's seconds.
        ttl_ms: the ttl of the lock's holder, in milliseconds.
        linger_ms: for how much longer the key lives, in milliseconds.
        registry: the waiter registry that hears when the key is wanted; None: no registry does, so it is not kept.
        began_at: when the key was granted, in the clock's seconds.

    Attributes:
        keep_until: until when a release may keep the key, in the clock's seconds.
        take_until: until when a caller with the same ttl may take the key in memory, in the clock's seconds.
        reports: what gets a loss that is found while the key lingers, and the lock's name for it; None: nothing does.
        fences: the fencing numbers that its holders in this process get, one after the other; None: none are known.
        releases: how often a release of the key has begun: once, or again after an interrupt. No caller takes it then.
    """

    __slots__ = (
        "_lead_s",
        "_margin_s",
        "began_at",
        "deadline",
        "expires_at",
        "fences",
        "keep_until",
        "key",
        "registry",
        "releases",
        "reports",
        "take_until",
        "token",
        "ttl_ms",
    )

    def __init__(
        self,
        key: bytes,
        token: bytes,
        expires_at: float,
        ttl_ms: int,
        linger_ms: int,
        registry: object,
        began_at: float,
    ) -> None:
        self.key = key
        self.token = token
        self.fences: Sequence[int] | None = None
        self.reports: tuple[Metrics, str | bytes] | None = None
        self.releases = 0
        self.ttl_ms = ttl_ms
        self.registry = registry
        self.began_at = began_at
        self.keep_until = -math.inf if registry is None else began_at + LONGEST_KEPT_S
        self._margin_s, self._lead_s = drift_s((ttl_ms + linger_ms) / 1000), _lead_s(ttl_ms)
        self.set_end(expires_at)

    def set_end(self, expires_at: float) -> None:
        """Note when the key expires on the server at the earliest, in the clock's seconds."""
        self.expires_at = expires_at
        self.deadline = expires_at - self._margin_s
        self.take_until = self.deadline - self._lead_s
        if self.releases:  # looked at last: `close` may come meanwhile
            self._end_taking()

    def close(self) -> None:
        """Have no caller take or keep the key any more: it is about to be released on the server."""
        self.releases += 1
        self._end_taking()

    def _end_taking(self) -> None:
        self.keep_until = self.take_until = self.deadline = -math.inf

    def take_until_for(self, ttl_ms: int) -> float:
        """Until when a caller with this ttl may take the key."""
        return self.take_until if ttl_ms == self.ttl_ms else self.deadline - _lead_s(ttl_ms)

    def take_fence(self) -> int | None:
        """The fencing number of the next holder. The key is not kept after the last one."""
        if not self.fences:
            return None
        fence, self.fences = self.fences[0], self.fences[1:]
        if not self.fences:
            self.let_go()
        return fence

    def note_loss(self) -> None:
        """Log that the key was gone before its time while it lingered, and report it for metrics.

        Not where its release has begun twice: the first one may have found it.
        """
        now = clock()
        if now < self.expires_at and self.releases < 2:
            logger.warning("The lock %s was lost while its key lingered.", shown(self.key))
            if self.reports is not None:
                metrics, name = self.reports
                report((metrics,), "record_loss", name, now - self.began_at, LossReason.DELETED)

    def let_go(self) -> None:
        """Have the next release give the key up."""
        self.keep_until = -math.inf


class LocalWaiter:
    """A caller that waits for a local lock.

    Attributes:
        since: since when, in the clock's seconds; None before, and once that was logged as a long wait.
    """

    __slots__ = ("_outcome", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self._outcome: dict[int, object] = {}

    @property
    def is_given(self) -> bool:
        """Whether the caller has the local lock."""
        return self._outcome.get(0) is not None

    def give(self) -> bool:
        """Give the caller the local lock, and wake it. Returns False where it has given up, or has had it before."""
        gift = object()
        if self._outcome.setdefault(0, gift) is not gift:
            return False
        self.wake()
        return True

    def give_up(self) -> bool:
        """Stop waiting. Returns False where the caller has got the local lock."""
        return self._outcome.setdefault(0, None) is None

    @abstractmethod
    def wake(self) -> None:
        """Let the caller look whether it has the local lock. From any thread; never waits."""
