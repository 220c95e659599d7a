"""How fast a server has lately answered the majority rounds of Redlocks: says whether to ask it, or to wait for it.

A `ServerHealth` belongs to a server transport, and so to all Redlocks of its client in this process or event loop.

Thread safety: any thread assigns an attribute as a whole. `unanswered` is changed by atomic methods of set alone, and
replaced under `mutex`, so that one caller alone gets what was there. All other attributes are hints.
"""

from __future__ import annotations

from typing import Any

from redislock_fast._lease.prolonging import mutex
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._transport.base import ServerTransport
from redislock_fast._util.times import MOST_FAILURES

__all__ = ["ServerHealth", "health_of"]

_MOST_UNANSWERED = 64
_CHANCE_S = 0.0005
_FADING = 0.998  # in a round: a wait of a millisecond fades after 350 rounds
_BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 1.0


class ServerHealth:
    """How fast a server has lately answered majority rounds.

    Attributes:
        capabilities: of the connection that was used last; None before the first.
        silent: a wait for the server has failed, and it has not answered since.
        slowness: how long it was waited for lately, in whole half milliseconds.
        asked: the votes of an event loop that are to be told when the connection breaks.
        unanswered: the votes without a verdict for which no caller waits any more.
        trouble: why there was no connection at the last try; None while it is tried, and once there is one.
        opening: the thread or task that connects; None before the first.
        retry_at: when to try again, in the clock's seconds.
    """

    def __init__(self) -> None:
        self.opening: Any = None
        self.trouble: Exception | None = None
        self.retry_at = 0.0
        self._failures = 0

        self.capabilities: Capabilities | None = None
        self.silent = False
        self.slowness = 0
        self._waited_s = 0.0
        self.asked: set[Any] = set()
        self.unanswered: set[Any] = set()

    def use_connection(self, capabilities: Capabilities) -> set[Any] | None:
        """Begin anew on another connection. Its capabilities identify it: a reference would keep the old one alive.

        Returns:
            What is `unanswered` on the former one, for one caller alone; None where another one was faster, or it is
            the same connection.
        """
        asked: set[Any] = set()
        unanswered: set[Any] = set()
        with mutex.lock:
            if capabilities is self.capabilities:
                return None
            unanswered, self.unanswered = self.unanswered, unanswered
            self.asked, self.silent, self.slowness, self._waited_s = asked, False, 0, 0.0
            self.capabilities = capabilities  # last: others go on once they see it
        return unanswered

    def note_wait(self, waited_s: float | None) -> None:
        """Note for how long the server was waited for in a round, in seconds; None: its vote was not needed.

        Differences below `_CHANCE_S` are chance and do not count: the server that is asked first is waited for first.
        Without a wait the figure fades, or one outlier would count forever.
        """
        self._waited_s = self._waited_s * _FADING if waited_s is None else waited_s
        self.slowness = int(self._waited_s / _CHANCE_S)

    @property
    def is_new(self) -> bool:
        """Whether there was no connection yet, and no wait for one has failed."""
        return self.capabilities is None and not self._failures and not self.silent

    @property
    def is_full(self) -> bool:
        """Whether the server owes more replies than one that keeps up."""
        return len(self.unanswered) >= _MOST_UNANSWERED

    def backs_off(self, now: float) -> bool:
        """Whether the last failure to connect is too recent for another try."""
        return self.trouble is not None and now < self.retry_at

    def connected(self) -> None:
        """There is a connection."""
        self.trouble = None
        self._failures = 0

    def failed(self, trouble: Exception, now: float) -> None:
        """No connection could be made."""
        self.retry_at = now + min(_BACK_OFF_S * 2**self._failures, _LONGEST_BACK_OFF_S)
        self._failures = min(self._failures + 1, MOST_FAILURES)
        # Without its traceback: redis-py's frames and its errors keep each other alive.
        self.trouble = trouble.with_traceback(None)


def health_of(server: ServerTransport[Any]) -> ServerHealth:
    """How fast the server of this transport has answered."""
    kept = server.kept_by_wings
    health: ServerHealth = kept.get(ServerHealth) or kept.setdefault(ServerHealth, ServerHealth())
    return health
