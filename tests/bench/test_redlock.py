"""The bench of Redlock: every contestant's lock is one of a majority, and a frozen server is counted as it should be.

Rules: on real servers, few times: the figures mean nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench import redlock
from bench.contestants import OURS, REDIS_PY, CheckFailedError
from bench.redlock import MAKERS, Fleet
from redislock_fast.server import Server
from tests.support.helpers import wait_until


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which the servers vote on a busy machine, too."""
    monkeypatch.setattr(redlock, "_LIMIT_S", 1.0)


@pytest.fixture
def running(fleet: list[Server]) -> Iterator[Fleet]:
    with ExitStack() as closing:
        yield Fleet(fleet, closing)


def _keys(fleet: Fleet) -> list[int]:
    """How many keys there are, by server."""
    return [redis.Redis(port=server.port).dbsize() for server in fleet.servers]


def _acquires(lock: Any) -> bool:
    """Whether it is acquired now. On a busy machine too few servers may vote in time."""
    try:
        return lock.acquire() is True
    except redis.TimeoutError:
        return False


@pytest.mark.parametrize("name", MAKERS)
def test_contestants_lock_is_one(name: str, running: Fleet) -> None:
    if name == "pottery":
        pytest.importorskip("pottery")
    if name == "bare sockets" and len({server.kind for server in running.servers}) > 1:
        pytest.skip("it knows one kind of server at a time")
    lock = MAKERS[name](running, "name")
    wait_until(lambda: _acquires(lock), "it is acquired")
    wait_until(lambda: _keys(running) == [1] * 5, "all servers have it")
    lock.release()
    wait_until(lambda: _keys(running) == [0] * 5, "no server has it")


@pytest.mark.slow
@pytest.mark.parametrize("name", [REDIS_PY, OURS])
def test_frozen_server_is_no_failure(name: str, running: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redlock, "_LATER", 2)
    figures = redlock.freeze(running, name)
    assert figures["failed"] == 0
    assert 0 < figures["first"] <= figures["worst first"]


def test_lock_that_cannot_be_had_fails_the_check(running: Fleet) -> None:
    for server in running.servers[:3]:
        redis.Redis(port=server.port).set("name", "another's")
    with pytest.raises(CheckFailedError):
        redlock.entrant(OURS, MAKERS[OURS](running, "name")).check()


@pytest.mark.slow
def test_command_saves_both_tables(figures: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redlock, "_LATER", 1)
    monkeypatch.setattr(redlock, "MAKERS", {name: MAKERS[name] for name in (REDIS_PY, OURS)})
    result = figures("redlock", "--count", 3, "--rounds", 1, "--seconds", 0.01)
    assert [row["contestant"] for row in result["results"]] == [REDIS_PY, OURS]
    assert set(result["frozen_ms"]) == {REDIS_PY, OURS}
