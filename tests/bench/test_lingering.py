"""The bench of the option `linger`: every figure with a goal is measured, and keys that linger pass the checks.

Rules: on a real server, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

import redis

from bench import lingering
from bench.contention import figures
from bench.contention.window import open_window
from bench.contention.workload import Workload
from bench.contestants import (
    HALF_LINGERING,
    LEASE_S,
    LINGER_S,
    OURS,
    OURS_LINGERING,
    CheckFailedError,
    check,
    is_left,
    libraries,
)
from bench.measuring import rounds
from bench.measuring.rounds import Scene
from redislock_fast.server import Server


@pytest.fixture
def scene(valkey: Server) -> Iterator[Scene]:
    """A scene with names for all workloads."""
    with rounds.open_scene(valkey.url) as opened:
        yield opened


@pytest.mark.slow
def test_each_uncontended_figure_is_measured(scene: Scene) -> None:
    entrants = lingering.near(scene)
    rounds.race(entrants, rounds=1, seconds=0.01)
    rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    near = [goal for goal in lingering.GOALS if goal.figure in ("median", "latency_p50_ms")]
    near = [goal for goal in near if "away" not in goal.workload]
    assert len(lingering.GOALS) == 23
    assert [goal for goal in lingering.GOALS if goal.of(rows)[0] is not None] == near


@pytest.mark.slow
def test_threads_and_tasks_that_come_too_late_are_measured_all_the_same(scene: Scene) -> None:
    for entrant in lingering.near(scene):
        if "threads" in entrant.workload or "tasks" in entrant.workload:
            assert entrant.measure(0).pairs_per_s > 0, entrant


@pytest.mark.parametrize(("process", "name"), [(0, OURS_LINGERING), (1, OURS), (2, OURS_LINGERING)])
def test_every_other_process_lingers(process: int, name: str) -> None:
    assert libraries.find(HALF_LINGERING).name_for(process) == name


def test_processes_with_and_without_linger_exclude_one_another(valkey: Server) -> None:
    contestant = libraries.find(HALF_LINGERING)
    with redis.Redis.from_url(valkey.url) as witness:
        window = open_window(valkey.url, witness, contestant, LEASE_S, Workload(2), 0.1)
    assert figures.figures(window)["violations"] == 0
    assert figures.holds_of(window.records)[0][0].acquired_s < math.inf  # in the warm-up, if not later


def test_a_key_may_stay_for_as_long_as_it_lingers(scene: Scene) -> None:
    lingering_, plain = libraries.find(OURS_LINGERING), libraries.find(OURS)
    client, other = redis.Redis.from_url(scene.url), redis.Redis.from_url(scene.url)
    names = [f"{scene.prefix}:{number}" for number in range(2)]
    locks = [(lingering_.make(client, name), plain.make(other, name)) for name in names]
    with pytest.raises(CheckFailedError):
        check(names[0], *locks[0], scene.witness)
    check(names[1], *locks[1], scene.witness, LINGER_S)


def test_a_key_that_does_not_linger_is_left_at_once() -> None:
    looks = iter((True, False))
    assert is_left(lambda: next(looks), 0.0) is True
    assert is_left(lambda: next(looks), LINGER_S) is False
