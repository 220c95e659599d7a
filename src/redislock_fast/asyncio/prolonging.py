"""How an asyncio lock's lease is prolonged, by hand; and for whom a task acts.

`extend` and `reacquire` raise LockErrors at the call, as redis-py's do, and the others when they are awaited. A
cancelled one may or may not have been executed: the lease is believed to end no later than either way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NoReturn

from redis.exceptions import LockNotOwnedError

from redislock_fast._lease.ownership import Holding
from redislock_fast._lease.tenure import Tenure
from redislock_fast._procedures.facade import EXTEND, REACQUIRE
from redislock_fast._procedures.keeping import KeepingBase
from redislock_fast._protocol import commands
from redislock_fast._transport.loop.driver import Transport, drive
from redislock_fast._transport.loop.renewer import LoopRenewer, renewer_of
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import added_ms

__all__ = ["ProlongingBase"]


class ProlongingBase(KeepingBase):
    """A lock for tasks that can be prolonged."""

    _transport: Transport

    # ---- whose holding it is ----

    # The task that calls a method is the one that holds, whichever task awaits what the method returns: `shield`,
    # `gather` and `wait_for` (before Python 3.12) await in tasks of their own. So the holding is looked up in plain
    # methods, and handed to the coroutines.

    async def _hooked(self, local: Holding, hook: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Call an overridden hook, for this holding."""
        before = self._act_for(local)
        try:
            return await hook(*args)
        finally:
            self._act_no_more(before)

    # ---- extend, reacquire ----

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Awaitable[Literal[True]]:
        """Prolong the lease.

        Sends `EVALSHA`; where scripts are forbidden, `GET`, `PTTL` and `SET name token IFEQ token PX ms`. Sent again
        after a lost reply, it still adds only once. The LockErrors are raised by the call, the others by awaiting it.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: let `additional_time` be the new ttl instead.

        Returns:
            An awaitable of True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more, or has no ttl on the server.
            redis.exceptions.LockError: this task holds no lock, or the lock does not expire.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        local = self._held_with_ttl("extend")
        if local.tenure is None:
            return self._hooked(local, self.do_extend, additional_time, replace_ttl)
        new_ttl_ms = added_ms(additional_time, replace_ttl) if replace_ttl else None
        return self._prolong("extend", local, local.tenure, new_ttl_ms, self.do_extend, additional_time, replace_ttl)

    async def _prolong(
        self,
        verb: str,
        local: Holding,
        tenure: Tenure,
        new_ttl_ms: int | None,
        hook: Callable[..., Awaitable[Any]],
        *args: Any,
    ) -> Any:
        if tenure.is_lost():
            await self._raise_lost(verb, tenure)
        try:
            with tenure.prolonged_by_hand(local, new_ttl_ms):
                result = await self._hooked(local, hook, *args)
        except LockNotOwnedError as error:
            await self._raise_lost(verb, tenure, error)
        except GeneratorExit:  # the task was dropped: whoever collects garbage runs this, outside of the loop
            raise
        except BaseException:
            if tenure.loss is None:
                self._keep(tenure)  # it may have made the lease shorter
            raise
        if tenure.loss is not None:  # it was told of meanwhile: it does not come back
            self._transport.undo([(self._key, tenure.token)])
            raise self._lost_error(verb, tenure)
        self._keep(tenure)
        return result

    async def _raise_lost(
        self, verb: str, tenure: Tenure, error: LockNotOwnedError | None = None, by_release: bool = False
    ) -> NoReturn:
        """Find out why the lock was lost, and tell, unless that has been done, or another has given the lock back."""
        self._let_go(tenure)
        if tenure.loss is None and (by_release or not tenure.over):
            reason = await drive(self._transport, self._finding_out(tenure))
            if tenure.lose(reason, by_release):
                self._tell(tenure, reason)
        raise (self._lost(verb) if tenure.loss is None else self._lost_error(verb, tenure)) from error

    async def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend by the caller's token; may be overridden."""
        add_ms = added_ms(additional_time, replace_ttl)
        local = self._acting() or self._held()
        token = self._token_of(local, "extend")
        if self.lua_extend not in (EXTEND, None):
            args = [token, add_ms, "1" if replace_ttl else "0"]
            extended = bool(await self.lua_extend(keys=[self.name], args=args, client=self.redis))
        else:
            operation = commands.Extend(self._key, token, add_ms, replace_ttl, local.expires_at(token))
            prolonging = local.begin_prolonging(token, add_ms if replace_ttl else None, add_ms)
            try:
                await self._transport.execute(operation)
            finally:
                local.prolonged(prolonging, operation, add_ms)
            extended = operation.result
        if not extended:
            raise self._lost("extend")
        return True

    def reacquire(self) -> Awaitable[Literal[True]]:
        """Set the lease back to the lock's whole `timeout`.

        Sends `SET name token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`. The LockErrors are raised by the
        call, the others by awaiting it.

        Returns:
            An awaitable of True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more.
            redis.exceptions.LockError: this task holds no lock, or the lock does not expire.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        local = self._held_with_ttl("reacquire")
        if local.tenure is None:
            return self._hooked(local, self.do_reacquire)
        return self._prolong("reacquire", local, local.tenure, self._ttl_ms, self.do_reacquire)

    async def do_reacquire(self) -> Literal[True]:
        """Reacquire by the caller's token; may be overridden."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        local = self._acting() or self._held()
        token = self._token_of(local, "reacquire")
        if self.lua_reacquire not in (REACQUIRE, None):
            held = bool(await self.lua_reacquire(keys=[self.name], args=[token, ttl_ms], client=self.redis))
        else:
            operation = commands.Reacquire(self._key, token, ttl_ms, local.queued == token)
            prolonging = local.begin_prolonging(token, ttl_ms)
            try:
                await self._transport.execute(operation)
            finally:
                local.prolonged(prolonging, operation)
            held = operation.result
        if not held:
            raise self._lost("reacquire")
        return True

    async def try_extend(self, additional_time: float, replace_ttl: bool = False) -> bool:
        """`extend`, with False where the lock is not held any more; see `redislock_fast.Lock.try_extend`."""
        try:
            return await self.extend(additional_time, replace_ttl)
        except LockNotOwnedError:
            return False

    def _renewer(self) -> LoopRenewer:
        return renewer_of(self._transport)

    def _tell(self, tenure: Tenure, reason: LossReason) -> None:
        self._renewer().tell(tenure, reason)
