"""`Call` and `ReleaseCall`: one acquire or release under way, made by the public method and handed down alone.

Either makes its first request for the connection on which the server transport's `begin` sends it. The usual reply
settles the call there and then; any other outcome goes on in the steps of the procedures.

Each belongs to the thread or task that has made the call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from redislock_fast._util.times import Limit
from redislock_fast._util.tokens import PLAIN

if TYPE_CHECKING:
    from redislock_fast._lease.holding import Held, Holding
    from redislock_fast._lease.owner import Owner
    from redislock_fast._pipe.base import Args, Reply
    from redislock_fast._protocol.commands import Acquire
    from redislock_fast._util.tokens import TokenSource

__all__ = ["Call", "CleanupEntries", "FirstRequest", "ReleaseCall"]

CleanupEntries: TypeAlias = "list[tuple[bytes, bytes]]"
"""Keys and tokens that must be cleaned up when an acquire fails: the steps fill it, and the driver cleans up."""


class FirstRequest(Protocol):
    """The part of a call that a server transport's `begin` uses.

    Attributes:
        key: the lock.
        sent_at: when the request left, in the clock's seconds; `begin` sets it.
        wait_s: how long the caller waits at most, in seconds; None: as the client's settings say.
    """

    key: bytes
    sent_at: float
    wait_s: float | None

    def request_on(self, connection: Any, tokens: TokenSource) -> Args | None:
        """The request, in the form for this connection, and note the connection; None: send nothing."""


class Call:
    """One acquire.

    Attributes:
        key: the lock.
        owner: the caller's, in which the acquire is noted.
        sleep: the parameter of `acquire`, and so are the next two.
        blocking: see there.
        blocking_timeout: see there.
        own_token: the token that the caller passed; None where the caller passed none.
        task: the task that will hold the lock; None in threads, and where no option needs it.
        before: the token that the owner held before.
        wait_s: how long to wait at most, in seconds; None: forever.
        sleep_s: how long to pause between two attempts or two health checks, in seconds.
        waits: whether to wait after the first attempt.
        limit: the deadline; None before the steps begin.
        kind: the operation of the first attempt.
        ttl_ms: the key's ttl.
        linger_ms: how long the key may outlive the lease, in milliseconds.
        begins: whether its first request may leave at once; see `new_call`.
        token_kind: the kind of the tokens that the call draws; see `tokens.py`.
        joins: whether the caller may join the lock's queue instead of an attempt.
        token: the token of the attempts; None before the first one is drawn.
        is_contended: whether others were known to wait, so that the first request was not sent.
        connection: on which the first request left, until it is settled or handed on.
        request: the first request.
        ours: the reply to it that means that the lock is held.
        sent_at: when it left, in the clock's seconds; 0: it has not.
        attempt: the last attempt.
        is_refused: whether the reply to the first request has said that the lock is another's.
        is_kept: whether the key that was granted is noted in the cache of keys, which gives it back.
        ticket: the token with which the caller waits, or has waited, in the lock's queue; None where it has not.
        left: what must be cleaned up when the acquire fails; not set before the steps begin.
    """

    # Without an `__init__`, whose call would cost as much as the rest. What an uncontended acquire reads is assigned:
    # Python 3.11 reads an instance's own attributes eight times faster than those that it finds in the class.
    key: bytes
    owner: Owner
    sleep: Any = None
    blocking: Any = None
    blocking_timeout: Any = None
    own_token: Any = None
    task: asyncio.Task[Any] | None = None
    kind: type[Acquire]
    ttl_ms: int | None
    before: bytes | None = None
    wait_s: float | None = None
    sleep_s: float = 0.1
    waits: bool = True
    limit: Limit | None = None
    linger_ms: int | None = None
    begins: bool = False
    token_kind: bytes = PLAIN
    joins: bool = False
    token: bytes | None = None
    is_contended: bool = False
    connection: Any = None
    request: Args | None = None
    ours: Reply = None
    sent_at: float = 0.0
    attempt: Acquire | None = None
    is_refused: bool = False
    is_kept: bool = False
    ticket: bytes | None = None
    left: CleanupEntries

    def request_on(self, connection: Any, tokens: TokenSource) -> Args | None:
        """The first request, with a new token; None where others are known to wait, so that it would fail."""
        self.token = token = tokens.new_token(self.token_kind)
        if self.joins:
            registry = connection.registry
            wait_s = self.wait_s
            if registry is not None and registry.is_contended(self.key, wait_s is None or wait_s > self.sleep_s):
                self.is_contended = True
                return None
        self.request, self.ours = self.kind.first_request(connection.capabilities, self.key, token, self.ttl_ms)
        self.connection = connection
        return self.request

    @property
    def deadline(self) -> Limit:
        """The deadline of a call whose steps have begun."""
        assert self.limit is not None
        return self.limit


class ReleaseCall:
    """One release of a lock without hooks.

    Attributes:
        key: the lock.
        kind: the operation.
        token: with which it is held.
        contended: whether the first request hands the lock over; see `Release`.
        holding: what the owner has held on options; None where it never has.
        held: what it held when the release began.
        connection: on which the first request left; None: on none.
        request: the first request.
        ours: the reply to it that means that the lock was held.
        sent_at: when it left, in the clock's seconds.
    """

    key: bytes
    kind: Any
    token: bytes
    contended: bool
    holding: Holding | None
    held: Held | None
    connection: Any = None
    request: Args
    ours: Reply = None
    sent_at: float = 0.0
    wait_s: float | None = None

    def request_on(self, connection: Any, tokens: TokenSource) -> Args:  # noqa: ARG002  # as for an acquire
        """The first request."""
        self.request, self.ours = self.kind.first_request(connection.capabilities, self.key, self.token, self.contended)
        self.connection = connection
        return self.request


def _share_keys(kind: type[Any]) -> None:
    """Have all instances share the table of their attributes' names, each of which is annotated.

    CPython 3.11 closes the table as instances are made. Where many calls begin before the first has sent its request,
    each would have a dict of its own: with 100 tasks, a pair would take 4 % more instructions.
    """
    call = kind()
    for name in kind.__annotations__:
        setattr(call, name, None)


_share_keys(Call)
_share_keys(ReleaseCall)
