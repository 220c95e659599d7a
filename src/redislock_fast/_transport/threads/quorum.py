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

from redislock_fast._pipe.base import Lost, Mailbox, NoReply
from redislock_fast._procedures.steps import Ask, AskAll, Sleep, Steps
from redislock_fast._protocol.majority import Round
from redislock_fast._transport.quorum import Ballot, Quorum, Voting, insist, meet
from redislock_fast._transport.threads.connect import Link
from redislock_fast._transport.threads.server import ThreadChannel
from redislock_fast._util.times import clock

__all__ = ["ThreadQuorum"]

_CONNECT_LIMIT_S = 5.0
_STALE_AFTER_S = 0.01
_FIRST_SLICE_S = 0.001
_SLICE_GROWTH = 4
_LOOK_EVERY_S = 0.1
_LINGER_S = 1.0

_patience = attrgetter("standing.silent", "standing.slowness")


class ThreadQuorum(Quorum):
    """The servers of a Redlock, asked by threads.

    Args:
        transports: one for each server.
    """

    def __init__(self, transports: list[ThreadChannel]) -> None:
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

    def ask(self, *rounds: Round) -> None:
        """Hold majority rounds at once, until the outcome of each is certain or the time of the shortest is up."""
        thread = get_ident()
        entered: list[set[int]] = []
        try:
            for channel in self._transports:
                if thread in channel.inside:
                    break
                entered.append(channel.inside)  # before: an interrupt may come between the two
                channel.inside.add(thread)
            else:
                self._hold(rounds)
                return
        finally:
            for inside in entered:
                inside.discard(thread)
        self._ask_apart(rounds)

    def _hold(self, rounds: Sequence[Round]) -> None:
        try:
            with Voting(self._transports, rounds, Ballot) as voting:
                _collect(self._transports, voting)
        finally:
            if any(round_.insists for round_ in rounds):
                self._lookout.look(self._transports)

    def _ask_apart(self, rounds: Sequence[Round]) -> None:
        """Hold rounds on connections of their own: this is a signal handler or a finalizer inside of another call.

        The thread that reads the shared connections may be this very one, which cannot go on meanwhile.
        """
        apart = [channel.apart() for channel in self._transports]
        try:
            ThreadQuorum(apart).ask(*rounds)
        finally:
            for channel in apart:
                channel.close()
            for round_ in rounds:
                for index in filter(round_.awaits, range(len(apart))):
                    round_.lose(index, True)
                self._undo_rest(round_)  # the transports apart are gone before they could do so


def _collect(channels: Sequence[ThreadChannel], voting: Voting[Ballot]) -> None:
    """Post the requests and wait for the votes: in turn for each connection that is made, and for each vote.

    The order is that of the servers' patience: those that have made no round wait lately come first. A silent server is
    not asked before it is known whether the others suffice.
    """
    connect_s = 0.0
    slice_s = _FIRST_SLICE_S
    ballots = voting.ballots
    while True:
        ballots.sort(key=_patience)
        for ballot in ballots:
            if ballot.link is None:
                _post(channels[ballot.index], ballot, connect_s, voting.ends_at)
        in_vain: set[int] = set()  # a server that owes several votes is waited for once
        for ballot in ballots:
            if ballot.link is None or ballot.index in in_vain:
                continue
            if ballot.round.decided or ballot.has_voted:
                ballot.standing.note_wait(None)
            elif not _wait(ballot, slice_s, voting.ends_at):
                in_vain.add(ballot.index)
        ballots = voting.awaited()
        if not ballots:
            return
        if clock() >= voting.ends_at:
            voting.time_is_up()
            return
        slice_s *= _SLICE_GROWTH
        connect_s = slice_s


def _post(channel: ThreadChannel, ballot: Ballot, connect_s: float, ends_at: float) -> None:
    """Send a request if there is a connection, or is one within `connect_s`; to a silent server only if needed."""
    standing = ballot.standing
    link = channel.link
    if link is None or link.pipe.broken:
        link = _connected(channel, min(clock() + connect_s, ends_at))
    if link is None:
        if standing.trouble is not None:
            ballot.skip(standing.trouble)
        return
    if standing.dialect is not link.dialect:
        meet(channel, link)
    if link.pipe.silence_s > _STALE_AFTER_S or standing.is_full:
        _read(channel, link)
        if ballot.must_wait or (standing.silent and not connect_s and not ballot.round.insists):
            return
    ballot.post(link)


def _read(channel: ThreadChannel, link: Link) -> None:
    """Read what has come, be it the end, and wait for nothing."""
    channel.hear(link.pipe.mailbox(), 0.0)
    if channel.standing.owed:  # else it is silent because it was asked for nothing
        channel.leave_if_silent(link)


def _wait(ballot: Ballot, slice_s: float, ends_at: float) -> bool:
    """Wait for a vote for `slice_s` at most, inside of its server transport. Returns False if that was in vain."""
    mailbox: Mailbox | None = ballot.listener
    if mailbox is None:
        ballot.listener = mailbox = ballot.link.pipe.mailbox()
        if not ballot.is_open:  # another thread that reads has noted the vote before
            return True
    began = clock()
    broken = False
    try:
        mailbox.wait(max(min(slice_s, ends_at - began), 0.0), soon=True)
    except NoReply:
        pass
    except Lost:
        broken = True
    ballot.standing.note_wait(clock() - began)
    if broken and ballot.is_open:
        ballot.listener = None
        ballot.lose(True, ConnectionError("the connection broke"))
    return not ballot.is_open


def _connected(channel: ThreadChannel, wait_until: float) -> Link | None:
    """The server transport's connection. Without one, it is made in the background, and waited for until then."""
    channel.leave_if_broken()
    link = channel.link
    if link is None:
        opening = _opening(channel)
        if opening is not None:
            left_s = wait_until - clock()
            if left_s > 0:
                opening.join(left_s)
            link = channel.link
    return link


def _opening(channel: ThreadChannel) -> threading.Thread | None:
    """The thread that connects; None while a failure is too recent."""
    standing = channel.standing
    opening: threading.Thread | None = standing.opening
    if opening is not None and opening.is_alive():
        return opening
    if standing.backs_off(clock()):
        return None
    # Two at once, after a race, do no harm: the server transport connects once.
    opening = threading.Thread(target=_open, args=(weakref.ref(channel),), name="redislock_fast-connect", daemon=True)
    standing.trouble = None
    standing.opening = opening
    try:
        opening.start()
    except RuntimeError as error:  # no thread can be started while the interpreter ends
        standing.failed(ConnectionError(str(error)), clock())
        return None
    return opening


def _open(channel_ref: weakref.ref[ThreadChannel]) -> None:
    channel = channel_ref()
    if channel is not None:
        try:
            channel.connect(clock() + _CONNECT_LIMIT_S)
        except Exception as error:
            channel.standing.failed(error, clock())
        else:
            channel.standing.connected()


class _Lookout:
    """Reads the replies for which no caller waits any more.

    A release that was lost with its connection is done again in the background, even if there is no other call. The
    thread that looks for that stays for `_LINGER_S`, so that the next release need not start another.

    Who may touch what: any thread assigns `_until` and `_thread`, each as a whole. A caller assigns `_until` and then
    reads `_thread`; the thread that ends does so the other way round.

    Args:
        channels: the server transports. They are not kept alive.
    """

    def __init__(self, channels: Sequence[ThreadChannel]) -> None:
        self._refs = [weakref.ref(channel) for channel in channels]
        self._until = 0.0
        self._thread: threading.Thread | None = None

    def look(self, channels: Sequence[ThreadChannel]) -> None:
        """Have a thread look for the replies that are owed after this call has read what has come."""
        if any(channel.standing.owed for channel in channels):
            self._until = clock() + _LINGER_S
            thread = self._thread
            # After a fork the thread is dead. Starting one takes longer than a whole release.
            if (thread is None or not thread.is_alive()) and [channel for channel in channels if _owes(channel)]:
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


def _owes(channel: ThreadChannel | None) -> bool:
    """Read what has come, and do again what was lost. Returns whether replies are still owed."""
    if channel is None or not channel.standing.owed:
        return False
    link = channel.link
    if link is not None:
        _read(channel, link)
        channel.leave_if_broken()
    link = channel.link
    if link is None:
        insist(channel, channel.standing.owed)
    else:
        meet(channel, link)
    return bool(channel.standing.owed)
