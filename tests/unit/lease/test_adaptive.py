"""An adaptive ttl stays within its bounds, follows the hold times of a name, and forgets in time.

Rules: no server and no clock; hold times are made up.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redislock_fast import AdaptiveTTL
from redislock_fast._lease.adaptive import _KEPT_NAMES, _MAX_NAMES, _WINDOW
from redislock_fast._lease.options import Options
from redislock_fast._util.times import positive_ms
from tests.support.forks import run_in_fork

NAME = "reports:nightly"

HOLDS_S = st.lists(st.floats(0, 1e6), max_size=2 * _WINDOW)
QUANTILES = st.floats(0, 1, exclude_min=True)
FACTORS = st.floats(1.01, 100)
WIDE: dict[str, float] = {"initial": 1e-3, "floor": 1e-3, "ceiling": 1e9}


@st.composite
def any_ttls(draw: st.DrawFn) -> AdaptiveTTL:
    floor, initial, ceiling = sorted(draw(st.tuples(*[st.floats(0.001, 1e5)] * 3)))
    return AdaptiveTTL(initial, floor=floor, ceiling=ceiling, quantile=draw(QUANTILES), factor=draw(FACTORS))


def observe_all(ttl: AdaptiveTTL, holds_s: list[float], name: str | bytes = NAME) -> None:
    for hold_s in holds_s:
        ttl.observe(name, hold_s)


def known_well(hold_s: float, **settings: float) -> AdaptiveTTL:
    """One that has a whole window of one hold time for NAME."""
    ttl = AdaptiveTTL(**{**WIDE, **settings})
    observe_all(ttl, [hold_s] * _WINDOW)
    return ttl


# ---- bounds ----


@given(any_ttls(), HOLDS_S)
def test_the_ttl_is_never_beyond_its_bounds(ttl: AdaptiveTTL, holds_s: list[float]) -> None:
    lowest_ms, highest_ms = positive_ms(ttl.floor, "floor"), positive_ms(ttl.ceiling, "ceiling")
    for hold_s in holds_s:
        ttl.observe(NAME, hold_s)
        assert lowest_ms <= ttl.ttl_ms(NAME) <= highest_ms


@given(any_ttls(), st.lists(st.floats(0, 1e6), max_size=_WINDOW - 1))
def test_few_hold_times_never_bring_it_below_the_initial(ttl: AdaptiveTTL, holds_s: list[float]) -> None:
    initial_ms = positive_ms(ttl.initial, "initial")
    assert initial_ms == ttl.ttl_ms(NAME)
    for hold_s in holds_s:
        ttl.observe(NAME, hold_s)
        assert initial_ms <= ttl.ttl_ms(NAME)


def test_a_burst_of_very_short_holds_ends_at_the_floor() -> None:
    ttl = AdaptiveTTL(10, floor=2)
    observe_all(ttl, [1e-6] * (_WINDOW - 1))
    assert 10_000 == ttl.ttl_ms(NAME)
    observe_all(ttl, [1e-6] * 10_000)
    assert 2_000 == ttl.ttl_ms(NAME)


def test_a_hold_beyond_the_ceiling_ends_at_the_ceiling() -> None:
    ttl = known_well(1e300, ceiling=60, factor=1e300)
    assert 60_000 == ttl.ttl_ms(NAME)


# ---- the formula ----


@given(
    st.lists(st.floats(0.01, 1e6), min_size=_WINDOW, max_size=_WINDOW), HOLDS_S, st.sampled_from([0.5, 0.9, 0.99, 1])
)
def test_it_is_the_factor_times_the_quantile_of_the_last_holds(
    last_s: list[float], before_s: list[float], quantile: float
) -> None:
    ttl = AdaptiveTTL(**WIDE, quantile=quantile, factor=2)
    observe_all(ttl, before_s + last_s)
    rank = math.ceil(Fraction(str(quantile)) * _WINDOW)
    assert positive_ms(2 * sorted(last_s)[rank - 1], "ttl") == ttl.ttl_ms(NAME)


@given(st.floats(0.01, 1e6), QUANTILES, FACTORS)
def test_a_steady_stream_leads_to_the_factor_times_its_hold(hold_s: float, quantile: float, factor: float) -> None:
    ttl = known_well(hold_s, quantile=quantile, factor=factor)
    assert positive_ms(factor * hold_s, "ttl") == ttl.ttl_ms(NAME)


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_a_random_stream_leads_to_about_the_factor_times_its_quantile(quantile: float) -> None:
    ttl = AdaptiveTTL(**WIDE, quantile=quantile)
    holds = random.Random(1)
    seen_ms = []
    for _ in range(100):
        observe_all(ttl, [holds.uniform(0, 10) for _ in range(_WINDOW)])
        seen_ms.append(ttl.ttl_ms(NAME))
    assert 3 * 10_000 * quantile == pytest.approx(sum(seen_ms) / len(seen_ms), rel=0.05)


# ---- following ----


@given(st.floats(0.01, 100))
def test_it_grows_with_the_second_hold_that_is_ten_times_longer(hold_s: float) -> None:
    ttl = known_well(hold_s)
    observe_all(ttl, [10 * hold_s] * 2)
    assert positive_ms(3 * (10 * hold_s), "ttl") == ttl.ttl_ms(NAME)


def test_work_that_always_outlasts_its_ttl_gets_a_ttl_that_covers_it() -> None:
    ttl = known_well(0.01)
    outlasted = 0
    while ttl.ttl_ms(NAME) < 1_000:
        outlasted += 1
        ttl.observe(NAME, 1.0)
    assert 2 == outlasted


def test_work_that_stops_when_its_lock_is_lost_makes_the_ttl_grow_too() -> None:
    ttl = known_well(0.01)
    before_ms = ttl.ttl_ms(NAME)
    for _ in range(2):
        ttl.observe(NAME, ttl.ttl_ms(NAME) / 1000)
    assert 3 * before_ms == ttl.ttl_ms(NAME)


def test_it_shrinks_only_when_the_long_holds_have_left_the_window() -> None:
    ttl = known_well(10)
    observe_all(ttl, [1] * (_WINDOW - 2))
    assert 30_000 == ttl.ttl_ms(NAME)
    ttl.observe(NAME, 1)
    assert 3_000 == ttl.ttl_ms(NAME)


def test_one_outlier_in_a_full_window_changes_nothing() -> None:
    ttl = known_well(1)
    ttl.observe(NAME, 1000)
    assert 3_000 == ttl.ttl_ms(NAME)


def test_with_a_quantile_of_one_an_outlier_counts_until_it_has_left_the_window() -> None:
    ttl = known_well(1, quantile=1)
    observe_all(ttl, [1000] + [1.0] * (_WINDOW - 1))
    assert 3_000_000 == ttl.ttl_ms(NAME)
    ttl.observe(NAME, 1)
    assert 3_000 == ttl.ttl_ms(NAME)


# ---- names ----


def test_names_do_not_share_what_is_known() -> None:
    ttl = AdaptiveTTL(1)
    ttl.observe("slow", 100)
    assert (300_000, 1_000) == (ttl.ttl_ms("slow"), ttl.ttl_ms("other"))


def test_a_str_and_its_utf8_are_one_name() -> None:
    ttl = AdaptiveTTL(1)
    ttl.observe("schloß", 100)
    assert 300_000 == ttl.ttl_ms("schloß".encode())


def test_asking_alone_keeps_no_name() -> None:
    ttl = AdaptiveTTL(1)
    for number in range(3):
        ttl.ttl_ms(f"name-{number}")
    assert 0 == len(ttl._known)


def test_names_and_hold_times_are_bounded_in_number() -> None:
    ttl = AdaptiveTTL(1)
    for number in range(5 * _MAX_NAMES):
        ttl.observe(f"name-{number}", 0.1)
        assert len(ttl._known) <= _MAX_NAMES
    observe_all(ttl, [random.random() for _ in range(5 * _WINDOW)])
    known = ttl._known[NAME.encode()]
    assert (_WINDOW, _WINDOW) == (len(known.holds_s), len(known.ranked_s))


def test_names_released_last_are_known_and_those_released_longest_ago_forgotten() -> None:
    ttl = AdaptiveTTL(1)
    ttl.observe("often", 100)
    for number in range(_MAX_NAMES):
        ttl.observe(f"name-{number}", 100)
        ttl.observe("often", 100)
    assert 300_000 == ttl.ttl_ms("often")
    assert {300_000} == {ttl.ttl_ms(f"name-{number}") for number in range(_MAX_NAMES + 1 - _KEPT_NAMES, _MAX_NAMES)}
    assert 1_000 == ttl.ttl_ms("name-0")


# ---- threads ----


def test_threads_with_names_of_their_own_lose_nothing() -> None:
    ttl = AdaptiveTTL(**WIDE, quantile=0.5)
    start = Barrier(8)

    def work(number: int) -> int:
        start.wait()
        observe_all(ttl, [float(number)] * _WINDOW, f"thread-{number}")
        return ttl.ttl_ms(f"thread-{number}")

    with ThreadPoolExecutor(8) as threads:
        assert [3_000 * number for number in range(1, 9)] == list(threads.map(work, range(1, 9)))


def test_threads_with_the_same_names_keep_the_bounds_and_the_window() -> None:
    ttl = AdaptiveTTL(10, floor=5, ceiling=20)
    start = Barrier(8)

    def work(seed: int) -> set[bool]:
        chance = random.Random(seed)
        start.wait()
        inside = set()
        for _ in range(1_000):
            ttl.observe(NAME, chance.random() * 10)
            ttl.observe(f"name-{chance.randrange(2 * _MAX_NAMES)}", 1)
            inside.add(5_000 <= ttl.ttl_ms(NAME) <= 20_000)
        return inside

    with ThreadPoolExecutor(8) as threads:
        assert [{True}] * 8 == list(threads.map(work, range(8)))
    known = ttl._known[NAME.encode()]
    assert sorted(known.holds_s) == known.ranked_s


# ---- copies ----


def test_a_forked_child_begins_with_what_its_parent_knew() -> None:
    ttl = AdaptiveTTL(1)
    ttl.observe(NAME, 100)
    assert "300000" == run_in_fork(lambda: str(ttl.ttl_ms(NAME)))


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda ttl: pickle.loads(pickle.dumps(ttl))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_has_the_settings_and_nothing_learnt(copied: Callable[[AdaptiveTTL], AdaptiveTTL]) -> None:
    ttl = AdaptiveTTL(2, floor=1.5, ceiling=400, quantile=0.9, factor=4)
    ttl.observe(NAME, 50)
    other = copied(ttl)
    assert (repr(ttl), 2_000) == (repr(other), other.ttl_ms(NAME))
    other.observe(NAME, 90)
    assert (200_000, 360_000) == (ttl.ttl_ms(NAME), other.ttl_ms(NAME))


def test_a_repr_has_the_settings_and_no_names() -> None:
    ttl = AdaptiveTTL(2)
    ttl.observe("secret", 50)
    assert "AdaptiveTTL(initial=2, floor=1.0, ceiling=3600.0, quantile=0.99, factor=3.0)" == repr(ttl)


# ---- bad input ----


@pytest.mark.parametrize("name", ["initial", "floor", "ceiling", "quantile", "factor"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (None, TypeError),
        ("5", TypeError),
    ],
)
def test_a_nonsensical_setting_is_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name if error is ValueError else None):
        AdaptiveTTL(**{"initial": 10, name: value})


@pytest.mark.parametrize(
    "settings",
    [{"floor": 11}, {"ceiling": 9}, {"floor": 20, "ceiling": 15}, {"quantile": 1.01}, {"factor": 1}],
    ids=str,
)
def test_settings_that_contradict_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdaptiveTTL(10, **settings)


@pytest.mark.parametrize(
    ("hold_s", "error"),
    [(-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError), (None, TypeError), ("1", TypeError)],
)
def test_a_nonsensical_hold_time_is_refused_and_not_noted(hold_s: Any, error: type[Exception]) -> None:
    ttl = AdaptiveTTL(10)
    with pytest.raises(error):
        ttl.observe(NAME, hold_s)
    assert 10_000 == ttl.ttl_ms(NAME)


@pytest.mark.parametrize(
    ("settings", "expected_ms"),
    [
        ({}, 60_000),
        ({"wait_replicas": 1, "wait_timeout": 40}, 80_000),
        ({"auto_renew": True, "max_hold": 50}, 50_000),
        ({"auto_renew": True, "max_stall": 40}, 40_000),
        ({"auto_renew": True, "max_hold": 50, "max_stall": 40}, 40_000),
        ({"auto_renew": True, "max_hold": 100}, 60_000),
    ],
    ids=str,
)
def test_ttl_of_a_lock_is_within_what_its_other_options_allow(settings: dict[str, Any], expected_ms: int) -> None:
    assert expected_ms == Options(adaptive=AdaptiveTTL(60), **settings).adapted_ms("name")
