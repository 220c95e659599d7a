"""Notes which keys acquires with a caller's own token took, as the replies to their requests say.

Another owner may have the same token. So an acquire of unknown outcome is not cleaned up for that alone: the cleanup
could delete the other owner's lock. It is cleaned up when a reply says that this acquire itself took the key, also when
the reply comes after the caller has given up. If the connection breaks before, the key is left to its ttl.

The acquires of one server transport with one key and one token share a `Claim`: the lock that one of them takes may be
found by another, which owns it from then on. A request that leaves later can take the key only after that lock has
ended, so it belongs to the next claim.

Thread safety: the fields of a claim are changed under its mutex, and `Claims.open` under that of the `Claims`, which is
taken first. A signal handler or a finalizer of the same thread may enter both again. The thread or loop that reads the
connection calls a `ReplyTaker`. It never waits for a mutex, since a signal handler of the thread that has it may wait
for the reader: it first sets `_is_taken`, and then tries the claim's mutex. Who ends an acquire looks at `_is_taken`
after it has released that mutex.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from redislock_fast._pipe.base import Args, Reply


def has_taken(request: Args, reply: Reply) -> bool:
    """Whether the reply says that this request, of any kind of attempt, took the key."""
    if request[0] == b"SET":  # with NX; or with IFEQ, which takes nothing
        return request[3] == b"NX" and (reply is None if request[-1] == b"GET" else reply == b"OK")
    return isinstance(reply, list) and reply[0] == 1  # of acquire_fenced.lua or redeem.lua


class _Claiming(Protocol):
    claim: Claim | None


class _Acquire(_Claiming, Protocol):
    """An acquire with a caller's own token."""

    key: bytes
    token: bytes


class Claims:
    """The claims of one server transport.

    Args:
        clean_up: `ServerTransport.clean_up`. Only a weak reference is kept: a request under way must not keep the
            transport alive.
    """

    def __init__(self, clean_up: Callable[[list[tuple[bytes, bytes]]], None]) -> None:
        self.clean_up = weakref.WeakMethod(clean_up)
        self.mutex = threading.RLock()
        self.open: weakref.WeakValueDictionary[tuple[bytes, bytes], Claim] = weakref.WeakValueDictionary()

    def begin(self, operation: _Acquire) -> None:
        """Give an acquire that begins its claim. Each `begin` is followed by one `Claim.end`."""
        self.join(operation, (operation.key, operation.token))

    def join(self, operation: _Claiming, entry: tuple[bytes, bytes]) -> None:
        """Give an acquire the claim of this key and token that no caller holds."""
        with self.mutex:
            claim = self.open.get(entry)
            if claim is None:
                claim = self.open[entry] = Claim(self, entry)
            with claim.mutex:
                claim.under_way += 1
                operation.claim = claim

    def adapt(self) -> None:
        """After a patch of `threading`: take mutexes of the kind that is in force now."""
        self.mutex = threading.RLock()
        for claim in self.open.values():
            claim.mutex = threading.RLock()


class Claim:
    """Whether acquires with one key and one token have taken the key although no caller owns the lock.

    Attributes:
        mutex: see above.
        under_way: how many acquires have not ended.
    """

    __slots__ = ("__weakref__", "_claims", "_entry", "_is_held", "_is_taken", "mutex", "under_way")

    def __init__(self, claims: Claims, entry: tuple[bytes, bytes]) -> None:
        self._claims = claims
        self._entry = entry
        self.mutex = threading.RLock()
        self.under_way = 0
        self._is_taken = False
        self._is_held = False

    def leave_if_held(self, operation: _Claiming) -> None:
        """Give an acquire whose claim this is the next one, if a caller owns the lock of this one."""
        if self._is_held:
            self._claims.join(operation, self._entry)

    def take(self) -> None:
        """Note that a request of an acquire took the key, whether or not the acquire has ended."""
        self._is_taken = True
        self._clean_up_if_unheld()

    def end(self, is_held: bool) -> None:
        """Note that an acquire has ended.

        Args:
            is_held: whether its caller owns the lock: then late replies do not matter any more.
        """
        with self._claims.mutex, self.mutex:
            self.under_way -= 1
            if is_held:
                self._is_held = True
                if self._claims.open.get(self._entry) is self:
                    del self._claims.open[self._entry]
        self._clean_up_if_unheld()

    @property
    def _is_left(self) -> bool:
        return self._is_taken and not self._is_held and not self.under_way

    def _clean_up_if_unheld(self) -> None:
        while self._is_left and self.mutex.acquire(blocking=False):
            # Under the mutex: an acquire that begins later finds the entry among those that are to be cleaned up first.
            try:
                if self._is_left:
                    self._is_taken = False
                    clean_up = self._claims.clean_up()
                    if clean_up is not None:
                        clean_up([self._entry])
            finally:
                self.mutex.release()


class ReplyTaker:
    """The callback for the reply to a request of such an acquire. It is made just before that request leaves.

    Args:
        operation: the acquire.
        request: what is posted.
        wake: wakes the caller; its argument is this object.

    Attributes:
        reply: to the request, once the caller was woken.
        wake: None once the caller has stopped waiting, since it refers to the connection.
    """

    __slots__ = ("_claim", "_request", "reply", "wake")

    def __init__(self, operation: _Claiming, request: Args, wake: Callable[[Any], None]) -> None:
        assert operation.claim is not None
        operation.claim.leave_if_held(operation)
        self._claim = operation.claim
        self._request = request
        self.reply: Reply = None
        self.wake: Callable[[Any], None] | None = wake

    def __call__(self, reply: Reply) -> None:
        """Take the reply."""
        if has_taken(self._request, reply):
            self._claim.take()
        self.reply = reply
        wake = self.wake
        if wake is not None:
            wake(self)
