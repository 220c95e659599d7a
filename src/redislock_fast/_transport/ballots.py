"""A server's part in a round of a Redlock, as far as it is the same for threads and for asyncio.

A `Ballot` sends a round's requests to one server by `post`, so nobody waits in between, and is given the replies by
whoever reads the connection: also late, when who asked has long gone on.

Who may touch what: a ballot is posted by who asks and answered by who reads.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

from redislock_fast._pipe.base import Lost, Reply, is_unauthenticated
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._protocol.majority import Round
from redislock_fast._protocol.queue import undo_requests
from redislock_fast._transport.base import Channel
from redislock_fast._transport.health import Standing

__all__ = ["Ballot", "end", "insist", "meet", "undo"]

_TRIES = 2
"""A connection that was closed while idle is found out by the request that it loses."""


class Ballot:
    """One server's part in a round. Whoever posts it, or reads its connection, is inside of its channel.

    Attributes:
        links: the connections on which a request has left, while somebody waits.
    """

    _dialect: Dialect | None = None
    links: tuple[Any, ...] = ()
    tries = _TRIES

    def __init__(self, channel: Any, round_: Round, index: int) -> None:
        # A pipe keeps those whose replies it owes, unseen by the garbage collector: so none of them keeps a pipe.
        self._channel: weakref.ref[Any] = weakref.ref(channel)
        self.round = round_
        self.index = index
        self.standing: Standing = channel.standing

    @property
    def is_open(self) -> bool:
        """Whether its server may still vote in time."""
        return self.round.awaits(self.index)

    @property
    def is_new(self) -> bool:
        """Whether its server is to be asked although others have decided: the first lock is held everywhere, too."""
        return not self.links and self.standing.is_new

    @property
    def must_wait(self) -> bool:
        """Whether its server is owed so much that it is asked for nothing new: pipes must not fill up."""
        return self.standing.is_full and not self.round.insists

    @property
    def has_voted(self) -> bool:
        """Whether its server has."""
        return self.round.votes[self.index] is not None

    def skip(self, error: Exception) -> None:
        """The server has no vote, for this reason."""
        self.round.errors[self.index] = error

    def lose(self, sent: bool, cause: Exception) -> None:
        """The connection broke. Another is worth a try, but not for ever."""
        self.round.lose(self.index, sent)
        self.tries -= 1
        if not self.tries:
            self.skip(cause)

    def post(self, link: Any) -> bool:
        """Send the request. Returns False where it cannot be sent."""
        self._dialect = link.dialect
        self.links += (link,)
        try:
            link.pipe.post(self.round.request(self.index, link.dialect), self.answer)
        except Lost as lost:
            self.lose(lost.sent, lost)
            return False
        return True

    def answer(self, reply: Reply) -> None:
        """Take a reply, and send the next request if the operation takes more than one.

        Raises:
            Malformed: as `Round.take`. The connection is left then, and that loses what was asked on it.
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
                with contextlib.suppress(Lost):  # who waits is told of that
                    link.pipe.post(self.round.request(self.index, dialect), self.answer)
                return
        self.standing.owed.discard(self)
        self.settled()

    def _current_link(self) -> Any:
        """The connection on which the request has left, if the channel still uses it; else None."""
        channel = self._channel()
        link = None if channel is None else channel.link
        return link if link is not None and link.dialect is self._dialect else None

    def close(self, link: Any) -> None:
        """Close a connection that has lost its authentication: each ballot on it is told, as after any break."""
        link.close()

    def settled(self) -> None:
        """There is a verdict."""
        raise NotImplementedError

    def leave(self) -> None:
        """Nobody waits any more."""
        if self.links and self.round.awaits(self.index):
            self.standing.owed.add(self)
            if self.has_voted:  # just now
                self.standing.owed.discard(self)
        self.links = ()


def end(ballots: Sequence[Ballot], channels: Sequence[Channel[Any]], round_: Round) -> None:
    """Nobody waits for a round any more. See to it that nothing stays on a server that must not.

    Behind each request on its connection; and in the background, until the server has confirmed it, where it is not
    known what the server has done.

    Args:
        ballots: the round's, perhaps among others, before they are left.
        channels: of its servers.
        round_: which.
    """
    entries = round_.to_undo()
    if not entries:
        return
    links = {ballot.index: ballot.links for ballot in ballots if ballot.round is round_}
    for index, entry in entries.items():
        posted = False
        for link in links.get(index, ()):
            with contextlib.suppress(Lost):
                for request in undo_requests(link.dialect, [entry]):
                    channels[index].post(link, request)
                posted = True
        if not posted or round_.votes[index] is None:
            channels[index].undo([entry])


def meet(channel: Channel[Any], link: Any) -> bool:
    """A round is about to use a connection. Returns whether it is a new one."""
    standing = channel.standing
    owed = standing.owed
    if not standing.meet(link.dialect):
        return False
    insist(channel, owed)  # on the old one, which will never answer
    return True


def insist(channel: Channel[Any], owed: set[Ballot]) -> None:
    """The connection broke on which these were owed a reply: what must come to pass is done in the background."""
    while owed:
        ballot = owed.pop()
        if ballot.round.insists and not ballot.has_voted:
            operation = ballot.round.operations[ballot.index]
            channel.undo([(operation.key, operation.token)])


def undo(channels: Sequence[Channel[Any]], round_: Round) -> None:
    """Undo in the background what has become of a round, however long ago it was held."""
    for index, entry in round_.to_undo().items():
        channels[index].undo([entry])
