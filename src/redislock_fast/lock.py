"""`Lock`: redis-py's lock on our transport.

Any difference in behaviour from `redis.lock.Lock` is a bug, except those that `docs/differences.md` lists. The class
derives from the original, so that whatever asks for one takes ours.

Must not know: bytes on the wire, sockets.
"""

from __future__ import annotations

import logging
import threading
import time as mod_time
from types import SimpleNamespace, TracebackType
from typing import Any, Literal

import redis
import redis.lock
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast import _clients, _process, _protocol, _scripts
from redislock_fast._times import positive_ms, wait_seconds
from redislock_fast._tokens import new_token
from redislock_fast._transport import transport_of

__all__ = ["Lock"]

logger = logging.getLogger(__name__)

_NOT_ENTERED = "Unable to acquire lock within the time specified"


class _LuaScript:
    """A script as redis-py's `Script` is called, without a client of its own to keep alive."""

    def __init__(self, text: str) -> None:
        self.script = text
        self.sha = ""

    def __call__(self, keys: Any, args: Any, client: Any) -> Any:
        script = client.register_script(self.script)
        self.sha = script.sha
        return script(keys=keys, args=args, client=client)


def _script_object(text: str, ours: _LuaScript) -> _LuaScript:
    return ours if text is ours.script else _LuaScript(text)


def _ttl_ms(timeout: float | None) -> int | None:
    # 0 is redis-py's other way to say that the lock does not expire.
    return None if timeout is None or timeout == 0 else positive_ms(timeout, "timeout")


_RELEASE = _LuaScript(_scripts.RELEASE.text.decode())
_EXTEND = _LuaScript(_scripts.EXTEND.text.decode())
_REACQUIRE = _LuaScript(_scripts.REACQUIRE.text.decode())


class _ThreadToken(threading.local):
    """What a thread holds: the defaults below until it acquires."""

    token: bytes | None = None
    lease: tuple[bytes | None, float | None] = (None, None)
    attempt: _protocol.Acquire | None = None
    releasing: bytes | None = None


class Lock(redis.lock.Lock):
    """A lock on one Redis or Valkey server, shared by processes and machines.

    The key `name` holds the owner's token. Exclusion holds until the ttl passes, on one server that keeps its data;
    what is not guaranteed stands in the README.

    Args:
        redis: a `redis.Redis` or `redis.RedisCluster` of any kind; its settings are used, its connections are not.
        name: the key, bytes or str.
        timeout: the ttl in seconds, rounded up to whole milliseconds. None or 0: the lock does not expire.
        sleep: how long a waiter sleeps between two attempts, in seconds.
        blocking: whether `acquire` waits.
        blocking_timeout: how long `acquire` waits at most, in seconds. None: for ever.
        thread_local: whether the token belongs to the thread that acquired, or to every thread with this object.
        raise_on_release_error: whether leaving a `with` block raises when the lock was lost, or only logs.

    Raises:
        TypeError: for a pipeline or an asyncio client, or a `timeout` that is no number.
        ValueError: for a `timeout` that is negative, NaN or infinite.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    lua_release: Any = None
    lua_extend: Any = None
    lua_reacquire: Any = None

    LUA_RELEASE_SCRIPT: str = _RELEASE.script
    LUA_EXTEND_SCRIPT: str = _EXTEND.script
    LUA_REACQUIRE_SCRIPT: str = _REACQUIRE.script

    local: Any

    def __init__(
        self,
        redis: Any,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
    ) -> None:
        # Not through the properties: a lock is often made for one use.
        self._redis = redis
        self._transport = transport = transport_of(redis)
        self._name = name
        self._key = name.encode() if isinstance(name, str) else transport.encode(name)
        self._timeout = timeout
        self._ttl_ms = None if timeout is None else _ttl_ms(timeout)
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self._own_nothing()
        self.register_scripts()

    # ---- settings, which may be changed at any time as redis-py's may ----

    @property
    def redis(self) -> Any:
        """The client."""
        return self._redis

    @redis.setter
    def redis(self, client: Any) -> None:
        self._transport = transport_of(client)
        self._redis = client

    @property
    def name(self) -> Any:
        """The key."""
        return self._name

    @name.setter
    def name(self, name: Any) -> None:
        # As UTF-8 whatever the client's encoding is: so does hiredis, which packs redis-py's own commands.
        self._key = name.encode() if isinstance(name, str) else self._transport.encode(name)
        self._name = name

    @property
    def timeout(self) -> float | None:
        """The ttl in seconds."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._ttl_ms = _ttl_ms(timeout)
        self._timeout = timeout

    def _own_nothing(self) -> None:
        self._generation = _process.generation
        self.local = (
            _ThreadToken()
            if self.thread_local
            else SimpleNamespace(token=None, lease=(None, None), attempt=None, releasing=None)
        )

    def _token(self) -> bytes | None:
        """The caller's token. A forked child has none of its parent's."""
        if self._generation != _process.generation:
            self._own_nothing()
        token: bytes | None = self.local.token
        return token

    def _expires_at(self, token: bytes) -> float | None:
        """Until when the lease of this token is certainly valid; None where it does not expire or is not known."""
        owner, expires_at = self.local.lease
        return expires_at if owner == token else None

    def _shorten(self, token: bytes, expires_at: float) -> None:
        """Believe in no more of the lease than what a request of unknown outcome may have left of it."""
        known = self._expires_at(token)
        self.local.lease = (token, expires_at if known is None else min(known, expires_at))

    def register_scripts(self) -> None:
        """Make the class's script objects; may be overridden.

        A class with scripts of its own, by `LUA_*_SCRIPT` or `lua_*`, has those executed and no native commands.
        """
        cls = type(self)
        if cls.lua_release is None:
            cls.lua_release = _script_object(cls.LUA_RELEASE_SCRIPT, _RELEASE)
        if cls.lua_extend is None:
            cls.lua_extend = _script_object(cls.LUA_EXTEND_SCRIPT, _EXTEND)
        if cls.lua_reacquire is None:
            cls.lua_reacquire = _script_object(cls.LUA_REACQUIRE_SCRIPT, _REACQUIRE)

    # ---- acquire ----

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: Any = None,
    ) -> bool:
        """Take the lock.

        Sends `SET name token NX [PX ms] GET` (Redis 7.0, Valkey) or `SET name token NX [PX ms]` and, when that fails,
        `GET name`, once per attempt. If it raises, the lock is not held, and an attempt of unknown outcome is undone.

        Args:
            sleep: seconds between two attempts, instead of the lock's own setting.
            blocking: whether to wait, likewise.
            blocking_timeout: seconds to wait at most, likewise. An attempt under way at the end may take 0.1 s more.
                0 or less makes one attempt.
            token: the token to use, bytes or str; by default a random one.

        Returns:
            True once the lock is held, False when it was not to be had in time.

        Raises:
            redis.exceptions.LockError: this thread holds the lock itself, without a ttl, and would wait for ever.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: the server's error, as WRONGTYPE for a key that is no string.
            ValueError: `sleep` negative, or a time that is NaN.
        """
        if self._generation != _process.generation:
            self._own_nothing()
        local = self.local
        sleep = self.sleep if sleep is None else sleep
        if not sleep >= 0:  # nor is NaN
            raise ValueError(f"sleep must be a number of seconds from 0, not {sleep!r}")
        if token is None:
            token = new_token()
        else:
            token = self._transport.encode(token)
            local.attempt = None  # which may have had the same token
        blocking = self.blocking if blocking is None else blocking
        blocking_timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        stop_trying_at = None
        if blocking_timeout is not None:
            stop_trying_at = mod_time.monotonic() + wait_seconds(blocking_timeout, "blocking_timeout")
        bounded = blocking and blocking_timeout is not None and blocking_timeout > 0
        try:
            while True:
                if self._attempt(token, stop_trying_at) if bounded else self.do_acquire(token):
                    local.token = token
                    return True
                if not blocking or (stop_trying_at is not None and mod_time.monotonic() + sleep > stop_trying_at):
                    return False
                if stop_trying_at is None and local.token is not None:
                    self._refuse_to_wait_for_itself(local.token)
                mod_time.sleep(sleep)
        except Exception:
            raise
        except BaseException:  # KeyboardInterrupt, between the server's reply and the line that notes it
            attempt = local.attempt
            if attempt is not None and attempt.token is token and attempt.result and local.token != token:
                self._transport.undo(self._key, token)
            raise

    def _attempt(self, token: bytes, stop_trying_at: float | None) -> bool:
        """Make one attempt that ends in time; an overridden `do_acquire` ends when it likes."""
        hook = self.do_acquire
        if stop_trying_at is None or getattr(hook, "__func__", None) is not Lock.do_acquire:
            return bool(hook(token))
        return self._try_acquire(token, max(stop_trying_at - mod_time.monotonic(), 0.0))

    def _refuse_to_wait_for_itself(self, own: bytes) -> None:
        attempt = self.local.attempt  # None where an overridden do_acquire made it
        if self.thread_local and self._ttl_ms is None and attempt is not None and attempt.holder == own:
            raise LockError("Cannot acquire a lock that this thread holds: it does not expire", lock_name=self.name)

    def do_acquire(self, token: Any) -> bool:
        """Make one attempt; may be overridden. Returns True when the lock is held."""
        return self._try_acquire(token if type(token) is bytes else self._transport.encode(token))

    def _try_acquire(self, token: bytes, limit_s: float | None = None) -> bool:
        ttl_ms = self._ttl_ms
        local = self.local
        local.attempt = attempt = _protocol.Acquire(self._key, token, ttl_ms)
        self._transport.execute(attempt, limit_s)
        if attempt.result:
            local.lease = (token, None if ttl_ms is None else attempt.sent_at + ttl_ms / 1000)
        return attempt.result

    # ---- look ----

    def locked(self) -> bool:
        """Whether anybody holds the lock. Sends `GET name`, always to the primary."""
        look = _protocol.Look(self._key)
        self._transport.execute(look)
        return look.result

    def owned(self) -> bool:
        """Whether this thread holds the lock, by the server's word. Sends `GET name`, always to the primary."""
        token = self._token()
        look = _protocol.Look(self._key)
        self._transport.execute(look)
        return token is not None and look.holder == token

    # ---- release, extend, reacquire ----

    def release(self) -> None:
        """Give the lock back.

        Sends `DELIFEQ` (Valkey 9.0), `DELEX ... IFEQ` (Redis 8.4), or `EVALSHA`. The token is forgotten only after the
        server's verdict: when this raises a connection error, it can be called again.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock expired, or was deleted or taken by another.
            redis.exceptions.LockError: this thread holds no lock.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        if self._generation != _process.generation:
            self._own_nothing()
        local = self.local
        token = local.token
        if token is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", lock_name=self.name)
        try:
            self.do_release(token)
        except LockNotOwnedError:
            local.token = None
            raise
        if local.token == token:  # where the token is shared, another thread may have acquired meanwhile
            local.token = None

    def do_release(self, expected_token: Any) -> None:
        """Release by token; may be overridden."""
        if self.lua_release is _RELEASE or self.lua_release is None:
            released = self._release(expected_token)
        else:
            released = bool(self.lua_release(keys=[self.name], args=[expected_token], client=self.redis))
        if not released:
            raise LockNotOwnedError("Cannot release a lock that's no longer owned", lock_name=self.name)

    def _release(self, expected_token: Any) -> bool:
        token = expected_token if type(expected_token) is bytes else self._transport.encode(expected_token)
        local = self.local
        owner, expires_at = local.lease
        operation = _protocol.Release(
            self._key, token, expires_at if owner == token else None, local.releasing == token
        )
        try:
            self._transport.execute(operation)
        except BaseException:
            local.releasing = token if operation.unsettled and operation.valid else None
            raise
        if operation.unsettled:
            local.releasing = None
        return operation.result

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Prolong the lease.

        Sends `EVALSHA`; where scripts are forbidden, `GET`, `PTTL` and `SET name token IFEQ token PX ms`. Sent again
        after a lost reply, it still adds only once.

        Args:
            additional_time: seconds to add to the remaining ttl, rounded up to whole milliseconds; 0 adds nothing.
            replace_ttl: let `additional_time` be the new ttl instead.

        Returns:
            True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more, or has no ttl on the server.
            redis.exceptions.LockError: this thread holds no lock, or the lock does not expire.
            ValueError: a time that is negative, NaN or infinite, or a new ttl of 0. Nothing was sent.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        if self._token() is None:
            raise LockError("Cannot extend an unlocked lock", lock_name=self.name)
        if not self.timeout:
            raise LockError("Cannot extend a lock with no timeout", lock_name=self.name)
        return self.do_extend(additional_time, replace_ttl)

    def do_extend(self, additional_time: float, replace_ttl: bool) -> Literal[True]:
        """Extend by the caller's token; may be overridden."""
        add_ms = 0
        if additional_time != 0 or replace_ttl:
            add_ms = positive_ms(additional_time, "additional_time")
        token = self._transport.encode(self.local.token)
        if self.lua_extend not in (_EXTEND, None):
            args = [token, add_ms, "1" if replace_ttl else "0"]
            extended = bool(self.lua_extend(keys=[self.name], args=args, client=self.redis))
        else:
            operation = _protocol.Extend(self._key, token, add_ms, replace_ttl, self._expires_at(token))
            try:
                self._transport.execute(operation)
            except BaseException:
                if replace_ttl and operation.unsettled:
                    self._shorten(token, operation.sent_at + add_ms / 1000)
                raise
            extended = operation.result
            if extended:
                self.local.lease = (token, operation.expires_at)
        if not extended:
            raise LockNotOwnedError("Cannot extend a lock that's no longer owned", lock_name=self.name)
        return True

    def reacquire(self) -> Literal[True]:
        """Set the lease back to the lock's whole `timeout`.

        Sends `SET name token IFEQ token PX ms` (Valkey 9.0, Redis 8.4) or `EVALSHA`.

        Returns:
            True.

        Raises:
            redis.exceptions.LockNotOwnedError: the lock is not held any more.
            redis.exceptions.LockError: this thread holds no lock, or the lock does not expire.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        if self._token() is None:
            raise LockError("Cannot reacquire an unlocked lock", lock_name=self.name)
        if not self.timeout:
            raise LockError("Cannot reacquire a lock with no timeout", lock_name=self.name)
        return self.do_reacquire()

    def do_reacquire(self) -> Literal[True]:
        """Reacquire by the caller's token; may be overridden."""
        ttl_ms = self._ttl_ms
        assert ttl_ms is not None
        token = self._transport.encode(self.local.token)
        if self.lua_reacquire not in (_REACQUIRE, None):
            held = bool(self.lua_reacquire(keys=[self.name], args=[token, ttl_ms], client=self.redis))
        else:
            operation = _protocol.Reacquire(self._key, token, ttl_ms)
            try:
                self._transport.execute(operation)
            except BaseException:
                if operation.unsettled:
                    self._shorten(token, operation.sent_at + ttl_ms / 1000)
                raise
            held = operation.result
            if held:
                self.local.lease = (token, operation.sent_at + ttl_ms / 1000)
        if not held:
            raise LockNotOwnedError("Cannot reacquire a lock that's no longer owned", lock_name=self.name)
        return True

    # ---- with ----

    def __enter__(self) -> Lock:
        """Acquire.

        Raises:
            redis.exceptions.LockError: the lock was not to be had in time; and whatever `acquire` raises.
        """
        if self.acquire():
            return self
        raise LockError(_NOT_ENTERED, lock_name=self.name)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release. An error of the release never takes the place of the body's own exception: it is logged."""
        try:
            self.release()
        except LockError:
            if self.raise_on_release_error and exc_type is None:
                raise
            logger.warning("Lock was unlocked or no longer owned when exiting context manager.")
        except Exception as error:
            if exc_type is None:
                raise
            logger.warning("Lock could not be released when exiting context manager: %r", error)

    # ---- copying and pickling ----

    def __copy__(self) -> Lock:
        """A second handle: same client, same token."""
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """The settings and a recipe for the client; never a token or a credential."""
        state = {name: value for name, value in vars(self).items() if name not in _NOT_PICKLED}
        state["_redis"] = _clients.recipe_of(self._redis)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """An unowned lock with the same settings."""
        state = dict(state)
        client = _clients.client_from(state.pop("_redis"))
        vars(self).update(state)
        self.redis = client
        self._own_nothing()
        self.register_scripts()


_NOT_PICKLED = {"local", "_transport", "_generation"}
