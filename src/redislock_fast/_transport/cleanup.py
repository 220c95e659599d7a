"""Deletes what acquires of unknown outcome may have left on a server: the part that threads and event loops share.

An acquire that fails may have set its key, or the server may set it later. The key and token are then put on a list
and deleted in the background, until the server has confirmed it. Nothing here waits.

Thread safety: any thread adds to `pending`, by one `+=` on the list; `threads/cleanup.py` and `loop/cleanup.py` say
when entries are removed. `endings` is used by atomic methods of set alone.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from redislock_fast._pipe.base import Args, ConnectionBroken, Forked, Reply
from redislock_fast._protocol.claims import Claims
from redislock_fast._protocol.operation import Exchange, Operation
from redislock_fast._protocol.pipeline import Pipeline, ReleasePipeline
from redislock_fast._protocol.queue import LeaveQueue, cleanup_requests
from redislock_fast._transport.base import Part, ServerType

CLEANUP_LIMIT_S = 1.0
CLEANUP_FIRST_S = 0.05
CLEANUP_LAST_S = 600.0  # doubling: after about 20 minutes without a connection, the rest is left to the locks' own ttls

_AT_ONCE = 1000
_MOST_PENDING = 200_000


class Cleanup(Part[ServerType]):
    """The part of a server transport that deletes what failed acquires may have left on the server.

    Args:
        server: the transport.

    Attributes:
        pending: the keys and tokens that are to be deleted.
        endings: the requests that end connections that were given up.
        claims: of the acquires with tokens of their callers.
    """

    def __init__(self, server: ServerType) -> None:
        super().__init__(server)
        self.pending: list[tuple[bytes, bytes]] = []
        self.endings: set[Args] = set()
        self.claims = Claims(server.clean_up)

    @abstractmethod
    def start(self) -> bool:
        """Make sure that the cleanup runs in the background. Returns False where no thread can be started for it."""

    def tidy(self, operation: Operation, unanswered: Sequence[Any], failed: bool) -> None:
        """Clean up after an acquire that failed although the server may have executed it, or may do so later.

        On each connection, the cleanup is sent after the attempt, so it comes last in whatever order the server reads
        the connections. An attempt with a caller's own token is cleaned up by its claim alone.

        Args:
            operation: the acquire.
            unanswered: the connections on which a request left without an answer.
            failed: whether the caller gets an error.
        """
        first_outcome, operation.first_outcome = operation.first_outcome, None
        if first_outcome is not None:  # an interrupt came before the transport has looked at it
            operation.note_unanswered(True)
            unanswered = [*unanswered, first_outcome[0]]
        claim, operation.claim = operation.claim, None
        if claim is not None:
            claim.end(operation.result)
        entries = operation.to_clean_up(failed)
        if entries:
            for connection in unanswered:
                with contextlib.suppress(ConnectionBroken):
                    for request in cleanup_requests(connection.capabilities, entries):
                        self.server.post(connection, request)
            self.server.clean_up(entries)

    def delete(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, in the background and until the server has confirmed it."""
        try:
            self._begin(entries)
        except BaseException as interrupt:  # another one: mostly, the first one is the reason for the cleanup
            if not isinstance(interrupt.__context__, Forked):
                self._begin(entries)
            raise

    def _begin(self, entries: list[tuple[bytes, bytes]]) -> None:
        if not entries or isinstance(sys.exc_info()[1], Forked):  # a call that a fork ends here goes on in the parent
            return
        self.pending += entries
        if not self.start():
            self.server.post_cleanup(entries)

    @property
    def idle(self) -> bool:
        """Whether nothing is to be cleaned up, or nothing can be, because the client is gone."""
        return not self.pending or self.server.owner() is None

    def post_first(self, connection: Any) -> None:
        """Send the first requests of a new connection: they end the old connections, and then clean up after them.

        Otherwise the server could execute a request on an old connection after the cleanup for it.
        """
        for ending in list(self.endings):
            connection.pipe.post(ending, partial(_note_ended, self.endings, ending))
        registry = connection.registry
        for request in cleanup_requests(connection.capabilities, list(self.pending)):
            connection.pipe.post(request, None if registry is None else registry.try_queue())

    def _next(self) -> Pipeline:
        """The oldest entries that go to one server. They are moved to the front of `pending`.

        Only the thread or task that removes entries from the list may call this.
        """
        del self.pending[:-_MOST_PENDING]
        oldest = self.pending[:_AT_ONCE]
        token = oldest[0][1]
        batch = [index for index, entry in enumerate(oldest) if entry[1] == token]
        # A waiter has a token of its own for one key. A token of many keys is a batch's, which is in no queue.
        is_batch = len({oldest[index][0] for index in batch}) > 1
        chosen = batch if is_batch else range(len(oldest))
        together = [chosen[at] for at in self.server.at_one_server([oldest[index][0] for index in chosen])]
        others = set(range(len(oldest))).difference(together)
        self.pending[: len(oldest)] = map(oldest.__getitem__, [*together, *sorted(others)])
        if is_batch:
            return ReleasePipeline([oldest[index][0] for index in together], token, None)
        return Pipeline([LeaveQueue(*oldest[index]) for index in together])

    def _returning(self, operation: Exchange) -> list[tuple[bytes, bytes]]:
        """The entries with a key and token that the operation is about to set again.

        They must be cleaned up first. Later, the cleanup would delete the lock that the new attempt takes.
        """
        taken = set(operation.takes())
        pending = self.pending.copy()  # the cleanup may remove entries meanwhile: none must be passed over
        return [entry for entry in pending if entry in taken]


def _note_ended(endings: set[Args], ending: Args, _: Reply) -> None:
    endings.discard(ending)  # not a method: a request under way must keep no server transport alive
