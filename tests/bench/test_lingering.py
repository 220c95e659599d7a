"""The bench of the option `linger`: every figure with a goal is measured, and keys that linger pass the checks.

Rules: on a real server, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

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
    LINGER_S,
    OURS,
    OURS_LINGERING,
    CheckFailedError,
    Options,
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
    with rounds.open_scene(valkey.url, 100) as opened:
        yield opened


@pytest.mark.slow
def test_each_uncontended_figure_is_measured(scene: Scene) -> None:
    entrants = list(lingering._near(scene))
    rounds.race(entrants, rounds=1, seconds=0.01)
    goals = lingering.goals_of([rounds.summary(entrant, entrants) for entrant in entrants])
    measured = [goal.about for goal, *_ in goals if goal.figure is not None]
    assert len(goals) == 24
    assert measured == [
        goal.about
        for goal, *_ in goals
        if goal.about.endswith(("median : redis-py", "median : redislock_fast")) and "away" not in goal.about
    ] + [goals[-2][0].about]


@pytest.mark.slow
def test_threads_and_tasks_that_come_too_late_are_measured_all_the_same(scene: Scene) -> None:
    for entrant in lingering._near(scene):
        if "threads" in entrant.workload or "tasks" in entrant.workload:
            assert entrant.measure(0).pairs_per_s > 0, entrant


def test_a_figure_is_a_ratio_of_medians() -> None:
    def row(contestant: str, workload: str, median: float) -> dict[str, object]:
        return {"contestant": contestant, "workload": workload, "median": median}

    rows = [row(OURS_LINGERING, "a new name each time", 8.0), row(OURS, "a new name each time", 4.0)]
    found = [(goal.figure, goal.verdict, own, base) for goal, own, base in lingering.goals_of(rows) if goal.figure]
    assert found == [(2.0, "met", 8.0, 4.0)]


@pytest.mark.parametrize(("process", "name"), [(0, OURS_LINGERING), (1, OURS), (2, OURS_LINGERING)])
def test_every_other_process_lingers(process: int, name: str) -> None:
    assert libraries.find(HALF_LINGERING).name_for(process) == name


def test_processes_with_and_without_linger_exclude_one_another(valkey: Server) -> None:
    contestant = libraries.find(HALF_LINGERING)
    with redis.Redis.from_url(valkey.url) as witness:
        window = open_window(valkey.url, witness, contestant, Options(), Workload(2), 0.1)
    of_window = figures.figures(window)
    assert of_window["violations"] == 0
    assert of_window["acquisitions"] > 0


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
