"""`LockBase`: the settings of a lock, which may be changed at any time as redis-py's may, and what its callers hold.

Its operations are functions in the other modules of this package. Nothing here sends anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from sys import modules
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Protocol, TypeAlias

from redis.backoff import AbstractBackoff
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast import otel  # here, not where it is needed: a child forked in the midst of that would hang
from redislock_fast._lease.callbacks import end_callback
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.logs import knows_whether, logs_calls
from redislock_fast._lease.metrics import installed, report_call
from redislock_fast._lease.options import Options, linger_ms_of, refuse_unknown, spelled_out
from redislock_fast._lease.owner import Local, Owner, PendingOwner, SharedOwner, current_task, owners_of, twin_of
from redislock_fast._lease.prolonging import mutex
from redislock_fast._procedures.lease import (
    describe,
    end_lost,
    forget_lease,
    lost_error,
    refuse_in_callback,
    unlocked_error,
)
from redislock_fast._procedures.loss import reason_of
from redislock_fast._protocol import scripts
from redislock_fast._protocol.commands import Acquire, ReadHolder, Release
from redislock_fast._protocol.fenced import AcquireFenced, AcquireManyFenced, AcquireOwnFenced
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LockLostError, LossReason, noted, shown, shown_held
from redislock_fast._util.times import MOST_FAILURES, blocks, clock, drift_s, poll_seconds, ttl_ms_of, wait_seconds
from redislock_fast._util.tokens import LISTENS, MARKER, PERMIT, PLAIN, is_permit, without_flag

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.handle import Handle
    from redislock_fast._lease.options import OptionSettings
    from redislock_fast._procedures.acquire import Call

# By weak references: a task that is started meanwhile, such as the one that connects, keeps a copy of the context.
_acting: ContextVar[tuple[weakref.ref[LockBase], weakref.ref[Owner], weakref.ref[Call] | None] | None] = ContextVar(
    "_acting", default=None
)

WaitBy: TypeAlias = "Literal['push', 'poll'] | AbstractBackoff"

_LINGER = {"linger"}

_provided = "opentelemetry.metrics"
"""The module that may have a meter provider, if the program has imported it; empty: that is decided."""

_provider_place: Any = SimpleNamespace(_METER_PROVIDER="not known")
"""What has the provider, None where it is not set."""


def observe_by_otel() -> None:
    """Have OpenTelemetry's meter provider get metrics of all locks, where the program has set one.

    The public function that tells takes as long as the rest of making a lock, and redis-py imports OpenTelemetry
    wherever it is installed. So later calls are made only where the variable behind it is set, or is gone.
    """
    global _provided, _provider_place  # noqa: PLW0603  # the only place that changes them
    if _provided in modules and _provider_place._METER_PROVIDER is not None:  # as said
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


def is_replaced(script: Any, own: Any) -> bool:
    """Whether a user's script stands in place of our own, as redis-py's users may set `lua_release` and the like."""
    return script is not own and script is not None


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


hooks_of = attrgetter(*Hooks._fields)
"""The hooks of a class, as a tuple."""


class Backoff:
    """The pauses before the attempts of one acquire, except the first.

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


class Lingers(Protocol):
    """How locks are acquired and released whose holder hears that they are wanted: those with `linger` or `on_wanted`.

    The public classes name the object, which is of the wing of lingering.
    """

    def acquire(self, lock: LockBase, call: Call) -> Steps:
        """The steps of an acquire. They return whether the lock is held."""

    def release(self, lock: LockBase, owner: Owner) -> bool:
        """Release a lock whose key may linger. Returns whether it was held."""

    def listen(self, lock: LockBase, lease: Lease) -> None:
        """Have the holder of this lease told once that the lock is wanted."""

    def end_listening(self, lock: LockBase, lease: Lease) -> None:
        """Do not tell the holder of this lease any more."""

    def listens(self, lock: LockBase) -> bool:
        """Whether the process hears when another one wants the lock, as far as is known without a request."""


class LockBase:
    """A lock without its operations: its settings, and what its callers hold. Sends nothing.

    The public classes describe the parameters.
    """

    lua_release: Any = None
    lua_extend: Any = None
    lua_reacquire: Any = None

    LUA_RELEASE_SCRIPT: str = RELEASE.script
    LUA_EXTEND_SCRIPT: str = EXTEND.script
    LUA_REACQUIRE_SCRIPT: str = REACQUIRE.script

    # An object's `__dict__` is mostly empty. So one look at it tells that the object overrides no hook: 6 % of a pair.
    __slots__ = (
        "_at_least_s",
        "_attached",
        "_attempt_kind",
        "_cached",
        "_former",
        "_generation",
        "_is_direct",
        "_key",
        "_linger_ms",
        "_local",
        "_name",
        "_options",
        "_original",
        "_own_hooks",
        "_own_kind",
        "_owners",
        "_pool",
        "_redis",
        "_release_kind",
        "_timeout",
        "_token_kind",
        "_transport",
        "_ttl_ms",
        "_wait",
        "blocking",
        "blocking_timeout",
        "raise_on_release_error",
        "sleep",
        "thread_local",
    )

    _owners: Any

    _attempt_kind: type[Acquire]  # with a new token
    _own_kind: type[Acquire]  # with a caller's own token
    _own_hooks: Hooks  # which override nothing
    _transport: Any
    _pool: Any
    """The client's pool when the transport was looked up; None for a client of a cluster."""
    _former: Any
    """The pool before and its transport, which may renew a lock: that ends with its pool."""
    _options: Options | None
    _linger_ms: int | None
    _at_least_s: float | None
    """For how many seconds after its acquire the lock of a job is not another's, released or not; see `once`."""
    _attached: bytes | None
    """The attached token, until a `with` block enters it."""
    _cached: Any
    """The key in the cache of its server, for a lock with `linger` that was acquired."""
    _is_direct: bool  # whether the reply to its first request may be all that an acquire needs
    _is_for_tasks = False
    _token_kind: bytes  # of the tokens of acquires
    _release_kind: Any  # `Release`, or what stands in its place for what is no lock
    _class_hooks: Hooks  # of the class that users name, and so is the next one
    _linger: Lingers

    def __init_subclass__(cls, **settings: Any) -> None:
        """Refuse a class with a property of its own in the place of what a lock keeps to itself.

        It would not be asked: callers of this class and of redis-py's would lock two keys.

        Raises:
            TypeError: it has one.
        """
        super().__init_subclass__(**settings)
        for name in ("local", "name", "redis", "timeout"):
            if getattr(cls, name) is not getattr(LockBase, name):
                text = "a lock reads it once: pass the value to super().__init__(), or assign it"
                raise TypeError(f"{cls.__name__}.{name} cannot take the place of Lock.{name}, since {text}")

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
        # Here and not in the class, where Python 3.11 is slow to find them.
        self._options = self._linger_ms = self._at_least_s = self._attached = self._cached = self._former = None
        self._own_hooks = self._class_hooks
        self._is_direct, self._attempt_kind, self._own_kind = True, Acquire, AcquireOwn
        self._token_kind: bytes = PLAIN
        self._release_kind: Any = Release
        self._redis = redis
        self._transport = transport = self._transport_of(redis)
        self._pool = getattr(redis, "connection_pool", None)
        self._name = name
        self._key = transport.encoding.key_of(name)
        seconds: Any = timeout
        adaptive: Any = None
        if hasattr(timeout, "observe"):  # an AdaptiveTTL: importing it takes a millisecond, and few need it
            adaptive, seconds = timeout, None  # `_set_options` asks for the ttl
        self._timeout: float | None = seconds
        self._ttl_ms = None if seconds is None else ttl_ms_of(seconds)
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self._wait: WaitBy = "push"
        if wait != "push":
            self.wait = wait
        if _provided in modules and _provider_place._METER_PROVIDER is not None:  # see `observe_by_otel`
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
        refuse_unknown(type(self).__name__, options, LockBase.__init__)
        checked = Options(adaptive=adaptive, **options)
        self._adapt(checked)
        checked.check(self._ttl_ms, self.thread_local, self._is_for_tasks)
        if checked.wait_replicas and not self._transport.sends_wait:
            raise ValueError(
                f"the lock {shown(self._name)} cannot wait for replicas: its client sends commands in its own way"
            )
        if checked.fencing:
            kind = AcquireFenced if checked.linger is None else AcquireManyFenced
            self._attempt_kind, self._own_kind = kind, AcquireOwnFenced
        self._linger_ms = linger_ms_of(checked.linger, self._ttl_ms)
        self._is_direct = self.thread_local and checked.need_reply_alone
        self._options = checked

    def _adapt(self, options: Options) -> None:
        """Set the ttl by the hold times, where it is adaptive."""
        if options.adaptive is not None:
            self._ttl_ms = ttl_ms = options.adapted_ms(self._name)
            self._timeout = ttl_ms / 1000

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
        self._key = transport.encoding.key_of(self._name)
        if transport is not self._transport:  # else another caller was faster
            self._former, self._transport = (self._transport, self._pool), transport
        self._pool = getattr(client, "connection_pool", None)
        self._cached = None
        self._redis = client

    # `mock.patch.object` deletes what it has set on an object, and sets it anew where it is then missing.

    @redis.deleter
    def redis(self) -> None:
        del self._redis

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
        self._key = self._transport.encoding.key_of(name)
        self._cached = None
        self._name = name

    @name.deleter
    def name(self) -> None:
        del self._name

    @property
    def timeout(self) -> float | None:
        """The ttl in seconds. One that is assigned takes the place of an `AdaptiveTTL`, too."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        ttl_ms = ttl_ms_of(timeout)
        if self._options is not None:
            self._options.check(ttl_ms, self.thread_local, self._is_for_tasks)
        if self._linger_ms is not None:
            linger_ms_of(self._linger_ms / 1000, ttl_ms)
        if self._options is not None and self._options.adaptive is not None:
            self._options = fixed = copy.copy(self._options)  # a copy of the lock has the same
            fixed.adaptive = None
        self._ttl_ms = ttl_ms
        self._timeout = timeout

    @timeout.deleter
    def timeout(self) -> None:
        del self._timeout

    @property
    def wait(self) -> WaitBy:
        """How `acquire` waits: "push", "poll" or a `redis.backoff.AbstractBackoff`."""
        return self._wait

    @wait.setter
    def wait(self, wait: WaitBy) -> None:
        if wait not in ("push", "poll") and not isinstance(wait, AbstractBackoff):
            raise ValueError(f"wait must be 'push', 'poll' or a redis.backoff.AbstractBackoff, not {wait!r}")
        self._wait = wait

    def _own_nothing(self) -> None:
        self._generation = fork.generation()
        self._local = patching.in_force
        self._owners = self._new_owner() if self.thread_local else SharedOwner()

    def _own_anew(self) -> None:
        """Go on after a fork, or a patch of `threading`. Threads of a child may do so at the same time."""
        if self._local is not threading.local:
            self._adapt_to_patch()
        generation = fork.generation()
        if self._generation != generation:
            owners = self._new_owner() if self.thread_local else SharedOwner()
            with mutex.lock:
                if self._generation != generation:  # else another thread was faster, and may hold the lock by now
                    self._cached = None  # of the parent
                    self._owners = owners
                    self._generation = generation  # last: others go on once they see it

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

    def _has_own_hooks(self) -> bool:
        """Whether no hook is overridden, by a class or on this object: both may change at any time."""
        hooks: tuple[Any, ...] = hooks_of(type(self))
        return hooks == self._own_hooks and not self._overrides_here()

    def _overrides_here(self) -> bool:
        """Whether this object overrides a hook of its class."""
        return not vars(self).keys().isdisjoint(Hooks._fields)

    def _is_overridden(self, name: str) -> bool:
        """Whether this `do_*` hook is overridden."""
        return name in vars(self) or getattr(type(self), name) is not getattr(self._own_hooks, name)

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
        """Whether the holder gets a message when another caller wants the lock."""
        return self._linger_ms is not None or (self._options is not None and self._options.on_wanted is not None)

    def _next_token(self, token: Any) -> bytes:
        """The token of the next acquire: the caller's own, or a new one."""
        if token is None:
            fresh: bytes = self._transport.new_token(self._key, LISTENS if self._listens else self._token_kind)
            return fresh if self._may_be_flagged() else fresh[len(MARKER) :]
        return self._encoded(token)

    def _encoded(self, token: Any) -> bytes:
        """A caller's token as bytes. It may be the lock's value, as `local.token` shows it."""
        return without_flag(self._transport.encoding.encode(token))

    # An overridden hook may call the original, which finds the owner for which it acts in the context and notes its
    # results there: other callers may use the same lock object at the same time.

    def _acting(self) -> Owner | None:
        """The owner for which an overridden hook calls the original."""
        acting = _acting.get()
        return acting[1]() if acting is not None and acting[0]() is self else None

    def _acting_call(self) -> Call | None:
        """The acquire for which an overridden `do_acquire` calls the original."""
        acting = _acting.get()
        return None if acting is None or acting[0]() is not self or acting[2] is None else acting[2]()

    def _call_hook(self, owner: Owner, hook: Callable[..., Any], *args: Any, call: Call | None = None) -> Steps:
        """Call an overridden hook for this owner, and for this acquire. Returns what the hook returns."""
        before = _acting.set((weakref.ref(self), weakref.ref(owner), None if call is None else weakref.ref(call)))
        try:
            return (yield Do("call", partial(hook, *args)))
        finally:
            with contextlib.suppress(ValueError):  # a dropped task may end in another context
                _acting.reset(before)

    # ---- the background ----

    @abstractmethod
    def _renewer(self) -> Any:
        """The renewer of the leases on this lock's server."""

    @abstractmethod
    def _report_loss(self, lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss, and cancel the owner's task, as the options say."""

    @abstractmethod
    def _report_former_loss(self, lease: Lease, reason: LossReason) -> None:
        """Report the loss of an earlier lease, which the next acquire has found out."""

    @abstractmethod
    def _on_wanted_caller(self) -> Callable[[Lease], object]:
        """What calls `on_wanted` for a lease. It does not keep the lock alive."""

    def _keep(self, lease: Lease) -> None:
        """Have the renewer renew the lease and watch for its loss, as its options say."""
        if lease.is_watched:
            self._renewer().keep(lease)
        if lease.options.on_wanted is not None:
            self._linger.listen(self, lease)

    def _let_go(self, lease: Lease) -> None:
        """Have the renewer drop the lease."""
        if lease.is_watched:
            self._renewer().let_go(lease)
        if lease.options.on_wanted is not None:
            self._linger.end_listening(self, lease)

    # ---- what the caller holds ----
    def _held(self) -> Owner:
        """The owner whose lock the caller may use. A forked child holds nothing of its parent's."""
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        owner: Owner = self._owners.held()
        return owner

    @property
    def local(self) -> Any:
        """As redis-py's: `local.token` is the caller's token, and may be set.

        A caller that sets another token, or None, gives up what it has held: that is not renewed any more.
        """
        self._held()
        return Local(self._owners, self._transport.encoding.encode, forget_lease)

    @local.setter
    def local(self, local: Any) -> None:
        owners = owners_of(local)
        if hasattr(owners, "held"):
            self._owners = owners
        else:  # a caller's own object with a token, such as a `SimpleNamespace`, which redis-py's locks have
            self._owners = self._new_owner() if isinstance(local, threading.local) else SharedOwner()
            self.local.token = getattr(local, "token", None)

    @local.deleter
    def local(self) -> None:
        del self._owners

    def _mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        owner: Owner = self._owners.mine()
        return owner

    def _taken(self) -> Owner:
        """The owner in whose place the caller may hold, without an acquire of its own."""
        if self._local is not threading.local or self._generation != fork.generation():
            self._own_anew()
        owner: Owner = self._owners.taken()
        return owner

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        """The error for a lock that is not held any more and has no lease."""
        error = LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self.name)
        return noted(error, f"of the lock {shown(self.name)}")

    # ---- validity ----
    def remaining(self) -> float:
        """How long the lock is certainly still held, in seconds. Sends nothing.

        The lease counts from before the last request that set it was sent, less 1 % of the ttl and 2 ms for clock
        drift. 0.0 where the lock is lost or not held, or a release has an unknown outcome; `math.inf` where the lock
        does not expire.
        """
        held = self._held()
        return 0.0 if held.token is None or self._is_released(held) else max(self._deadline(held) - clock(), 0.0)

    def _deadline(self, owner: Owner) -> float:
        """Until when the owner certainly holds the lock, in the clock's seconds."""
        lease = owner.held_lease
        if lease is not None:
            return -math.inf if lease.loss is not None else lease.deadline
        token, expires_at = owner.expiry
        if token != owner.token:  # set by hand
            return -math.inf if self._ttl_ms else math.inf
        return math.inf if expires_at is None else expires_at - drift_s((self._ttl_ms or 0) / 1000)

    def _is_released(self, owner: Owner) -> bool:
        """Whether a release was called and has failed, but may have been executed."""
        lease = owner.held_lease
        return owner.releasing == owner.token or (lease is not None and lease.over)

    @property
    def valid(self) -> bool:
        """Whether the lock is certainly held, by the clock: `remaining() > 0`."""
        return self.remaining() > 0

    @property
    def lost(self) -> bool:
        """Whether the lock was lost before it was released, as far as is known without asking the server."""
        held = self._held()
        return held.token is not None and clock() >= self._deadline(held)

    def ensure_held(self) -> None:
        """Return if the lock is certainly held: where `valid` is true. Sends nothing.

        Raises:
            LockLostError: the lock was lost.
            redis.exceptions.LockError: this thread or task holds no lock, or a release has an unknown outcome.
        """
        held = self._held()
        refuse_in_callback(self, "use", held)
        if held.token is not None and clock() >= self._deadline(held):
            raise self._lost_by(held, "use")
        if held.token is None or self._is_released(held):
            raise unlocked_error(self, "Cannot use a lock that's not owned or is already unlocked.")

    def _lost_by(self, owner: Owner, verb: str) -> LockLostError:
        """The error for the owner's lock, which was lost."""
        lease = owner.held_lease
        if lease is not None:
            return lost_error(self, verb, lease)
        text = f"Cannot {verb} the {shown_held(self.name, owner.token or b'')}, which was lost: {LossReason.EXPIRED}"
        return LockLostError(text, lock_name=self.name, reason=LossReason.EXPIRED)

    @property
    def wanted(self) -> bool:
        """Whether another caller waits for the lock that the caller holds, as far as is known. Sends nothing.

        With `linger` or `on_wanted`, waiters tell the holder. Else it is known after a request that has seen the lock's
        value. A waiter may have given up since.
        """
        held = self._held()
        if held.token is None:
            return False
        cached, lease = held.cached, held.held_lease
        if cached is not None and cached.is_wanted:
            return True
        return (lease is not None and lease.wanted) or held.is_contended(held.token)

    @property
    def fence(self) -> int | None:
        """The fence of the held lock, higher than those of all earlier owners; see `redislock_fast.fencing`.

        None where the lock is not held, or has no `fencing`.
        """
        held = self._held()
        return None if held.token is None else held.fence

    # ---- begin and end ----
    def _is_meant(self, token: Any, held: bytes) -> bool:
        """Whether an acquire with this token, which may be None, may mean the held lock."""
        return token is None or self._encoded(token) == held

    def _begin(
        self,
        options: Options,
        owner: Owner,
        pending: PendingOwner,
        asked_at: float | None = None,
        attempts: int = 1,
        task: asyncio.Task[Any] | None = None,
    ) -> Lease:
        """Begin the lease of a lock that was just acquired on options.

        Raises:
            LockLostError: the lock is lost, and another caller that shares the lock object may have it now.
        """
        token = pending.token
        assert token is not None
        lease = Lease(weakref.ref(self), self._key, token, self._ttl_ms, pending.expires_at(token), options)
        lease.contended = pending.contended == token
        lease.cached = pending.cached
        lease.task = None if task is None else weakref.ref(task)
        before = owner.lease
        if before is not pending.before and lease.is_lost():
            raise self._lost_at_once()
        pending.publish(owner, lease)
        end_callback(self)
        if before is not None and before.token != token:
            end_lost(self, before, LossReason.DELETED)
        elif before is not None:
            self._let_go(before)
        waited_s = None if asked_at is None else lease.acquired_at - asked_at
        lease.report_begin(waited_s, attempts)
        if waited_s is not None:
            report_call(options, "acquired {} after", self._name, waited_s, token)
        return lease

    def _lost_at_once(self) -> LockLostError:
        reason = LossReason.EXPIRED
        what = "permit of the semaphore" if self._token_kind is PERMIT else "lock"
        text = f"Lost the {what} {shown(self.name)} before its acquire was done"
        return LockLostError(text, lock_name=self.name, reason=reason)

    # ---- loss ----
    def _find_out_why(self, lease: Lease) -> Steps:
        """Returns why the lock was lost. Sends `GET name` where the lease has not ended, and it is no permit."""
        if clock() >= lease.deadline:
            return LossReason.EXPIRED
        if self._token_kind is PERMIT:
            return LossReason.DELETED  # nobody can take it: others have permits of their own
        read = ReadHolder(self._key)
        try:
            yield Do("execute", read)
        except Exception:  # then the reason is not known
            return LossReason.SERVER_GONE
        return reason_of(read)

    def detach(self) -> Handle:
        """Give up the held lock without releasing it. The caller of `attach` with the returned handle holds it then.

        Sends nothing. The lock is not renewed until the handle is attached.

        Raises:
            redis.exceptions.LockError: this thread or task holds no lock, or has entered it more than once.
            LockLostError: the lock was lost.
        """
        from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # few need it, and it takes a millisecond

        held = self._held()
        refuse_in_callback(self, "detach", held)
        token = held.token
        if token is None:
            raise unlocked_error(self, f"Cannot detach an unlocked lock: {self.name!r}")
        lease = held.held_lease
        lease_end = held.expires_at(token)
        if lease is not None:
            if lease.depth > 1:
                text = f"Cannot detach a lock that was entered more than once: {shown(self.name)}"
                raise LockError(text, lock_name=self.name)
            if lease.is_lost():
                raise lost_error(self, "detach", lease)
            lease_end = lease.expires_at
            forget_lease(held, lease)
        held.token = None
        held.forget_cached()  # it goes with the handle
        name = self.name if isinstance(self.name, (str, bytes)) else self._key
        return Handle.of(name, token, self._timeout, lease_end, held.fence)

    @classmethod
    def attach(cls, client: Any, handle: Handle, **settings: Any) -> Self:
        """Hold a lock that was detached, here or in another process. Sends nothing.

        The lease ends when the handle says, by the wall clock; `reacquire` makes it exact. The next `with` block of the
        lock uses the attached lock without an acquire, and raises LockLostError where it is lost.

        Args:
            client: as for the class.
            handle: the handle that `detach` has returned.
            settings: other parameters of the class; name and timeout come from the handle.

        Returns:
            The lock, held by this thread or task.

        Raises:
            TypeError: `handle` is no `Handle`; and as the class.
            ValueError: as the class.
        """
        from redislock_fast._lease.handle import Handle  # noqa: PLC0415  # as above

        if not isinstance(handle, Handle):
            raise TypeError(f"attach needs a handle that detach has returned, not {type(handle).__name__}")
        for given in ("name", "timeout"):
            if given in settings:
                raise TypeError(f"{cls.__name__}.attach() takes no {given!r}: the handle has it")
        lock = cls(client, handle.name, handle.timeout, **settings)
        if is_permit(handle.token) != (lock._token_kind is PERMIT):
            text = f"the handle is of the {shown_held(handle.name, handle.token)}, which another class attaches"
            raise ValueError(text)
        owner = lock._mine()
        pending = PendingOwner(owner)
        # A ttl whose end is not known counts as ended.
        pending.expiry = (handle.token, clock() if handle.timeout and handle.expires_at is None else handle.lease_end())
        pending.fence = handle.fence
        pending.token = handle.token
        if lock._options is None:
            pending.publish(owner, None)
        else:
            lock._keep(lock._begin(lock._options, owner, pending, task=current_task()))
        lock._attached = handle.token
        return lock

    def _enter_attached(self) -> bool:
        """Enter an attached lock without an acquire. Returns False where the caller does not hold it any more.

        Raises:
            LockLostError: the lock was lost.
        """
        held = self._taken()
        if held.token is not self._attached:  # another object: the lock was released, and perhaps acquired again
            return False
        if clock() >= self._deadline(held):
            raise self._lost_by(held, "enter")
        self._attached = None
        return True

    @property
    def lingers(self) -> bool:
        """Whether a release lets the key linger in this process, as far as is known without asking the server.

        False without `linger`, with a token of the caller's own, where hooks or scripts are overridden, and where the
        server cannot tell the process that the key is wanted.
        """
        if self._linger_ms is None or not self._has_own_hooks():
            return False
        held = self._held()
        return held.cached is not None or (held.token is None and self._linger.listens(self))

    # ---- copying ----

    def __repr__(self) -> str:
        """The name and, for the caller, whether the lock is held and for how long. Never the token. Sends nothing."""
        return describe(self)

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
