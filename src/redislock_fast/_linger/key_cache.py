"""The keys that this process keeps on a server after their locks were released, for the option `linger`.

A `CachedKey` has a local lock, which one caller of this process holds while it uses the key: it asks the server for the
key, holds the lock, or gives the key up. Other callers wait for the local lock in the order of their arrival, so one of
them at most waits at the server. The literature calls that a cohort lock (Dice, Marathe and Shavit, "Lock Cohorting").
A `KeyLease` is what the server has granted. Between two holders it stays with the `CachedKey`: the key lingers. The
server tells the process when another one wants the key ("wanted"), as distributed file systems call cached locks back.

Thread safety: any thread uses a `KeyCache`, without a mutex. Each step is one method of a dict or deque that is atomic
with and without the GIL, so a signal handler or finalizer may come in between. Copying a deque is not: see
`CachedKey.all_waiters`.

- The local lock is the one entry of `CachedKey.locked_by`. `setdefault` takes it, for one caller alone.
- `CachedKey.lease`, `passes` and `idle_until` are changed by the caller that has the local lock. Others read them as a
  hint, and look again when they have it.
- Any thread sets `wanted_at`, and `is_current` to False, and then tries the local lock. A caller that frees the local
  lock looks at both afterwards (`CachedKey.free`). So one of the two gives the key up.
- A waiter is first added to `waiters`, and then tries the local lock. A caller that frees the local lock looks at
  `waiters` afterwards (`CachedKey.unlock`). So no waiter is forgotten.
- `LocalWaiter` is decided once: it gets the local lock, or it gives up.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.logs import log_wait
from redislock_fast._linger.key_lease import LONGEST_KEPT_S, KeyLease, LocalWaiter
from redislock_fast._pipe.loop_py import running_loop
from redislock_fast._util.times import Limit, clock

if TYPE_CHECKING:
    from redislock_fast._lease.lease import Lease

__all__ = ["CachedKey", "KeyCache"]

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
        return self.wanted_at is not None or len(self.waiters) > 0

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
        except ValueError:
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


class _Listener:
    """A lease whose holder is to hear once that the lock is wanted.

    Args:
        lease: it is not kept alive.
        tell: called with it.
    """

    __slots__ = ("_on_wanted", "lease")

    def __init__(self, lease: Lease, on_wanted: Callable[[Lease], object]) -> None:
        self.lease = weakref.ref(lease)
        self._on_wanted = on_wanted

    def call(self) -> None:
        """Tell the holder, if it was not told."""
        lease = self.lease()
        if lease is not None and not (lease.wanted or lease.over):
            lease.wanted = True
            self._on_wanted(lease)


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
        self._listeners: dict[bytes, _Listener] = {}
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
            self._keys.pop(cached.key, None)

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
        """Have `on_wanted` called once, when another caller is heard to want the lock of this lease."""
        self._listeners[lease.key] = _Listener(lease, on_wanted)
        if not self.is_watched:
            self.watch()

    def end_listening(self, lease: Lease) -> None:
        """Do not tell the holder of this lease any more."""
        listener = self._listeners.get(lease.key)
        if listener is not None and listener.lease() is lease:
            self._listeners.pop(lease.key, None)

    def ask_holder(self, key: bytes) -> None:
        """Tell the holder of this key, if it listens, that another caller wants it."""
        listener = self._listeners.get(key)
        if listener is not None:
            listener.call()

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
            if listener.lease() is None:
                self._listeners.pop(key, None)
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
