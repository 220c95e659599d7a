"""The keys that this process keeps on a server after their locks were released, for the option `linger`.

A `CachedKey` has a local lock, which one caller of this process holds while it uses the key: it asks the server for the
key, holds the lock, or gives the key up. Other callers wait for the local lock in the order of their arrival, so one of
them at most waits at the server. The literature calls that a cohort lock (Dice, Marathe and Shavit, "Lock Cohorting").
A `KeyLease` is what the server has granted. Between two holders it stays with the `CachedKey`: the key lingers. The
server tells the process when another one wants the key ("wanted"), as distributed file systems call cached locks back.

A `Lingering` gives keys back: by a release that is posted on the connection on which the key was granted. No caller
waits for the reply. Where that connection is gone, or the server does not execute the release, the key is cleaned up
like the remains of a failed acquire (`_transport/cleanup.py`).

Thread safety: any thread uses a `KeyCache`, without a mutex. Each step is one method of a dict or deque that is atomic
with and without the GIL, so a signal handler or finalizer may come in between. Copying a deque is not: see
`CachedKey.all_waiters`.

- The local lock is the one entry of `CachedKey.locked_by`. `setdefault` takes it, for one caller alone.
- `CachedKey.lease`, `passes` and `idle_until` are changed by the caller that has the local lock, as is a `KeyLease`,
  except that any thread calls its `close` and `let_go`. Others read them as a hint, and look again when they have it.
- Any thread sets `wanted_at`, and `is_current` to False, and then tries the local lock. A caller that frees the local
  lock looks at both afterwards (`CachedKey.free`). So one of the two gives the key up.
- A waiter is first added to `waiters`, and then tries the local lock. A caller that frees the local lock looks at
  `waiters` afterwards (`CachedKey.unlock`). So no waiter is forgotten.
- `LocalWaiter` is decided once, by one method of a dict: it gets the local lock, or it gives up.
- Any thread adds to `Lingering._unconfirmed` and removes from it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.logs import log_wait
from redislock_fast._lease.metrics import report
from redislock_fast._pipe.base import Args, ConnectionBroken, Reply
from redislock_fast._pipe.loop_py import running_loop
from redislock_fast._protocol.commands import Release, release_request
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._transport.base import Part, ServerType
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.times import Limit, clock, drift_s

if TYPE_CHECKING:
    from redislock_fast._lease.lease import Lease
    from redislock_fast._lease.metrics import Metrics

logger = logging.getLogger(__name__)

LONGEST_KEPT_S = 1.0
"""After how long a key is given up though no caller was heard to want it: pollers cannot say so."""


def _lead_s(ttl_ms: int) -> float:
    """How long before the end of a key, less its margin, a caller with this ttl may take it.

    Its lease, less the margin for drifting clocks, ends before the key does, less the key's own margin.
    """
    ttl_s = ttl_ms / 1000
    return ttl_s - drift_s(ttl_s)


class KeyLease:
    """A key that the server has granted to this process.

    Args:
        key: the lock's name on the wire.
        token: the key's token.
        expires_at: when the key expires on the server at the earliest, in the clock's seconds.
        ttl_ms: the ttl of the lock's holder, in milliseconds.
        linger_ms: for how much longer the key lives, in milliseconds.
        registry: the waiter registry that hears when the key is wanted; None: no registry does, so it is not kept.
        began_at: when the key was granted, in the clock's seconds.

    Attributes:
        keep_until: until when a release may keep the key, in the clock's seconds.
        take_until: until when a caller with the same ttl may take the key in memory, in the clock's seconds.
        reports: what gets a loss that is found while the key lingers, and the lock's name for it; None: nothing does.
        fences: the fencing numbers that its holders in this process get, one after the other; None: none are known.
        releases: how often a release of the key has begun: once, or again after an interrupt. No caller takes it then.
    """

    __slots__ = (
        "_lead_s",
        "_margin_s",
        "began_at",
        "deadline",
        "expires_at",
        "fences",
        "keep_until",
        "key",
        "registry",
        "releases",
        "reports",
        "take_until",
        "token",
        "ttl_ms",
    )

    def __init__(
        self,
        key: bytes,
        token: bytes,
        expires_at: float,
        ttl_ms: int,
        linger_ms: int,
        registry: object,
        began_at: float,
    ) -> None:
        self.key = key
        self.token = token
        self.fences: Sequence[int] | None = None
        self.reports: tuple[Metrics, str | bytes] | None = None
        self.releases = 0
        self.ttl_ms = ttl_ms
        self.registry = registry
        self.began_at = began_at
        self.keep_until = -math.inf if registry is None else began_at + LONGEST_KEPT_S
        self._margin_s, self._lead_s = drift_s((ttl_ms + linger_ms) / 1000), _lead_s(ttl_ms)
        self.set_end(expires_at)

    def set_end(self, expires_at: float) -> None:
        """Note when the key expires on the server at the earliest, in the clock's seconds."""
        self.expires_at = expires_at
        self.deadline = expires_at - self._margin_s
        self.take_until = self.deadline - self._lead_s
        if self.releases:  # looked at last: `close` may come meanwhile
            self._end_taking()

    def close(self) -> None:
        """Have no caller take or keep the key any more: it is about to be released on the server."""
        self.releases += 1
        self._end_taking()

    def _end_taking(self) -> None:
        self.keep_until = self.take_until = self.deadline = -math.inf

    def take_until_for(self, ttl_ms: int) -> float:
        """Until when a caller with this ttl may take the key."""
        return self.take_until if ttl_ms == self.ttl_ms else self.deadline - _lead_s(ttl_ms)

    def take_fence(self) -> int | None:
        """The fencing number of the next holder. The key is not kept after the last one."""
        if not self.fences:
            return None
        fence, self.fences = self.fences[0], self.fences[1:]
        if not self.fences:
            self.let_go()
        return fence

    def note_loss(self) -> None:
        """Log that the key was gone before its time while it lingered, and report it for metrics.

        Not where its release has begun twice: the first one may have found it.
        """
        now = clock()
        if now < self.expires_at and self.releases < 2:
            logger.warning("The lock %s was lost while its key lingered.", shown(self.key))
            if self.reports is not None:
                metrics, name = self.reports
                report((metrics,), "record_loss", name, now - self.began_at, LossReason.DELETED)

    def let_go(self) -> None:
        """Have the next release give the key up."""
        self.keep_until = -math.inf


class LocalWaiter:
    """A caller that waits for a local lock.

    Attributes:
        since: since when, in the clock's seconds; None before, and once that was logged as a long wait.
    """

    __slots__ = ("_outcome", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self._outcome: dict[int, object] = {}

    @property
    def is_given(self) -> bool:
        """Whether the caller has the local lock."""
        return self._outcome.get(0) is not None

    def give(self) -> bool:
        """Give the caller the local lock, and wake it. Returns False where it has given up, or has had it before."""
        gift = object()
        if self._outcome.setdefault(0, gift) is not gift:
            return False
        self.wake()
        return True

    def give_up(self) -> bool:
        """Stop waiting. Returns False where the caller has got the local lock."""
        return self._outcome.setdefault(0, None) is None

    @abstractmethod
    def wake(self) -> None:
        """Let the caller look whether it has the local lock. From any thread; never waits."""


_MOST_PASSES = 16
_LONGEST_PASSING_S = 0.005
"""After so many hand-overs to local waiters, or so long, a key that another process wants is given up."""

_OVERDUE_S = 0.005
"""How long after its end a lease is certainly over on the server."""

_FIRST_BAN_S = 1.0
_LONGEST_BAN_S = 60.0
"""How long a key that was wanted while it lingered is not kept; doubled when that happens again soon."""


class CachedKey:
    """One key, for the callers of this process.

    Args:
        key: the lock's name on the wire.
        cache: has it.

    Attributes:
        locked_by: the local lock: empty, or with an entry 0. Its value tells the holder: the expiry that its owner has
            noted (a tuple), or any other object while the key is asked for or given up.
        waiters: the callers that wait for the local lock, in order.
        lease: what the server has granted; None where it has not, or where it was given up.
        wanted_at: when another process was first heard to want the key, in the clock's seconds; None: not yet.
        passes: how often a local waiter has got the key since then.
        idle_until: when a key that lingers is given up, in the clock's seconds.
        keeps_from: until when the key is not kept, in the clock's seconds.
        is_current: whether the cache still has this object for the key.
    """

    __slots__ = (
        "_ban_s",
        "cache",
        "idle_until",
        "is_current",
        "keeps_from",
        "key",
        "lease",
        "locked_by",
        "passes",
        "waiters",
        "wanted_at",
    )

    def __init__(self, key: bytes, cache: KeyCache) -> None:
        self.key = key
        self.cache = cache
        self.locked_by: dict[int, object] = {}
        self.waiters: deque[LocalWaiter] = deque()
        self.lease: KeyLease | None = None
        self.wanted_at: float | None = None
        self.passes = 0
        self.idle_until = 0.0
        self.keeps_from = 0.0
        self._ban_s = 0.0
        self.is_current = True

    # ---- the owner that has the local lock ----

    @property
    def holding_id(self) -> object:
        """What names the present holding: the key has one token for many."""
        return self.locked_by.get(0)

    @property
    def is_here(self) -> bool:
        """Whether the caller may let the key linger; see `KeyCache.is_here`."""
        return self.cache.is_here

    @property
    def is_wanted(self) -> bool:
        """Whether another caller is known to wait for the lock."""
        return self.wanted_at is not None or self.has_waiters

    @property
    def has_waiters(self) -> bool:
        """Whether callers of this process wait for the local lock; one that has just got it may still be listed."""
        return any(not waiter.is_given for waiter in self.all_waiters())

    def forget(self) -> None:
        """Have other callers of the process ask the server for the key, which was held."""
        self.lease = None
        self.free()

    def give_back(self) -> bool:
        """Give up the key of a lock that is not to be held after all. Returns whether it is given back."""
        is_kept = self.lease is not None
        self.drop()
        self.free()
        return is_kept

    # ---- the local lock ----

    def try_lock(self, holder: object = None) -> bool:
        """Take the local lock if it is free.

        Args:
            holder: names the caller; no other caller has the same. None: a new object.
        """
        if holder is None:
            holder = object()
        return self.locked_by.setdefault(0, holder) is holder

    def unlock(self) -> None:
        """Give the local lock to the first waiter; without waiters, free it. The caller has it."""
        mine = self.locked_by.get(0)
        first: LocalWaiter | None = None
        try:
            self.locked_by.pop(1, None)
            while True:
                first = self.waiters[0] if self.waiters else None  # none but this caller removes one that has not left
                if first is None:
                    self.locked_by.pop(0, None)
                    if not (self.waiters and self.try_lock(mine)):
                        return
                else:
                    self.locked_by[0] = first
                    was_given = first.give()
                    self._remove(first)
                    if was_given:
                        return
        except IndexError:  # it has left just now
            self.unlock()
        except BaseException:  # an interrupt may come before any line, and a waiter must not be forgotten
            holder = self.locked_by.get(0)
            if first is not None and first.is_given:
                first.wake()
            elif holder is not None and (holder is mine or holder is first):
                self.unlock()
            raise

    def _remove(self, waiter: LocalWaiter) -> None:
        try:  # noqa: SIM105  # a hot path, in which `suppress` takes as long as all the rest
            self.waiters.remove(waiter)
        except (ValueError, IndexError):  # the latter where others change the deque meanwhile: it is passed over later
            pass

    def join(self, waiter: LocalWaiter) -> None:
        """Add a waiter for the local lock. It may get it at once."""
        waiter.since = clock()
        self.waiters.append(waiter)
        if not self.locked_by and self.if_free():
            return
        self.cache.ask_holder(self.key)
        if not self.cache.is_watched:  # its holder may forget it
            self.cache.watch()

    def log_long_waits(self, now: float) -> None:
        """Log each waiter that has waited for long, once. The keys' watcher alone may call this."""
        if Limit.long_s is None:
            return
        for waiter in reversed(self.all_waiters()):
            if waiter.since is None:
                continue
            if now < waiter.since + Limit.long_s:  # those after it have come later
                return
            log_wait(self.key, now - waiter.since, "another caller of this process")
            waiter.since = None

    def all_waiters(self) -> list[LocalWaiter]:
        """The waiters, the last one first: all that wait before and after this call, some of them twice perhaps.

        Without the GIL, a deque that other threads change cannot be copied. Where one of them removes an entry, those
        after it move to the front: so this goes from the end to the front, and misses none.
        """
        found: list[LocalWaiter] = []
        for index in range(len(self.waiters) - 1, -1, -1):
            with contextlib.suppress(IndexError):  # so many have left meanwhile
                found.append(self.waiters[index])
        return found

    def leave(self, waiter: LocalWaiter) -> bool:
        """Remove a waiter. Returns False where it has got the local lock."""
        if not waiter.give_up():
            return False
        self._remove(waiter)
        return True

    def tidy(self, holder: object) -> None:
        """Finish what this holder of the local lock has begun to free: give it to a waiter, or give the key up."""
        if self.locked_by.get(0) is holder:
            self.free()
        else:
            self.if_free()

    def free(self) -> None:
        """`unlock`, and give the key up where it must not be kept. What lingers is watched."""
        self.unlock()
        while self._is_due and (self.lease, self.wanted_at) != (None, None) and self.if_free(self.drop):
            pass
        if self.lease is not None and not self.cache.is_watched:
            self.cache.watch()

    def if_free(self, work: Callable[[], object] | None = None) -> bool:
        """Take the local lock, do the work, and free it. Returns False where another caller has the local lock."""
        me = object()
        try:
            if not self.try_lock(me):
                return False
            if work is not None:
                work()
            self.free()
        except BaseException:  # an interrupt may come before any line
            if self.locked_by.get(0) is me:
                self.free()
            raise
        return True

    # ---- what the holder of the local lock does ----

    @property
    def must_go(self) -> bool:
        """Whether the key must not be kept."""
        return self.wanted_at is not None or not self.is_current

    @property
    def _is_due(self) -> bool:
        """Whether the key must be given up: `must_go`, or its release has begun, and may have been interrupted."""
        lease = self.lease
        return self.must_go or (lease is not None and lease.releases > 0)

    def _may_pass(self, now: float) -> bool:
        """Whether the next local waiter may have the key, or it may linger."""
        lease = self.lease
        return (
            lease is not None
            and now < lease.keep_until
            and self.is_current
            and (self.wanted_at is None or (self.passes < _MOST_PASSES and now < self.wanted_at + _LONGEST_PASSING_S))
        )

    def release(self, now: float, linger_s: float) -> None:
        """Pass the key on to a local waiter, let it linger for `linger_s` seconds, or give it up.

        Frees the local lock.
        """
        if not self._may_pass(now) or not (self.waiters or (now >= self.keeps_from and not self.must_go)):
            self.drop()
        elif self.waiters:
            self.passes += self.wanted_at is not None
        self.idle_until = now + linger_s
        self.free()

    def drop(self) -> None:
        """Give the key up, in the background."""
        lease = self.lease
        if lease is not None:  # first of all, for another process waits
            lease.close()  # before: an interrupt may leave the lease here, and it is given up once more then
            self.cache.give_up([lease], self.wanted_at is not None)
            self.lease = None
        self.wanted_at = None
        self.passes = 0

    def take_out(self, due: list[KeyLease], now: float) -> None:
        """Add what the server has granted to `due`, which the caller gives up."""
        lease = self.lease
        if lease is not None:
            lease.close()
            due.append(lease)
            self.lease = self.wanted_at = None
            self.passes = 0
        if now >= self.remembers_until:
            self.replace()

    def is_of_interest(self, now: float) -> bool:
        """Whether others may have something to say of the key: it lingers, or is held, as far as is known."""
        lease = self.lease
        return lease is not None and (not self.locked_by or now < lease.expires_at)

    def give_up_idle(self) -> None:
        """Give the key up, which another process wants, and do not keep it for some time if it lingered."""
        lingered = self.lease is not None
        self.drop()
        if lingered:
            self.ban(clock())

    @property
    def remembers_until(self) -> float:
        """Until when a second ban is twice as long as the last one, in the clock's seconds."""
        return self.keeps_from + self._ban_s

    def ban(self, now: float) -> None:
        """Do not keep the key for some time: it was wanted while it lingered, so that keeping it does not pay."""
        repeats = now < self.remembers_until
        self._ban_s = min(2 * self._ban_s, _LONGEST_BAN_S) if repeats else _FIRST_BAN_S
        self.keeps_from = now + self._ban_s

    # ---- a local lock that was forgotten ----

    def overdue_at(self) -> float:
        """When the local lock counts as forgotten by its holder, in the clock's seconds; `math.inf`: not yet."""
        lease = self.lease
        is_held = type(self.locked_by.get(0)) is tuple
        return lease.expires_at + _OVERDUE_S if is_held and lease is not None else math.inf

    def lose(self, token: bytes) -> None:
        """Have the local waiters ask the server: a holder has lost the key with this token, and may not know it yet."""
        lease = self.lease
        if lease is not None and lease.token == token:
            lease.close()  # no caller takes it, and its release finds nothing that was not told
            self.replace()

    def replace(self) -> None:
        """Have the cache make another object for the key. The waiters begin again with that."""
        self.is_current = False
        self.cache.forget_key(self)
        if self.lease is not None:
            self.if_free(self.drop)
        for waiter in self.all_waiters():
            waiter.wake()


class KeyCache:
    """The keys of one server that this process keeps, or one event loop of it.

    Args:
        give_up: gives leases back to the server in the background; the bool says whether they are known to be wanted.
        watch: has `sweep` called from now on, and `take_wanted` with each message, until `rests` says yes. Where that
            is so already, it changes nothing.
        new_waiter: makes a waiter for the local lock of a key.

    Attributes:
        give_up, new_waiter: as above.
        is_watched: whether the keys are watched.
        loop: the event loop whose tasks use the keys; None: threads do.
        shortest_s: the shortest time for which keys linger, in seconds.
    """

    def __init__(
        self,
        give_up: Callable[[list[KeyLease], bool], None],
        watch: Callable[[], None],
        new_waiter: Callable[[], LocalWaiter],
    ) -> None:
        self.give_up = give_up
        self.new_waiter = new_waiter
        self._watch = watch
        self._keys: dict[bytes, CachedKey] = {}
        self._listeners: dict[bytes, tuple[weakref.ref[Lease], Callable[[Lease], object]]] = {}
        self.is_watched = False
        self.loop: object = None
        self.shortest_s = LONGEST_KEPT_S

    @property
    def is_here(self) -> bool:
        """Whether the caller may let a key linger: a task may in its own loop only, for another one may have ended."""
        return self.loop is None or self.loop is running_loop()

    def of(self, key: bytes) -> CachedKey:
        """The cached key, which is made where there is none."""
        cached = self._keys.get(key)
        return self._keys.setdefault(key, CachedKey(key, self)) if cached is None else cached

    def forget_key(self, cached: CachedKey) -> None:
        """Forget a cached key, which is not current any more."""
        if self._keys.get(cached.key) is cached:
            found = self._keys.pop(cached.key, None)
            if found is not None and found is not cached:  # made after another thread has forgotten this one
                found.replace()

    def watch(self) -> None:
        """Have the keys watched."""
        try:
            self.is_watched = True
            self._watch()
        except BaseException:  # an interrupt: the next caller does it again
            self.end_watching()
            raise

    def end_watching(self) -> None:
        """Note that the keys may not be watched any more."""
        self.is_watched = False

    def listen(self, lease: Lease, on_wanted: Callable[[Lease], object]) -> None:
        """Have `on_wanted` called once, when another caller is heard to want the lock of this lease, or was before."""
        self._listeners[lease.key] = weakref.ref(lease), on_wanted
        if lease.cached is not None and lease.cached.has_waiters:  # they have told an earlier holder
            self.ask_holder(lease.key)
        if not self.is_watched:
            self.watch()

    def end_listening(self, lease: Lease) -> None:
        """Do not tell the holder of this lease any more."""
        listener = self._listeners.get(lease.key)
        if listener is not None and listener[0]() is lease:
            self._forget_listener(lease.key, listener)

    def _forget_listener(self, key: bytes, listener: object) -> None:
        found = self._listeners.pop(key, None)
        if found is not None and found is not listener:  # of the next holder, which has come just now
            self._listeners.setdefault(key, found)

    def ask_holder(self, key: bytes) -> None:
        """Tell the holder of this key, if it listens and was not told, that another caller wants it."""
        listener = self._listeners.get(key)
        lease = None if listener is None else listener[0]()
        if listener is not None and lease is not None and not (lease.wanted or lease.over):
            lease.wanted = True
            listener[1](lease)

    def take_wanted(self, key: bytes) -> None:
        """Note that another process wants a key. A key that lingers is given up at once."""
        self.ask_holder(key)
        cached = self._keys.get(key)
        if cached is None or (cached.lease is None and not cached.locked_by):
            return
        now = clock()
        if cached.wanted_at is None:
            cached.wanted_at = now
        cached.if_free(cached.give_up_idle)

    def take_give_up(self, key: bytes, token: bytes) -> None:
        """Release a lock that an operator takes from its holder. Before that, no caller can take it in memory."""
        cached = self._keys.get(key)
        lease = None if cached is None else cached.lease
        if cached is not None and lease is not None and lease.token == token:
            lease.close()  # its holder finds that it is lost
            cached.replace()
        elif cached is not None and lease is None and cached.locked_by:  # it may have been granted just now
            cached.replace()
        now = clock()
        unheard = KeyLease(key, token, now, 0, 0, None, now)  # so it is cleaned up, until the server has confirmed it
        self.give_up([unheard], False)

    def sweep(self, now: float) -> bool:
        """Give up the keys that have lingered for long enough, all together.

        Returns whether others linger, are held, or have local waiters.
        """
        due: list[KeyLease] = []
        try:
            is_used = self._sweep_into(due, now)
            if due:
                self.give_up(due, False)
        except BaseException:  # an interrupt may strike an event loop here
            for lease in due:
                lease.close()  # once more: the release that was begun may find the key
            if due:
                self.give_up(due, False)
            raise
        for key, listener in list(self._listeners.items()):
            if listener[0]() is None:
                self._forget_listener(key, listener)
        return is_used or len(self._listeners) > 0

    def _sweep_into(self, due: list[KeyLease], now: float) -> bool:
        """`sweep`, which adds to `due` what must be given up."""
        is_used = False
        for cached in list(self._keys.values()):
            if cached.waiters:
                is_used = True
                cached.log_long_waits(now)
                if now >= cached.overdue_at():
                    cached.replace()
            elif cached.locked_by:
                is_used = is_used or cached.is_of_interest(now)
            elif cached.lease is not None and cached.idle_until > now:
                is_used = True
            else:
                cached.if_free(partial(cached.take_out, due, now))
        return is_used

    def drop_all(self, except_of: Any = None) -> None:
        """Give up what lingers, but what this registry hears of. What is held is given up by its release."""
        for cached in list(self._keys.values()):
            lease = cached.lease
            if lease is None or (except_of is not None and lease.registry is except_of):
                continue
            if not cached.if_free(cached.drop):
                lease.let_go()
                cached.wanted_at = clock()  # a release that has looked at the lease before looks at this afterwards
                cached.if_free(cached.drop)

    def forget(self) -> None:
        """In a forked child: leave all keys to the parent."""
        self._keys = {}
        self._listeners = {}
        self.is_watched = False

    def _needs_watching(self) -> bool:
        now = clock()
        return len(self._listeners) > 0 or any(
            cached.waiters or cached.is_of_interest(now) for cached in list(self._keys.values())
        )

    def rests(self) -> bool:
        """Whether the watching may end. Once this has returned True, the next release calls for it again.

        What lingers meanwhile relies on this watching. So it is looked at after `is_watched` has become False.
        """
        self.is_watched = False
        if self._needs_watching():
            self.is_watched = True
            return False
        return True


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
        self, connection: Any, leases: list[KeyLease], requests: Any, on_replies: Callable[[list[Reply]], object]
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
