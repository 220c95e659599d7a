"""The settings of a lock: redis-py's attributes and hooks, which may be changed at any time. Sends nothing."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from sys import modules
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias

from redis.backoff import AbstractBackoff
from redis.exceptions import LockError

from redislock_fast._lease.call_log import knows_whether, logs_calls
from redislock_fast._lease.metrics import installed
from redislock_fast._lease.options import Options, linger_ms_of, refuse_unknown, spelled_out
from redislock_fast._lease.owner import Owner, SharedOwner, twin_of
from redislock_fast._procedures.steps import Do, Steps
from redislock_fast._protocol import scripts
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.fenced import AcquireFenced, AcquireManyFenced, AcquireOwnFenced
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import noted, shown
from redislock_fast._util.times import MOST_FAILURES, blocks, poll_seconds, ttl_ms_of, wait_seconds
from redislock_fast._util.tokens import MARKER, without_flag

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.key_cache import CachedKey
    from redislock_fast._lease.options import OptionSettings

__all__ = [
    "EXTEND",
    "REACQUIRE",
    "RELEASE",
    "UNLOCKED",
    "Backoff",
    "Hooks",
    "LockSettings",
    "WaitBy",
    "hooks_of",
    "not_entered",
    "observe_by_otel",
    "would_wait_for_itself",
]

# By weak references: a task that is started meanwhile, such as the one that connects, keeps a copy of the context.
_acting: ContextVar[tuple[weakref.ref[LockSettings], weakref.ref[Owner]] | None] = ContextVar("_acting", default=None)

WaitBy: TypeAlias = "Literal['push', 'poll'] | AbstractBackoff"

_LINGER = {"linger"}

_provided = "opentelemetry.metrics"
"""The module that may have a meter provider, if the program has imported it; empty: that is decided."""

_provider_place: Any = SimpleNamespace(_METER_PROVIDER="not known")
"""What has the provider, None where it is not set."""

UNLOCKED = "Cannot release a lock that's not owned or is already unlocked."


def not_entered(name: Any) -> LockError:
    """The error of a `with` whose lock was not acquired."""
    error = LockError("Unable to acquire lock within the time specified", lock_name=name)
    return noted(error, f"of the lock {shown(name)}")


def would_wait_for_itself(name: Any, owner: str) -> LockError:
    """The error of an acquire by the thread or task that holds the lock, without a ttl or renewed."""
    text = f"this {owner} holds the lock {shown(name)} and would wait for itself; reentrant=True lets it enter again"
    return LockError(text, lock_name=name)


def observe_by_otel() -> None:
    """Have OpenTelemetry's meter provider get metrics of all locks, where the program has set one.

    The public function that tells takes as long as the rest of making a lock, and redis-py imports OpenTelemetry
    wherever it is installed. So later calls are made only where the variable behind it is set, or is gone.
    """
    global _provided, _provider_place  # noqa: PLW0603  # the only place that changes them
    if _provided in modules and _provider_place._METER_PROVIDER is not None:  # noqa: SLF001  # as said
        from redislock_fast import otel  # noqa: PLC0415  # few need it

        internal = getattr(modules[_provided], "_internal", None)
        if hasattr(internal, "_METER_PROVIDER"):
            _provider_place = internal
        if otel.install_if_set():
            _provided = ""


class _LuaScript:
    """A script with the call of redis-py's `Script`, but without a reference to a client."""

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


class Hooks(NamedTuple):
    """The attributes of a lock that a class or an object may override, as `redis.lock.Lock` has them."""

    lua_release: Any
    lua_extend: Any
    lua_reacquire: Any
    do_acquire: Any
    do_release: Any
    do_extend: Any
    do_reacquire: Any

    @classmethod
    def of(cls, lock_class: Any) -> Hooks:
        """The hooks of a class of this library, which override nothing."""
        do = (lock_class.do_acquire, lock_class.do_release, lock_class.do_extend, lock_class.do_reacquire)
        return cls(RELEASE, EXTEND, REACQUIRE, *do)


hooks_of = attrgetter(*(f"{name}.__func__" if name.startswith("do_") else name for name in Hooks._fields))


class Backoff:
    """The pauses before the attempts of one acquire, but the first.

    Args:
        wait: the lock's setting.
        sleep: the pause in seconds where `wait` is no backoff.
    """

    def __init__(self, wait: WaitBy, sleep: float) -> None:
        self._sleep = sleep
        self._failures = 0
        self._backoff = None if isinstance(wait, str) else copy.deepcopy(wait)  # it may remember its last pause
        if self._backoff is not None:
            self._backoff.reset()  # type: ignore[no-untyped-call]

    def next_s(self) -> float:
        """The pause after one more attempt that has failed, in seconds."""
        if self._backoff is None:
            return self._sleep
        self._failures = min(self._failures + 1, MOST_FAILURES)
        return poll_seconds(self._backoff.compute(self._failures))


class LockSettings:
    """The settings of a lock. The public classes describe the parameters."""

    lua_release: Any = None
    lua_extend: Any = None
    lua_reacquire: Any = None

    LUA_RELEASE_SCRIPT: str = RELEASE.script
    LUA_EXTEND_SCRIPT: str = EXTEND.script
    LUA_REACQUIRE_SCRIPT: str = REACQUIRE.script

    _owners: Any

    _attempt_kind: type[Acquire] = Acquire  # with a new token
    _own_kind: type[Acquire] = AcquireOwn  # with a caller's own token
    _transport: Any
    _pool: Any
    """The client's pool when the transport was looked up; None for a client of a cluster."""
    _former: Any = None
    """The pool before and its transport, which may renew a lock: that ends with its pool."""
    _wait: WaitBy = "push"
    _options: Options | None = None
    _linger_ms: int | None = None
    _is_direct = True  # whether the reply to its first request may be all that an acquire needs
    _is_for_tasks = False

    @spelled_out("Lock")
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
        **options: Unpack[OptionSettings[Any]],
    ) -> None:
        # Hot path: properties are bypassed, since a lock is often made for one use.
        if type(sleep) is not float or not sleep >= 0.0:
            poll_seconds(sleep)
        waits: Any = blocking
        if type(waits) is not bool:
            blocks(waits)
        if blocking_timeout is not None:
            wait_seconds(blocking_timeout, "blocking_timeout")
        self._options = self._linger_ms = None  # and not in the class, where Python 3.11 is slow to find them
        self._redis = redis
        self._transport = transport = self._transport_of(redis)
        self._pool = getattr(redis, "connection_pool", None)
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
        if wait != "push":  # else the class's attribute serves
            self.wait = wait
        if _provided in modules and _provider_place._METER_PROVIDER is not None:  # noqa: SLF001  # see `observe_by_otel`
            observe_by_otel()
        is_seen = installed or (knows_whether() is not False and logs_calls())
        if options or adaptive is not None or is_seen:
            if adaptive is None and not is_seen and options.keys() == _LINGER:  # making `Options` takes 3 us
                self._linger_ms = linger_ms_of(options["linger"], self._ttl_ms)
            else:
                self._set_options(options, adaptive)
        self._own_nothing()
        self.register_scripts()

    def _set_options(self, options: Any, adaptive: Any) -> None:
        """Check and set the options of the lock."""
        refuse_unknown(type(self).__name__, options, LockSettings.__init__)
        checked = Options(adaptive=adaptive, **options)
        checked.check(self._ttl_ms, self.thread_local, self._is_for_tasks)
        if checked.wait_replicas and not self._transport.sends_wait:
            raise ValueError(
                f"the lock {shown(self._name)} cannot wait for replicas: its client sends commands in its own way"
            )
        if checked.fencing:
            kind = AcquireFenced if checked.linger is None else AcquireManyFenced
            self._attempt_kind, self._own_kind = kind, AcquireOwnFenced
        self._linger_ms = linger_ms_of(checked.linger, self._ttl_ms)
        self._is_direct = self.thread_local and checked.only_note
        self._options = checked

    # ---- settings, which may be changed at any time as redis-py's may ----

    @staticmethod
    @abstractmethod
    def _transport_of(client: Any) -> Any:
        """The transport that serves this client."""

    @abstractmethod
    def _new_owner(self) -> Any:
        """Make the owners, where `thread_local` is true."""

    def _heirs_of(self, former: Any) -> Any:
        """Make the owners anew after a patch of `threading`."""
        return former  # of tasks

    @property
    def redis(self) -> Any:
        """The client."""
        return self._redis

    @redis.setter
    def redis(self, client: Any) -> None:
        transport = self._transport_of(client)
        self._key = transport.key_of(self._name)
        if transport is not self._transport:  # else another caller was faster
            self._former, self._transport = (self._transport, self._pool), transport
        self._pool = getattr(client, "connection_pool", None)
        self._cached = None
        self._redis = client

    def _follow_pool(self) -> None:
        """Lock where the client's own commands go by now: its pool may have been replaced."""
        pool = self._pool
        if pool is not None and self._redis.connection_pool is not pool:
            self.redis = self._redis

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
        if self._options is not None:
            self._options.check(ttl_ms, self.thread_local, self._is_for_tasks)
        if self._linger_ms is not None:
            linger_ms_of(self._linger_ms / 1000, ttl_ms)
        self._ttl_ms = ttl_ms
        self._timeout = timeout

    @property
    def wait(self) -> WaitBy:
        """How `acquire` waits: "push", "poll" or a `redis.backoff.AbstractBackoff`."""
        return self._wait

    @wait.setter
    def wait(self, wait: WaitBy) -> None:
        if wait not in ("push", "poll") and not isinstance(wait, AbstractBackoff):
            raise ValueError(f"wait must be 'push', 'poll' or a redis.backoff.AbstractBackoff, not {wait!r}")
        self._wait = wait

    _cached: CachedKey | None = None
    """The key in the cache of its server, for a lock with `linger` that was acquired."""

    def _own_nothing(self) -> None:
        self._generation = fork.generation()
        if self._cached is not None:  # of the parent
            self._cached = None
        self._local = patching.in_force
        self._owners = self._new_owner() if self.thread_local else SharedOwner()

    def _own_anew(self) -> None:
        """Go on after a fork, or a patch of `threading`."""
        if self._local is not threading.local:
            self._adapt_to_patch()
        if self._generation != fork.generation():
            self._own_nothing()

    def _adapt_to_patch(self) -> None:
        """Go on after a patch of `threading`: each greenlet is an owner of its own from now on."""
        patching.adapt()
        if self._local is not patching.in_force:  # else another greenlet was faster, or this thread must not adapt
            self._local = patching.in_force
            if self.thread_local:
                self._owners = self._heirs_of(self._owners)

    def register_scripts(self) -> None:
        """Make the class's script objects; may be overridden.

        Where a class has scripts of its own, in `LUA_*_SCRIPT` or `lua_*`, they are sent instead of native commands.
        """
        cls = type(self)
        if cls.lua_release is None:
            cls.lua_release = _script_object(cls.LUA_RELEASE_SCRIPT, RELEASE)
        if cls.lua_extend is None:
            cls.lua_extend = _script_object(cls.LUA_EXTEND_SCRIPT, EXTEND)
        if cls.lua_reacquire is None:
            cls.lua_reacquire = _script_object(cls.LUA_REACQUIRE_SCRIPT, REACQUIRE)

    # ---- hooks ----

    do_acquire: Any
    do_release: Any
    do_extend: Any
    do_reacquire: Any
    _own_hooks: Hooks  # of the class that users name

    def _has_own_hooks(self) -> bool:
        """Whether no hook is overridden, by a class or on this object: both may change at any time."""
        try:
            hooks: tuple[Any, ...] = hooks_of(self)
        except AttributeError:  # a hook that is no method
            return False
        return hooks == self._own_hooks

    def _has_own_release(self) -> bool:
        """Whether no hook is overridden that concerns a release."""
        own = self._own_hooks
        return getattr(self.do_release, "__func__", None) is own.do_release and self.lua_release is own.lua_release

    def _is_overridden(self, name: str) -> bool:
        """Whether this `do_*` hook is overridden."""
        return getattr(getattr(self, name), "__func__", None) is not getattr(self._own_hooks, name)

    def _may_be_flagged(self) -> bool:
        """Whether waiters may add the contended flag to the value, which others' scripts may compare with the token."""
        return self._has_own_hooks() or (  # do_acquire compares none
            self.lua_release is RELEASE
            and self.lua_extend is EXTEND
            and self.lua_reacquire is REACQUIRE
            and not any(map(self._is_overridden, ("do_release", "do_extend", "do_reacquire")))
        )

    @property
    def _listens(self) -> bool:
        """Whether the holder hears of waiters."""
        return self._linger_ms is not None or (self._options is not None and self._options.on_wanted is not None)

    def _next_token(self, token: Any) -> bytes:
        """The token of the next acquire: the caller's own, or a new one."""
        if token is None:
            fresh: bytes = self._transport.new_token(self._key, self._listens)
            return fresh if self._may_be_flagged() else fresh[len(MARKER) :]
        return self._encoded(token)

    def _encoded(self, token: Any) -> bytes:
        """A caller's token as bytes. It may be the lock's value, as `local.token` shows it."""
        return without_flag(self._transport.encode(token))

    # An overridden hook may call the original, which finds the owner for which it acts in the context and notes its
    # results there: other callers may use the same lock object at the same time.

    def _acting(self) -> Owner | None:
        """The owner for which an overridden hook calls the original."""
        acting = _acting.get()
        return acting[1]() if acting is not None and acting[0]() is self else None

    def _calling(self, owner: Owner, hook: Callable[..., Any], *args: Any) -> Steps:
        """Call an overridden hook for this owner. Returns what the hook returns."""
        before = _acting.set((weakref.ref(self), weakref.ref(owner)))
        try:
            return (yield Do("call", partial(hook, *args)))
        finally:
            with contextlib.suppress(ValueError):  # a dropped task may end in another context
                _acting.reset(before)

    # ---- copying ----

    def __copy__(self) -> Any:
        """A second lock object: same client, same token."""
        return twin_of(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            TypeError: always. `detach` returns a handle, which can be pickled.
        """
        raise TypeError(
            f"the lock {shown(self._name)} cannot be pickled: pass it to another process by detach() and attach()"
        )
