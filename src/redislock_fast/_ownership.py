"""Who holds what: the token and lease of a lock object, by thread, by task, or shared.

`lock.local` is one of these; other projects read and set `lock.local.token`, as on redis-py's.

Who may touch what: a `ThreadHolding` is each thread's own. A `SharedHolding` belongs to whoever has the lock, as
`thread_local=False` asks for; each attribute is assigned as a whole. `TaskHoldings` may be used from several loops in
several threads: its dict is used by atomic methods alone, each entry by its own task while that lives.

Must not know: servers, times of the API.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from redislock_fast import _protocol

if TYPE_CHECKING:
    from redislock_fast._quorum import QuorumLease
    from redislock_fast._round import Round
    from redislock_fast._tenure import Tenure

# Names of their own: each attribute of a module less is one look-up less for every acquire and release.
_current_task = asyncio.current_task
_ref = weakref.ref

__all__ = ["Holding", "SharedHolding", "TaskHoldings", "ThreadHolding", "current_task", "twin_of"]


def current_task() -> asyncio.Task[Any] | None:
    """The running task; None outside of tasks."""
    try:
        return _current_task()
    except RuntimeError:  # no loop runs here
        return None


class Holding:
    """What one owner holds: the defaults below until it acquires.

    Attributes:
        token: the lock's, None where it is not held.
        lease: a token, and until when its lease is certainly valid in the clock's seconds; None if it does not expire.
        attempt: the last acquire.
        brought: the last token that the caller brought himself.
        releasing: the token of a release whose outcome is unknown, and which left while the lease was valid.
        queued: the token of a lock behind which somebody waited when it was granted.
        retries: how often the last acquire polled again.
        fence: the number of what is held, where it was asked for.
        tenure: what is known of what is held on terms.
        quorum: what a Redlock holds under the token.
        round: a Redlock's last operation.
    """

    if not TYPE_CHECKING:  # mypy takes it for a promise that a holding has no attributes
        __slots__ = ()  # 16 bytes less in each ThreadHolding

    token: bytes | None = None
    lease: tuple[bytes | None, float | None] = (None, None)
    attempt: _protocol.Acquire | None = None
    releasing: bytes | None = None
    queued: bytes | None = None
    brought: bytes | None = None
    retries = 0
    fence: int | None = None
    tenure: Tenure | None = None
    quorum: QuorumLease | None = None
    round: Round | None = None

    def expires_at(self, token: bytes) -> float | None:
        """Until when the lease of this token is certainly valid; None where it does not expire or is not known."""
        owner, expires_at = self.lease
        return expires_at if owner == token else None

    def shorten(self, token: bytes, expires_at: float) -> None:
        """Believe in no more of the lease than what a request of unknown outcome may have left of it."""
        known = self.expires_at(token)
        self.lease = (token, expires_at if known is None else min(known, expires_at))

    def mine(self) -> Holding:
        """The holding of whoever asks."""
        return self

    def held(self) -> Holding:
        """The holding that whoever asks may release."""
        return self


class ThreadHolding(Holding, threading.local):
    """What each thread holds."""

    if not TYPE_CHECKING:
        __slots__ = ()


class SharedHolding(Holding, SimpleNamespace):
    """What everybody who has the lock object holds together."""

    __repr__ = object.__repr__  # a SimpleNamespace shows its attributes: the token


class _TaskHolding(Holding):
    def __init__(self, task: weakref.ref[asyncio.Task[Any]] | None) -> None:
        self._task = task

    @property
    def forsaken(self) -> bool:
        """Whether its task has ended, or there never was one."""
        task = None if self._task is None else self._task()
        return task is None or task.done()


class TaskHoldings:
    """What each task holds.

    A task that ended while it held was a helper: `asyncio.wait_for` (before Python 3.12) and `gather` run what they are
    given in tasks of their own. What it held belongs to whoever has the lock object and no token of his own, as with
    redis-py.
    """

    __slots__ = ("_holdings", "_tidy_at")

    def __init__(self) -> None:
        # By weak reference: a dead one equals no other, even where a new task has the old one's address.
        self._holdings: dict[weakref.ref[asyncio.Task[Any]] | None, _TaskHolding] = {}
        self._tidy_at = 8

    def mine(self) -> Holding:
        """The calling task's holding. Outside of tasks there is one for all."""
        try:  # as current_task, without the call: every acquire and release comes here
            task = _current_task()
        except RuntimeError:
            task = None
        key = None if task is None else _ref(task)
        holding = self._holdings.get(key)
        if holding is None:
            if len(self._holdings) >= self._tidy_at:
                self._tidy()
            holding = self._holdings.setdefault(key, _TaskHolding(key))
        return holding

    def held(self) -> Holding:
        """The calling task's holding if it has a token, else the last one that an ended task has left."""
        mine = self.mine()
        if mine.token is None:
            for holding in reversed(list(self._holdings.values())):
                if holding.token is not None and holding.forsaken:
                    return holding
        return mine

    def _tidy(self) -> None:
        """Forget tasks that have ended and hold nothing. As often as their number doubles."""
        for key, holding in list(self._holdings.items()):
            if holding.token is None and holding.forsaken:
                self._holdings.pop(key, None)
        self._tidy_at = 2 * len(self._holdings) + 8

    @property
    def token(self) -> bytes | None:
        """The token that the calling task may release by."""
        return self.held().token

    @token.setter
    def token(self, token: bytes | None) -> None:
        self.held().token = token


def twin_of(lock: Any) -> Any:
    """A second handle on a lock: same client, same token."""
    kind: Any = type(lock)
    twin = kind.__new__(kind)
    vars(twin).update(vars(lock))
    return twin
