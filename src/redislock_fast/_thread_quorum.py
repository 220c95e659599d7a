"""The servers of a Redlock, asked by threads.

All requests of a round leave before any reply is waited for. Then the asking thread reads from one connection after the
other, as any caller does, until the outcome is certain: first from those that made it wait least the last time, and
from none for long before it has looked at the others. So a server that is slow or silent costs nothing unless its vote
is needed. All waiting of a round ends `limit_s` after its beginning.

Connecting is a thread of its own for each server that has no connection: nobody waits for it longer than his round
lasts, and a server that cannot be reached is not tried again at once.

A release is over when a majority has answered. Where the others have not by then, whoever asks next reads what they
answer; and as nobody may ever ask again, a thread looks for it, until there is nothing to come.

Must not know: the API of Redlock.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from redislock_fast._ballots import Ballot, end, insist, meet, undo
from redislock_fast._connect import Link
from redislock_fast._quorums import QuorumEntry
from redislock_fast._room import BROKEN
from redislock_fast._round import Round
from redislock_fast._steps import Ask, AskAll, Sleep, Steps
from redislock_fast._thread_channel import ThreadChannel
from redislock_fast._times import clock
from redislock_fast._wire import Mailbox

__all__ = ["ThreadQuorum"]

_CONNECT_LIMIT_S = 5.0
_STALE_AFTER_S = 0.001
_FIRST_SLICE_S = 0.001
_SLICE_GROWTH = 4
_LOOK_EVERY_S = 0.1


class _ThreadBallot(Ballot):
    """One server's part in a round that a thread asks."""

    link: Link | None = None  # where it was posted, unless that was lost
    mailbox: Mailbox | None = None  # of that link, once it is waited for

    def __init__(self, channel: ThreadChannel, round_: Round, index: int) -> None:
        super().__init__(channel, round_, index)
        self.channel = channel

    def settled(self) -> None:
        mailbox = self.mailbox
        if mailbox is not None:
            mailbox.tell(None)

    def leave(self) -> None:
        self.link = self.mailbox = None
        super().leave()
        del self.channel


_patience = attrgetter("standing.silent", "standing.waited_s")


class ThreadQuorum:
    """The servers of a Redlock.

    Args:
        channels: one for each server.
    """

    def __init__(self, channels: list[ThreadChannel]) -> None:
        self._channels = channels

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
        if any(channel.is_entered for channel in self._channels):
            self._ask_apart(rounds)
            return
        began = clock()
        ballots: list[list[_ThreadBallot]] = []
        for round_ in rounds:
            round_.began = began
            ballots.append(
                [
                    _ThreadBallot(channel, round_, index)
                    for index, channel in enumerate(self._channels)
                    if round_.awaits(index)
                ]
            )
        try:
            _collect(list(chain(*ballots)), began + min(round_.limit_s for round_ in rounds))
            for round_ in rounds:
                round_.close(clock())
        except BaseException:
            for round_ in rounds:
                round_.give_up()
            raise
        finally:
            for round_, own in zip(rounds, ballots, strict=True):
                end(own, self._channels, round_)
            if any(round_.insists for round_ in rounds):
                _look_after(self._channels)

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


def _collect(ballots: list[_ThreadBallot], deadline: float) -> None:
    """Post, and wait for votes: in turn for each connection that is to be made, and each vote that is to come."""
    connect_s = 0.0  # nor is a silent server asked before it is known whether the others suffice
    slice_s = _FIRST_SLICE_S
    while True:
        for ballot in ballots:
            if ballot.link is None:
                _post(ballot, min(clock() + connect_s, deadline), needed=connect_s > 0)
        in_vain: set[int] = set()  # servers that owe more than one vote are not waited for more than once
        for ballot in sorted(ballots, key=_patience):
            if ballot.link is None or ballot.index in in_vain or not ballot.is_open or ballot.round.decided:
                continue
            _wait(ballot, min(clock() + slice_s, deadline))
            if ballot.is_open:
                in_vain.add(ballot.index)
        ballots = [ballot for ballot in ballots if ballot.is_open and (not ballot.round.decided or ballot.is_new)]
        if not ballots:
            return
        if clock() >= deadline:
            break
        slice_s *= _SLICE_GROWTH
        connect_s = slice_s
    for ballot in ballots:
        ballot.standing.silent = True
        if ballot.link is not None:
            ballot.channel.leave_if_silent(ballot.link)


def _post(ballot: _ThreadBallot, wait_until: float, needed: bool) -> None:
    """Send a ballot's request, where there is a connection, or will be by then; to a silent server only if needed."""
    channel = ballot.channel
    link = _connected(channel, wait_until)
    standing = channel.standing
    if link is None:
        if standing.trouble is not None:
            ballot.skip(standing.trouble)
        return
    meet(channel, link)
    if link.pipe.silence_s > _STALE_AFTER_S:
        _read(channel, link)
        if ballot.must_wait or (standing.silent and not needed and not ballot.round.insists):
            return
    ballot.link = link
    if not ballot.post(channel, link):
        ballot.link = None


def _read(channel: ThreadChannel, link: Link) -> None:
    """Read what has come, be it the end, and wait for nothing."""
    channel.hear(link.pipe.mailbox(), 0.0)
    if channel.standing.owed:  # else it is silent because nobody has asked for anything
        channel.leave_if_silent(link)


def _wait(ballot: _ThreadBallot, until: float) -> None:
    """Wait for a ballot's vote, till then."""
    if ballot.mailbox is None:
        assert ballot.link is not None
        ballot.mailbox = ballot.link.pipe.mailbox()
        if not ballot.is_open:  # it was answered before there was a mailbox, by another thread that reads
            return
    began = clock()
    lost = ballot.channel.hear(ballot.mailbox, max(until - began, 0.0)) is BROKEN
    ballot.standing.waited_s = clock() - began
    if lost and ballot.is_open:
        ballot.link = ballot.mailbox = None
        ballot.lose(True, ConnectionError("the connection was lost"))


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


def _look_after(channels: list[ThreadChannel]) -> None:
    """Have replies read that nobody waits for: a release that was lost with its connection is to be done again."""
    refs = [
        weakref.ref(channel)
        for channel in channels
        if channel.standing.owed and not channel.standing.looked_after and _owes(channel)
    ]
    if refs:
        looking = threading.Thread(target=_look, args=(refs,), name="redislock_fast-look", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started while the interpreter ends
            looking.start()


def _look(channel_refs: list[weakref.ref[ThreadChannel]]) -> None:
    while channel_refs:
        time.sleep(_LOOK_EVERY_S)
        channel_refs = [ref for ref in channel_refs if _owes(ref())]


def _owes(channel: ThreadChannel | None) -> bool:
    """Read what has come, and see to what was lost. Returns whether there is more to come."""
    if channel is None:
        return False
    standing = channel.standing
    link = channel.link
    if link is not None:
        _read(channel, link)
        channel.leave_if_broken()
    link = channel.link
    if link is None:
        insist(channel, standing.owed)
    else:
        meet(channel, link)
    standing.looked_after = False  # before the last look: who is owed from here on has another thread look
    standing.looked_after = bool(standing.owed)
    return standing.looked_after
