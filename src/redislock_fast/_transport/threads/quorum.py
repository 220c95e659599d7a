"""The servers of a Redlock, asked by threads.

All requests of a round leave before any reply is waited for. Then the asking thread reads from one connection after the
other, as any caller does, until the outcome is certain: in the order in which they were asked, who made nobody wait
lately first, and from none for long before it has looked at the others. So a server that is slow or silent costs
nothing unless its vote is needed. All waiting of a round ends `limit_s` after its beginning.

Connecting is a thread of its own for each server that has no connection: nobody waits for it longer than his round
lasts, and a server that cannot be reached is not tried again at once.

A release is over when a majority has answered. Where the others have not by then, whoever asks next reads what they
answer; and as nobody may ever ask again, a thread looks for it, until there is nothing to come.
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

from redislock_fast._lease.quorum import QuorumEntry
from redislock_fast._pipe.base import Mailbox
from redislock_fast._procedures.steps import Ask, AskAll, Sleep, Steps
from redislock_fast._procedures.waiters import BROKEN
from redislock_fast._protocol.majority import Round
from redislock_fast._transport.ballots import Ballot, end, insist, meet, undo
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


class _ThreadBallot(Ballot):
    """One server's part in a round that a thread asks."""

    link: Link | None = None  # where it was posted, unless that was lost
    mailbox: Mailbox | None = None  # of that link, once it is waited for

    def settled(self) -> None:
        mailbox = self.mailbox
        if mailbox is not None:
            mailbox.tell(None)

    def leave(self) -> None:
        self.link = self.mailbox = None
        super().leave()


_patience = attrgetter("standing.silent", "standing.slowness")


class ThreadQuorum:
    """The servers of a Redlock.

    Args:
        channels: one for each server.
    """

    def __init__(self, channels: list[ThreadChannel]) -> None:
        self._channels = channels
        self._lookout = _Lookout(channels)

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
        """Hold rounds, at once, until the outcome of each is certain or the time of the shortest is up.

        An acquire that comes to nothing, or is interrupted, is undone.
        """
        channels = self._channels
        thread = get_ident()
        entered: list[set[int]] = []
        try:
            for channel in channels:
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
        channels = self._channels
        began = clock()
        for round_ in rounds:
            round_.began = began
        ballots = [
            _ThreadBallot(channels[index], round_, index)
            for round_ in rounds
            for index, vote in enumerate(round_.votes)
            if vote is None
        ]
        try:
            _collect(channels, ballots, began + min([round_.limit_s for round_ in rounds]))
            for round_ in rounds:
                round_.close(clock())
        except BaseException:
            for round_ in rounds:
                round_.give_up()
            raise
        finally:
            for round_ in rounds:
                end(ballots, channels, round_)
            for ballot in ballots:
                if not ballot.has_voted or len(ballot.links) > 1:  # else there is nothing to come
                    ballot.leave()
            if any(round_.insists for round_ in rounds):
                self._lookout.look(channels)

    def undo_round(self, round_: Round) -> None:
        """Undo a round whose outcome nobody has noted; in the background."""
        round_.give_up()
        undo(self._channels, round_)

    def undo(self, entries: list[QuorumEntry]) -> None:
        """Delete locks that hold their tokens, at all servers, without waiting."""
        for index, channel in enumerate(self._channels):
            channel.undo([(entry.keys[index], entry.token) for entry in entries])

    def _ask_apart(self, rounds: Sequence[Round]) -> None:
        """Hold rounds from within another: who reads for all is this very thread, and cannot."""
        apart = [channel.apart() for channel in self._channels]
        try:
            ThreadQuorum(apart).ask(*rounds)
        finally:
            for channel in apart:
                channel.close()
            for round_ in rounds:
                for index in filter(round_.awaits, range(len(apart))):
                    round_.lose(index, True)
                undo(self._channels, round_)  # what the channels apart would do in the background


def _collect(channels: Sequence[ThreadChannel], ballots: list[_ThreadBallot], deadline: float) -> None:
    """Post, and wait for votes: in turn for each connection that is to be made, and each vote that is to come.

    Who is asked first is heard first: those that have made nobody wait lately.
    """
    connect_s = 0.0  # nor is a silent server asked before it is known whether the others suffice
    slice_s = _FIRST_SLICE_S
    while True:
        ballots.sort(key=_patience)
        for ballot in ballots:
            if ballot.link is None:
                _post(channels[ballot.index], ballot, connect_s, deadline)
        in_vain: set[int] = set()  # servers that owe more than one vote are not waited for more than once
        for ballot in ballots:
            index, round_ = ballot.index, ballot.round
            if ballot.link is None or round_.decided or round_.votes[index] is not None or index in in_vain:
                continue
            if not _wait(channels[index], ballot, slice_s, deadline):
                in_vain.add(index)
        ballots = [ballot for ballot in ballots if (not ballot.round.decided or ballot.is_new) and ballot.is_open]
        if not ballots:
            return
        if clock() >= deadline:
            break
        slice_s *= _SLICE_GROWTH
        connect_s = slice_s
    for ballot in ballots:
        ballot.standing.silent = True
        if ballot.link is not None:
            channels[ballot.index].leave_if_silent(ballot.link)


def _post(channel: ThreadChannel, ballot: _ThreadBallot, connect_s: float, deadline: float) -> None:
    """Send a ballot's request, where there is a connection, or will be so soon; to a silent server only in need."""
    standing = ballot.standing
    link = channel.link
    if link is None or link.pipe.broken:
        link = _connected(channel, min(clock() + connect_s, deadline))
    if link is None:
        if standing.trouble is not None:
            ballot.skip(standing.trouble)
        return
    if standing.dialect is not link.dialect:
        meet(channel, link)
    if link.pipe.silence_s > _STALE_AFTER_S:
        _read(channel, link)
        if ballot.must_wait or (standing.silent and not connect_s and not ballot.round.insists):
            return
    if ballot.post(link):
        ballot.link = link


def _read(channel: ThreadChannel, link: Link) -> None:
    """Read what has come, be it the end, and wait for nothing."""
    channel.hear(link.pipe.mailbox(), 0.0)
    if channel.standing.owed:  # else it is silent because nobody has asked for anything
        channel.leave_if_silent(link)


def _wait(channel: ThreadChannel, ballot: _ThreadBallot, slice_s: float, deadline: float) -> bool:
    """Wait for a ballot's vote, for so long at most. Returns False if that was in vain."""
    mailbox = ballot.mailbox
    if mailbox is None:
        assert ballot.link is not None
        ballot.mailbox = mailbox = ballot.link.pipe.mailbox()
        if not ballot.is_open:  # it was answered before there was a mailbox, by another thread that reads
            return True
    began = clock()
    lost = channel.hear(mailbox, max(min(slice_s, deadline - began), 0.0)) is BROKEN
    ballot.standing.note_wait(clock() - began)
    if ballot.has_voted:
        return True
    if lost and ballot.is_open:
        ballot.link = ballot.mailbox = None
        ballot.lose(True, ConnectionError("the connection was lost"))
    return not ballot.is_open


def _connected(channel: ThreadChannel, wait_until: float) -> Link | None:
    """The channel's connection; else one is made in the background, and waited for till then."""
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
    if standing.trouble is not None and clock() < standing.retry_at:
        return None
    # Two at once, after a race, do no harm: the channel connects once.
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
    """Reads what servers answer when nobody waits for it any more.

    A release that was lost with its connection is to be done again, even if nobody ever asks again. The thread that
    looks for that stays for a while, so that the next release need not start another.

    Who may touch what: `_until` and `_thread` are assigned as a whole by anybody. Who wants somebody to look assigns
    `_until` and then reads `_thread`; the thread that leaves does so the other way round.

    Args:
        channels: whose servers. They are not kept alive.
    """

    def __init__(self, channels: Sequence[ThreadChannel]) -> None:
        self._refs = [weakref.ref(channel) for channel in channels]
        self._until = 0.0
        self._thread: threading.Thread | None = None

    def look(self, channels: Sequence[ThreadChannel]) -> None:
        """Have what is owed looked for, if anything is once this thread has read what has come."""
        if any(channel.standing.owed for channel in channels):
            self._until = clock() + _LINGER_S
            thread = self._thread
            # A dead one, as after a fork, is none. Starting one takes 0.2 ms, which a lone release need not wait for.
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
    """Read what has come, and see to what was lost. Returns whether there is more to come."""
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
