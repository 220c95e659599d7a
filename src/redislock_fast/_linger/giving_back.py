"""The keys that linger: how they are given back to their server, the part that threads and event loops share.

A key is given back by a release that is posted on the connection on which it was granted. No caller waits for the
reply. Where that connection is gone, or the server does not execute the release, the key is cleaned up like the
remains of a failed acquire (`cleanup.py`): in the background, until the server has confirmed it.

Thread safety: any thread adds to `_unconfirmed` and removes from it, by atomic methods of dict alone.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from redislock_fast._linger.key_cache import KeyCache
from redislock_fast._linger.key_lease import KeyLease, LocalWaiter
from redislock_fast._pipe.base import Args, ConnectionBroken, Reply
from redislock_fast._protocol.commands import Release, release_request
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._transport.parts import Part, ServerType
from redislock_fast._util.times import clock

__all__ = ["Lingering"]

_LONGEST_TICK_S = 0.5
_SHORTEST_TICK_S = 0.005


class Lingering(Part[ServerType]):
    """The part of a server transport that keeps keys for locks with `linger`.

    Args:
        server: the transport.
        new_waiter: makes waiters for local locks. It does not keep the transport alive.

    Attributes:
        key_cache: the keys of this server that linger.
    """

    def __init__(self, server: ServerType, new_waiter: Callable[[], LocalWaiter]) -> None:
        super().__init__(server)
        self.key_cache = KeyCache(_weakly(server, self._give_back), _weakly(server, self._watch_keys), new_waiter)
        self._unconfirmed: dict[int, list[KeyLease]] = {}  # leases whose release has no reply yet

    @abstractmethod
    def _post_many(self, connection: Any, requests: list[Args], on_replies: Callable[[list[Reply]], object]) -> None:
        """Send requests in one piece, without waiting for the replies."""

    @abstractmethod
    def _watch_keys(self) -> None:
        """Have the connection read, and `KeyCache.sweep` called, until `KeyCache.rests` says yes."""

    def _confirm_soon(self) -> None:
        """Have the replies to posted releases read, and the keys cleaned up where none come."""
        if not self.key_cache.is_watched:
            self.key_cache.watch()

    def _leave_if_unconfirmed(self) -> None:
        """Clean up on a new connection what the server does not confirm on this one."""
        connection = self.server.connection
        if connection is not None and self.has_unconfirmed:
            self.server.leave_if_silent(connection)

    def give_up(self) -> None:
        """Give up what lingers, in the background."""
        self.key_cache.drop_all()

    @property
    def tick_s(self) -> float:
        """How long to wait between two looks at the keys that linger, in seconds."""
        return min(max(self.key_cache.shortest_s / 2, _SHORTEST_TICK_S), _LONGEST_TICK_S)

    # ---- giving back ----

    def _give_back(self, leases: list[KeyLease], is_wanted: bool) -> None:
        """Release the keys, without waiting for the replies."""
        server = self.server
        connection: Any = server.connection
        asked = []
        for lease in leases:
            if connection is None or lease.registry is not connection.registry:
                server.clean_up([(lease.key, lease.token) for lease in leases])
                return
            asked.append(release_request(connection.capabilities, lease.key, lease.token, is_wanted))
        requests = [request for request, _ in asked]
        self._post_releases(
            connection, leases, requests, partial(self._take_first, server, connection, leases, asked, is_wanted)
        )
        if is_wanted and connection.registry is not None:  # after the requests, for which another process waits
            for lease in leases:
                connection.registry.note_hand_over(lease.key, True)

    def _post_releases(
        self,
        connection: Any,
        leases: list[KeyLease],
        requests: Any,
        on_replies: Callable[[list[Reply]], object],
    ) -> None:
        self._unconfirmed[id(leases)] = leases
        try:
            self._post_many(connection, requests, on_replies)
        except BaseException as trouble:  # after an interrupt, only some of the requests may have left
            self._clean_up_unconfirmed(leases)
            if not isinstance(trouble, ConnectionBroken):
                raise
        self._confirm_soon()

    def _take_first(
        self,
        server: ServerType,
        connection: Any,
        leases: list[KeyLease],
        asked: list[tuple[Args, Reply]],
        is_wanted: bool,
        replies: list[Reply],
    ) -> None:
        """Take the replies to the first requests. Mostly all of them say that the key was released.

        What waits for replies keeps the transport alive.
        """
        if all(reply == settling for (_, settling), reply in zip(asked, replies, strict=True)):
            self._unconfirmed.pop(id(leases), None)
            return
        releases = [Release(lease.key, lease.token, lease.expires_at, contended=is_wanted) for lease in leases]
        pipeline = Pipeline(releases)
        if pipeline.request(connection.capabilities, clock()) == [request for request, _ in asked]:
            self._take_replies(server, connection, pipeline, leases, replies)
        else:  # the capabilities have fallen since
            self._clean_up_unconfirmed(leases)

    def _take_replies(
        self, server: ServerType, connection: Any, pipeline: Pipeline, leases: list[KeyLease], replies: list[Reply]
    ) -> None:
        if id(leases) not in self._unconfirmed:  # cleaned up meanwhile: the connection is not used any more
            return
        try:
            finished = pipeline.feed(replies, connection.capabilities)
        except (NotExecuted, Redirected, Refused):
            self._clean_up_unconfirmed(leases)
            return
        if not finished:
            requests = pipeline.request(connection.capabilities, clock())
            take = partial(self._take_replies, server, connection, pipeline, leases)
            self._post_releases(connection, leases, requests, take)
            return
        self._unconfirmed.pop(id(leases), None)
        for lease, was_held in zip(leases, pipeline.results, strict=True):
            if not was_held:
                lease.note_loss()

    def _clean_up_unconfirmed(self, leases: list[KeyLease]) -> None:
        if id(leases) in self._unconfirmed:
            self.server.clean_up([(lease.key, lease.token) for lease in leases])
            self._unconfirmed.pop(id(leases), None)  # last, since an interrupt may come before

    def clean_up_unconfirmed(self, except_of: Any = None) -> None:
        """Clean up the keys whose release has got no reply, but those of this registry: their connection is gone."""
        for leases in list(self._unconfirmed.values()):
            if except_of is None or leases[0].registry is not except_of:
                self._clean_up_unconfirmed(leases)

    def drop(self, except_of: Any = None) -> None:
        """Give up what lingers, and clean up what was given back without a reply: the connection is gone.

        Args:
            except_of: the registry of the connection that is there now; None: there is none.
        """
        self.clean_up_unconfirmed(except_of)
        self.key_cache.drop_all(except_of)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether a release of keys that lingered has got no reply yet, and the keys may still be there."""
        if not self._unconfirmed:
            return False
        now = clock()
        return any(lease.expires_at > now for leases in list(self._unconfirmed.values()) for lease in leases)

    def forget(self) -> None:
        """In a forked child: leave all keys to the parent."""
        self._unconfirmed = {}
        self.key_cache.forget()


def _weakly(server: object, method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method of a part as long as its transport lives."""
    server_ref, method_ref = weakref.ref(server), weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        server, live = server_ref(), method_ref()  # the transport lives until this returns
        if server is not None and live is not None:
            live(*args)

    return call
