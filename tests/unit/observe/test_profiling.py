"""The parts of a profile: what it keeps of callers, its records, the orders in which locks are acquired."""

from __future__ import annotations

import gc
import random

import pytest

from redislock_fast._observe.profiling import orders, recorder, records
from redislock_fast._observe.profiling.orders import Orders, cycles_of
from redislock_fast._observe.profiling.recorder import Recorder
from redislock_fast._observe.profiling.records import OTHER, LockRecord, Records, Waits
from tests.support.helpers import in_thread, wait_until


def test_what_one_caller_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_HELD", 3)
    told = Recorder()
    for number in range(10):
        told.record_acquisition(str(number), 0.0, 1)
    assert [list(caller.held) for caller in told._callers.values()] == [["7", "8", "9"]]


def test_what_a_thread_holds_is_forgotten_with_it() -> None:
    told = Recorder()
    in_thread(lambda: told.record_acquisition("name", 0.0, 1))
    wait_until(lambda: gc.collect() >= 0 and not told._callers, "the thread has ended")


def test_a_name_of_any_type_is_text() -> None:
    told = Recorder()
    for name in ("name", b"name", b"\xff", 7):
        told.record_acquisition(name, 0.0, 1)
    assert sorted(lock["name"] for lock in told.as_dict()["locks"]) == ["7", "\\xff", "name"]


def test_a_report_may_come_in_the_midst_of_another() -> None:
    """As where a signal handler uses a lock, or the garbage collector drops one."""
    told = Recorder()

    class Interrupting(float):
        def __rsub__(self, now: float) -> float:
            told.record_acquisition("other", 0.0, 1)
            told.record_release("other", 0.0, True)
            return now - float(self)

    told.record_acquisition("name", Interrupting(1.0), 1)
    assert {lock["name"]: lock["acquisitions"] for lock in told.as_dict()["locks"]} == {"name": 1, "other": 1}


# The records: quantiles, whose holding a wait was for, and bounds


@pytest.mark.parametrize("longest_s", [0.0, 1e-9, 1e-6, 0.0015, 1.0, 1000.0])
def test_the_99th_percentile_is_at_most_a_fifth_too_high(longest_s: float) -> None:
    waits = Waits()
    times = [longest_s * (i + 1) / 200 for i in range(200)]
    for seconds in times:
        waits.add(seconds)
    assert times[197] <= waits.quantile_s(0.99) <= min(max(times[197] * 2**0.25, 1e-6), longest_s)
    assert waits.longest_s == longest_s
    assert waits.total_s == pytest.approx(sum(times))


def test_without_waits_a_percentile_is_0() -> None:
    assert Waits().quantile_s(0.99) == 0.0


def test_a_wait_counts_for_each_holder_for_as_long_as_it_held_meanwhile() -> None:
    record = LockRecord()
    for site, begun, ended in (("a", 0.0, 5.0), ("b", 5.0, 7.0), ("c", 8.0, 10.0)):
        record.end(record.begin("name", site, begun), ended - begun, ended)
    record.note_wait(6.0, 10.0)
    assert {site: found.blocked_s for site, found in record.sites.items()} == {"a": 1.0, "b": 2.0, "c": 2.0}


def test_a_holding_whose_release_is_recorded_late_has_ended_with_the_next() -> None:
    record = LockRecord()
    late = record.begin("name", "a", 0.0)
    record.note_wait(3.0, 3.0)
    after = record.begin("name", "b", 3.0)
    record.end(late, 2.9, 3.1)
    assert (late.ended, record.held()) == (3.0, after)
    assert (record.sites["a"].held_s, record.sites["a"].blocked_s) == (2.9, 3.0)


def test_a_release_without_a_known_acquire_counts() -> None:
    record = LockRecord()
    record.end(None, 2.0, 2.0)
    assert (record.held_s, record.longest_held_s, record.sites) == (2.0, 2.0, {})


def test_the_names_of_the_least_time_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_NAMES", 10)
    kept = Records()
    for number in range(100):
        record = kept.of(f"name-{number}")
        assert kept.of(f"name-{number}") is record
        record.end(record.begin(f"name-{number}", "site", 0.0), 0.1, 0.1)
        record.note_wait(1000.0 - number if number < 5 else 1.0, 0.1)
        record.failures += 1
        record.losses += 1
    found = kept.all()
    assert len(found) <= 21
    assert set(found) >= {OTHER, *(f"name-{number}" for number in range(5))}
    assert sum(record.acquisitions for record in found.values()) == 100
    assert sum(record.failures for record in found.values()) == 100
    assert sum(record.losses for record in found.values()) == 100
    assert sum(record.held_s for record in found.values()) == pytest.approx(10.0)
    assert found[OTHER].sites["site"].acquisitions == found[OTHER].acquisitions
    assert found[OTHER].waits.quantile_s(0.99) == 1.0


def test_the_sites_of_a_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_SITES", 3)
    record = LockRecord()
    for number in range(10):
        record.end(record.begin("name", f"site-{number}", 0.0), 1.0, 1.0)
    assert {name: site.held_s for name, site in record.sites.items()} == {
        "site-0": 1.0,
        "site-1": 1.0,
        "site-2": 1.0,
        OTHER: 7.0,
    }


# The orders in which locks are acquired, and the cycles among them


def pairs(text: str) -> list[tuple[str, str]]:
    """Orders from "ab bc": b was acquired while a was held, and c while b was."""
    return [(pair[0], pair[1]) for pair in text.split()]


@pytest.mark.parametrize(
    ("text", "cycles"),
    [
        ("", []),
        ("ab bc ac", []),
        ("ab ba", ["ab ba"]),
        ("ab bc ca", ["ab bc ca"]),
        ("ab bc ca ac", ["ac ca", "ab bc ca"]),
        ("ab ba bc cd dc", ["ab ba", "cd dc"]),
        ("xa ab bc ca cy", ["ab bc ca"]),
    ],
)
def test_each_order_in_a_cycle_is_in_one_of_the_shortest(text: str, cycles: list[str]) -> None:
    found = [" ".join(map("".join, cycle)) for cycle in cycles_of(pairs(text))]
    assert sorted(map(turned, found)) == sorted(map(turned, cycles))


def turned(cycle: str) -> list[str]:
    """A cycle, begun at its least order."""
    parts = cycle.split()
    first = parts.index(min(parts))
    return parts[first:] + parts[:first]


def test_an_order_is_in_a_cycle_if_there_is_a_way_back() -> None:
    chosen = random.Random(23)
    for _ in range(200):
        names = "abcdefgh"
        some = {(a, b) for a, b in zip(chosen.choices(names, k=14), chosen.choices(names, k=14), strict=True) if a != b}
        found = cycles_of(some)
        for cycle in found:
            assert set(cycle) <= some
            assert [name for _, name in cycle] == [held for held, _ in cycle[1:] + cycle[:1]]
        expected = {(held, name) for held, name in some if held in reached(some, name)}
        assert {order for cycle in found for order in cycle} == expected


def reached(some: set[tuple[str, str]], start: str) -> set[str]:
    """The names to which orders lead from this one."""
    names = {start}
    while more := {name for held, name in some if held in names} - names:
        names |= more
    return names


def test_a_long_chain_of_orders_is_no_deep_recursion() -> None:
    chain = [(str(number), str(number + 1)) for number in range(5_000)]
    assert cycles_of(chain) == []
    assert cycles_of([*chain, ("5000", "0")]) == [[*chain, ("5000", "0")]]


def test_the_orders_that_were_seen_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MOST_ORDERS", 2)
    seen = Orders()
    for held, name in pairs("ab bc ab cd"):
        seen.note(held, f"{held}'s site", name, f"{name}'s site")
    assert {pair: order.as_dict() for pair, order in seen.copy().items()} == {
        ("a", "b"): {"held_site": "a's site", "acquired_site": "b's site", "count": 2},
        ("c", "d"): {"held_site": "c's site", "acquired_site": "d's site", "count": 1},
    }


def test_no_more_than_100_cycles_are_told() -> None:
    assert len(cycles_of([pair for i in range(200) for pair in ((f"a{i}", f"b{i}"), (f"b{i}", f"a{i}"))])) == 100
