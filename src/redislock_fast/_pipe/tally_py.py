"""Requests that leave at once on several pipes, and whoever answers first.

A tally is for the usual day, on which all who are asked answer soon. What goes beyond that, the slow and the broken
connections, is for who asks; so it can have every reply that has not come yet handed on to somebody else.

Who may touch what: a tally belongs to the thread that asks. An answer is given its reply by whoever reads that
connection, once; the list with the reply is used by atomic methods alone, and `_on_reply` is assigned before the asking
thread looks into the list, and read after the reading thread has put something there. So one of them sees the other,
and one alone takes the reply out.
"""

from __future__ import annotations

import contextlib

from redislock_fast._pipe.base import MISSING, Args, Lost, Mailbox, NoReply, OnReply, Pipe, Reply
from redislock_fast._pipe.impl import compiled
from redislock_fast._util.times import clock

__all__ = ["PythonTally", "new_tally"]


class _Answer:
    """What a reply is given to.

    Attributes:
        mailbox: of the connection, while somebody waits for this one.
    """

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._on_reply: OnReply | None = None
        self.mailbox: Mailbox | None = None

    @property
    def reply(self) -> Reply:
        """The reply, or MISSING."""
        return self._replies[0] if self._replies else MISSING

    def take(self, reply: Reply) -> None:
        """Take the reply."""
        self._replies.append(reply)
        mailbox = self.mailbox
        if self._on_reply is not None:
            self._pass_on(self._on_reply)
        elif mailbox is not None:
            mailbox.tell(None)

    def hand_on(self, on_reply: OnReply) -> None:
        """Have it given to somebody else."""
        self._on_reply = on_reply
        self.mailbox = None  # which would keep a connection that owes the reply
        self._pass_on(on_reply)

    def _pass_on(self, on_reply: OnReply) -> None:
        try:
            reply = self._replies.pop()
        except IndexError:
            return
        on_reply(reply)


class PythonTally:
    """One request on each of several pipes, and their replies.

    Args:
        pipes: the connections, in the order in which to ask and to wait.

    Attributes:
        lost: by pipe: why its request was not sent; None where it was.
        waited_s: by pipe: for how long it was waited for, in seconds; None for not at all.
    """

    def __init__(self, pipes: list[Pipe]) -> None:
        self._pipes = pipes
        self._answers: list[_Answer] = []
        self.lost: list[Lost | None] = [None] * len(pipes)
        self.waited_s: list[float | None] = [None] * len(pipes)

    def ask(self, requests: list[Args]) -> None:
        """Send the requests, one on each pipe; once."""
        for index, (pipe, request) in enumerate(zip(self._pipes, requests, strict=True)):
            answer = _Answer()
            self._answers.append(answer)
            try:
                pipe.post(request, answer.take)
            except Lost as lost:
                self.lost[index] = lost

    def wait(self, enough: int, slice_s: float, limit_s: float) -> None:
        """Wait until so many have answered, or each was waited for, in the order of the pipes.

        Args:
            enough: how many replies.
            slice_s: how long to wait for one pipe at most, in seconds.
            limit_s: and for all of them.

        Raises:
            KeyboardInterrupt: or whatever else a signal handler raised.
        """
        now = clock()
        deadline = now + limit_s
        for index, answer in enumerate(self._answers):
            if answer.reply is MISSING and self.lost[index] is None:
                answer.mailbox = mailbox = self._pipes[index].mailbox()
                if answer.reply is MISSING:  # else another thread that reads was faster
                    began = now
                    with contextlib.suppress(NoReply, Lost):
                        mailbox.wait(max(min(slice_s, deadline - began), 0.0), soon=True)
                    now = clock()
                    self.waited_s[index] = now - began
            if answer.reply is not MISSING:
                enough -= 1
                if enough <= 0:
                    return

    def replies(self) -> list[Reply]:
        """By pipe: what has come, else MISSING."""
        return [answer.reply for answer in self._answers]

    def hand_on(self, index: int, on_reply: OnReply) -> None:
        """Have a pipe's reply given to somebody else: now, or by whoever reads it. Nobody waits for it any more."""
        self._answers[index].hand_on(on_reply)


new_tally: type[PythonTally] = PythonTally
if compiled is not None:
    from redislock_fast._pipe import tally

    new_tally = tally.Tally
