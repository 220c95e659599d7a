"""An uncontended acquire and release by a task, in one coroutine each, as `_transport/threads/uncontended.py` has them.

The one request leaves without steps or a state machine. Only the reply that settles it is handled here; any other
outcome is handed to the steps of `_procedures/lock.py`, which go on from there. No other module knows of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import redis.asyncio

from redislock_fast._lease.telling import is_telling
from redislock_fast._procedures.lock import LockBase
from redislock_fast._procedures.settings import RELEASE, hooks_of
from redislock_fast._procedures.waiting import POLL, Waiting
from redislock_fast._protocol.commands import HANDED_OVER, Acquire, release_request
from redislock_fast._transport.loop.driver import AsyncTransport, drive
from redislock_fast._util.coroutines import runs
from redislock_fast._util.times import Limit, clock, poll_seconds
from redislock_fast._util.tracing import OWN_ASYNC, providers

if TYPE_CHECKING:
    from redislock_fast._lease.owner import Owner
    from redislock_fast._procedures.acquisition import CleanupEntries
    from redislock_fast._procedures.steps import Steps
    from redislock_fast._protocol.operation import Begun
    from redislock_fast._transport.loop.server import LoopServerTransport

__all__ = ["UncontendedBase"]

_Client = redis.asyncio.Redis


class UncontendedBase(LockBase):
    """A lock for tasks. The public classes describe the parameters.

    By steps and a state machine, an acquire and a release take more than twice the CPU.
    """

    _transport: AsyncTransport

    # Hooks and tracers may come and go at any time, so every call looks: 0.3 us in a pair. What both methods look at
    # beside hooks is what `is_observed` looks at.

    def _is_plain_acquire(self) -> bool:
        """Whether no hook is overridden, and nothing observes redis-py's commands."""
        try:
            return (
                hooks_of(self) == self._own_hooks
                and _Client.execute_command is OWN_ASYNC
                and "execute_command" not in self._redis.__dict__
                and providers._observability_instance._provider_manager is None  # noqa: SLF001
            )
        except AttributeError:  # a hook that is no method, a client without attributes, or the metrics were reset
            return False

    def _is_plain_release(self) -> bool:
        """Whether no hook is overridden that concerns a release, and nothing observes redis-py's commands."""
        try:
            return (
                self.lua_release is RELEASE
                and self.do_release.__func__ is self._own_hooks.do_release
                and _Client.execute_command is OWN_ASYNC
                and "execute_command" not in self._redis.__dict__
                and providers._observability_instance._provider_manager is None  # noqa: SLF001
            )
        except AttributeError:  # as above
            return False

    @runs("Lock.acquire")
    async def _acquire_uncontended(self, owner: Owner, blocking: bool | None) -> bool:
        """Acquire on the usual settings: with a new token, without hooks and a deadline, waiting by push."""
        server = self._transport.of_running_loop()
        connection = server.connection  # no pending cleanup concerns a new token
        token = server.new_token(self._key) if connection is None else server.tokens.new_token()
        ttl_ms, options = self._ttl_ms, self._options
        attempt: Acquire | None = None
        to_clean_up: CleanupEntries = []
        queues = False
        if options is not None and (owner.token is not None or is_telling() is not None):
            connection = None  # it may reenter the lock, or end a callback for its loss
        if connection is not None:
            waits = owner.token is None and (self.blocking if blocking is None else blocking)
            queues = waits and connection.registry is not None and connection.registry.is_contended(self._key, True)
        if connection is not None and not queues:
            request, ours = self._attempt_kind.first_request(connection.capabilities, self._key, token, ttl_ms)
            begun: Begun
            sent_at = clock()
            try:
                reply = await connection.pipe.call(request, connection.timeout_s)
                if options is None:
                    if reply == ours:
                        owner.expiry = (token, None if ttl_ms is None else sent_at + ttl_ms / 1000)
                        owner.token = token
                        if owner.forgotten_by is not None:  # else `hold` would do no more
                            owner.hold(token)
                        return True
                elif self._is_noted(options, owner, server, token, ttl_ms, sent_at, reply, ours):
                    return True
                begun = (connection, reply, None)
            except BaseException as interruption:
                self._drop_noted(owner, token)
                begun = (connection, None, interruption)
            queues = waits and options is None and self._can_queue_at_once(begun)
            if not queues:
                attempt = self._attempt_kind(self._key, token, ttl_ms)
                attempt.begin(request, connection.capabilities, sent_at, begun)
            del begun
        del connection  # an error keeps this frame, which must keep neither it nor a connection
        if queues and options is None and await self._acquire_contended(server, owner, token):
            return True
        steps = self._acquiring(owner, None, blocking, None, None, to_clean_up, None, attempt)
        return bool(await drive(server, steps, to_clean_up))

    async def _acquire_contended(
        self, server: LoopServerTransport, owner: Owner, token: bytes, linger_ms: int | None = None
    ) -> bool:
        """Acquire by the lock's queue, on the same settings. Returns False where the connection takes no messages."""
        to_clean_up: CleanupEntries = []
        waiting = Waiting(self._key, token, self._key_ttl_ms(linger_ms), poll_seconds(self.sleep), Limit(None))
        return await drive(server, self._queueing(waiting, owner, to_clean_up), to_clean_up) is not POLL

    def _releasing_what(self, owner: Owner, holding: object) -> Steps:
        """`_releasing`, of what the owner held when that was called, though it may hold the lock anew by now."""
        if owner.token is not None and owner.holding != holding:
            raise self._not_owned("release")
        yield from self._releasing(owner)

    @runs("Lock.release")
    async def _release_uncontended(self, owner: Owner, token: bytes) -> None:
        """Release what is held since an uncontended acquire, where no hook is overridden that concerns it."""
        server = self._transport.of_running_loop()
        connection = server.connection
        note = owner.note
        held = None if note is None else note.held
        if (
            connection is None
            or owner.token is not token
            or (note is not None and held is not None and not (is_telling() is None and note.begin_release(token)))
        ):
            await drive(server, self._releasing_what(owner, token))
            return
        request, ours = release_request(connection.capabilities, self._key, token, owner.contended == token)
        begun: Begun | None = None
        sent_at = clock()
        try:
            reply = await connection.pipe.call(request, connection.timeout_s)
            if reply == ours:
                if reply == HANDED_OVER and connection.registry is not None:
                    connection.registry.note_hand_over(self._key, True)
                if note is not None and note.held is held:
                    note.held = None
                if owner.token == token:  # where the token is shared, another task may have acquired meanwhile
                    owner.token = None
                if note is not None and held is not None and held[4].observers:
                    self._report_noted_release(note, held)
            else:
                begun = (connection, reply, None)
        except BaseException as interruption:
            begun = (connection, None, interruption)
        if begun is None:
            return
        operation = self._release_of(token, owner)
        operation.begin(request, connection.capabilities, sent_at, begun)
        del connection, begun
        await drive(server, self._releasing(owner, operation))
