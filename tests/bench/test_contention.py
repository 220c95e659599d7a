"""The arithmetic of the contention bench: what it makes of the records of its workers.

Rules: records are written by hand, in whole seconds; no processes, and a server for its commands alone.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter

import pytest
import redis

pytest.importorskip("bench.contention", reason="the bench is no part of the package")

from bench.contention.figures import (
    Hold,
    Span,
    Window,
    cdf,
    figures,
    gaps_s,
    holds_of,
    jain,
    longest_without_s,
    summary,
    violations,
)
from bench.contention.goals import Goal
from bench.contention.window import commands_until, count_commands
from bench.measuring.rounds import percentile

SPAN = Span(0.0, 100.0)


def turn(asked_s: float, acquired_s: float, released_s: float, worker: int = 0) -> Hold:
    return Hold(acquired_s, released_s, asked_s, worker, 0)


def window(*records: list[float], commands: Counter[str] | None = None) -> Window:
    return Window(SPAN, SPAN, [array("d", flat) for flat in records], commands, 0.5, 0.25, 2)


def test_turns_that_follow_one_another_are_no_violation() -> None:
    assert violations([turn(0, 1, 2), turn(0, 2, 3), turn(0, 5, 6)]) == 0


def test_each_turn_that_begins_while_somebody_holds_is_a_violation() -> None:
    # The second and third begin within the first, which outlasts both.
    assert violations([turn(0, 1, 9), turn(0, 2, 3), turn(0, 4, 5), turn(0, 9, 10)]) == 2


def test_a_turn_is_a_violation_where_as_many_hold_as_may() -> None:
    holds = [turn(0, 1, 9), turn(0, 2, 3), turn(0, 3, 5), turn(0, 4, 8), turn(0, 8, 9)]
    assert (violations(holds), violations(holds, 2), violations(holds, 3)) == (4, 1, 0)


def test_holders_of_different_locks_are_no_violation() -> None:
    of_window = figures(window([0, 0, 1, 9], [1, 0, 2, 8]))
    assert of_window["violations"] == 0


def test_a_planted_overlap_is_found_in_the_records() -> None:
    of_window = figures(window([0, 0, 1, 3, 0, 4, 5, 7], [0, 1, 6, 8]))
    assert of_window["violations"] == 1


def test_a_gap_is_from_a_release_to_the_next_acquire() -> None:
    assert gaps_s([turn(0, 1, 2), turn(0, 5, 6), turn(0, 7, 8)], SPAN) == [3, 1]


def test_with_two_holders_a_gap_is_from_a_release_to_the_acquire_in_its_place() -> None:
    assert gaps_s([turn(0, 1, 9), turn(0, 1, 4), turn(0, 6, 7), turn(0, 8, 20)], SPAN, 2) == [2, 1]


def test_where_nobody_waits_there_is_no_gap() -> None:
    assert gaps_s([turn(0, 1, 2), turn(4, 5, 6)], SPAN) == []


def test_a_gap_counts_where_a_newcomer_overtakes_a_waiter() -> None:
    # The contender that asked at 1 waits at 2; the one that asked at 3 is quicker.
    assert gaps_s([turn(0, 1, 2), turn(3, 4, 5), turn(1, 8, 9)], SPAN) == [2, 3]


def test_gaps_outside_the_span_do_notcount_commands() -> None:
    assert gaps_s([turn(0, 1, 2), turn(0, 3, 4), turn(0, 6, 7)], Span(3, 5)) == [2]


def test_waiter_at_the_end_has_no_turn_and_no_gap() -> None:
    holds = holds_of([array("d", [0, 0, 1, 2]), array("d", [0, 1])])[0]
    assert holds[1] == Hold(math.inf, math.inf, 1, 1, 0)
    assert gaps_s(holds, SPAN) == []


def test_waiter_at_the_end_has_waited_until_then() -> None:
    of_window = figures(window([0, 0, 1, 2], [0, 40]))
    assert (of_window["wait_max_ms"], of_window["left_waiting"], of_window["acquisitions"]) == (60_000, 1, 1)


@pytest.mark.parametrize(("counts", "fairness"), [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 0.25), ([1, 3], 0.8)])
def test_fairness_is_jains(counts: list[int], fairness: float) -> None:
    assert jain(counts) == fairness


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.51, 6), (0.99, 10), (1.0, 10)])
def test_a_percentile_is_a_value_that_occurred(share: float, value: float) -> None:
    assert percentile(list(range(1, 11)), share) == value


def test_of_nothing_there_is_no_percentile() -> None:
    assert percentile([], 0.5) is None
    assert cdf([]) == []


@pytest.mark.parametrize(("acquired_s", "longest_s"), [([], 100), ([10, 30], 70), ([60, 10], 50), ([-5, 50, 105], 50)])
def test_starvation_counts_from_edge_to_edge(acquired_s: list[float], longest_s: float) -> None:
    assert longest_without_s(map(float, acquired_s), SPAN) == longest_s


def test_costs_are_for_each_acquisition() -> None:
    of_window = figures(window([0, 0, 1, 2], [0, 1, 3, 4], commands=Counter(SET=4, DELIFEQ=2)))
    costs = [of_window[name] for name in ("commands", "client_cpu_us", "server_cpu_us", "acquisitions_per_s")]
    assert costs == [3, 250_000, 125_000, 0.02]


def test_rounds_are_summed_up_by_median_maximum_and_sum() -> None:
    rounds = [{"gap_p50_ms": gap_ms, "wait_max_ms": gap_ms, "violations": 1} for gap_ms in (1, 9, 2)]
    assert summary(rounds) == {"gap_p50_ms": 2, "wait_max_ms": 9, "violations": 3}


def test_commands_that_scripts_call_are_not_clients_commands() -> None:
    lines = [
        b'1700000000.000001 [0 127.0.0.1:5000] "set" "a] \\"b" "c" "NX"',
        b'1700000000.000002 [0 127.0.0.1:5000] "EVALSHA" "0f" "1" "a"',
        b'1700000000.000003 [0 lua] "get" "a"',
        b'1700000000.000004 [0 127.0.0.1:5001] "SET" "a" "d" "NX"',
        b'1700000000.000005 [0 127.0.0.1:5002] "RESET"',
    ]
    assert count_commands(lines) == {"SET": 2, "EVALSHA": 1}


def test_where_monitor_is_refused_nothing_is_known_of_commands(valkey_client: redis.Redis) -> None:
    valkey_client.acl_setuser("unseeing", enabled=True, nopass=True, commands=["+@all", "-monitor"], keys=["*"])
    port = valkey_client.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port, username="unseeing", password="") as client:
        assert commands_until(client, time.monotonic()) is None


@pytest.mark.parametrize(
    ("figure", "sign", "verdict"), [(2, "<", "MISSED"), (2, "<=", "met"), (2, ">=", "met"), (None, "<", "not measured")]
)
def test_a_goal_says_whether_it_is_met(figure: float | None, sign: str, verdict: str) -> None:
    assert Goal("", "", sign, 2).verdict(figure) == verdict


def test_a_goal_is_for_a_figure_or_for_its_ratio_to_that_of_another_row() -> None:
    gaps_ms = {"redislock_fast": 0.3, "python-redis-lock": 0.6}
    rows = [{"contestant": who, "workload": "8 processes", "gap_p50_ms": gap_ms} for who, gap_ms in gaps_ms.items()]
    assert Goal("8 processes", "gap_p50_ms", "<", 1).of(rows) == (0.3, 0.3, None)
    assert Goal("8 processes", "gap_p50_ms", "<", 1, "python-redis-lock").of(rows) == (0.5, 0.3, 0.6)
    assert Goal("64 processes", "gap_p50_ms", "<", 1, "python-redis-lock").of(rows) == (None, None, None)
