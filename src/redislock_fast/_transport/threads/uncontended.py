"""An uncontended acquire and release by a thread, in as few calls as can be.

The one request leaves without steps or a state machine. Only the reply that settles it is dealt with here; whatever
else comes of it is handed to the steps of `_procedures/lock.py`, which go on from there. Nothing else knows of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._pipe.base import NOT_ASKED
from redislock_fast._procedures.lock import LockBase
from redislock_fast._procedures.waiting import POLL
from redislock_fast._protocol.commands import HANDED_OVER, Acquire, Release, acquire_request, release_request
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.server import ThreadChannel
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import new_token

if TYPE_CHECKING:
    from redislock_fast._lease.ownership import Holding
    from redislock_fast._procedures.acquisition import Left
    from redislock_fast._protocol.operation import Begun

__all__ = ["UncontendedBase"]


class UncontendedBase(LockBase):
    """A lock for threads. The parameters stand on the classes that users name.

    By steps and a state machine, a pair takes 7 us of CPU more, of 30 in all.
    """

    _transport: ThreadChannel

    def _acquire_uncontended(self, local: Holding, blocking: bool | None) -> bool:
        """Acquire on the usual settings: with a new token, without hooks, options and a deadline, waiting by push."""
        transport = self._transport
        token, ttl_ms = new_token(), self._ttl_ms
        attempt: Acquire | None = None
        left: Left = []
        link = transport.link  # nothing that is yet to be undone concerns a new token
        if link is not None:
            waits = local.token is None and (self.blocking if blocking is None else blocking)
            if waits and link.room is not None and link.room.is_contended(self._key, True):
                del link
                waiting = self._waiting(token, None, self.sleep, Limit(None))
                if drive(transport, self._queueing(waiting, local, left), left) is not POLL:
                    return True
                link = None
        if link is not None:
            request, ours = acquire_request(link.dialect, self._key, token, ttl_ms)
            begun: Begun | None = None
            sent_at = clock()
            try:
                reply = link.pipe.ask(request, transport.timeout_s, transport.inside)
                if reply == ours:
                    local.lease = (token, None if ttl_ms is None else sent_at + ttl_ms / 1000)
                    local.hold(token)
                    return True
                if reply is not NOT_ASKED:
                    begun = (link, reply, None)
            except BaseException as interruption:
                if local.token == token:  # it came just behind the noting
                    local.token = None
                begun = (link, None, interruption)
            if begun is not None:
                attempt = Acquire(self._key, token, ttl_ms)
                attempt.begin(request, link.dialect, sent_at, begun)
            del begun
        del link  # an error keeps this frame, which must keep neither it nor a connection
        steps = self._acquiring_until(Limit(None), local, None, blocking, None, left, attempt)
        return bool(drive(self._transport, steps, left))

    def _release_uncontended(self, local: Holding, token: bytes) -> None:
        """Release what is held without options, where no hook is overridden that concerns it."""
        transport = self._transport
        link = transport.link
        if link is None:
            drive(transport, self._releasing(local))
            return
        request, ours = release_request(link.dialect, self._key, token, local.queued == token)
        begun: Begun
        sent_at = clock()
        try:
            reply = link.pipe.ask(request, transport.timeout_s, transport.inside)
            if reply == ours:
                if reply == HANDED_OVER and link.room is not None:
                    link.room.note_hand_over(self._key, True)
                if local.token == token:  # where the token is shared, another thread may have acquired meanwhile
                    local.token = None
                return
            begun = (link, reply, None)
        except BaseException as interruption:
            begun = (link, None, interruption)
        operation: Release = self._release_of(token, local)
        if begun[1] is not NOT_ASKED:
            operation.begin(request, link.dialect, sent_at, begun)
        del link, begun
        drive(transport, self._finishing_release(operation, local))
