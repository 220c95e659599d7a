"""Owners: the token and lease that a lock object has for each thread, for each task, or for all that share it.

Other projects read and set `lock.local.token`, as on redis-py's locks: `Local` has it.

Thread safety: each thread has an `Owner` of its own, which `ThreadOwners` finds. All threads or tasks that share a lock
object with `thread_local=False` use one `SharedOwner`; each attribute is assigned as a whole. An acquire on options
notes what it gets in a `PendingOwner` of its own. The owners of tasks are in `task_owner.py`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.holding import Holding
from redislock_fast._lease.prolonging import Prolonging, Prolongings
from redislock_fast._protocol import commands
from redislock_fast._protocol.commands import Extend, Reacquire
from redislock_fast._util import patching
from redislock_fast._util.times import clock
from redislock_fast._util.tokens import CONTENDED_FLAG, is_ours, without_flag

if TYPE_CHECKING:
    from redislock_fast._lease.kept import KeptKey
    from redislock_fast._lease.lease import Lease


def current_task() -> asyncio.Task[Any] | None:
    """The running task; None outside of tasks."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


NEVER: tuple[bytes | None, float | None] = (None, None)
"""The expiry of no token."""


class Owner:
    """The token and lease of one owner.

    Attributes:
        token: the held lock's token; None where the lock is not held.
        expiry: a token, and until when its lease is certainly valid in the clock's seconds; None if it does not expire.
        releasing: the token of a release of unknown outcome that was sent while the lease was valid.
        left: the token of a release that goes on in the background, after its caller was cancelled.
        contended: the token of a lock whose release looks for waiters first: its value is known to have the contended
            flag, or cannot have it.
        prolongings: the requests under way that prolong the lease; None before the first one.
        booked: `expiry` as these requests have left it.
        fence: the fencing token, where the lock has one.
        holding: what is held on options; None before the first acquire that was.
        extra: what a wing keeps for the owner, since its first operation. It has `ends_at`, which counts instead of
            `expiry`: when the lease of the token ends, in the clock's seconds; None: never, or that is not known.
        cached: the cached key of a lock with `linger`, whose local lock the owner has.
        forgotten_by: the dict from which a task's owner was removed; an acquire that then succeeds calls `hold`.
    """

    __slots__ = (
        "__weakref__",
        "booked",
        "cached",
        "contended",
        "expiry",
        "extra",
        "fence",
        "forgotten_by",
        "holding",
        "left",
        "prolongings",
        "releasing",
        "token",
    )

    is_shared = False  # whether callers may use it at the same time: then each acquire on options makes its lease
    book_mutex: AbstractContextManager[Any] = nullcontext()  # for `prolongings` and `booked`: of a shared owner alone

    def __init__(self) -> None:
        self.token: bytes | None = None
        self.expiry: tuple[bytes | None, float | None] = NEVER
        self.releasing: bytes | None = None
        self.left: bytes | None = None
        self.contended: bytes | None = None
        self.prolongings: Prolongings | None = None
        self.booked: tuple[bytes | None, float | None] | None = None
        self.fence: int | None = None
        self.holding: Holding | None = None
        self.extra: Any = None
        self.cached: KeptKey | None = None
        self.forgotten_by: dict[Any, Any] | None = None

    @property
    def lease(self) -> Lease | None:
        """The lease of a lock that is held on options; it is made now where nothing has needed it before."""
        return None if self.holding is None else self.holding.lease_for_owner()

    @lease.setter
    def lease(self, lease: Lease | None) -> None:
        if self.holding is not None:
            self.holding.set(lease)
        elif lease is not None:
            holding = Holding(lease.lock)
            holding.set(lease)
            self.holding = holding

    @property
    def held_lease(self) -> Lease | None:
        """The lease of the present token."""
        lease = self.lease
        return lease if lease is not None and lease.token == self.token else None

    def expires_at(self, token: bytes) -> float | None:
        """Until when this token's lease is certainly valid; None where it does not expire, or the end is not known."""
        owner, expires_at = self.expiry
        return expires_at if owner == token else None

    def is_contended(self, token: bytes) -> bool:
        """Whether the value of the lock that is held with this token is known to have the contended flag."""
        lease = self.lease
        is_known = self.contended == token or (lease is not None and lease.contended and lease.token == token)
        return is_known and is_ours(token)

    @property
    def holding_id(self) -> object:
        """What names the present holding: a key that lingers has one token for many."""
        return self.token if self.cached is None else self.cached.holding_id

    @property
    def may_hold(self) -> bool:
        """Whether it has a token whose lease has not ended, and which is not being released, as far as is known."""
        token, lease = self.token, None if self.holding is None else self.holding.lease
        if token is None or token == self.releasing:
            return False
        if lease is not None and lease.token == token:
            return not lease.over and not lease.is_lost()
        ends_at = self.expires_at(token) if self.extra is None else self.extra.ends_at
        return ends_at is None or clock() < ends_at

    def hold(self, token: bytes | None) -> None:
        """Note that the lock was acquired. A release of unknown outcome with the same token was of an earlier lease."""
        if token == self.releasing:
            self.releasing = None
        if token == self.left:
            self.left = None
        self.token = token

    def begin_prolonging(self, token: bytes, ttl_ms: int | None, added_ms: int = 0) -> Prolonging:
        """Note that a request begins that prolongs this token's lease: it sets a ttl, or (None) adds to it.

        Other callers that share the owner may do so at the same time. `prolonged` notes the end of the request.
        """
        with self.book_mutex:
            book = self.prolongings
            if book is None or book.token != token or not book.under_way:
                book = self.prolongings = Prolongings(token, self.expires_at(token))
            elif self.expiry is not self.booked:  # acquired again with the same token, or renewed in the background
                self._book_others(book)
            one = book.begin(clock(), None if ttl_ms is None else ttl_ms / 1000, added_ms / 1000)
            self._note_lease(book)
            return one

    def prolonged(self, one: Prolonging, operation: Extend | Reacquire, added_ms: int = 0) -> None:
        """Note that the request has ended: it was executed, was not executed, or has an unknown outcome."""
        with self.book_mutex:
            book = self.prolongings
            if book is None or one not in book.under_way:  # the owner has another token now
                return
            if self.expiry is not self.booked:
                self._book_others(book)
            book.under_way.remove(one)
            if one.ttl_s is not None:
                if operation.result or operation.unsettled:
                    book.set(one, operation.sent_at, operation.result)
            elif operation.result:
                assert isinstance(operation, Extend)
                book.add(one, added_ms / 1000, operation.expires_at, operation.may_cut)
            self._note_lease(book)

    def _book_others(self, book: Prolongings) -> None:
        ends_at = self.expires_at(book.token)
        if ends_at is not None:
            book.cut(ends_at)

    def _note_lease(self, book: Prolongings) -> None:
        token, ends_at = lease = book.token, book.ends_at
        # Nothing is noted where the owner has another token now, or the end is not known.
        if token == self.token and ends_at is not None and lease != self.expiry:
            self.expiry = lease
        self.booked = self.expiry

    @property
    def is_prolonging(self) -> bool:
        """Whether a request that sets the ttl of the held lock may still be executed."""
        book, lease = self.prolongings, self.lease
        return (book is not None and len(book.under_way) > 0) or (
            lease is not None and (lease.renewing or lease.troubled or lease.busy > 0)
        )

    def forget_cached(self) -> None:
        """Have other callers of the process ask the server for the key of a lock with `linger`, which was held."""
        cached, self.cached = self.cached, None
        if cached is not None:
            cached.forget()

    def lose_cached(self, token: bytes) -> None:
        """Have no caller take a key in memory whose holder has found it lost with this token."""
        if self.cached is not None:
            self.cached.lose(token)

    def give_cached_back(self) -> bool:
        """Give up the key of a lock that is not to be held after all. Returns whether it is given back by that."""
        cached, self.cached = self.cached, None
        return cached is not None and cached.give_back()

    def note_release(self, operation: commands.Release) -> None:
        """Note that a release has failed, and may have been executed."""
        if operation.may_be_done:
            self.releasing = operation.token

    def is_released(self, operation: commands.Release) -> bool:
        """Whether this release, or an earlier one of unknown outcome, has found the lock held."""
        was_sent = self.releasing == operation.token  # another caller that shares the owner may have sent it
        if was_sent:
            self.releasing = None
        return operation.result or was_sent

    def mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""
        return self

    def held(self) -> Owner:
        """The owner whose lock the caller may use."""
        return self

    def taken(self) -> Owner:
        """The owner in whose place the caller may hold."""
        return self


class ThreadOwners:
    """The owners of all threads that use one lock object.

    `of_threads` derives from it and from `threading.local`, of which gevent and eventlet have others. An attribute of
    that costs some 300 instructions: so it has one alone.

    Attributes:
        owner: the calling thread's.
    """

    owner: Owner

    def mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""
        return self.owner

    def held(self) -> Owner:
        """The owner whose lock the caller may use."""
        return self.owner

    def taken(self) -> Owner:
        """The owner in whose place the caller may hold."""
        return self.owner

    @property
    def token(self) -> bytes | None:
        """The token with which the calling thread may release the lock."""
        return self.owner.token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self.owner.token = token


of_threads: type[ThreadOwners]
_heirs: Any


def heirs_of(former: ThreadOwners) -> ThreadOwners:
    """Make the owners of the greenlets that use a lock object from before a patch of `threading`.

    A thread's main greenlet goes on with what the thread has held. All others hold nothing.
    """
    return _heirs(former)  # type: ignore[no-any-return]


def _make_kinds() -> None:
    """Make the classes for the `threading.local` that is in force now."""
    global of_threads, _heirs  # the only place that changes them
    local: Any = threading.local

    class Owners(ThreadOwners, local):  # type: ignore[misc]  # of a class that is not known before
        def __init__(self) -> None:  # called in each thread
            self.owner = Owner()

    class Heirs(ThreadOwners, local):  # type: ignore[misc]  # as above
        def __init__(self, former: ThreadOwners) -> None:  # called in each greenlet
            self.owner = former.owner if _is_main_greenlet() else Owner()

    of_threads, _heirs = Owners, Heirs


def _is_main_greenlet() -> bool:
    greenlet = sys.modules.get("greenlet")  # gevent and eventlet import it
    return greenlet is None or greenlet.getcurrent().parent is None


_make_kinds()
patching.on_patch(_make_kinds)


class SharedOwner(Owner):
    """The one owner of all threads or tasks that share the lock object."""

    is_shared = True

    def __init__(self) -> None:
        super().__init__()
        self.book_mutex = threading.RLock()  # a signal handler of the thread that has it may enter it again

    @property
    def owner(self) -> Owner:
        """Itself, as `ThreadOwners` have one for each thread."""
        return self


class PendingOwner(Owner):
    """The token and end of an acquire under way. No other caller sees them before the acquire is complete.

    Args:
        owner: the caller's.

    Attributes:
        before: the owner's lease when the acquire began.
    """

    __slots__ = ("before",)

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.token = owner.token
        self.holding = owner.holding
        self.before = owner.lease

    def publish(self, owner: Owner, lease: Lease | None) -> None:
        """Make the caller the owner: the acquire is complete, with this lease where it was on options."""
        owner.expiry = self.expiry
        owner.contended = self.contended
        owner.fence = self.fence
        if lease is not None:
            owner.lease = lease
        owner.cached = self.cached
        owner.hold(self.token)


_Slot: Any = type(vars(Owner)["token"])
"""The class of the descriptors that `__slots__` makes. A user's class may hide one, or name it in a form of its own."""


def twin_of(lock: Any) -> Any:
    """A second lock object: same client, same token. It keeps the first one, to which a lease may refer weakly."""
    kind: Any = type(lock)
    twin = kind.__new__(kind)
    vars(twin).update(vars(lock))
    for base in kind.__mro__:
        for slot in vars(base).values():
            if type(slot) is _Slot:
                with suppress(AttributeError):  # it is not set
                    slot.__set__(twin, slot.__get__(lock))
    twin._original = lock  # noqa: SLF001  # the twin's own
    return twin


class Local(SimpleNamespace):
    """The caller's token, in the form in which the lock's value has it. All other attributes are the owners'.

    Args:
        owners: of the lock.
        encode: makes bytes of what is assigned: a token, or the lock's value.
        forget_lease: ends the lease of an owner that has another token now, or none.
    """

    __repr__ = object.__repr__  # a SimpleNamespace would show the token

    def __init__(
        self, owners: Any, encode: Callable[[Any], bytes], forget_lease: Callable[[Owner, Lease], object]
    ) -> None:
        vars(self).update(_owners=owners, _encode=encode, _forget_lease=forget_lease)

    @property
    def token(self) -> Any:
        """The caller's token, and after it the contended flag where the lock's value is known to have it."""
        owner: Owner = self._owners.held()
        token = owner.token
        return token + CONTENDED_FLAG if token is not None and owner.is_contended(token) else token

    @token.setter
    def token(self, value: Any) -> None:
        owner: Owner = self._owners.taken()
        encoded = None if value is None else self._encode(value)
        token = None if encoded is None else without_flag(encoded)
        if token != encoded:
            owner.contended = token
        if token != owner.token:
            owner.forget_cached()  # whoever has the former token may hold the lock
        lease, owner.token = owner.lease, token
        if lease is not None and lease.token != token:
            self._forget_lease(owner, lease)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owners, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "token":
            super().__setattr__(name, value)
        else:
            setattr(self._owners, name, value)


def owners_of(local: Any) -> Any:
    """The owners that a lock gets where a caller assigns `lock.local`: perhaps those of another lock."""
    return vars(local)["_owners"] if isinstance(local, Local) else local
