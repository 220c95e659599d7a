"""The servers of a Redlock, asked by threads.

All requests of a majority round leave before any reply is waited for. Then the calling thread reads one connection
after the other until the outcome is certain: first those of servers that have made no round wait lately, and none for
long before it has looked at the others. So a server that is slow or silent costs nothing unless its vote is needed.

A server without a connection is connected to in a thread of its own, which no caller waits for longer than its round
lasts. After a failure that is not tried again at once.

A release returns when a majority has answered. The next caller reads the replies that are missing then; since there may
be none, a thread looks for them until they have come.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any

from redislock_fast._pipe.base import ConnectionBroken, Mailbox, NoReply
from redislock_fast._procedures.steps import Ask, AskAll, Sleep, Steps
from redislock_fast._protocol.majority import MajorityRound
from redislock_fast._transport.quorum import Quorum, Vote, Voting, insist, meet
from redislock_fast._transport.threads.connect import Connection
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util.times import clock

__all__ = ["ThreadQuorum"]

_CONNECT_LIMIT_S = 5.0
_STALE_AFTER_S = 0.01
_FIRST_SLICE_S = 0.001
_SLICE_GROWTH = 4
_LOOK_EVERY_S = 0.1
_LINGER_S = 1.0

_patience = attrgetter("health.silent", "health.slowness")


class ThreadQuorum(Quorum):
    """The servers of a Redlock, asked by threads.

    Args:
        transports: one for each server.
    """

    def __init__(self, transports: list[ThreadServerTransport]) -> None:
        super().__init__(transports)
        self._lookout = _Lookout(transports)

    def drive(self, steps: Steps) -> Any:
        """Do what the steps say. Returns what they return."""
        try:
            step = next(steps)
            while True:
                try:
                    if type(step) is Ask:
                        self.ask(step.round)
                    elif type(step) is AskAll:
                        self.ask(*step.rounds)
                    elif type(step) is Sleep:
                        time.sleep(step.seconds)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = next(steps)
        except StopIteration as end:
            return end.value

    def ask(self, *rounds: MajorityRound) -> None:
        """Hold majority rounds at once, until the outcome of each is certain or the time of the shortest is up."""
        thread = get_ident()
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
        self._ask_apart(rounds)

    def _hold(self, rounds: Sequence[MajorityRound]) -> None:
        try:
            with Voting(self._transports, rounds, Vote) as voting:
                _collect(self._transports, voting)
        finally:
            if any(round_.insists for round_ in rounds):
                self._lookout.look(self._transports)

    def _ask_apart(self, rounds: Sequence[MajorityRound]) -> None:
        """Hold rounds on connections of their own: this is a signal handler or a finalizer inside of another call.

        The thread that reads the shared connections may be this very one, which cannot go on meanwhile.
        """
        apart = [server.apart() for server in self._transports]
        try:
            ThreadQuorum(apart).ask(*rounds)
        finally:
            for server in apart:
                server.close()
            for round_ in rounds:
                for index in filter(round_.awaits, range(len(apart))):
                    round_.lose(index, True)
                self._undo_rest(round_)  # the transports apart are gone before they could do so


def _collect(servers: Sequence[ThreadServerTransport], voting: Voting[Vote]) -> None:
    """Post the requests and wait for the votes: in turn for each connection that is made, and for each vote.

    The order is that of the servers' patience: those that have made no round wait lately come first. A silent server is
    not asked before it is known whether the others suffice.
    """
    connect_s = 0.0
    slice_s = _FIRST_SLICE_S
    votes = voting.votes
    while True:
        votes.sort(key=_patience)
        for vote in votes:
            if vote.connection is None:
                _post(servers[vote.index], vote, connect_s, voting.ends_at)
        in_vain: set[int] = set()  # a server that owes several votes is waited for once
        for vote in votes:
            if vote.connection is None or vote.index in in_vain:
                continue
            if vote.round.decided or vote.has_voted:
                vote.health.note_wait(None)
            elif not _wait(vote, slice_s, voting.ends_at):
                in_vain.add(vote.index)
        votes = voting.awaited()
        if not votes:
            return
        if clock() >= voting.ends_at:
            voting.time_is_up()
            return
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
        meet(server, connection)
    if connection.pipe.silence_s > _STALE_AFTER_S or health.is_full:
        _read(server, connection)
        if vote.must_wait or (health.silent and not connect_s and not vote.round.insists):
            return
    vote.post(connection)


def _read(server: ThreadServerTransport, connection: Connection) -> None:
    """Read what has come, be it the end, and wait for nothing."""
    server.hear(connection.pipe.mailbox(), 0.0)
    if server.health.owed:  # else it is silent because it was asked for nothing
        server.leave_if_silent(connection)


def _wait(vote: Vote, slice_s: float, ends_at: float) -> bool:
    """Wait for a vote for `slice_s` at most, inside of its server transport. Returns False if that was in vain."""
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
    """The server transport's connection. Without one, it is made in the background, and waited for until then."""
    server.leave_if_broken()
    connection = server.connection
    if connection is None:
        opening = _opening(server)
        if opening is not None:
            left_s = wait_until - clock()
            if left_s > 0:
                opening.join(left_s)
            connection = server.connection
    return connection


def _opening(server: ThreadServerTransport) -> threading.Thread | None:
    """The thread that connects; None while a failure is too recent."""
    health = server.health
    opening: threading.Thread | None = health.opening
    if opening is not None and opening.is_alive():
        return opening
    if health.backs_off(clock()):
        return None
    # Two at once, after a race, do no harm: the server transport connects once.
    opening = threading.Thread(target=_open, args=(weakref.ref(server),), name="redislock_fast-connect", daemon=True)
    health.trouble = None
    health.opening = opening
    try:
        opening.start()
    except RuntimeError as error:  # no thread can be started while the interpreter ends
        health.failed(ConnectionError(str(error)), clock())
        return None
    return opening


def _open(server_ref: weakref.ref[ThreadServerTransport]) -> None:
    server = server_ref()
    if server is not None:
        try:
            server.connect(clock() + _CONNECT_LIMIT_S)
        except Exception as error:
            server.health.failed(error, clock())
        else:
            server.health.connected()


class _Lookout:
    """Reads the replies for which no caller waits any more.

    A release that was lost with its connection is done again in the background, even if there is no other call. The
    thread that looks for that stays for `_LINGER_S`, so that the next release need not start another.

    Who may touch what: any thread assigns `_until` and `_thread`, each as a whole. A caller assigns `_until` and then
    reads `_thread`; the thread that ends does so the other way round.

    Args:
        servers: the server transports. They are not kept alive.
    """

    def __init__(self, servers: Sequence[ThreadServerTransport]) -> None:
        self._refs = [weakref.ref(server) for server in servers]
        self._until = 0.0
        self._thread: threading.Thread | None = None

    def look(self, servers: Sequence[ThreadServerTransport]) -> None:
        """Have a thread look for the replies that are owed after this call has read what has come."""
        if any(server.health.owed for server in servers):
            self._until = clock() + _LINGER_S
            thread = self._thread
            # After a fork the thread is dead. Starting one takes longer than a whole release.
            if (thread is None or not thread.is_alive()) and [server for server in servers if _owes(server)]:
                self._start()

    def _start(self) -> None:
        # Two at once, after a race, do no harm.
        self._thread = thread = threading.Thread(target=self._run, name="redislock_fast-look", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
            thread.start()

    def _run(self) -> None:
        owing = self._refs
        while owing or clock() < self._until:
            time.sleep(_LOOK_EVERY_S)
            owing = [ref for ref in self._refs if _owes(ref())]
        self._thread = None
        if clock() < self._until:
            self._start()


def _owes(server: ThreadServerTransport | None) -> bool:
    """Read what has come, and do again what was lost. Returns whether replies are still owed."""
    if server is None or not server.health.owed:
        return False
    connection = server.connection
    if connection is not None:
        _read(server, connection)
        server.leave_if_broken()
    connection = server.connection
    if connection is None:
        insist(server, server.health.owed)
    else:
        meet(server, connection)
    return bool(server.health.owed)
