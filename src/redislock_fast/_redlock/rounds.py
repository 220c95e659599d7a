"""A majority round: one operation at all servers of a Redlock, their votes, and the outcome.

The rules are those of "The Redlock algorithm", https://redis.io/docs/latest/develop/clients/patterns/distributed-locks:
the clock starts before the first request leaves, a majority decides, and a lease counts for its ttl less the time
passed and an allowance for clocks that drift.

Each server executes an operation of `commands.py`, whose result is the server's vote. A server that answers with an
error, cannot be reached or does not answer has no vote.

Thread safety: `votes`, `errors`, `sent` and `lost` are assigned item by item, an item by the caller that asks its
server or by the reader of that server's connection. A vote never changes; one that comes late is still noted. Once
True, `decided` stays so.
"""

from __future__ import annotations

from collections.abc import Sequence

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire, Reacquire, ReadHolder, Release
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._util.times import drift_s
from redislock_fast._util.tokens import is_held_with


def valid_s(ttl_ms: int) -> float:
    """How long a lease is certainly valid from the time before its request left, in seconds.

    That is less than the ttl, for clocks that drift.
    """
    ttl_s = ttl_ms / 1000
    return ttl_s - drift_s(ttl_s)


class MajorityRound:
    """One operation at all servers.

    Args:
        operations: by server.
        limit_s: how long to wait for replies, in seconds from before the first request.
        votes: by server: the vote of one that is not to be asked, because its vote is known; None for the others.

    Attributes:
        votes: by server: True for agreed, False for refused, None where there is no vote, or none so far.
        errors: by server: why there is no verdict; None where that is not known.
        sent: by server: whether a request has left.
        lost: by server: whether its connection broke, and nothing has left since.
        decided: whether no vote that is missing can change the outcome.
        began: the time before the first request, in the clock's seconds.
        must_execute: whether the servers must execute it in the end, also those that have not answered for long.
        given_up: whether it was given up, so that nothing more must be set.
    """

    must_execute = False
    given_up = False
    decided = False

    def __init__(
        self,
        operations: Sequence[Acquire | Reacquire | Release | ReadHolder],
        limit_s: float,
        votes: list[bool | None] | None = None,
    ) -> None:
        count = len(operations)
        for operation in operations:
            # A script's text, not its hash: the caller may have gone on before NOSCRIPT is read.
            operation.with_text = True
        self.operations = operations
        self.limit_s = limit_s
        self.votes: list[bool | None] = [None] * count
        self.errors: list[Exception | None] = [None] * count
        self.sent = [False] * count
        self.lost = [False] * count
        self.began = 0.0
        self._quorum = count // 2 + 1
        if votes:
            self.votes = votes
            self._count()

    # ---- one server ----

    def awaits(self, index: int) -> bool:
        """Whether the server may still vote in time."""
        return self.votes[index] is None and self.errors[index] is None

    def request(self, index: int, capabilities: Capabilities) -> Args:
        """The next request to a server."""
        self.sent[index] = True
        self.lost[index] = False
        return self.operations[index].request(capabilities, self.began)

    def lose(self, index: int, sent: bool) -> None:
        """Note that the connection broke before the reply; `sent`: a byte of the request may have left."""
        self.operations[index].note_unanswered(sent)
        self.lost[index] = True

    def take(self, index: int, reply: Reply, capabilities: Capabilities) -> bool:
        """Take a server's reply. True: the server is done. False: send it the next request.

        Raises:
            Malformed: the request cannot have this reply; the connection must be given up.
        """
        if self.votes[index] is not None:  # by another connection, when this one seemed broken
            return True
        operation = self.operations[index]
        try:
            finished = operation.feed(reply, capabilities)
        except (NotExecuted, Redirected, Refused) as error:
            self.errors[index] = error.with_traceback(None)
            return True
        if finished:
            self.votes[index] = operation.result
            self._count()
        return finished or self.given_up

    def _count(self) -> None:
        """Update `decided`, after each vote: of several threads that vote at once, the last one sees all votes."""
        votes = self.votes
        if not self.decided and (votes.count(True) >= self._quorum or votes.count(False) > len(votes) - self._quorum):
            self.decided = True

    # ---- all of them ----

    @property
    def agreed(self) -> bool:
        """Whether a majority has agreed."""
        return self.votes.count(True) >= self._quorum

    @property
    def refused(self) -> bool:
        """Whether so many servers have refused that no majority can agree."""
        return self.votes.count(False) > len(self.votes) - self._quorum

    @property
    def answered(self) -> bool:
        """Whether a majority has voted."""
        return len(self.votes) - self.votes.count(None) >= self._quorum

    # ---- cleanup ----

    def close(self, now: float) -> None:
        """Note that the caller stops waiting, and give up a round that has failed."""

    def give_up(self) -> None:
        """Note that the caller will not learn the outcome, so that what the servers have agreed to must not stay."""
        self.given_up = not self.must_execute

    def to_clean_up(self) -> dict[int, tuple[bytes, bytes]]:
        """By server: the key and token that must not stay there."""
        return {}


class LeaseRound(MajorityRound):
    """A majority round that sets a lease: `AcquireRound` or `ReacquireRound`."""

    ttl_ms: int

    @property
    def valid_until(self) -> float:
        """Until when the lease is certainly valid, in the clock's seconds."""
        return self.began + valid_s(self.ttl_ms)

    @property
    def ends_at(self) -> float:
        """When the first server may end the lease, in the clock's seconds."""
        return self.began + self.ttl_ms / 1000


class AcquireRound(LeaseRound):
    """Take the lock at each server where it is free.

    Args:
        keys: by server.
        token: a new one, which no server knows from an earlier attempt.
        ttl_ms: of the lease.
        limit_s: as for `MajorityRound`.
    """

    def __init__(self, keys: list[bytes], token: bytes, ttl_ms: int, limit_s: float) -> None:
        self._acquires = [Acquire(key, token, ttl_ms) for key in keys]
        super().__init__(self._acquires, limit_s)
        self.token = token
        self.ttl_ms = ttl_ms

    def is_held_with(self, token: bytes) -> bool:
        """Whether a majority has refused because it holds this token."""
        holders = [operation.holder for operation in self._acquires]
        return holders.count(token) >= self._quorum

    def close(self, now: float) -> None:
        if not self.agreed or now >= self.valid_until:
            self.give_up()

    def to_clean_up(self) -> dict[int, tuple[bytes, bytes]]:
        if not self.given_up:
            return {}
        return {
            index: (operation.key, operation.token)
            for index, operation in enumerate(self.operations)
            if self.sent[index] and self.votes[index] is not False
        }


class ReacquireRound(LeaseRound):
    """Set the ttl wherever the lock holds this token.

    An extend sets the whole ttl, too, so that a server that missed an earlier extend gets the same lease as the others.

    Args:
        keys: by server.
        token: the lock's.
        ttl_ms: the new lease.
        limit_s: as for `MajorityRound`.
        votes: as for `MajorityRound`.
    """

    def __init__(self, keys: list[bytes], token: bytes, ttl_ms: int, limit_s: float, votes: list[bool | None]) -> None:
        super().__init__([Reacquire(key, token, ttl_ms) for key in keys], limit_s, votes)
        self.ttl_ms = ttl_ms


class ReleaseRound(MajorityRound):
    """Delete the lock wherever it holds this token; at a silent server too, after the acquire.

    Args:
        keys: by server.
        token: the lock's.
        ends_at: when the first server may end the lease, in the clock's seconds.
        limit_s: as for `MajorityRound`.
        votes: as for `MajorityRound`.
        doubtful: whether an earlier release, which was called while the lease was valid, may have been executed.
    """

    must_execute = True

    def __init__(
        self,
        keys: list[bytes],
        token: bytes,
        ends_at: float,
        limit_s: float,
        votes: list[bool | None],
        doubtful: bool,
    ) -> None:
        super().__init__([Release(key, token, ends_at, doubtful) for key in keys], limit_s, votes)
        self._ends_at = ends_at
        self._doubtful = doubtful

    @property
    def may_be_done(self) -> bool:
        """Whether it, or an earlier one, may have been executed while the lease was valid."""
        return self._doubtful or 0 < self.began < self._ends_at

    def to_clean_up(self) -> dict[int, tuple[bytes, bytes]]:
        if all(self.sent) and not any(self.lost) and not any(self.errors):
            return {}
        return {
            index: (operation.key, operation.token)
            for index, operation in enumerate(self.operations)
            if self.votes[index] is None
            and (self.lost[index] or not self.sent[index] or isinstance(self.errors[index], NotExecuted))
        }


class _ReadOwn(ReadHolder):
    """Read whether the lock holds this token; with `another`, another value; without a token, any value."""

    def __init__(self, key: bytes, token: bytes, another: bool = False) -> None:
        super().__init__(key)
        self.token = token
        self.another = another

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        finished = super().feed(reply, capabilities)
        if self.another:
            self.result = self.result and self.holder != self.token
        elif self.token:
            self.result = is_held_with(self.holder, self.token)
        return finished


class ReadRound(MajorityRound):
    """Read whether the lock is held.

    Args:
        keys: by server.
        token: which token to look for; empty for any value.
        limit_s: as for `MajorityRound`.
    """

    def __init__(self, keys: list[bytes], token: bytes, limit_s: float) -> None:
        super().__init__([_ReadOwn(key, token) for key in keys], limit_s)


class TakenRound(MajorityRound):
    """Read whether the key has another value.

    Args:
        keys: by server.
        token: under which the lock was held.
        limit_s: as for `MajorityRound`.
    """

    def __init__(self, keys: list[bytes], token: bytes, limit_s: float) -> None:
        super().__init__([_ReadOwn(key, token, another=True) for key in keys], limit_s)
