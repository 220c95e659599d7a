"""How a lock with `linger` is acquired and released: in memory, where its key lingers in this process.

One caller of this process at a time has the local lock of the key (`key_cache.py`). It takes the key where that
lingers, confirms it by one request where it has lingered for too long to outlive the whole `timeout`, or else acquires
it as any lock (`acquire_until`). A release passes the key on to the next local waiter, or lets it linger; it sends
nothing and waits for nothing. The key's ttl on the server is `timeout` and `linger` together, so a key that lingers
leaves each holder its whole `timeout`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.metrics import waiting_of
from redislock_fast._lease.owner import Owner
from redislock_fast._linger.key_cache import CachedKey, KeyCache, KeyLease, Lingering
from redislock_fast._procedures.acquire import Call, acquire_until, key_ttl_ms, set_limit
from redislock_fast._procedures.lock import LockBase
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.steps import CleanupEntries, Do, Steps
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import LISTENS, identifier_of

if TYPE_CHECKING:
    from redislock_fast._lease.lease import Lease
    from redislock_fast._queue.waiters import WaiterRegistry


class Turn:
    """The place of one acquire at the local lock of a cached key. It belongs to the thread or task that acquires.

    An interrupt may come between any two lines: `end` finds out by itself whether the local lock was got.

    Attributes:
        expiry: the expiry that was noted for the holder; another acquire that shares the owner has another object.
    """

    __slots__ = ("_has_joined", "cached", "expiry", "waiter")

    waiter: Any  # a `LocalWaiter`, or another object that names the acquire at the local lock

    def __init__(self) -> None:
        self.cached: CachedKey | None = None
        self.expiry: tuple[bytes, float] | None = None
        self._has_joined = False

    def begin(self, cached: CachedKey, waiter: Any) -> Any:
        """Begin at a cached key. Returns the waiter."""
        self.waiter = waiter
        self._has_joined = False
        self.cached = cached
        return waiter

    def join(self) -> None:
        """Wait for the local lock."""
        assert self.cached is not None
        self._has_joined = True
        self.cached.join(self.waiter)

    def leave(self) -> bool:
        """Stop waiting. Returns whether the local lock was got."""
        assert self.cached is not None
        if self.cached.leave(self.waiter):
            self.cached = None
        return self.cached is not None

    @property
    def lease(self) -> KeyLease | None:
        """What the server has granted."""
        return None if self.cached is None else self.cached.lease

    @property
    def has_lock(self) -> bool:
        """Whether the local lock is this acquire's, which has not joined, or has left."""
        holder = None if self.cached is None else self.cached.locked_by.get(0)
        return holder is not None and (holder is self.waiter or holder is self.expiry)

    def end(self, owner: Owner) -> None:
        """Stop waiting. If the local lock was got, the owner holds nothing, and the local lock is freed."""
        cached = self.cached
        if cached is None or (self._has_joined and cached.leave(self.waiter)) or not self.has_lock:
            return
        if owner.expiry is self.expiry:
            owner.token = owner.cached = None
        cached.free()


# ---- the wing as the core uses it ----


class Linger:
    """How locks are acquired and released whose holder hears that they are wanted; see `Lingers`.

    Args:
        kind: makes the part of a server transport that keeps keys.
    """

    def __init__(self, kind: Callable[[Any], Lingering[Any]]) -> None:
        self._kind = kind

    def begin_at(self, server: Any) -> Lingering[Any]:
        """Give a server transport the part that keeps keys: one alone, however many threads do so at the same time."""
        lingering: Lingering[Any] = server.kept_by_wings.setdefault(Lingering, self._kind(server))
        server.lingering = lingering
        return lingering

    def acquire(self, lock: LockBase, call: Call) -> Steps:
        return acquire_listening(lock, call) if lock._linger_ms is None else acquire_in_memory(lock, call)

    def release(self, lock: LockBase, owner: Owner) -> bool:
        return let_linger(lock, owner)

    def listen(self, lock: LockBase, lease: Lease) -> None:
        key_cache_of(lock).listen(lease, lock._on_wanted_caller())

    def end_listening(self, lock: LockBase, lease: Lease) -> None:
        key_cache_of(lock).end_listening(lease)

    def listens(self, lock: LockBase) -> bool:
        return registry_of(lock) is not None


def key_cache_of(lock: LockBase) -> KeyCache:
    """The cache of the lock's server. That of a cluster, where no node is known, keeps no key."""
    server = lock._transport.server_of(lock._key)
    return (server.lingering or _begin_at(lock, server)).key_cache


def _begin_at(lock: LockBase, server: Any) -> Lingering[Any]:
    assert isinstance(lock._linger, Linger)
    return lock._linger.begin_at(server)


def registry_of(lock: LockBase) -> WaiterRegistry | None:
    """The registry of the connection that hears when the lock is wanted; None where there is none yet."""
    server = lock._transport.server_of(lock._key)
    connection = server.connection
    registry: WaiterRegistry | None = None if connection is None else connection.registry
    if connection is None or registry is None or connection.pipe.broken or registry.channel_of(lock._key) is None:
        return None
    cache: KeyCache = (server.lingering or _begin_at(lock, server)).key_cache
    registry.on_wanted = cache.take_wanted
    registry.on_give_up = cache.take_give_up
    return registry


# ---- in memory ----


def cached_key(lock: LockBase) -> CachedKey:
    """The key in the cache of its server."""
    lock._cached = cached = key_cache_of(lock).of(lock._key)
    return cached


def own_cached_key(lock: LockBase) -> CachedKey | None:
    """The key in the cache of its server, for a lock whose hooks are our own; None for another.

    The lock keeps it, and hooks are not looked at again: that would take a third of a pair's time. What is overridden
    later is called where a request is sent. In memory, nothing is attempted or released by token.
    """
    return cached_key(lock) if lock._has_own_hooks() else None


def take_at_once(lock: LockBase, cached: CachedKey, owner: Owner) -> bool:
    """Take a key that lingers. Returns False where that is not possible at once, and the steps must decide."""
    lease, ttl_ms = cached.lease, lock._ttl_ms
    if lease is None or ttl_ms != lease.ttl_ms or cached.waiters:
        return False
    now = clock()
    token = lease.token
    expiry = token, now + ttl_ms / 1000
    try:
        if cached.locked_by.setdefault(0, expiry) is not expiry:
            return False
        if now <= lease.take_until and cached.lease is lease:  # after: it may be given up meanwhile
            owner.expiry = expiry
            owner.cached = cached
            owner.token = token
            return True
        cached.free()
    except BaseException:  # an interrupt may come before any line
        if cached.locked_by.get(0) is expiry:
            owner.token = owner.cached = None
            cached.free()
        raise
    return False


def release_here(lock: LockBase, owner: Owner, cached: CachedKey) -> None:
    """Release a lock whose key may linger, without other options. Sends nothing that it waits for.

    Raises:
        redis.exceptions.LockNotOwnedError: the lease has ended.
    """
    lease, expiry, now = cached.lease, owner.expiry, clock()
    if (
        lease is not None
        and now < expiry[1]  # type: ignore[operator]  # a lock that lingers has a ttl
        and cached.locked_by.get(0) is expiry
        and lock.thread_local
    ):
        keeps = cached.wanted_at is None and now < lease.keep_until and now >= cached.keeps_from and cached.is_current
        if keeps or not (cached.waiters or lease.releases):
            # first of all, before an interrupt could free the local lock of a lock that is still held
            owner.cached = owner.token = None
            try:
                if keeps:
                    cached.idle_until = now + lock._linger_ms / 1000  # type: ignore[operator]  # it lingers
                else:
                    cached.drop()
                if cached.waiters:
                    cached.free()
                    return
                cached.locked_by.pop(0, None)
                must_go = cached.wanted_at is not None or not cached.is_current
                if cached.waiters or must_go or (keeps and not cached.cache.is_watched):
                    cached.tidy(expiry)
            except BaseException:  # an interrupt may come before any line
                cached.tidy(expiry)
                raise
            return
    if not let_linger(lock, owner):
        raise lock._not_owned("release")


# ---- acquire ----


def acquire_listening(lock: LockBase, call: Call) -> Steps:
    """Acquire a lock whose holder gets a message when it is wanted. Returns whether the lock is held."""
    set_limit(lock, call)
    yield from listen_for_wanted(lock, call.deadline)
    return (yield from acquire_until(lock, call))


def acquire_in_memory(lock: LockBase, call: Call, turn: Turn | None = None) -> Steps:
    """Acquire a lock with `linger`, in memory where the key lingers. Returns whether it is held.

    `turn` is that of a caller that may have the local lock.
    """
    set_limit(lock, call)
    owner, limit = call.owner, call.deadline
    has_lock = turn is not None and turn.has_lock
    if turn is not None and has_lock and not lock._has_own_hooks():
        turn.end(owner)
        has_lock = False
    is_own = call.own_token is None and lock._has_own_hooks()
    if not has_lock and not (is_own and (yield from listen_for_wanted(lock, limit))):
        key_cache_of(lock).take_wanted(lock._key)  # a hook may poll
        return (yield from acquire_until(lock, call))
    if turn is None or not has_lock:
        turn = Turn()
    before = owner.token
    try:
        if (has_lock or (yield from lock_locally(lock, turn, call))) and (yield from acquire_in_turn(lock, turn, call)):
            return True  # after an interrupt here, the lock is not held, too
        turn.end(owner)
    except BaseException:
        call.left.extend(undo(lock, turn, owner, before))
        raise
    return False


def acquire_in_turn(lock: LockBase, turn: Turn, call: Call) -> Steps:
    """Acquire with the local lock. Returns whether the lock is held."""
    cached = lock._cached = turn.cached
    assert cached is not None
    if take_kept(lock, turn, cached, call.owner) or (yield from confirm_kept(lock, turn, call.owner, call.deadline)):
        return True
    call.linger_ms = lock._linger_ms
    acquired = yield from acquire_until(lock, call)
    if acquired:
        call.is_kept = True
        keep_acquired(lock, turn, call.owner)
    return acquired


# ---- the first request ----


def may_begin(lock: LockBase, call: Call, turn: Turn, cached: CachedKey) -> bool:
    """Take the local lock of a key that does not linger, if it is free, for the first request of an acquire.

    Returns whether that was possible, on a connection that hears when the key is wanted.
    """
    if cached.locked_by or registry_of(lock) is None:
        return False
    turn.begin(cached, call)
    call.token_kind = LISTENS
    call.ttl_ms = key_ttl_ms(lock, lock._linger_ms)
    return cached.lease is None and cached.try_lock(call)


def is_fetching(call: Call, turn: Turn) -> bool:
    """Whether an interrupt came between the first request and its reply, as far as the local lock shows."""
    cached = turn.cached
    return cached is not None and cached.lease is None and cached.locked_by.get(0) is call


def keep_first_grant(lock: LockBase, call: Call, turn: Turn) -> None:
    """Keep the key that the first request has got for the owner, which has the local lock."""
    assert call.token is not None
    call.is_kept = True
    expires_at = call.sent_at + (call.ttl_ms or 0) / 1000
    keep_granted(lock, turn, call.owner, call.token, expires_at, call.connection.registry)


def undo(lock: LockBase, turn: Turn, owner: Owner, before: bytes | None) -> CleanupEntries:
    """End a turn in which an interrupt or an error has come. Returns what must be cleaned up.

    Args:
        lock: the caller's.
        turn: of the acquire.
        owner: the caller's.
        before: the token that the owner had before.
    """
    token, lease = owner.token, turn.lease
    left: CleanupEntries = []
    if token is not None and token != before and turn.has_lock:
        owner.token = owner.cached = None
        if lease is None or lease.token != token:
            left.append((lock._key, token))
    turn.end(owner)
    return left


def listen_for_wanted(lock: LockBase, limit: Limit) -> Steps:
    """Returns whether the connection hears when another process wants the key. Subscribes where that is missing."""
    if registry_of(lock) is not None:
        return True
    waiter = yield Do("enter", lock._key, b"", limit.left_s())
    if waiter is None:
        return False
    waiter.registry.leave(waiter)
    return waiter.channel is not None and registry_of(lock) is not None


def lock_locally(lock: LockBase, turn: Turn, call: Call) -> Steps:
    """Take the local lock. Returns whether that was possible in time."""
    limit = call.deadline
    while True:
        cached = key_cache_of(lock).of(lock._key)
        turn.begin(cached, cached.cache.new_waiter())
        if cached.try_lock(turn.waiter):
            return True
        if clock() >= cached.overdue_at():
            cached.replace()
            continue
        if not call.waits or limit.is_over:
            return False
        with waiting_of(lock._options, lock._name, "local") as wait:
            turn.join()
            while not turn.waiter.is_given and cached.is_current and not limit.is_over:
                yield Do("call", turn.waiter.wait, limit.listen_s())
            if turn.leave():
                if wait is not None:
                    wait.handed_over = True
                return True


def take_kept(lock: LockBase, turn: Turn, cached: CachedKey, owner: Owner) -> bool:
    """Take the key in memory. Returns False where it would not outlive the whole `timeout`. Has the local lock."""
    lease, now = cached.lease, clock()
    if lease is None or now > lease.take_until_for(lock._ttl_ms or 0):
        return False
    hold_cached(lock, turn, cached, lease, owner, now)
    return True


def hold_cached(lock: LockBase, turn: Turn, cached: CachedKey, lease: KeyLease, owner: Owner, since: float) -> None:
    """Note that the owner holds the lock, from this moment of the clock on. It has the local lock."""
    expiry = lease.token, since + (lock._ttl_ms or 0) / 1000
    turn.expiry = expiry  # before: after an interrupt, `Turn.end` knows the local lock by it
    cached.locked_by[0] = expiry
    owner.expiry = expiry
    owner.cached = cached
    owner.contended = None
    owner.token = lease.token


def confirm_kept(lock: LockBase, turn: Turn, owner: Owner, limit: Limit) -> Steps:
    """Set the ttl of a key that lingers. Returns whether the lock is held; else it lingers no more."""
    cached, lease = turn.cached, turn.lease
    if cached is None or lease is None:
        return False
    if lease.releases:  # begun, and interrupted
        cached.drop()
        return False
    ttl_ms = (lock._ttl_ms or 0) + (lock._linger_ms or 0)
    confirm = Reacquire(lock._key, lease.token, ttl_ms)  # no flag is known: "wanted" may be of an earlier token
    try:
        yield Do("execute", confirm, limit.left_s())
    except BaseException:
        cached.drop()
        raise
    if confirm.result:
        expires_at = confirm.sent_at + ttl_ms / 1000
        cached.lease = new_lease(lock, lease.token, expires_at, lease.registry, lease.began_at)
        cached.lease.fences = lease.fences
        hold_cached(lock, turn, cached, cached.lease, owner, min(clock(), cached.lease.take_until))
        return True
    cached.lease = None
    lease.note_loss()
    return False


def new_lease(lock: LockBase, token: bytes, expires_at: float, registry: object, began_at: float) -> KeyLease:
    lease = KeyLease(lock._key, token, expires_at, lock._ttl_ms or 0, lock._linger_ms or 0, registry, began_at)
    if lock._options is not None and lock._options.metrics is not None:
        lease.reports = lock._options.metrics, lock._name
    return lease


def keep_acquired(lock: LockBase, turn: Turn, owner: Owner) -> None:
    """Keep the key that the owner has acquired, whose local lock it has."""
    cached = turn.cached
    token, expires_at = owner.expiry
    assert cached is not None
    assert token is not None
    assert expires_at is not None
    if owner.contended == token and cached.wanted_at is None:  # granted by the queue: others may wait there
        cached.wanted_at = clock()
    keep_granted(lock, turn, owner, token, expires_at, registry_of(lock))


def keep_granted(
    lock: LockBase, turn: Turn, owner: Owner, token: bytes, expires_at: float, registry: WaiterRegistry | None
) -> None:
    """Keep the key that the server has granted to the owner, which has the local lock.

    Args:
        lock: the holder's.
        turn: of the acquire.
        owner: the holder.
        token: the key's.
        expires_at: when the key expires on the server at the earliest, in the clock's seconds.
        registry: of the connection for the key; where the token is not of that connection, "wanted" is not heard.
    """
    if registry is not None and registry.identifier != identifier_of(token):
        registry = None
    cached = turn.cached
    assert cached is not None
    cached.cache.shortest_s = min(cached.cache.shortest_s, (lock._linger_ms or 0) / 1000)
    now = clock()
    cached.lease = lease = new_lease(lock, token, expires_at, registry, now)
    hold_cached(lock, turn, cached, lease, owner, min(now, lease.take_until))
    if not cached.cache.is_watched:  # it may be taken from its holder
        cached.cache.watch()


# ---- release ----


def let_linger(lock: LockBase, owner: Owner) -> bool:
    """Let the key of a held lock linger, or give it up in the background. Returns whether the lock was held.

    The owner has no token then, unless another caller that shares it has acquired meanwhile.
    """
    cached: Any = owner.cached
    if cached is None:
        return False  # another caller that shares the owner has released it
    claim: list[bool] = []
    try:
        try:
            return cached.locked_by.setdefault(1, claim) is claim and release_kept(lock, cached, owner, claim)
        finally:
            end_claim(cached, owner, claim)
    except BaseException:  # an interrupt may come before any line
        end_claim(cached, owner, claim)
        raise


def release_kept(lock: LockBase, cached: CachedKey, owner: Owner, claim: list[bool]) -> bool:
    """`_let_linger`, for the one caller that releases what the owner holds."""
    if owner.cached is not cached:
        return False
    claim.append(True)
    owner.cached = owner.token = None  # first: the next holder may have the same owner and token
    lease, (token, end) = cached.lease, owner.expiry
    now = clock()
    if lease is None or end is None or token != lease.token or now >= end or lease.releases:
        return False  # the last: an operator has taken it
    if owner.expiry != cached.locked_by.get(0):  # prolonged, or cut
        lease.set_end(end)
    if owner.is_prolonging:  # a request under way may still cut the lease
        lease.let_go()
    cached.release(now, (lock._linger_ms or 0) / 1000)
    return True


def end_claim(cached: CachedKey, owner: Owner, claim: list[bool]) -> None:
    if cached.locked_by.get(1) is not claim:
        return
    if owner.cached is cached or not claim:  # nothing was released
        cached.locked_by.pop(1, None)
    else:  # lost, or interrupted
        cached.drop()
        cached.free()
