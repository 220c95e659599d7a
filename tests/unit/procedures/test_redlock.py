"""What an interrupt does to a Redlock that a majority has just granted, while its caller does not know of it yet.

Rules: no server. The quorum agrees at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast._procedures.steps import Ask, Steps
from redislock_fast._protocol.majority import AcquireRound, MajorityRound

PORTS = (1, 2, 3)


class Agreeing:
    """Servers that agree, and an interrupt when the steps have ended.

    Attributes:
        asked: the rounds.
        cleaned_up: the rounds that were cleaned up.
    """

    def __init__(self) -> None:
        self.asked: list[MajorityRound] = []
        self.cleaned_up: list[MajorityRound] = []

    def drive(self, steps: Steps) -> Any:
        """Drive the steps to their end, and interrupt their caller."""
        step = next(steps)
        assert isinstance(step, Ask)
        assert isinstance(step.round, AcquireRound)
        self.asked.append(step.round)
        step.round.verdicts[:] = [True] * len(PORTS)
        with pytest.raises(StopIteration):
            steps.send(None)
        raise KeyboardInterrupt

    def clean_up_round(self, round_: MajorityRound) -> None:
        """Note the round."""
        self.cleaned_up.append(round_)


class AsyncAgreeing(Agreeing):
    """The same for tasks."""

    async def drive(self, steps: Steps) -> Any:
        """Drive the steps to their end, and interrupt their caller."""
        return super().drive(steps)


def test_interrupted_redlock_is_cleaned_up() -> None:
    lock: Any = redislock_fast.Redlock([redis.Redis(port=port) for port in PORTS], "name", timeout=60)
    lock._quorum = quorum = Agreeing()
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert quorum.cleaned_up == quorum.asked
    assert (len(quorum.asked), lock.local.token, lock.valid) == (1, None, False)


def test_interrupted_redlock_of_a_task_is_cleaned_up() -> None:
    async def scenario() -> None:
        clients = [redis.asyncio.Redis(port=port) for port in PORTS]
        lock: Any = redislock_fast.asyncio.Redlock(clients, "name", timeout=60)
        lock._quorum = quorum = AsyncAgreeing()
        with pytest.raises(KeyboardInterrupt):
            await lock.acquire()
        assert quorum.cleaned_up == quorum.asked
        assert (len(quorum.asked), lock.valid) == (1, False)

    asyncio.run(scenario())
