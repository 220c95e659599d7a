"""The bench of held locks: every holder renews its locks, a lost one is a failure, and the command says what it should.

Rules: on a real server, with few locks and short ttls: the figures mean nothing here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench import renewal
from bench.contestants import CheckFailedError
from bench.measuring import rounds
from bench.measuring.rounds import Scene
from bench.renewal import (
    HOLDERS,
    KINDS,
    SHARES,
    cost_of_keeping,
    effect_of_a_busy_loop,
    effect_of_stalls,
    renewed_pairs_per_s,
)
from redislock_fast.server import Server

TTL_S = 1.5
CALM_TTL_S = 6  # for figures that a busy machine must not spoil


@pytest.fixture
def scene(valkey: Server) -> Iterator[Scene]:
    with rounds.open_scene(valkey.url) as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("holder", HOLDERS)
def test_holder_renews_its_locks_beyond_their_ttl_and_gives_them_back(holder: tuple[str, str], scene: Scene) -> None:
    names = [f"{scene.prefix}:{number}" for number in range(3)]

    async def held() -> None:
        async with HOLDERS[holder](scene.url, names, TTL_S):
            values = scene.witness.mget(names)
            await asyncio.sleep(2 * TTL_S)
            assert None not in values
            assert scene.witness.mget(names) == values

    asyncio.run(held())
    assert scene.witness.mget(names) == [None] * 3


@pytest.mark.parametrize("holder", HOLDERS)
def test_holder_ends_with_a_measurement_that_fails(holder: tuple[str, str], scene: Scene) -> None:
    async def fails() -> None:
        async with HOLDERS[holder](scene.url, [f"{scene.prefix}:0"], TTL_S):
            raise CheckFailedError("a lock was lost")

    with pytest.raises(CheckFailedError):
        asyncio.run(fails())
    assert scene.witness.keys() == []


@pytest.mark.slow
def test_figures_are_of_what_was_done(scene: Scene) -> None:
    measuring = cost_of_keeping(HOLDERS["redislock_fast", "threads"], scene, 10, CALM_TTL_S, CALM_TTL_S)
    figures = asyncio.run(measuring)
    assert 0 <= figures["least_left_percent"] <= 100  # on a busy machine a lease may end
    assert 10 / CALM_TTL_S < figures["renewals_per_s"] < 100 / CALM_TTL_S


def test_a_lock_of_ours_that_is_lost_is_a_failure(
    valkey: Server, bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def keeps_nothing(url: str, names: Sequence[str], ttl_s: float) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(renewal, "HOLDERS", {("redislock_fast", "threads"): keeps_nothing})
    few = ["--only", "keeping", "--locks", 3, "--ttl", 0.1, "--seconds", 0.01]
    assert bench("renewal", "--server", valkey.url, *few) == 1
    assert "3 of 3 locks were lost" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_stall_of_three_ttls_loses_the_lock_and_on_lost_is_called(kind: str, scene: Scene) -> None:
    figures = effect_of_stalls(kind, scene, 3, 0.2, 1)
    assert (figures["kept"], figures["times"]) == (0, 1)
    assert figures["on_lost_max_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "rows", "column", "options"),
    [
        ("keeping", len(HOLDERS), "% of a core", ["--locks", 5, "--ttl", CALM_TTL_S, "--seconds", 0.3]),
        ("stalls", len(KINDS) * len(SHARES), "still held", ["--stalls", 1, "--stall-ttl", 0.2]),
        (
            "busy",
            2,
            "pairs/s",
            ["--seconds", 0.3, "--stall-ttl", TTL_S],
        ),  # a lock that a thread renews must not be lost
    ],
)
def test_command_prints_and_saves_every_table(
    table: str,
    rows: int,
    column: str,
    options: list[object],
    valkey: Server,
    figures: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = figures("renewal", "--server", valkey.url, "--only", table, *options)
    assert len(result[table]) == rows
    assert column in capsys.readouterr().out


@pytest.mark.slow
def test_loop_that_is_blocked_loses_what_it_renews_by_itself(scene: Scene) -> None:
    figures = asyncio.run(effect_of_a_busy_loop("by the loop", scene, TTL_S, 0.1))
    assert (figures["lost_half"], figures["lost_blocked"]) == (0, figures["locks"])
    figures = asyncio.run(effect_of_a_busy_loop("by a thread", scene, TTL_S, 0.1))
    assert (figures["lost_half"], figures["lost_blocked"]) == (0, 0)


def test_pairs_are_of_both_ways(scene: Scene) -> None:
    pairs_per_s = asyncio.run(renewed_pairs_per_s(scene, 0.05))
    assert all(pairs_per_s.values())
    assert pairs_per_s.keys() == {"by a thread", "by the loop"}
