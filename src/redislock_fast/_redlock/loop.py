"""The servers of a Redlock, asked by the tasks of an event loop.

The event loop delivers each reply as it comes, so a majority round is over as soon as its outcome is certain, whichever
servers answer first.

Thread safety: everything belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from functools import partial
from types import TracebackType
from typing import Any

from redislock_fast._protocol.steps import Steps
from redislock_fast._redlock.quorum import Owing, Quorum, Vote, Voting, resend, use_connection
from redislock_fast._redlock.rounds import MajorityRound
from redislock_fast._transport.loop.driver import drive
from redislock_fast._transport.loop.server import LoopServerTransport
from redislock_fast._util.times import clock


class LoopQuorum(Quorum):
    """The servers of a Redlock, asked by tasks."""

    def drive(self, steps: Steps) -> Coroutine[Any, Any, Any]:
        """Do what the steps say. Returns what they return."""
        return drive(self, steps)

    def of_running_loop(self) -> LoopQuorum:
        """Itself: each round asks the server transports of the running loop."""
        return self

    async def ask(self, *rounds: MajorityRound) -> None:
        """Hold majority rounds at once, until the outcome of each is certain or the time of the shortest is up."""
        voting = _LoopVoting([transport.of_running_loop() for transport in self._transports], rounds)
        with voting:
            for vote in voting.votes:
                vote.start()
            voting.put(None)
            await voting.over


class _LoopVote(Vote):
    """One server's vote in a round that a task holds."""

    def start(self) -> None:
        """Send the request, now or as soon as there is a connection."""
        server: LoopServerTransport | None = self._server()
        if server is None or self.listener is None:
            return
        health = self.health
        server.leave_if_broken()
        connection = server.connection
        if connection is not None:
            if use_connection(server, connection):
                broken = partial(_break, self._server, health.asked, health.unanswered)
                connection.pipe.closed.add_done_callback(broken)
            if health.silent:
                server.leave_if_silent(connection)
            health.asked.add(self)
            if self.must_wait:
                self.skip(Owing())
            elif not self.post(connection):
                health.asked.discard(self)  # else the next request would be notified of the end of this connection
                self.start_again()
        elif health.backs_off(clock()):
            assert health.trouble is not None
            self.skip(health.trouble)
        else:
            health.trouble = None
            health.opening = opening = server.opening()
            opening.add_done_callback(self._opened)

    def start_again(self) -> None:
        """Send the request again after a connection broke, or could not be made."""
        if self.is_open:
            self.start()
        if self.listener is not None:
            self.listener.put(None)

    def _opened(self, opening: asyncio.Task[None]) -> None:
        health = self.health
        if health.opening is opening:  # the first to learn of it
            health.opening = None
            error = ConnectionError("connecting was cancelled") if opening.cancelled() else opening.exception()
            if isinstance(error, Exception):
                health.failed(error, clock())
            else:
                health.connected()
        if health.trouble is not None:
            self.skip(health.trouble)
        self.start_again()

    def close(self, connection: Any) -> None:
        asyncio.get_running_loop().call_soon(connection.close)  # the pipe that calls this has more replies to deliver

    def leave(self) -> None:
        self.health.asked.discard(self)
        super().leave()


class _LoopVoting(Voting[_LoopVote]):
    """Majority rounds that a task holds.

    Args:
        servers: the servers' transports.
        rounds: the majority rounds.

    Attributes:
        over: done once no vote is awaited any more.
    """

    def __init__(self, servers: list[LoopServerTransport], rounds: tuple[MajorityRound, ...]) -> None:
        super().__init__(servers, rounds, _LoopVote)
        for vote in self.votes:
            vote.listener = self
        self._waiting = self.votes[:]  # shrinks, so that many rounds at once cost no more than one by one
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_later(self.ends_at - clock(), self.time_is_up)

    def put(self, _: None) -> None:
        """Check whether the rounds are over."""
        waiting = self._waiting
        while waiting and not waiting[-1].is_awaited:
            waiting.pop()
        if not waiting and not self.over.done():
            self.over.set_result(None)

    def time_is_up(self) -> None:
        super().time_is_up()
        if not self.over.done():
            self.over.set_result(None)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is not GeneratorExit:
            super().__exit__(exc_type, exc_value, traceback)
        elif not self._loop.is_closed():  # the task was dropped: the garbage collector runs this, in any thread
            self._loop.call_soon_threadsafe(super().__exit__, exc_type, None, None)

    def _end(self) -> None:
        self._timer.cancel()
        super()._end()


def _break(server_ref: weakref.ref[Any], asked: set[_LoopVote], unanswered: set[Vote], _: object) -> None:
    """Handle the end of the connection on which these votes were asked for, or have no reply."""
    server = server_ref()
    if server is None or server.has_ended:
        return
    resend(server, unanswered)
    for vote in list(asked):
        asked.discard(vote)
        if vote.is_open:
            vote.lose(True, ConnectionError("the connection broke"))
        vote.start_again()
