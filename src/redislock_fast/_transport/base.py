"""What the transports for threads and for asyncio share: whom they serve, when they try again, what must be undone.

Nothing here waits, sends or receives.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from redis.exceptions import (
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    TimeoutError,  # noqa: A004
)

from redislock_fast._pipe.base import Args, Forked, Lost, NoReply, OnReply, Reply
from redislock_fast._procedures.waiters import Room
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.claims import Claims
from redislock_fast._protocol.commands import NOAUTH, Exchange, NotExecuted, Operation
from redislock_fast._protocol.pipeline import Many
from redislock_fast._protocol.queue import Leave, undo_requests
from redislock_fast._transport.health import Standing
from redislock_fast._transport.reauth import take_part
from redislock_fast._util import fork
from redislock_fast._util.redis_py import RetryPolicy, redis_error
from redislock_fast._util.times import GRACE_S

__all__ = [
    "FOREVER_S",
    "UNDO_FIRST_S",
    "UNDO_LAST_S",
    "UNDO_LIMIT_S",
    "Channel",
    "Encoding",
    "Registry",
    "is_cluster",
]

FOREVER_S = 1e9
"""Longer than this is no limit: clocks and locks overflow beyond."""

UNDO_LIMIT_S = 1.0
UNDO_FIRST_S = 0.05
UNDO_LAST_S = 600.0  # doubling: after about 20 minutes without a connection, the rest is left to the locks' own ttls

_UNDO_AT_ONCE = 1000
_MAX_UNDONE = 200_000


class Encoding:
    """The client's encoder.

    Args:
        owner: whatever has redis-py's `get_encoder`.
    """

    def __init__(self, owner: Any) -> None:
        self._encoder = owner.get_encoder()
        self._utf8 = (self._encoder.encoding, self._encoder.encoding_errors) == ("utf-8", "strict")

    def encode(self, value: object) -> bytes:
        """A name or token as bytes, as the client's own encoder has it."""
        if type(value) is bytes:
            return value
        if type(value) is str and self._utf8:  # as the encoder does, in a tenth of the time
            return value.encode()
        return bytes(self._encoder.encode(value))

    def key_of(self, name: object) -> bytes:
        """A lock's name as its key, as the client's own commands have it."""
        return self.encode(name)

    def keys_of(self, names: Sequence[Any]) -> tuple[list[bytes], bool]:
        """Many names as keys, and whether names that differ have certainly different keys."""
        if self._utf8:
            with contextlib.suppress(TypeError):  # one of them is no str
                return list(map(str.encode, names)), True
        return [self.key_of(name) for name in names], False


class _Pipe(Protocol):
    @property
    def broken(self) -> bool: ...

    @property
    def silence_s(self) -> float: ...

    def post(self, args: Args, on_reply: OnReply | None = None) -> None: ...


class _Link(Protocol):
    @property
    def pipe(self) -> _Pipe: ...

    dialect: Dialect
    ending: Args | None
    room: Room | None

    def close(self) -> None: ...


LinkType = TypeVar("LinkType", bound=_Link)


class Channel(Encoding, Generic[LinkType]):
    """All that goes to one server: the part of it that waits for nothing.

    Args:
        owner: the connection pool whose server it is. Only a weak reference is kept, so that it ends with its clients.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self._owner = weakref.ref(owner)
        settings = self._settings_of(owner)
        self._retry = RetryPolicy(settings.get("retry"))
        timeout_s = settings.get("socket_timeout")
        self.timeout_s = -1.0 if timeout_s is None else float(timeout_s)
        self.link: LinkType | None = None
        self._undone: list[tuple[bytes, bytes]] = []
        self._endings: set[Args] = set()  # of connections that were given up
        self.claims = Claims(self.undo)
        self.standing = Standing()
        take_part(owner, self)

    @staticmethod
    def _settings_of(owner: Any) -> dict[str, Any]:
        settings: dict[str, Any] = owner.connection_kwargs
        return settings

    def _live_owner(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise ConnectionError("the client is gone")
        return owner

    # ---- whether others wait ----

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt to take this lock would probably fail; see `Room.is_contended`."""
        link = self.link
        return link is not None and link.room is not None and link.room.is_contended(key, is_patient)

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """This lock was released here, and a waiter has it now, or nobody waited."""
        link = self.link
        if link is not None and link.room is not None:
            link.room.note_hand_over(key, handed_over)

    # ---- trying again ----

    def _bounded_s(self, left_s: float) -> float:
        """How long to wait for a reply when the caller's time ends in so many seconds; below 0: has ended before."""
        bounded_s = max(left_s + GRACE_S, 0.0)
        return bounded_s if self.timeout_s < 0 else min(self.timeout_s, bounded_s)

    def _drop(self, link: LinkType | None) -> None:
        if link is not None:
            self._give_up(link)
            link.close()

    def _give_up(self, link: LinkType) -> None:
        if self.link is link:
            self.link = None
            if link.ending is not None:
                self._endings.add(link.ending)

    def leave_if_silent(self, link: LinkType) -> None:
        """Send nothing more on a connection that is dead, as far as one can know.

        A caller's own limit says nothing about the connection; silence for the pool's timeout does. It is left, not
        closed: an undoing must go behind what it undoes, and the last to leave lets it close.
        """
        if 0 <= self.timeout_s <= link.pipe.silence_s:
            self._give_up(link)

    def leave_if_broken(self) -> None:
        """Have the next caller connect anew."""
        link = self.link
        if link is not None and link.pipe.broken:
            self._drop(link)

    def _trouble(
        self, link: LinkType | None, operation: Exchange, trouble: Exception, loose: list[LinkType]
    ) -> Exception:
        """Note what happened, and leave the link if it is of no more use. Returns the error as redis-py has it."""
        if isinstance(trouble, Lost):
            operation.lost(trouble.sent)
            self._drop(link)
            return ConnectionError(f"connection lost: {trouble}")
        if isinstance(trouble, NoReply):
            operation.lost(True)
            if link is not None:
                loose.append(link)
                self.leave_if_silent(link)
            return TimeoutError(str(trouble))
        if isinstance(trouble, NotExecuted):
            if trouble.code in ("READONLY", NOAUTH):  # a demoted primary: look for the new one; or authenticate anew
                self._drop(link)
            return redis_error(str(trouble))
        # Without its traceback: redis-py's frames and its errors keep each other alive, and this frame with them.
        return trouble.with_traceback(None)

    def _pause_s(self, trouble: Exception, failures: int, now: float, deadline: float | None) -> float | None:
        """How long to wait before the next attempt; None to give up."""
        retries = self._retry.retries
        if isinstance(trouble, NotExecuted):
            if trouble.code == NOAUTH:  # one new connection is worth a try
                retries = 1
            elif deadline is not None:  # a server that answers "later" is asked until the caller's time ends
                retries = -1
        delay_s = self._retry.delay_s(failures)
        if 0 <= retries < failures or (deadline is not None and now + delay_s >= deadline + GRACE_S):
            return None
        return delay_s

    # ---- undoing ----

    def tidy(self, operation: Operation, loose: list[LinkType], failed: bool) -> None:
        """Undo an acquire that failed although the server may have, or may yet, execute it.

        On each connection the undoing goes behind the attempt, so that in whatever order the connections are read, the
        last word on each is the undoing. An attempt by a caller's own token is undone by its claim alone.
        """
        claim, operation.claim = operation.claim, None
        if claim is not None:
            claim.end(operation.result)
        entries = operation.to_undo(failed)
        if entries:
            for link in loose:
                with contextlib.suppress(Lost):
                    for request in undo_requests(link.dialect, entries):
                        self.post(link, request)
            self.undo(entries)

    def post(self, link: Any, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply nobody waits; see `_pipe.base.Pipe.post`."""
        link.pipe.post(args, on_reply)

    def authenticate(self, request: Args) -> None:
        """Send new credentials on the connection, in order with all other requests. From any thread.

        The server's answer is not waited for: a connection that goes on with the old credentials is replaced when the
        server does not accept them any more.
        """
        link = self.link
        if link is not None:
            with contextlib.suppress(Lost):
                self.post(link, request)

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, in the background and until the server has said that it is done."""
        if not entries or isinstance(
            sys.exc_info()[1], Forked
        ):  # what fails by that in the child goes on in the parent
            return
        self._undone += entries
        self._start_undoing()

    def _start_undoing(self) -> None:
        raise NotImplementedError

    def _post_first(self, link: LinkType) -> None:
        """What goes first on a new connection: it ends the old ones, and then undoes what they may have done.

        Else the server could yet execute what was sent on them, when all that was to undo it is done.
        """
        for ending in list(self._endings):
            link.pipe.post(ending, partial(_note_ended, self._endings, ending))
        for request in undo_requests(link.dialect, list(self._undone)):
            link.pipe.post(request)

    def _next_undoing(self) -> Many:
        """The oldest that go to one server, which stand first in `_undone` then. For who alone takes from it now."""
        del self._undone[:-_MAX_UNDONE]
        oldest = self._undone[:_UNDO_AT_ONCE]
        together = self._at_one_server([key for key, _ in oldest])
        others = set(range(len(oldest))).difference(together)
        self._undone[: len(oldest)] = map(oldest.__getitem__, [*together, *sorted(others)])
        return Many([Leave(*oldest[index]) for index in together])

    def _at_one_server(self, keys: list[bytes]) -> Sequence[int]:
        """The indexes of those keys that the server of the first one has."""
        return range(len(keys))

    def _returning(self, operation: Exchange) -> list[tuple[bytes, bytes]]:
        """What waits to be undone under a token that comes back.

        It must go first: later, it would hit the new attempt, which takes what the old one has left for another's.
        """
        taken = set(operation.takes())
        return [entry for entry in self._undone if entry in taken]

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be undone, or nothing can be, because the owner is gone."""
        return not self._undone or self._owner() is None


def _note_ended(endings: set[Args], ending: Args, _: Reply) -> None:
    endings.discard(ending)  # not a method: a request under way must keep no channel alive


Transport = TypeVar("Transport")


class Registry(Generic[Transport]):
    """One transport per owner: a connection pool, or a cluster client.

    By the owner's id: a tenth of the time of a WeakKeyDictionary, which every lock that is made would pay. An entry
    goes when its owner does. `get` is dict.get, which is atomic; `add` fills under the lock, which a finalizer may
    enter again.
    """

    def __init__(self) -> None:
        self._transports: dict[int, Transport] = {}
        self.get: Callable[[int], Transport | None] = self._transports.get
        self._new_lock()
        fork.on_fork(self._new_lock)  # another thread may have held it at the fork

    def _new_lock(self) -> None:
        self._lock = threading.RLock()

    def add(self, owner: Any, make: Callable[[Any], Transport]) -> Transport:
        """The owner's transport, made now unless another thread was faster."""
        with self._lock:
            transport = self._transports.get(id(owner))
            if transport is None:
                transport = self._transports[id(owner)] = make(owner)
                weakref.finalize(owner, self._transports.pop, id(owner), None).atexit = False
        return transport


def is_cluster(client: Any, for_asyncio: bool) -> bool:
    """Whether this is redis-py's cluster client.

    Args:
        client: what a lock was given.
        for_asyncio: whether the lock is an asyncio lock.

    Raises:
        TypeError: for a pipeline, for a client of the other world, and for what is no client.
    """
    kind = type(client)
    names = {f"{base.__module__}.{base.__qualname__}".removeprefix("redis.") for base in kind.__mro__}
    plain = {name.removeprefix("asyncio.") for name in names}
    if plain & {"client.Pipeline", "cluster.ClusterPipeline"}:
        raise TypeError("a pipeline cannot take a lock: its commands are executed later. Use the client itself")
    is_asyncio = any(name.startswith("asyncio.") for name in names)
    if is_asyncio and not for_asyncio:
        raise TypeError("an asyncio client needs an asyncio lock: this Lock blocks")
    if for_asyncio and not is_asyncio and any(base.__module__.startswith("redis.") for base in kind.__mro__):
        raise TypeError("an asyncio lock needs an asyncio client, from redis.asyncio: this client blocks")
    if "cluster.RedisCluster" in plain:
        return True
    if not hasattr(client, "connection_pool"):
        where = "redis.asyncio" if for_asyncio else "redis"
        raise TypeError(f"a lock needs a {where}.Redis or {where}.RedisCluster, not {kind.__name__}")
    return False
