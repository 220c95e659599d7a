"""A gateway in front of a language model: a limit for the whole fleet, not for each worker.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/llm_gateway.py

Four workers share a limit of three calls. Clients wait for their turn; one that does not wait gets 429 while the model
has all the calls that it may have.
"""

from __future__ import annotations

import asyncio
import os

import redis.asyncio

from redislock_fast.asyncio import Semaphore

LIMIT = 3


class Model:
    """Stands for the provider's API. It answers once the gateway has turned a client away: only for this demonstration.

    Attributes:
        most: how many calls it has had at once.
    """

    def __init__(self) -> None:
        self.most = 0
        self._calls = 0
        self.is_full = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def answer(self, prompt: str) -> str:
        """Answer a prompt."""
        self._calls += 1
        self.most = max(self.most, self._calls)
        if self._calls == LIMIT:
            self.is_full.set()
        await self.may_answer.wait()
        self._calls -= 1
        return f"answer to {prompt}"


class Worker:
    """One process of the gateway, with a client of its own."""

    def __init__(self, model: Model) -> None:
        self.client = redis.asyncio.Redis.from_url(os.environ["REDIS_URL"])
        self._model = model
        self._calls = Semaphore(self.client, "llm:gpt", LIMIT, timeout=30, blocking_timeout=30)

    async def complete(self, prompt: str, patient: bool = True) -> tuple[int, str]:
        """The status and the text of a response."""
        permit = await self._calls.acquire(blocking=patient)
        if permit is None:
            return 429, "too many requests"
        async with permit:  # until the answer is complete
            return 200, await self._model.answer(prompt)


async def main() -> None:
    """Send ten prompts to the workers, and one that does not wait."""
    model = Model()
    workers = [Worker(model) for _ in range(4)]
    asked = [asyncio.ensure_future(workers[number % 4].complete(f"prompt {number}")) for number in range(10)]
    await asyncio.wait_for(model.is_full.wait(), 30)
    status, _ = await workers[0].complete("at once", patient=False)
    print("while it is full:", status)
    model.may_answer.set()
    print("answered:", sum(status == 200 for status, _ in await asyncio.gather(*asked)))
    print("most at once:", model.most)
    for worker in workers:
        await worker.client.aclose()


if __name__ == "__main__":
    asyncio.run(main())
