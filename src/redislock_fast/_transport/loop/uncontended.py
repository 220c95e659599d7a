"""An uncontended acquire and release by a task, in one coroutine each, as `_transport/threads/uncontended.py` has them.

The one request leaves without steps or a state machine. Only the reply that settles it is dealt with here; whatever
else comes of it is handed to the steps of `_procedures/lock.py`, which go on from there. Nothing else knows of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redislock_fast._procedures.lock import LockBase
from redislock_fast._procedures.waiting import POLL
from redislock_fast._protocol.commands import HANDED_OVER, Acquire, acquire_request, release_request
from redislock_fast._transport.loop.driver import AsyncTransport, drive
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import new_token

if TYPE_CHECKING:
    from redislock_fast._lease.ownership import Holding
    from redislock_fast._procedures.acquisition import Left
    from redislock_fast._protocol.operation import Begun

__all__ = ["UncontendedBase"]


class UncontendedBase(LockBase):
    """A lock for tasks. The parameters stand on the classes that users name.

    By steps and a state machine, a pair takes 7 us of CPU more, of 5 in all with 100 tasks.
    """

    _transport: AsyncTransport

    async def _acquire_uncontended(self, local: Holding, blocking: bool | None) -> bool:
        """Acquire on the usual settings: with a new token, without hooks, options and a deadline, waiting by push."""
        token, ttl_ms = new_token(), self._ttl_ms
        attempt: Acquire | None = None
        left: Left = []
        channel = self._transport.channel()
        link = channel.link  # nothing that is yet to be undone concerns a new token
        if link is not None:
            waits = local.token is None and (self.blocking if blocking is None else blocking)
            if waits and link.room is not None and link.room.is_contended(self._key, True):
                del link
                waiting = self._waiting(token, None, self.sleep, Limit(None))
                if await drive(self._transport, self._queueing(waiting, local, left), left) is not POLL:
                    return True
                link = None
        if link is not None:
            request, ours = acquire_request(link.dialect, self._key, token, ttl_ms)
            begun: Begun
            sent_at = clock()
            try:
                reply = await link.pipe.call(request, link.timeout_s)
                if reply == ours:
                    local.lease = (token, None if ttl_ms is None else sent_at + ttl_ms / 1000)
                    local.token = token
                    if local.forgotten_by is not None:  # else `hold` would do no more
                        local.hold(token)
                    return True
                begun = (link, reply, None)
            except BaseException as interruption:
                if local.token == token:  # it came just behind the noting
                    local.token = None
                begun = (link, None, interruption)
            attempt = Acquire(self._key, token, ttl_ms)
            attempt.begin(request, link.dialect, sent_at, begun)
            del begun
        del link  # an error keeps this frame, which must keep neither it nor a connection
        steps = self._acquiring_until(Limit(None), local, None, blocking, None, left, attempt)
        return bool(await drive(channel, steps, left))

    async def _release_uncontended(self, local: Holding, token: bytes) -> None:
        """Release what is held without options, where no hook is overridden that concerns it."""
        channel = self._transport.channel()
        link = channel.link
        if link is None or local.token is not token:
            await drive(self._transport, self._releasing(local))
            return
        request, ours = release_request(link.dialect, self._key, token, local.queued == token)
        begun: Begun
        sent_at = clock()
        try:
            reply = await link.pipe.call(request, link.timeout_s)
            if reply == ours:
                if reply == HANDED_OVER and link.room is not None:
                    link.room.note_hand_over(self._key, True)
                if local.token == token:  # where the token is shared, another task may have acquired meanwhile
                    local.token = None
                return
            begun = (link, reply, None)
        except BaseException as interruption:
            begun = (link, None, interruption)
        operation = self._release_of(token, local)
        operation.begin(request, link.dialect, sent_at, begun)
        del link, begun
        await drive(channel, self._finishing_release(operation, local))
