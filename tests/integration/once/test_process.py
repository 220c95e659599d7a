"""`once` in many processes, whose scheduler delivers each tick to all of them, at other times.

Rules: `FAR_S` never passes during a test. No process decides by a clock when a tick comes: the test tells it, and ends
the time of `at_least` by hand.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import Skipped
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import FAR_S, until_queued

TICKS = 5
AT_LEAST_S = 3 * FAR_S

_WORKERS = multiprocessing.get_context("forkserver")  # a plain fork would copy locks that other threads hold


def work(connection: Connection, port: int, settings: dict[str, Any]) -> None:
    """Run the ticks that the connection delivers; the last of them forever."""
    client = redis.Redis(port=port)

    @redislock_fast.once(client, "nightly", on_skip=lambda _: "skipped", **settings)
    def run(is_endless: bool) -> str:
        if is_endless:
            connection.send("begun")
            connection.recv()
        return "ran"

    connection.send("ready")
    while True:
        connection.send(run(connection.recv()))


def work_in_a_loop(connection: Connection, port: int, settings: dict[str, Any]) -> None:
    """The same by a task."""

    async def main() -> None:
        client = redis.asyncio.Redis(port=port)
        recv = partial(asyncio.get_running_loop().run_in_executor, None, connection.recv)
        guard = redislock_fast.asyncio.once(client, "nightly", on_skip=lambda _: "skipped", **settings)

        @guard
        async def run(is_endless: bool) -> str:
            if is_endless:
                connection.send("begun")
                await recv()
            return "ran"

        connection.send("ready")
        while True:
            connection.send(await run(await recv()))

    asyncio.run(main())


class Worker:
    """A worker in another process."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._connection, far = Pipe()
        self._process = _WORKERS.Process(target=target, args=(far, *arguments), daemon=True)
        self._process.start()
        far.close()

    def tell(self, is_endless: bool = False) -> None:
        """Deliver a tick."""
        self._connection.send(is_endless)

    def answer(self) -> str:
        """What it has done, once it has."""
        if not self._connection.poll(PATIENCE_S):
            raise AssertionError("the worker hangs")
        done: str = self._connection.recv()
        return done

    def call(self, is_endless: bool = False) -> str:
        """Deliver a tick, and wait for what it does."""
        self.tell(is_endless)
        return self.answer()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._process.join()
        self._connection.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    """The workers of a test, which are ended behind it."""
    made: list[Worker] = []
    yield made
    for worker in made:
        worker.kill()


def start(workers: list[Worker], targets: list[Callable[..., None]], *arguments: object) -> None:
    """Start workers, and return once they are ready."""
    workers += [Worker(target, *arguments) for target in targets]
    assert [worker.answer() for worker in workers] == ["ready"] * len(targets)


@pytest.mark.slow
def test_each_tick_runs_once_on_eight_workers(
    valkey: Server, valkey_client: redis.Redis, workers: list[Worker]
) -> None:
    start(workers, [work, work_in_a_loop] * 4, valkey.port, {"timeout": FAR_S, "at_least": AT_LEAST_S})
    for tick in range(TICKS):
        behind, at_once = workers[tick : tick + 3], workers[:tick] + workers[tick + 3 :]
        for worker in at_once:
            worker.tell()
        done = [worker.answer() for worker in at_once]
        done += [worker.call() for worker in behind]  # to these, the tick comes when the job has ended
        assert sorted(done) == ["ran"] + ["skipped"] * 7
        assert 1000 * FAR_S < valkey_client.pttl("nightly") <= 1000 * AT_LEAST_S
        valkey_client.delete("nightly")  # `at_least` has passed


@pytest.mark.parametrize("target", [work, work_in_a_loop], ids=["threads", "tasks"])
def test_killed_worker_frees_the_job_within_its_timeout(
    valkey: Server, valkey_client: redis.Redis, workers: list[Worker], target: Callable[..., None]
) -> None:
    timeout_s = 0.5
    start(workers, [target], valkey.port, {"timeout": timeout_s, "at_least": AT_LEAST_S})
    assert workers[0].call(is_endless=True) == "begun"
    workers[0].kill()
    assert valkey_client.pttl("nightly") <= 1000 * timeout_s

    def runs() -> bool:
        try:
            with redislock_fast.once(valkey_client, "nightly", timeout=FAR_S):
                return True
        except Skipped:
            return False

    wait_until(runs, "another runs the job")


# ---- others that wait ----


@pytest.mark.slow
def test_job_that_all_wait_for_runs_once_on_eight_workers(valkey: Server, workers: list[Worker]) -> None:
    start(
        workers, [work, work_in_a_loop] * 4, valkey.port, {"timeout": FAR_S, "others": "wait", "done_for": AT_LEAST_S}
    )
    for worker in workers:
        worker.tell()
    assert sorted(worker.answer() for worker in workers) == ["ran"] + ["skipped"] * 7


@pytest.mark.slow
@pytest.mark.parametrize("target", [work, work_in_a_loop], ids=["threads", "tasks"])
def test_job_of_a_killed_worker_is_run_by_one_that_waits(
    valkey: Server, valkey_client: redis.Redis, workers: list[Worker], target: Callable[..., None]
) -> None:
    settings = {"timeout": 3.0, "others": "wait", "done_for": AT_LEAST_S}
    start(workers, [target] * 3, valkey.port, settings)
    killed, *others = workers
    assert killed.call(is_endless=True) == "begun"
    for worker in others:
        worker.tell()
    until_queued(valkey_client, "nightly", 2)
    killed.kill()
    assert sorted(worker.answer() for worker in others) == ["ran", "skipped"]
