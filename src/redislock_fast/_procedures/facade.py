"""What `Lock` and `asyncio.Lock` share: redis-py's attributes, which may be changed at any time, and its hooks.

Nothing here takes a lock.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from abc import abstractmethod
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from redis.backoff import AbstractBackoff
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding, SharedHolding, Trial, twin_of
from redislock_fast._procedures.waiting import Waiting
from redislock_fast._protocol import scripts
from redislock_fast._protocol.commands import Acquire, Release
from redislock_fast._protocol.fenced import AcquireFenced, AcquireOwnFenced
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._util import fork
from redislock_fast._util.times import MOST_FAILURES, Limit, poll_seconds, ttl_ms_of, wait_seconds
from redislock_fast._util.tokens import MARKER, is_held_with, is_ours, new_token

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.options import TermSettings

__all__ = ["EXTEND", "NOT_ENTERED", "REACQUIRE", "RELEASE", "UNLOCKED", "Backoff", "LockBase", "LockerBase", "WaitBy"]

# By weak references: what is started meanwhile, such as the task that connects, keeps a copy of the context.
_acting: ContextVar[tuple[weakref.ref[LockBase], weakref.ref[Holding]] | None] = ContextVar("_acting", default=None)

WaitBy: TypeAlias = "Literal['push', 'poll'] | AbstractBackoff"

NOT_ENTERED = "Unable to acquire lock within the time specified"
UNLOCKED = "Cannot release a lock that's not owned or is already unlocked."


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


RELEASE = _LuaScript(scripts.RELEASE.text.decode())
EXTEND = _LuaScript(scripts.EXTEND.text.decode())
REACQUIRE = _LuaScript(scripts.REACQUIRE.text.decode())


class Backoff:
    """How long to sleep before each attempt but the first.

    Args:
        wait: the lock's setting.
        sleep: in seconds, where that is no backoff.
    """

    def __init__(self, wait: WaitBy, sleep: float) -> None:
        self._sleep = sleep
        self._failures = 0
        self._backoff = None if isinstance(wait, str) else copy.deepcopy(wait)  # which may remember its last pause
        if self._backoff is not None:
            self._backoff.reset()  # type: ignore[no-untyped-call]

    def next_s(self) -> float:
        """After one more attempt that failed, in seconds."""
        if self._backoff is None:
            return self._sleep
        self._failures = min(self._failures + 1, MOST_FAILURES)
        return poll_seconds(self._backoff.compute(self._failures))


class LockBase:
    """The settings of a lock, and whose token is whose. The parameters stand on the classes that users name."""

    lua_release: Any = None
    lua_extend: Any = None
    lua_reacquire: Any = None

    LUA_RELEASE_SCRIPT: str = RELEASE.script
    LUA_EXTEND_SCRIPT: str = EXTEND.script
    LUA_REACQUIRE_SCRIPT: str = REACQUIRE.script

    local: Any

    _wait: WaitBy = "push"
    _terms: Terms | None = None
    _is_for_tasks = False

    def __init__(
        self,
        redis: Any,
        name: str | bytes,
        timeout: float | AdaptiveTTL | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        wait: WaitBy = "push",
        **terms: Unpack[TermSettings],
    ) -> None:
        # Not through the properties: a lock is often made for one use.
        self._redis = redis
        self._transport = transport = self._transport_of(redis)
        self._name = name
        self._key = transport.key_of(name)
        seconds: Any = timeout
        adaptive: Any = None
        if hasattr(timeout, "observe"):  # an AdaptiveTTL: importing it takes a millisecond, and few need it
            adaptive = timeout
            seconds = adaptive.ttl_ms(name) / 1000
        self._timeout: float | None = seconds
        self._ttl_ms = None if seconds is None else ttl_ms_of(seconds)
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        if wait != "push":  # an attribute less in most locks
            self.wait = wait
        if terms or adaptive is not None:
            self._terms = Terms(adaptive=adaptive, **terms)
            self._terms.check(self._ttl_ms, self.thread_local, self._is_for_tasks)
            if self._terms.fencing:
                self._attempt_kind, self._own_kind = AcquireFenced, AcquireOwnFenced
        self._own_nothing()
        self.register_scripts()

    # ---- settings, which may be changed at any time as redis-py's may ----

    @staticmethod
    @abstractmethod
    def _transport_of(client: Any) -> Any:
        """The transport that serves this client."""

    @abstractmethod
    def _new_holding(self) -> Any:
        """What `local` is where `thread_local` is true."""

    @property
    def redis(self) -> Any:
        """The client."""
        return self._redis

    @redis.setter
    def redis(self, client: Any) -> None:
        self._transport = self._transport_of(client)
        self._redis = client

    @property
    def name(self) -> Any:
        """The key."""
        return self._name

    @name.setter
    def name(self, name: Any) -> None:
        self._key = self._transport.key_of(name)
        self._name = name

    @property
    def timeout(self) -> float | None:
        """The ttl in seconds."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        ttl_ms = ttl_ms_of(timeout)
        if self._terms is not None:
            self._terms.check(ttl_ms, self.thread_local, self._is_for_tasks)
        self._ttl_ms = ttl_ms
        self._timeout = timeout

    @property
    def wait(self) -> WaitBy:
        """How `acquire` waits: "push", "poll" or a backoff of redis-py."""
        return self._wait

    @wait.setter
    def wait(self, wait: WaitBy) -> None:
        if wait not in ("push", "poll") and not isinstance(wait, AbstractBackoff):
            raise ValueError(f"wait is 'push', 'poll' or a redis.backoff.AbstractBackoff, not {wait!r}")
        self._wait = wait

    def _own_nothing(self) -> None:
        self._generation = fork.generation
        self.local = self._new_holding() if self.thread_local else SharedHolding()

    def _held(self) -> Holding:
        """What the caller holds and may release. A forked child has nothing of its parent's."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Holding = self.local.held()
        return holding

    def _held_with_ttl(self, verb: str) -> Holding:
        """What the caller holds.

        Raises:
            redis.exceptions.LockError: he holds nothing, or what does not expire.
        """
        held = self._held()
        if held.token is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self.name)
        if not self.timeout:
            raise LockError(f"Cannot {verb} a lock with no timeout", lock_name=self.name)
        return held

    def _token_of(self, held: Holding, verb: str) -> bytes:
        """The token of what is held; where it is shared, another may have released it since it was looked at."""
        if held.token is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self.name)
        token: bytes = self._transport.encode(held.token)  # others may have set it
        return token

    def _lost(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self.name)

    do_release: Any
    do_extend: Any
    do_reacquire: Any
    _own_hooks: tuple[Any, Any, Any]  # these three as the class that users name has them

    def _may_be_marked(self) -> bool:
        """Whether waiters may mark the lock's tokens: hooks and scripts that are not ours may compare them."""
        release, extend, reacquire = self._own_hooks
        return (
            self.lua_release is RELEASE
            and self.lua_extend is EXTEND
            and self.lua_reacquire is REACQUIRE
            and getattr(self.do_release, "__func__", None) is release
            and getattr(self.do_extend, "__func__", None) is extend
            and getattr(self.do_reacquire, "__func__", None) is reacquire
        )

    _attempt_kind: type[Acquire] = Acquire  # with a token made here
    _own_kind: type[Acquire] = AcquireOwn  # with a caller's own

    def _next_token(self, token: Any) -> bytes:
        """The token of the next acquire: the caller's own, or a new one."""
        if token is None:
            fresh = new_token()
            return fresh if self._may_be_marked() else fresh[len(MARKER) :]
        encoded: bytes = self._transport.encode(token)
        return encoded

    def _new_attempt(self, token: bytes, own: bool, local: Holding) -> Acquire:
        """The next attempt, with the caller's own token or another; noted for hooks and for fences."""
        kind = self._own_kind if own else self._attempt_kind
        local.attempt = attempt = kind(self._key, token, self._ttl_ms)
        return attempt

    @staticmethod
    def _note(attempt: Acquire, local: Holding) -> None:
        """Keep the lease that the attempt has got."""
        ttl_ms = attempt.ttl_ms
        local.lease = (attempt.token, None if ttl_ms is None else attempt.sent_at + ttl_ms / 1000)

    def _release_of(self, token: bytes, local: Holding) -> Release:
        """The release of what is held with this token."""
        return Release(self._key, token, local.expires_at(token), local.releasing == token, local.queued == token)

    def _token_after(self, token: bytes, brought: Any, attempt: Acquire | None) -> bytes:
        """The token of the next attempt, after one that failed: a token that is being undone does not come back."""
        is_undone = brought is None and attempt is not None and attempt.unsettled
        return self._next_token(None) if is_undone else token

    def _limit(self, blocking_timeout: float | None) -> Limit:
        """The deadline of an acquire that begins now."""
        wait_s = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        return Limit(None if wait_s is None else wait_seconds(wait_s, "blocking_timeout"))

    def _waiting(self, token: bytes, brought: Any, interval_s: float, limit: Limit) -> Waiting:
        """How to wait after an attempt with this token failed.

        Args:
            token: the attempt's.
            brought: the token as the caller brought it; None where he did not.
            interval_s: how often to look whether all is well, in seconds.
            limit: of the acquire.
        """
        queues = brought is None and is_ours(token)
        kind = self._attempt_kind if brought is None else self._own_kind
        return Waiting(self._key, token, self._ttl_ms, interval_s, limit, queues, kind)

    def _refuse_to_wait_for_itself(self, local: Holding, attempt: Acquire | None) -> None:
        if (
            self.thread_local
            and (self._ttl_ms is None or (local.tenure is not None and local.tenure.is_endless))
            and attempt is not None
            and local.token is not None
            and is_held_with(attempt.holder, local.token)
        ):
            raise LockError("Cannot acquire a lock that its owner holds: it does not expire", lock_name=self.name)

    def _leaves_unnoticed(
        self, local: Holding, token: bytes, before: bytes | None, brought: Any, attempt: Acquire | None = None
    ) -> bool:
        """Whether an acquire that was interrupted must be undone: its caller has not learnt of the server's reply.

        Args:
            local: the caller's holding.
            token: of the acquire.
            before: what was held till then.
            brought: the token as the caller brought it; None where he did not.
            attempt: the last one.
        """
        if token == before:
            return False
        acquired = attempt is not None and attempt.token is token and attempt.result
        noted = local.token == token and (acquired or brought is None)  # else by another who has brought the same token
        if noted:
            local.token = None
        if brought is not None:
            return acquired and attempt is not None and attempt.took
        return noted or acquired

    def _undo_unnoticed(
        self, local: Holding, token: bytes, before: bytes | None, brought: Any, attempt: Acquire | None = None
    ) -> None:
        """Undo an acquire that was interrupted, where `_leaves_unnoticed` says so."""
        if self._leaves_unnoticed(local, token, before, brought, attempt):
            self._transport.undo([(self._key, token)])

    @staticmethod
    def _leaves(waiting: Waiting, local: Holding) -> bool:
        """Whether a waiting that has ended by an error must be undone: the lock may have been granted to it.

        Not where nothing is handed over, unless an attempt has taken it: a token that was brought may be another's too.
        """
        attempt = waiting.attempt
        if not waiting.queues and not (attempt is not None and attempt.result):
            return False
        if local.token == waiting.token:
            local.token = None
        return waiting.queues or (attempt is not None and attempt.took)

    def register_scripts(self) -> None:
        """Make the class's script objects; may be overridden.

        A class with scripts of its own, by `LUA_*_SCRIPT` or `lua_*`, has those executed and no native commands.
        """
        cls = type(self)
        if cls.lua_release is None:
            cls.lua_release = _script_object(cls.LUA_RELEASE_SCRIPT, RELEASE)
        if cls.lua_extend is None:
            cls.lua_extend = _script_object(cls.LUA_EXTEND_SCRIPT, EXTEND)
        if cls.lua_reacquire is None:
            cls.lua_reacquire = _script_object(cls.LUA_REACQUIRE_SCRIPT, REACQUIRE)

    # ---- hooks ----

    # An overridden hook may call the original. That knows by the context for whom it acts, and leaves there what it has
    # got: others may act at the same time, by the same lock object.

    def _acting(self) -> Holding | None:
        """For whom an overridden hook calls the original."""
        acting = _acting.get()
        return acting[1]() if acting is not None and acting[0]() is self else None

    def _act_for(self, local: Holding) -> Token[Any]:
        """A hook is called now. Returns what `_act_no_more` needs."""
        return _acting.set((weakref.ref(self), weakref.ref(local)))

    @staticmethod
    def _act_no_more(before: Token[Any]) -> None:
        with contextlib.suppress(ValueError):  # a dropped task ends in the context of who collects it
            _acting.reset(before)

    def _trial_of(self, local: Holding, token: bytes, brought: Any, limit: Limit) -> Trial:
        """Where an overridden `do_acquire` leaves its attempts."""
        trial = Trial(local)
        trial.limit = limit
        trial.brought = None if brought is None else token
        return trial

    # ---- copying ----

    def __copy__(self) -> Any:
        """A second handle: same client, same token."""
        return twin_of(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            TypeError: always. `detach` makes a handle, which can be pickled.
        """
        raise TypeError(
            f"the lock {self._name!r} cannot be pickled: hand it to another process by detach() and attach()"
        )


_AnyLock = TypeVar("_AnyLock", bound=LockBase)


class LockerBase(Generic[_AnyLock]):
    """What the two `Locker`s share. The parameters stand on the classes that users name."""

    _lock_class: type[_AnyLock]

    def __init__(self, client: Any) -> None:
        self._client = client
        self._transport = self._lock_class._transport_of(client)  # noqa: SLF001  # of a class of ours

    def lock(
        self,
        name: str | bytes,
        timeout: float | AdaptiveTTL | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        wait: WaitBy = "push",
        **terms: Unpack[TermSettings],
    ) -> _AnyLock:
        """A lock on this client; the parameters are those of `Lock`."""
        return self._lock_class(
            self._client,
            name,
            timeout=timeout,
            sleep=sleep,
            blocking=blocking,
            blocking_timeout=blocking_timeout,
            thread_local=thread_local,
            raise_on_release_error=raise_on_release_error,
            wait=wait,
            **terms,
        )
