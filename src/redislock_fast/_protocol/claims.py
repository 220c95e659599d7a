"""The keys that attempts by a caller's own token have taken, as the replies to their requests say.

Another holder may have the same token, so an attempt of unknown outcome is not undone for that alone: it would delete
that holder's lock. It is undone when a reply says that the attempt itself took the key. That reply is heard also after
the caller has given up. If the connection breaks before it comes, the key is left to its ttl.

The attempts of one channel with one key and one token share a `Claim`: what one attempt takes, another one finds held
with its token, and holds from then on.

Who may touch what: the fields of a claim, under the mutex of its `Claims`. A signal handler or a finalizer of the same
thread may enter that again. The thread or loop that reads the connection calls a `Heard`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.own_token import AcquireOwn, has_taken

__all__ = ["Claim", "Claims", "Heard"]


class Claims:
    """The claims of one channel.

    Args:
        undo: the channel's; only a weak reference is kept, since a request under way must keep no channel alive.
    """

    def __init__(self, undo: Callable[[list[tuple[bytes, bytes]]], None]) -> None:
        self.undo = weakref.WeakMethod(undo)
        self.mutex = threading.RLock()
        self.open: weakref.WeakValueDictionary[tuple[bytes, bytes], Claim] = weakref.WeakValueDictionary()

    def begin(self, operation: AcquireOwn) -> None:
        """Give an attempt that begins its claim. `Claim.end` ends that."""
        entry = operation.key, operation.token
        with self.mutex:
            claim = self.open.get(entry)
            if claim is None:
                claim = self.open[entry] = Claim(self, entry)
            claim.under_way += 1
            operation.claim = claim


class Claim:
    """Whether attempts with one key and one token have taken the key and nobody holds it.

    Attributes:
        under_way: how many attempts have not ended.
    """

    __slots__ = ("__weakref__", "_claims", "_entry", "_is_held", "_is_taken", "under_way")

    def __init__(self, claims: Claims, entry: tuple[bytes, bytes]) -> None:
        self._claims = claims
        self._entry = entry
        self.under_way = 0
        self._is_taken = False
        self._is_held = False

    def take(self) -> None:
        """A request of an attempt took the key, whether or not the attempt has ended."""
        with self._claims.mutex:
            self._is_taken = True
            self._undo_if_unheld()

    def end(self, is_held: bool) -> None:
        """An attempt has ended. `is_held`: its caller holds the lock, so no late reply concerns anybody any more."""
        with self._claims.mutex:
            self.under_way -= 1
            if is_held:
                self._is_held = True
                if self._claims.open.get(self._entry) is self:
                    del self._claims.open[self._entry]
            self._undo_if_unheld()

    def _undo_if_unheld(self) -> None:
        # Under the mutex: an attempt that begins later finds the entry among those that must be undone first.
        if self._is_taken and not self._is_held and not self.under_way:
            self._is_taken = False
            undo = self._claims.undo()
            if undo is not None:
                undo([self._entry])


class Heard:
    """A request of an attempt, given its reply by whoever reads.

    Args:
        claim: the attempt's.
        request: what was posted.
        tell: wakes the caller, which is told this object.

    Attributes:
        reply: to the request, once the caller was told.
        tell: None once the caller has stopped waiting, since it leads to the connection.
    """

    __slots__ = ("_claim", "_request", "reply", "tell")

    def __init__(self, claim: Claim, request: Args, tell: Callable[[Any], None]) -> None:
        self._claim = claim
        self._request = request
        self.reply: Reply = None
        self.tell: Callable[[Any], None] | None = tell

    def __call__(self, reply: Reply) -> None:
        """The reply is there."""
        if has_taken(self._request, reply):
            self._claim.take()
        self.reply = reply
        tell = self.tell
        if tell is not None:
            tell(self)
