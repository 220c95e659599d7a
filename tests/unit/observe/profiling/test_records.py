"""The records of a profile: quantiles, whose holding a wait was for, and bounds."""

from __future__ import annotations

import pytest

from redislock_fast._observe.profiling import records
from redislock_fast._observe.profiling.records import OTHER, LockRecord, Records, Waits


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
