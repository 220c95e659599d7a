"""Sees to it that a command ends before the lease of its lock does."""

from __future__ import annotations

import math
import signal
from typing import Any

from redislock_fast import Lock, LossReason, Permit
from redislock_fast._cli.child import Child
from redislock_fast._cli.exits import say
from redislock_fast._cli.signals import STOPS, Signals, stop
from redislock_fast._util.times import clock

__all__ = ["Guard"]

_LONGEST_GRACE_S = 10.0
_LONGEST_MARGIN_S = 1.0
_LONGEST_GRACE_AFTER_LOSS_S = 1.0
_LONGEST_WAIT_S = 1.0  # the clock of a wait stands still while the machine is suspended, that of the lease does not
_LEFT_OTHERS_WAIT_S = 0.05


class Guard:
    """Runs a command to its end, and ends it where the lock is lost.

    The lease of the lock has a last part, in which the command must not run any more, and before it a grace, which
    begins with TERM and ends with KILL. Renewals set the lease back long before these begin.

    `note_loss` is called by a thread of the lock, everything else by the main thread.

    Args:
        what: what is held, in words.
        signals: what this process hears.
        ttl_s: its ttl in seconds.
        kills: whether the command is ended; else a loss is only reported.

    Attributes:
        loss: why the lock was lost; None where it was not, as far as is known.
        passed_on: the signals that the command was given.
    """

    def __init__(self, what: str, signals: Signals, ttl_s: float, kills: bool) -> None:
        self._what = what
        self._signals = signals
        self._margin_s = min(_LONGEST_MARGIN_S, ttl_s / 10)
        self._grace_s = min(_LONGEST_GRACE_S, ttl_s / 4)
        self._kills = kills
        self._kill_at = self._kill_after_loss_at = math.inf
        self._has_termed = False
        self._is_over = False
        self.loss: LossReason | None = None
        self.passed_on: set[int] = set()

    def note_loss(self, _: Any, reason: LossReason) -> None:
        """The lock's `on_lost`."""
        if self._is_over:  # the release has found it out, and its error says so
            return
        self._kill_after_loss_at = clock() + min(self._grace_s, _LONGEST_GRACE_AFTER_LOSS_S)
        self.loss = reason
        if self._kills:
            self._signals.wake()
        else:
            say(f"{self._what} was lost ({reason}), and the command goes on")

    @property
    def has_ended_it(self) -> bool:
        """Whether the command was told to end, or would have been at this moment."""
        return self._has_termed or (self._kills and self.loss is not None)

    def run(self, lock: Lock | Permit, child: Child) -> int:
        """Wait for the command's end, and pass signals on to it meanwhile. Returns its exit code."""
        received: list[int] = []
        while True:
            wait_s = self._look(lock, child) if self._kills else _LONGEST_WAIT_S
            for number in received:  # after the look: a job that is continued may have been stopped for too long
                self._pass_on(number, child)
            code = child.poll()
            if code is not None:
                if not (self._has_termed and clock() < self._kill_at and child.has_left_others()):
                    self._is_over = True
                    return code
                wait_s = _LEFT_OTHERS_WAIT_S
            received = self._signals.wait(wait_s)

    def _look(self, lock: Lock | Permit, child: Child) -> float:
        """Send TERM or KILL where it is time to. Returns in how many seconds to look again at the latest."""
        now, left_s = clock(), lock.remaining()
        if left_s > 0:
            self._kill_at = now + left_s - self._margin_s
        self._kill_at = min(self._kill_at, self._kill_after_loss_at)
        term_at = self._kill_at - self._grace_s
        if now >= term_at and not self._has_termed:
            self._has_termed = True
            child.send(signal.SIGTERM)
        if now >= self._kill_at:
            child.send(signal.SIGKILL)
            return _LONGEST_WAIT_S
        return min((self._kill_at if self._has_termed else term_at) - now, _LONGEST_WAIT_S)

    def end_others(self, lock: Lock | Permit, child: Child) -> None:
        """End what an ended command has left of its group, as the command is ended where the lock is lost."""
        if not child.has_left_others():
            return
        child.send(signal.SIGTERM)
        kill_at = min(clock() + self._grace_s, self._kill_after_loss_at)
        while clock() < kill_at and lock.remaining() > self._margin_s and child.has_left_others():
            for number in self._signals.wait(_LEFT_OTHERS_WAIT_S):
                self._pass_on(number, child)
        child.send(signal.SIGKILL)

    def _pass_on(self, number: int, child: Child) -> None:
        self.passed_on.add(number)
        if number in STOPS:  # a group whose session has no terminal ignores these
            child.send(signal.SIGSTOP)
            stop()
        else:
            child.send(number)
