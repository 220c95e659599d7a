"""The checker finds each breach in a history that has it, and blames no sound one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.torture.checker import ALLOWED, check
from tests.torture.history import FAIL, INFO, NOT_OWNED, OK, SECOND, Attempt, Fault, History, Span, Stall, Write

MS = SECOND // 1000


def hold(begins: int, ends: int, lease: int = 1000, **fields: object) -> Attempt:
    """A lock that was held from one millisecond to another and released then."""
    attempt = Attempt(f"at {begins}", f"process {begins}", "name", (begins - 1) * MS)
    attempt.answered, attempt.outcome, attempt.until = begins * MS, OK, (begins + lease) * MS
    attempt.releasing, attempt.released, attempt.release = ends * MS, (ends + 1) * MS, OK
    return replace(attempt, **fields)  # type: ignore[arg-type]


def failed(begins: int, ends: int, outcome: str = FAIL, **fields: object) -> Attempt:
    """An acquire that ended without the lock."""
    attempt = Attempt(f"at {begins}", f"process {begins}", "name", begins * MS)
    attempt.answered, attempt.outcome = ends * MS, outcome
    return replace(attempt, **fields)  # type: ignore[arg-type]


def fault(kind: str, since: int, until: int, **fields: object) -> Fault:
    """A fault, in milliseconds."""
    return replace(Fault(kind, since * MS, until * MS), **fields)  # type: ignore[arg-type]


def broken(*attempts: Attempt, **fields: object) -> list[str]:
    """The rules that these attempts break."""
    history = History(attempts=list(attempts), ended={attempt.process for attempt in attempts})
    return [violation.rule for violation in check(replace(history, **fields))]  # type: ignore[arg-type]


SOUND = [hold(10, 20, fence=1), hold(30, 40, fence=2), failed(12, 25), failed(12, 25, waits=False, limit_s=0.0)]


def test_sound_history_breaks_nothing() -> None:
    assert broken(*SOUND, free=[Span("name", 41 * MS, 5000 * MS)], stalls=[Stall(0, 5 * MS)]) == []


def test_as_many_permits_as_may_be_held_break_nothing() -> None:
    assert broken(*(hold(begins, ends, name="permits:2") for begins, ends in ((10, 20), (11, 30), (20, 25)))) == []


@pytest.mark.parametrize(
    ("rule", "attempts", "fields"),
    [
        ("exclusion", [hold(10, 20), hold(19, 30)], {}),
        ("exclusion", [hold(10, 40), hold(12, 13), hold(39, 50)], {}),
        ("exclusion", [hold(10, 20, label="a"), hold(19, 30, label="b")], {}),
        (
            "exclusion",
            [hold(10, 20, name="permits:2"), hold(11, 30, name="permits:2"), hold(19, 30, name="permits:2")],
            {},
        ),
        ("fence", [hold(10, 20, fence=2), hold(30, 40, fence=1)], {}),
        ("fence", [hold(10, 20, fence=1), hold(30, 40, fence=1)], {}),
        ("lost update", [], {"writes": [Write("name", "p", at, at, 7, True) for at in (1, 2)]}),
        ("taken", [hold(10, 20, release=NOT_OWNED)], {}),
        ("taken", [hold(10, 20, lost=15 * MS)], {}),
        ("forgotten", [failed(10, 400)], {"free": [Span("name", 20 * MS, 300 * MS)]}),
        ("forgotten", [hold(400, 410, asked=10 * MS)], {"free": [Span("name", 20 * MS, 300 * MS)]}),
        ("forgotten", [hold(400, 410, asked=10 * MS)], {"free": [Span("name", 20 * MS, 400 * MS)]}),
        ("orphan", [failed(10, 400, INFO, reason="CancelledError")], {"kept": [Span("name", 20 * MS, 900 * MS)]}),
        ("orphan", [hold(10, 20), hold(900, 910)], {"kept": [Span("name", 5 * MS, 920 * MS)]}),
        ("orphan", [hold(10, 20), failed(100, 300), failed(110, 600)], {"kept": [Span("name", 5 * MS, 900 * MS)]}),
        ("turn", [hold(400, 410, asked=10 * MS), hold(300, 310, asked=200 * MS)], {}),
        ("turn", [failed(10, 900), hold(300, 310, asked=200 * MS)], {}),
        ("limit", [failed(10, 280, limit_s=0.1)], {}),
        ("limit", [failed(10, 180, limit_s=0.0)], {}),
        ("limit", [hold(280, 290, asked=10 * MS, limit_s=0.1)], {}),
        ("hang", [failed(10, 10, answered=None)], {}),
        ("hang", [hold(10, 20, released=None, release="")], {}),
        ("told", [hold(10, 500, lease=100, is_watched=True, invalid=120 * MS, release=NOT_OWNED)], {}),
        ("told", [hold(10, 500, lease=100, is_watched=True, invalid=120 * MS, lost=400 * MS)], {}),
        ("error", [failed(10, 20, INFO, reason="ConnectionError")], {}),
        ("error", [hold(10, 20, release=INFO, reason="ConnectionError")], {}),
        ("crash", [], {"errors": [("p", 5, "ended with status -11")]}),
        ("left", [], {"left": [("left", 5, "a key")]}),
        ("left queue", [], {"left": [("left queue", 5, "a key")]}),
        ("left task", [], {"left": [("left task", 5, "a cleanup")]}),
    ],
)
def test_each_breach_is_found(rule: str, attempts: list[Attempt], fields: dict[str, object]) -> None:
    assert set(broken(*attempts, **fields)) == {rule}


@pytest.mark.parametrize(
    ("attempts", "fields"),
    [
        ([hold(10, 900, lease=100), hold(120, 130)], {}),  # the lease had ended
        ([hold(10, 900, lease=100, release=NOT_OWNED), hold(120, 130)], {}),
        ([hold(10, 20, label="a"), hold(12, 30, label="a")], {}),  # one token is one holder
        ([hold(10, 20, label="a"), hold(12, 60, label="a", release=NOT_OWNED), hold(22, 30)], {}),
        ([failed(10, 15, label="a"), hold(20, 60, label="a", release=NOT_OWNED)], {}),  # which gave the key back
        ([hold(30, 40, asked=5 * MS, fence=2), hold(10, 20, asked=9 * MS, fence=1)], {}),
        ([], {"writes": [Write("name", "p", at, at, 7, at == 1) for at in (1, 2)]}),  # one was refused
        ([failed(10, 400)], {"free": [Span("name", 20 * MS, 269 * MS)]}),
        ([failed(10, 400, waits=False)], {"free": [Span("name", 20 * MS, 300 * MS)]}),
        ([failed(10, 400)], {"free": [Span("name", 20 * MS, 300 * MS)], "stalls": [Stall(30 * MS, 70 * MS)]}),
        ([hold(10, 700), failed(800, 900)], {"kept": [Span("name", 5 * MS, 1090 * MS)]}),
        ([hold(10, 700), hold(710, 900)], {"kept": [Span("name", 5 * MS, 1090 * MS)]}),
        (
            [hold(10, 700, process="p", by="linger"), hold(710, 900, process="p", by="linger")],
            {"kept": [Span("name", 5 * MS, 1290 * MS)]},
        ),
        ([hold(10, 700, label="a"), hold(610, 900, label="a")], {"kept": [Span("name", 5 * MS, 1290 * MS)]}),
        ([hold(400, 410, asked=10 * MS), hold(300, 310, asked=100 * MS)], {}),  # it may not stand in the queue yet
        ([hold(400, 410, asked=10 * MS), hold(300, 310, asked=200 * MS, by="redis-py")], {}),
        ([failed(10, 340, limit_s=0.1)], {"stalls": [Stall(50 * MS, 200 * MS)]}),
        ([failed(10, 10, answered=None)], {"ended": set()}),  # its process was killed
        ([failed(10, 20, INFO, reason="CancelledError")], {}),
        ([hold(10, 500, lease=100, is_watched=True, invalid=120 * MS, lost=200 * MS)], {}),
    ],
)
def test_what_is_not_promised_is_no_breach(attempts: list[Attempt], fields: dict[str, object]) -> None:
    assert broken(*attempts, **fields) == []


OVERLAP = [hold(10, 20), hold(19, 30)]


@pytest.mark.parametrize(
    ("kind", "since", "explains"),
    [("key deleted", 15, True), ("all deleted", 15, True), ("key deleted", 25, False), ("server killed", 15, False)],
)
def test_a_fault_explains_what_its_class_may_break_and_in_its_time(kind: str, since: int, explains: bool) -> None:
    assert broken(*OVERLAP, faults=[fault(kind, since, since)]) == ([] if explains else ["exclusion"])


def test_a_fault_explains_nothing_elsewhere() -> None:
    elsewhere = [fault("key deleted", 15, 15, names=frozenset({"another"}))]
    assert broken(*OVERLAP, faults=elsewhere) == ["exclusion"]
    late = failed(10, 280, limit_s=0.1)
    stopped = fault("client stopped", 15, 270, processes=frozenset({late.process}))
    assert broken(late, faults=[stopped]) == []
    assert broken(late, faults=[replace(stopped, processes=frozenset({"another"}))]) == ["limit"]


@pytest.mark.parametrize(
    ("asked_ms", "release", "longest_ms"),
    [(10, INFO, 1250), (10, NOT_OWNED, 1250), (10, OK, 250), (40, INFO, 250)],
    ids=["no release", "late release", "release", "known lease"],
)
def test_the_end_of_a_lease_that_a_waiter_has_not_heard_of_is_found_by_a_health_check(
    asked_ms: int, release: str, longest_ms: int
) -> None:
    holder, waiter = hold(30, 90, lease=100, release=release), failed(asked_ms, 5000)
    for free_ms, breaks in ((longest_ms - 1, []), (longest_ms + 1, ["forgotten"])):
        free = [Span("name", 140 * MS, (140 + free_ms) * MS)]
        assert [rule for rule in broken(holder, waiter, free=free) if rule == "forgotten"] == breaks


@pytest.mark.parametrize(("topology", "late_ms"), [("single", 800), ("cluster", 1800)])
def test_the_first_use_of_a_client_and_its_turn_take_round_trips(topology: str, late_ms: int) -> None:
    waiter = failed(0, 5000)
    slow = replace(fault("link delayed", 0, 0, processes=frozenset({waiter.process})), delay_s=0.1)
    given = {"settings": {"topology": topology}, "faults": [slow]}
    for free_ms, breaks in ((249, []), (251, ["forgotten"])):
        assert breaks == broken(waiter, free=[Span("name", 0, (late_ms + free_ms) * MS)], **given)


def test_a_deleted_database_explains_a_fence_that_a_waiter_gets_again_afterwards() -> None:
    twins = [hold(10, 900, lease=100, asked=6 * MS, fence=1), hold(700, 710, asked=5 * MS, fence=1)]
    assert broken(*twins) == ["fence"]
    assert broken(*twins, faults=[fault("all deleted", 600, 600)]) == []


@pytest.mark.parametrize(("ended_ms", "explains"), [(7000, True), (2000, True), (1900, False)])
def test_a_cleanup_goes_on_while_the_server_cannot_be_asked(ended_ms: int, explains: bool) -> None:
    left = [("left task", 5910 * MS, "a cleanup")]
    assert broken(left=left, faults=[fault("server stopped", 900, ended_ms)]) == ([] if explains else ["left task"])


def test_redis_py_may_break_more_while_a_fault_lasts() -> None:
    taken = hold(10, 20, release=NOT_OWNED, by="redis-py")
    assert broken(taken) == ["taken"]
    assert broken(taken, faults=[fault("link cut", 15, 16)]) == []
    assert broken(replace(taken, by="push"), faults=[fault("link cut", 15, 16)]) == ["taken"]


def test_no_fault_breaks_a_fence_or_exclusion_unless_data_is_lost() -> None:
    assert {kind for kind, allowed in ALLOWED.items() if "exclusion" in allowed} == {
        "key deleted",
        "all deleted",
        "primary split",
    }
    assert {kind for kind, allowed in ALLOWED.items() if "fence" in allowed} == {"all deleted", "primary split"}
