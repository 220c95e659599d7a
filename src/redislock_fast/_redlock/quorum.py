"""Majority rounds over the servers of a Redlock, and how fast each has lately answered: what threads and tasks share.

A `Voting` is one or several majority rounds under way. It has a `Vote` for each server and round, which sends the
round's requests to the server and takes the replies. Nothing here waits: `threads.py` and `loop.py` do.

A caller stops waiting as soon as the outcome of its rounds is certain. The votes that are missing then are still taken
when they come, and those without a reply are kept in `ServerHealth.unanswered`. A `ServerHealth` belongs to a server
transport, and so to all Redlocks of its client in this process or event loop. It says whether to ask the server, or to
wait for it.

Thread safety: the caller posts a `Vote`, and the reader of the connection gives it the reply. `listener` is
assigned before the caller looks at the votes, and read after the reader has noted one, so no verdict is missed. A
`Voting` belongs to its caller. Any thread assigns an attribute of a `ServerHealth` as a whole. `unanswered` is changed
by atomic methods of set alone, and replaced under `mutex`, so that one caller alone gets what was there. Its other
attributes are hints.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError

from redislock_fast._lease.prolonging import mutex
from redislock_fast._pipe.base import ConnectionBroken, Reply, is_unauthenticated
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.operation import NotExecuted
from redislock_fast._protocol.queue import cleanup_requests
from redislock_fast._protocol.steps import Do
from redislock_fast._redlock.rounds import MajorityRound
from redislock_fast._transport.base import ServerTransport
from redislock_fast._util.times import MOST_FAILURES, clock

_MOST_UNANSWERED = 64
_CHANCE_S = 0.0005
_FADING = 0.998  # in a round: a wait of a millisecond fades after 350 rounds
_BACK_OFF_S = 0.05
_LONGEST_BACK_OFF_S = 1.0


class ServerHealth:
    """How fast a server has lately answered majority rounds.

    Attributes:
        capabilities: of the connection that was used last; None before the first.
        silent: a wait for the server has failed, and it has not answered since.
        slowness: how long it was waited for lately, in whole half milliseconds.
        asked: the votes of an event loop that are to be told when the connection breaks.
        unanswered: the votes without a verdict for which no caller waits any more.
        trouble: why there was no connection at the last try; None while it is tried, and once there is one.
        opening: the thread or task that connects; None before the first.
        retry_at: when to try again, in the clock's seconds.
    """

    def __init__(self) -> None:
        self.opening: Any = None
        self.trouble: Exception | None = None
        self.retry_at = 0.0
        self._failures = 0

        self.capabilities: Capabilities | None = None
        self.silent = False
        self.slowness = 0
        self._waited_s = 0.0
        self.asked: set[Any] = set()
        self.unanswered: set[Any] = set()

    def use_connection(self, capabilities: Capabilities) -> set[Any] | None:
        """Begin anew on another connection. Its capabilities identify it: a reference would keep the old one alive.

        Returns:
            What is `unanswered` on the former one, for one caller alone; None where another one was faster, or it is
            the same connection.
        """
        asked: set[Any] = set()
        unanswered: set[Any] = set()
        with mutex.lock:
            if capabilities is self.capabilities:
                return None
            unanswered, self.unanswered = self.unanswered, unanswered
            self.asked, self.silent, self.slowness, self._waited_s = asked, False, 0, 0.0
            self.capabilities = capabilities  # last: others go on once they see it
        return unanswered

    def note_wait(self, waited_s: float | None) -> None:
        """Note for how long the server was waited for in a round, in seconds; None: its vote was not needed.

        Differences below `_CHANCE_S` are chance and do not count: the server that is asked first is waited for first.
        Without a wait the figure fades, or one outlier would count forever.
        """
        self._waited_s = self._waited_s * _FADING if waited_s is None else waited_s
        self.slowness = int(self._waited_s / _CHANCE_S)

    @property
    def is_new(self) -> bool:
        """Whether there was no connection yet, and no wait for one has failed."""
        return self.capabilities is None and not self._failures and not self.silent

    @property
    def is_full(self) -> bool:
        """Whether the server owes more replies than one that keeps up."""
        return len(self.unanswered) >= _MOST_UNANSWERED

    def backs_off(self, now: float) -> bool:
        """Whether the last failure to connect is too recent for another try."""
        return self.trouble is not None and now < self.retry_at

    def connected(self) -> None:
        """There is a connection."""
        self.trouble = None
        self._failures = 0

    def failed(self, trouble: Exception, now: float) -> None:
        """No connection could be made."""
        self.retry_at = now + min(_BACK_OFF_S * 2**self._failures, _LONGEST_BACK_OFF_S)
        self._failures = min(self._failures + 1, MOST_FAILURES)
        # Without its traceback: redis-py's frames and its errors keep each other alive.
        self.trouble = trouble.with_traceback(None)


def health_of(server: ServerTransport[Any]) -> ServerHealth:
    """How fast the server of this transport has answered."""
    kept = server.kept_by_wings
    health: ServerHealth = kept.get(ServerHealth) or kept.setdefault(ServerHealth, ServerHealth())
    return health


class MajorityEntry(NamedTuple):
    """A Redlock to be cleaned up.

    Attributes:
        keys: the key, by server.
        token: the token under which it was held.
        quorum: the servers; kept alive, since a dropped lock may be the last that has a reference.
    """

    keys: list[bytes]
    token: bytes
    quorum: Any

    def __repr__(self) -> str:
        """Without the token."""
        return object.__repr__(self)


class Owing(Exception):
    """The server is not asked: it owes so many replies, since it has not answered for a while."""


_TRIES = 2
"""A request is sent once more: only a request that fails shows that the server has closed an idle connection."""


class Vote:
    """One server's vote in a majority round.

    Args:
        server: the server's transport.
        round_: the majority round.
        index: the server's place in it.

    Attributes:
        connection: the connection on which the last request left; None before, and when it broke.
        connections: every connection on which a request left, while a caller waits for the round.
        listener: its `put` is called when there is a verdict; None while no caller waits for it.
    """

    connection: Any = None
    connections: tuple[Any, ...] = ()
    listener: Any = None
    tries = _TRIES
    _capabilities: Capabilities | None = None

    def __init__(self, server: Any, round_: MajorityRound, index: int) -> None:
        # The garbage collector does not see what a pipe keeps for the replies to come: it must not keep the pipe.
        self._server: weakref.ref[Any] = weakref.ref(server)
        self.round = round_
        self.index = index
        self.health: ServerHealth = health_of(server)

    @property
    def is_open(self) -> bool:
        """Whether the server may still vote in time."""
        return self.round.awaits(self.index)

    @property
    def is_new(self) -> bool:
        """Whether the server is waited for after the others have decided, so that the first lock is held everywhere."""
        return not self.connections and self.health.is_new

    @property
    def is_awaited(self) -> bool:
        """Whether the round needs this vote to end. Once False, it stays so."""
        return (not self.round.decided or self.is_new) and self.is_open

    @property
    def must_wait(self) -> bool:
        """Whether the server owes too many replies to be asked anything new: connections must not fill up."""
        return self.health.is_full and not self.round.must_execute

    @property
    def has_voted(self) -> bool:
        """Whether the server has voted."""
        return self.round.votes[self.index] is not None

    def skip(self, error: Exception) -> None:
        """Note why the server does not vote."""
        self.round.errors[self.index] = error

    def lose(self, sent: bool, cause: Exception) -> None:
        """Note that the connection broke, and try again once; `sent`: a byte may have left before."""
        self.connection = None
        self.round.lose(self.index, sent)
        self.tries -= 1
        if not self.tries:
            self.skip(cause)

    def post(self, connection: Any) -> bool:
        """Send the request. Returns False where the connection has broken."""
        self._capabilities = connection.capabilities
        self.connections += (connection,)
        self.connection = connection
        try:
            connection.pipe.post(self.round.request(self.index, connection.capabilities), self.answer)
        except ConnectionBroken as lost:
            self.lose(lost.sent, lost)
            return False
        return True

    def answer(self, reply: Reply) -> None:
        """Take a reply, and send the next request if the operation takes more than one.

        Raises:
            Malformed: as `MajorityRound.take`. That breaks the connection, with every request on it.
        """
        capabilities: Any = self._capabilities
        self.health.silent = False
        if is_unauthenticated(reply):
            connection = self._current_connection()
            if connection is not None:
                self.close(connection)
            return
        if not self.round.take(self.index, reply, capabilities):
            connection = self._current_connection()
            if connection is not None:
                with contextlib.suppress(ConnectionBroken):  # the caller is told of that
                    connection.pipe.post(self.round.request(self.index, capabilities), self.answer)
                return
        self.health.unanswered.discard(self)
        listener = self.listener
        if listener is not None:
            listener.put(None)
        if not self.connections and isinstance(self.round.errors[self.index], NotExecuted):  # the caller has gone on
            server = self._server()
            if server is not None:
                resend(server, {self})

    def _current_connection(self) -> Any:
        """The connection on which the request left, if the server transport still uses it; else None."""
        server = self._server()
        connection = None if server is None else server.connection
        return connection if connection is not None and connection.capabilities is self._capabilities else None

    def close(self, connection: Any) -> None:
        """Close a connection that is not authenticated any more, with every request on it."""
        connection.close()

    def leave(self) -> None:
        """The caller stops waiting."""
        if self.connections and self.round.awaits(self.index):
            self.health.unanswered.add(self)
            if self.has_voted:  # meanwhile
                self.health.unanswered.discard(self)
        self.connections = ()
        self.connection = self.listener = None


VoteType = TypeVar("VoteType", bound=Vote)


class Voting(Generic[VoteType]):
    """Majority rounds that are held at once, as a context manager.

    At its end the caller stops waiting. An acquire that has failed by then, or was interrupted or cancelled, is cleaned
    up.

    Args:
        servers: the servers' transports.
        rounds: the majority rounds.
        kind: of `Vote`.

    Attributes:
        votes: one for each server that is asked, by round.
        ends_at: when the shortest time limit of the rounds ends, in the clock's seconds.
    """

    def __init__(
        self, servers: Sequence[ServerTransport[Any]], rounds: Sequence[MajorityRound], kind: type[VoteType]
    ) -> None:
        self._servers = servers
        self._rounds = rounds
        began = clock()
        for round_ in rounds:
            round_.began = began
        self.ends_at = began + min([round_.limit_s for round_ in rounds])
        self.votes = [
            kind(servers[index], round_, index)
            for round_ in rounds
            for index, vote in enumerate(round_.votes)
            if vote is None
        ]

    def awaited(self) -> list[VoteType]:
        """The votes without which the outcome is not certain yet."""
        return [vote for vote in self.votes if vote.is_awaited]

    def time_is_up(self) -> None:
        """Note the end of the time limit: the votes that are still awaited did not come."""
        for vote in self.awaited():
            vote.health.silent = True
            if vote.connection is not None:
                self._servers[vote.index].leave_if_silent(vote.connection)

    def __enter__(self) -> Voting[VoteType]:
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
            entries = round_.to_clean_up()
            if entries:
                self._clean_up(round_, entries)
        for vote in self.votes:
            vote.leave()

    def _clean_up(self, round_: MajorityRound, entries: dict[int, tuple[bytes, bytes]]) -> None:
        """Delete what must not stay on a server.

        The cleanup is sent after each request on its connection. Where the outcome is unknown, it also goes on in the
        background until the server has confirmed it.
        """
        connections = {vote.index: vote.connections for vote in self.votes if vote.round is round_}
        for index, entry in entries.items():
            server = self._servers[index]
            posted = False
            for connection in connections.get(index, ()):
                with contextlib.suppress(ConnectionBroken):
                    for request in cleanup_requests(connection.capabilities, [entry]):
                        server.post(connection, request)
                    posted = True
            if not posted or round_.votes[index] is None:
                server.clean_up([entry])


def use_connection(server: ServerTransport[Any], connection: Any) -> bool:
    """Note the connection that a round is about to use. Returns whether it is a new one."""
    unanswered = health_of(server).use_connection(connection.capabilities)
    if unanswered is None:
        return False
    resend(server, unanswered)  # on the old connection, where no reply comes any more
    return True


def resend(server: ServerTransport[Any], unanswered: set[Vote]) -> None:
    """Do releases again in the background that a server puts off, or whose connection broke before their replies."""
    while True:
        try:
            vote = unanswered.pop()
        except KeyError:  # another thread may do the same, or take the last reply
            return
        if vote.round.must_execute and not vote.has_voted:
            operation = vote.round.operations[vote.index]
            server.clean_up([(operation.key, operation.token)])


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

    def clean_up_round(self, round_: MajorityRound) -> None:
        """Clean up in the background after a round whose outcome no caller has noted."""
        round_.give_up()
        self._clean_up_rest(round_)

    def _clean_up_rest(self, round_: MajorityRound) -> None:
        for index, entry in round_.to_clean_up().items():
            self._clean_up_at(index, [entry])

    def clean_up(self, entries: list[MajorityEntry]) -> None:
        """Delete locks that hold their tokens, at all servers, without waiting."""
        for index in range(len(self._transports)):
            self._clean_up_at(index, [(entry.keys[index], entry.token) for entry in entries])

    def _clean_up_at(self, index: int, entries: list[tuple[bytes, bytes]]) -> None:
        with contextlib.suppress(RedisConnectionError):  # this server's client is gone, perhaps not the others'
            self._transports[index].clean_up(entries)


_quorums: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


def ask_servers(quorum: Any, *rounds: MajorityRound) -> Do:
    """The step that asks all servers of a quorum, until the outcome of each round is certain or its time is up."""
    return Do("call", quorum.ask, *rounds)
