"""The servers of a Redlock, asked by the tasks of an event loop.

What `threads/quorum.py` does for threads. Here nobody has to read: the loop hands out replies as they come, so a round
is over as soon as its outcome is certain, whichever servers answer first.

Who may touch what: everything belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from functools import partial
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from redislock_fast._lease.quorum import QuorumEntry
from redislock_fast._procedures.steps import Ask, AskAll, Sleep, Steps
from redislock_fast._protocol.majority import Round
from redislock_fast._transport.ballots import Ballot, end, insist, meet, undo
from redislock_fast._transport.loop.driver import AsyncTransport
from redislock_fast._transport.loop.server import LoopChannel
from redislock_fast._util.times import clock

__all__ = ["LoopQuorum"]


class LoopQuorum:
    """The servers of a Redlock.

    Args:
        transports: one for each server.
    """

    def __init__(self, transports: list[AsyncTransport]) -> None:
        self._transports = transports

    async def drive(self, steps: Steps) -> Any:
        """Do what the steps say. Returns what they return."""
        try:
            step = next(steps)
            while True:
                try:
                    if type(step) is Ask:
                        await self.ask(step.round)
                    elif type(step) is AskAll:
                        await self.ask(*step.rounds)
                    elif type(step) is Sleep:
                        await asyncio.sleep(step.seconds)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = next(steps)
        except StopIteration as end:
            return end.value

    async def ask(self, *rounds: Round) -> None:
        """Hold rounds, at once, until the outcome of each is certain or its time is up.

        An acquire that comes to nothing, or is cancelled, is undone.
        """
        loop = asyncio.get_running_loop()
        channels = [transport.channel() for transport in self._transports]
        meetings = [_Meeting(channels, round_, loop) for round_ in rounds]
        try:
            for meeting in meetings:
                meeting.start()
            for meeting in meetings:
                await meeting.over
                meeting.round.close(clock())
        except GeneratorExit:  # the task was dropped, and whoever collects garbage runs this, in any thread
            for meeting in meetings:
                meeting.round.give_up()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(meeting.end)
            raise
        except BaseException:
            for meeting in meetings:
                meeting.round.give_up()
                meeting.end()
            raise
        for meeting in meetings:
            meeting.end()

    def undo_round(self, round_: Round) -> None:
        """Undo a round whose outcome nobody has noted; in the background."""
        round_.give_up()
        undo([transport.channel() for transport in self._transports], round_)

    def undo(self, entries: list[QuorumEntry]) -> None:
        """Delete locks that hold their tokens, at all servers, without waiting."""
        for index, transport in enumerate(self._transports):
            with contextlib.suppress(RedisConnectionError):  # its client is gone; the others may not be
                transport.undo([(entry.keys[index], entry.token) for entry in entries])


class _Meeting:
    """A round under way.

    Attributes:
        round: which.
        over: done once nobody need wait any more.
    """

    def __init__(self, channels: list[LoopChannel], round_: Round, loop: asyncio.AbstractEventLoop) -> None:
        self.round = round_
        self._channels = channels
        self.over: asyncio.Future[None] = loop.create_future()
        self._timer = loop.call_later(round_.limit_s, self._time_is_up)
        round_.began = clock()
        self._ballots = [
            _LoopBallot(self, channel, round_, index) for index, channel in enumerate(channels) if round_.awaits(index)
        ]

    def start(self) -> None:
        """Post."""
        for ballot in self._ballots:
            ballot.start()
        self.look()

    def look(self) -> None:
        """See whether the round is over."""
        if self.over.done():
            return
        decided = self.round.decided
        if not any(ballot.is_open and (not decided or ballot.is_new) for ballot in self._ballots):
            self.over.set_result(None)

    def _time_is_up(self) -> None:
        for ballot in self._ballots:
            if ballot.is_open:
                ballot.standing.silent = True
        if not self.over.done():
            self.over.set_result(None)

    def end(self) -> None:
        """Nobody waits any more."""
        self._timer.cancel()
        end(self._ballots, self._channels, self.round)
        for ballot in self._ballots:
            ballot.leave()


class _LoopBallot(Ballot):
    """One server's part in a round that a task asks."""

    def __init__(self, meeting: _Meeting, channel: LoopChannel, round_: Round, index: int) -> None:
        super().__init__(channel, round_, index)
        self._meeting: _Meeting | None = meeting

    def start(self) -> None:
        """Send the request, now or as soon as there is a connection."""
        channel: LoopChannel | None = self._channel()
        if channel is None or self._meeting is None:
            return
        standing = self.standing
        channel.leave_if_broken()
        link = channel.link
        if link is not None:
            if meet(channel, link):
                broken = partial(_break, self._channel, standing.asked, standing.owed)
                link.pipe.closed.add_done_callback(broken)
            if standing.silent:
                channel.leave_if_silent(link)
            standing.asked.add(self)
            if self.must_wait:
                self.skip(TimeoutError("it has not answered for a while"))
            elif not self.post(link):
                standing.asked.discard(self)
                self.start_again()
        elif standing.trouble is not None and clock() < standing.retry_at:
            self.skip(standing.trouble)
        else:
            standing.trouble = None
            standing.opening = opening = channel.opening()
            opening.add_done_callback(self._opened)

    def start_again(self) -> None:
        """After a loss."""
        if self.is_open:
            self.start()
        if self._meeting is not None:
            self._meeting.look()

    def _opened(self, opening: asyncio.Task[None]) -> None:
        standing = self.standing
        if standing.opening is opening:  # the first to learn of it
            standing.opening = None
            error = ConnectionError("connecting was cancelled") if opening.cancelled() else opening.exception()
            if isinstance(error, Exception):
                standing.failed(error, clock())
            else:
                standing.connected()
        if standing.trouble is not None:
            self.skip(standing.trouble)
        self.start_again()

    def close(self, link: Any) -> None:
        asyncio.get_running_loop().call_soon(link.close)  # the pipe that calls this has more replies to hand out

    def settled(self) -> None:
        self.standing.asked.discard(self)
        if self._meeting is not None:
            self._meeting.look()

    def leave(self) -> None:
        self._meeting = None
        self.standing.asked.discard(self)
        super().leave()


def _break(channel_ref: weakref.ref[Any], asked: set[_LoopBallot], owed: set[Ballot], _: object) -> None:
    """The connection is gone on which these were asked, or left behind."""
    channel = channel_ref()
    if channel is None or channel.has_ended:
        return
    insist(channel, owed)
    for ballot in list(asked):
        asked.discard(ballot)
        ballot.lose(True, ConnectionError("the connection was lost"))
        ballot.start_again()
