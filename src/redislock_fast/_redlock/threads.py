"""The servers of a Redlock, asked by threads.

All requests of a majority round leave before any reply is waited for. Then the calling thread reads one connection
after the other until the outcome is certain. It begins with the servers for which no round has waited lately, and waits
long for none before it has looked at the others. So a slow or silent server costs nothing unless its vote is needed.

A thread of its own connects to a server without a connection. A caller waits for that at most until its round ends.
Where no thread can be started, the caller connects. After a failure, connecting is not tried again at once.

A release returns when a majority has answered. The next caller reads the missing replies, or else a thread does; see
`_LateReplies`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from redislock_fast._pipe.base import ConnectionBroken, Mailbox, NoReply
from redislock_fast._protocol.steps import Steps
from redislock_fast._redlock.quorum import Quorum, Vote, Voting, health_of, resend, use_connection
from redislock_fast._redlock.rounds import MajorityRound
from redislock_fast._transport.threads.connect import Connection
from redislock_fast._transport.threads.driver import drive
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._transport.threads.starting import Task
from redislock_fast._util import patching
from redislock_fast._util.times import clock

_CONNECT_LIMIT_S = 5.0
_CONNECT_ALONE_S = 0.5  # in the calling thread, for each server, where no other thread can be started
_STALE_AFTER_S = 0.01
_FIRST_SLICE_S = 0.001
_SLICE_GROWTH = 4
_READ_EVERY_S = 0.1
_LINGER_S = 1.0

_patience = attrgetter("health.silent", "health.slowness")


class ThreadQuorum(Quorum):
    """The servers of a Redlock, asked by threads.

    Args:
        transports: one for each server.
    """

    def __init__(self, transports: list[ThreadServerTransport]) -> None:
        super().__init__(transports)
        self._late_replies = _LateReplies(transports)

    def drive(self, steps: Steps) -> Any:
        """Do what the steps say. Returns what they return."""
        return drive(self, steps)

    def ask(self, *rounds: MajorityRound) -> None:
        """Hold majority rounds at once, until the outcome of each is certain or the time of the shortest is up."""
        thread = threading.get_ident()
        entered: list[set[int]] = []
        try:
            for server in self._transports:
                if thread in server.inside:
                    break
                entered.append(server.inside)  # before: an interrupt may come between the two
                server.inside.add(thread)
            else:
                self._hold(rounds)
                return
        finally:
            for inside in entered:
                inside.discard(thread)
        self._ask_separately(rounds)

    def _hold(self, rounds: Sequence[MajorityRound]) -> None:
        try:
            with Voting(self._transports, rounds, Vote) as voting:
                _collect(self._transports, voting)
        finally:
            if any(round_.must_execute for round_ in rounds):
                self._late_replies.expect(self._transports)

    def _ask_separately(self, rounds: Sequence[MajorityRound]) -> None:
        """Hold rounds on connections of their own: this is a signal handler or a finalizer inside of another call.

        This very thread may be the reader of the shared connections, which cannot go on meanwhile.
        """
        separate = [server.separate() for server in self._transports]
        try:
            ThreadQuorum(separate).ask(*rounds)
        finally:
            for server in separate:
                server.close()
            for round_ in rounds:
                for index in filter(round_.awaits, range(len(separate))):
                    round_.lose(index, True)
                self._clean_up_rest(round_)  # the temporary transports are closed by then


def _collect(servers: Sequence[ThreadServerTransport], voting: Voting[Vote]) -> None:
    """Post the requests and wait for the votes: in turn for each connection that is made, and for each vote.

    The servers for which no round has waited lately come first. A silent server is asked only where the others do not
    suffice.
    """
    connect_s = 0.0
    slice_s = _FIRST_SLICE_S
    votes = voting.votes
    while True:
        votes.sort(key=_patience)
        for vote in votes:
            if vote.connection is None:
                _post(servers[vote.index], vote, connect_s, voting.ends_at)
        silent: set[int] = set()  # a server that owes several votes is waited for once
        for vote in votes:
            if vote.connection is None or vote.index in silent:
                continue
            if vote.round.decided or vote.has_voted:
                vote.health.note_wait(None)
            elif not _wait(vote, slice_s, voting.ends_at):
                silent.add(vote.index)
        votes = voting.awaited()
        if not votes:
            return
        if clock() >= voting.ends_at:
            voting.time_is_up()
            return
        if all(vote.connection is None and vote.must_wait for vote in votes):  # nothing was waited for
            time.sleep(min(slice_s, max(voting.ends_at - clock(), 0.0)))
        slice_s *= _SLICE_GROWTH
        connect_s = slice_s


def _post(server: ThreadServerTransport, vote: Vote, connect_s: float, ends_at: float) -> None:
    """Send a request if there is a connection, or is one within `connect_s`; to a silent server only if needed."""
    health = vote.health
    connection = server.connection
    if connection is None or connection.pipe.broken:
        connection = _connected(server, min(clock() + connect_s, ends_at))
    if connection is None:
        if health.trouble is not None:
            vote.skip(health.trouble)
        return
    if health.capabilities is not connection.capabilities:
        use_connection(server, connection)
    if connection.pipe.silence_s > _STALE_AFTER_S or health.is_full:
        _read(server, connection)
        if vote.must_wait or (health.silent and not connect_s and not vote.round.must_execute):
            return
    vote.post(connection)


def _read(server: ThreadServerTransport, connection: Connection) -> None:
    """Read what has come, also the end of the stream, without waiting."""
    server.wait_for_message(connection.pipe.mailbox(), 0.0)
    if health_of(server).unanswered:  # else it is silent because it was asked for nothing
        server.leave_if_silent(connection)


def _wait(vote: Vote, slice_s: float, ends_at: float) -> bool:
    """Wait up to `slice_s` seconds for the vote of one server. Returns False if it did not come."""
    mailbox: Mailbox | None = vote.listener
    if mailbox is None:
        vote.listener = mailbox = vote.connection.pipe.mailbox()
        if not vote.is_open:  # another thread that reads has noted the vote before
            return True
    began = clock()
    broken = False
    try:
        mailbox.wait(max(min(slice_s, ends_at - began), 0.0), soon=True)
    except NoReply:
        pass
    except ConnectionBroken:
        broken = True
    vote.health.note_wait(clock() - began)
    if broken and vote.is_open:
        vote.listener = None
        vote.lose(True, ConnectionError("the connection broke"))
    return not vote.is_open


def _connected(server: ThreadServerTransport, wait_until: float) -> Connection | None:
    """The server transport's connection. A missing one is made in the background; this waits for it until then."""
    server.leave_if_broken()
    if server.connection is None:
        opening = _opening(server)
        left_s = wait_until - clock()
        if opening is not None and left_s > 0:
            opening.wait(left_s)
    return server.connection


def _opening(server: ThreadServerTransport) -> Task | None:
    """The thread that connects; None while a failure is too recent, and where the caller had to connect by itself."""
    health = health_of(server)
    opening: Task | None = health.opening
    if opening is not None and not opening.is_over:
        return opening
    if health.backs_off(clock()):
        return None
    # Two threads at once, after a race, do no harm: the server transport connects once.
    health.trouble = None
    try:
        health.opening = opening = Task("connect", patching.own_thread(_open), weakref.ref(server), _CONNECT_LIMIT_S)
    except RuntimeError:
        _open(weakref.ref(server), _CONNECT_ALONE_S)
        return None
    return opening


def _open(server_ref: weakref.ref[ThreadServerTransport], limit_s: float) -> None:
    server = server_ref()
    if server is not None:
        try:
            server.connect(clock() + limit_s)
        except Exception as error:
            health_of(server).failed(error, clock())
        else:
            health_of(server).connected()


class _LateReplies(patching.Adaptable):
    """Reads the replies for which no caller waits any more, in a thread where no other call does.

    A release whose connection broke is done again in the background. The thread stays for `_LINGER_S`, so that the next
    release need not start another.

    Thread safety: any thread assigns `_until` and `_reading`, each as a whole. A caller assigns `_until` and then
    reads `_reading`; the thread that ends does so the other way round.

    Args:
        servers: the server transports. They are not kept alive.
    """

    def __init__(self, servers: Sequence[ThreadServerTransport]) -> None:
        self._refs = [weakref.ref(server) for server in servers]
        self._until = 0.0
        self._reading: Task | None = None
        patching.adapt_later(self)

    def resume(self) -> None:
        if self._reading is not None:
            self._start()

    def expect(self, servers: Sequence[ThreadServerTransport]) -> None:
        """Read what has come, and have a thread read the replies that are still missing."""
        if any(health_of(server).unanswered for server in servers):
            self._until = clock() + _LINGER_S
            reading = self._reading
            # Starting a thread takes longer than a whole release.
            if (reading is None or reading.is_over) and [server for server in servers if _owes(server)]:
                self._start()

    def _start(self) -> None:
        # Two threads at once, after a race, do no harm. Where none can be started, the next caller reads.
        with contextlib.suppress(RuntimeError):
            self._reading = Task("late-replies", self._run)

    @patching.own_thread
    def _run(self) -> None:
        in_force = patching.in_force
        owing = self._refs
        while owing or clock() < self._until:
            time.sleep(_READ_EVERY_S)
            if patching.in_force is not in_force:
                return
            owing = [ref for ref in self._refs if _owes(ref())]
        self._reading = None
        if clock() < self._until:
            self._start()


def _owes(server: ThreadServerTransport | None) -> bool:
    """Read what has come, and send again the releases whose connection broke. Returns whether replies are missing."""
    if server is None or not health_of(server).unanswered:
        return False
    connection = server.connection
    if connection is not None:
        _read(server, connection)
        server.leave_if_broken()
    connection = server.connection
    if connection is None:
        resend(server, health_of(server).unanswered)
    else:
        use_connection(server, connection)
    return bool(health_of(server).unanswered)
