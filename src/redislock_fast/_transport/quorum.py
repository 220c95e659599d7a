"""Majority rounds over the servers of a Redlock: what threads and event loops have in common.

A `Voting` is one or several majority rounds under way. It has a `Ballot` for each server and round, which sends the
round's requests to the server and takes the replies. Nothing here waits: `threads/quorum.py` and `loop/quorum.py` do.

A caller stops waiting as soon as the outcome of its rounds is certain. The votes that are missing then are still taken
when they come, and those without a reply are kept in `Standing.owed`.

Who may touch what: the caller posts a `Ballot`, and the reader of the connection gives it the reply. `listener` is
assigned before the caller looks at the votes, and read after the reader has noted one, so no verdict is missed. A
`Voting` belongs to its caller.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

from redislock_fast._lease.majority_lease import QuorumEntry
from redislock_fast._pipe.base import Lost, Reply, is_unauthenticated
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.majority import Round
from redislock_fast._protocol.queue import undo_requests
from redislock_fast._transport.base import Channel
from redislock_fast._transport.health import Standing
from redislock_fast._util.times import clock

__all__ = ["Ballot", "BallotType", "Quorum", "Voting", "insist", "meet"]

_TRIES = 2
"""A connection that the server closed while it was idle is noticed by the request that is lost on it."""


class Ballot:
    """One server's vote in a majority round.

    Args:
        channel: the server's transport.
        round_: the majority round.
        index: the server's place in it.

    Attributes:
        link: the connection on which the last request left; None before, and when it broke.
        links: every connection on which a request left, while a caller waits for the round.
        listener: its `tell` is called when there is a verdict; None where nobody waits for that.
    """

    link: Any = None
    links: tuple[Any, ...] = ()
    listener: Any = None
    tries = _TRIES
    _dialect: Dialect | None = None

    def __init__(self, channel: Any, round_: Round, index: int) -> None:
        # The garbage collector does not see what a pipe keeps for the replies to come: it must not keep the pipe.
        self._channel: weakref.ref[Any] = weakref.ref(channel)
        self.round = round_
        self.index = index
        self.standing: Standing = channel.standing

    @property
    def is_open(self) -> bool:
        """Whether the server may still vote in time."""
        return self.round.awaits(self.index)

    @property
    def is_new(self) -> bool:
        """Whether the server is waited for after the others have decided: the first lock is held everywhere."""
        return not self.links and self.standing.is_new

    @property
    def is_awaited(self) -> bool:
        """Whether the round is not over without this vote. Once False, it stays so."""
        return (not self.round.decided or self.is_new) and self.is_open

    @property
    def must_wait(self) -> bool:
        """Whether the server owes too many replies to be asked anything new: connections must not fill up."""
        return self.standing.is_full and not self.round.insists

    @property
    def has_voted(self) -> bool:
        """Whether the server has voted."""
        return self.round.votes[self.index] is not None

    def skip(self, error: Exception) -> None:
        """The server does not vote, for this reason."""
        self.round.errors[self.index] = error

    def lose(self, sent: bool, cause: Exception) -> None:
        """The connection broke; `sent`: after a byte may have left. It is tried again once."""
        self.link = None
        self.round.lose(self.index, sent)
        self.tries -= 1
        if not self.tries:
            self.skip(cause)

    def post(self, link: Any) -> bool:
        """Send the request. Returns False where the connection has broken."""
        self._dialect = link.dialect
        self.links += (link,)
        self.link = link
        try:
            link.pipe.post(self.round.request(self.index, link.dialect), self.answer)
        except Lost as lost:
            self.lose(lost.sent, lost)
            return False
        return True

    def answer(self, reply: Reply) -> None:
        """Take a reply, and send the next request if the operation takes more than one.

        Raises:
            Malformed: as `Round.take`. That breaks the connection, and every request on it is lost.
        """
        dialect: Any = self._dialect
        self.standing.silent = False
        if is_unauthenticated(reply):
            link = self._current_link()
            if link is not None:
                self.close(link)
            return
        if not self.round.take(self.index, reply, dialect):
            link = self._current_link()
            if link is not None:
                with contextlib.suppress(Lost):  # the caller is told of that
                    link.pipe.post(self.round.request(self.index, dialect), self.answer)
                return
        self.standing.owed.discard(self)
        listener = self.listener
        if listener is not None:
            listener.tell(None)

    def _current_link(self) -> Any:
        """The connection on which the request left, if the server transport still uses it; else None."""
        channel = self._channel()
        link = None if channel is None else channel.link
        return link if link is not None and link.dialect is self._dialect else None

    def close(self, link: Any) -> None:
        """Close a connection that has lost its authentication. Every request on it is lost."""
        link.close()

    def leave(self) -> None:
        """The caller stops waiting."""
        if self.links and self.round.awaits(self.index):
            self.standing.owed.add(self)
            if self.has_voted:  # meanwhile
                self.standing.owed.discard(self)
        self.links = ()
        self.link = self.listener = None


BallotType = TypeVar("BallotType", bound=Ballot)


class Voting(Generic[BallotType]):
    """Majority rounds that are held at once, as a context: by its end, nobody waits for them any more.

    An acquire that has failed by then, or was interrupted or cancelled, is cleaned up.

    Args:
        channels: the servers' transports.
        rounds: the majority rounds.
        kind: of `Ballot`.

    Attributes:
        ballots: one for each server that is asked, by round.
        ends_at: when the shortest time limit of the rounds ends, in the clock's seconds.
    """

    def __init__(self, channels: Sequence[Channel[Any]], rounds: Sequence[Round], kind: type[BallotType]) -> None:
        self._channels = channels
        self._rounds = rounds
        began = clock()
        for round_ in rounds:
            round_.began = began
        self.ends_at = began + min([round_.limit_s for round_ in rounds])
        self.ballots = [
            kind(channels[index], round_, index)
            for round_ in rounds
            for index, vote in enumerate(round_.votes)
            if vote is None
        ]

    def awaited(self) -> list[BallotType]:
        """The votes without which the outcome is not certain yet."""
        return [ballot for ballot in self.ballots if ballot.is_awaited]

    def time_is_up(self) -> None:
        """The servers whose votes are still awaited have been waited for in vain."""
        for ballot in self.awaited():
            ballot.standing.silent = True
            if ballot.link is not None:
                self._channels[ballot.index].leave_if_silent(ballot.link)

    def __enter__(self) -> Voting[BallotType]:
        """Nothing has been sent yet."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop waiting."""
        try:
            for round_ in self._rounds:
                if exc_type is None:
                    round_.close(clock())
                else:
                    round_.give_up()
        finally:
            self._end()

    def _end(self) -> None:
        for round_ in self._rounds:
            entries = round_.to_undo()
            if entries:
                self._clean_up(round_, entries)
        for ballot in self.ballots:
            ballot.leave()

    def _clean_up(self, round_: Round, entries: dict[int, tuple[bytes, bytes]]) -> None:
        """Delete what must not stay on a server.

        The cleanup goes behind each request on its connection; and where it is not known what the server has done, into
        the background too, until the server has confirmed it.
        """
        links = {ballot.index: ballot.links for ballot in self.ballots if ballot.round is round_}
        for index, entry in entries.items():
            channel = self._channels[index]
            posted = False
            for link in links.get(index, ()):
                with contextlib.suppress(Lost):
                    for request in undo_requests(link.dialect, [entry]):
                        channel.post(link, request)
                    posted = True
            if not posted or round_.votes[index] is None:
                channel.undo([entry])


def meet(channel: Channel[Any], link: Any) -> bool:
    """A round is about to use a connection. Returns whether it is a new one."""
    standing = channel.standing
    owed = standing.owed
    if not standing.meet(link.dialect):
        return False
    insist(channel, owed)  # on the old connection, where no reply comes any more
    return True


def insist(channel: Channel[Any], owed: set[Ballot]) -> None:
    """The connection broke on which these replies were owed: releases are done again in the background."""
    while owed:
        ballot = owed.pop()
        if ballot.round.insists and not ballot.has_voted:
            operation = ballot.round.operations[ballot.index]
            channel.undo([(operation.key, operation.token)])


class Quorum:
    """The servers of a Redlock, to be asked together.

    Args:
        transports: one for each server.
    """

    def __init__(self, transports: list[Any]) -> None:
        self._transports = transports

    @classmethod
    def of(cls, transports: list[Any]) -> Any:
        """The one quorum of these servers while any Redlock on them lives: one renewer renews all of these.

        It keeps the transports alive, so their ids are unique. Two quorums at once, after a race, do no harm.
        """
        key = tuple(map(id, transports))
        return _quorums.get(key) or _quorums.setdefault(key, cls(transports))

    def undo_round(self, round_: Round) -> None:
        """Clean up in the background after a round whose outcome nobody has noted."""
        round_.give_up()
        self._undo_rest(round_)

    def _undo_rest(self, round_: Round) -> None:
        for index, entry in round_.to_undo().items():
            self._undo_at(index, [entry])

    def undo(self, entries: list[QuorumEntry]) -> None:
        """Delete locks that hold their tokens, at all servers, without waiting."""
        for index in range(len(self._transports)):
            self._undo_at(index, [(entry.keys[index], entry.token) for entry in entries])

    def _undo_at(self, index: int, entries: list[tuple[bytes, bytes]]) -> None:
        with contextlib.suppress(RedisConnectionError):  # this server's client is gone, perhaps not the others'
            self._transports[index].undo(entries)


_quorums: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()
