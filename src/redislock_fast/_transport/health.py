"""How a server has kept up with the rounds of Redlocks lately: whether to ask it, and whom to wait for first.

A `Standing` belongs to a server's channel, and so to all Redlocks of that client in this process (or loop).

Who may touch what: its attributes are hints, each assigned as a whole by anybody; `owed` is used by atomic methods of
set alone.
"""

from __future__ import annotations

from typing import Any

from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._util.times import MOST_FAILURES

__all__ = ["Standing"]

_MOST_OWED = 64
_CHANCE_S = 0.0005
_FADING = 0.998  # in a round: who has kept a round waiting for a millisecond is tried again after 350
_BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 1.0


class Standing:
    """How a server has kept up with rounds lately.

    Attributes:
        dialect: of the connection that was met last; None before the first.
        silent: it was waited for in vain, and has not answered since.
        slowness: how long it was waited for lately, in whole half milliseconds.
        asked: ballots that a loop is to tell when the connection breaks.
        owed: ballots without a verdict for which nobody waits any more.
        trouble: why there was no connection when it was last tried; None while it is tried, and since there is one.
        opening: who connects; None where nobody has yet.
        retry_at: when to try again, in the clock's seconds.
    """

    def __init__(self) -> None:
        self.opening: Any = None
        self.trouble: Exception | None = None
        self.retry_at = 0.0
        self._failures = 0
        self._renew(None)

    def meet(self, dialect: Dialect) -> bool:
        """Begin anew if the connection is another one, told by its dialect: nothing here may keep the old one alive."""
        if dialect is self.dialect:
            return False
        self._renew(dialect)
        return True

    def _renew(self, dialect: Dialect | None) -> None:
        self.dialect: Dialect | None = dialect
        self.silent = False
        self.slowness = 0
        self._waited_s = 0.0
        self.asked: set[Any] = set()
        self.owed: set[Any] = set()

    def note_wait(self, waited_s: float | None) -> None:
        """Note for how long it was waited for in a round, in seconds; None: it was not needed.

        Who is the first to answer among those that answer soon is chance, and who is asked first is to be heard first:
        to look at others first, for such a chance, made a Redlock on loopback 1.15 times slower. What nobody has waited
        for fades, or one outlier would count for ever.
        """
        self._waited_s = self._waited_s * _FADING if waited_s is None else waited_s
        self.slowness = int(self._waited_s / _CHANCE_S)

    @property
    def is_new(self) -> bool:
        """Whether it has not been met yet, and nobody has waited for that in vain."""
        return self.dialect is None and not self._failures and not self.silent

    @property
    def is_full(self) -> bool:
        """Whether it owes more answers than a server does that keeps up."""
        return len(self.owed) >= _MOST_OWED

    def connected(self) -> None:
        """There is a connection."""
        self.trouble = None
        self._failures = 0

    def failed(self, trouble: Exception, now: float) -> None:
        """No connection could be had."""
        self.retry_at = now + min(_BACK_OFF_S * 2**self._failures, _LONGEST_BACK_OFF_S)
        self._failures = min(self._failures + 1, MOST_FAILURES)
        # Without its traceback: redis-py's frames and its errors keep each other alive.
        self.trouble = trouble.with_traceback(None)
