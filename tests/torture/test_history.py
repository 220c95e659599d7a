"""A history is read as it was written."""

from __future__ import annotations

from pathlib import Path

from tests.torture.history import INFO, OK, Attempt, Fault, History, Log, Stall, read


def test_events_of_an_attempt_are_put_together_from_all_files(tmp_path: Path) -> None:
    first, second = Log(tmp_path, "first"), Log(tmp_path, "second")
    first.note("asked", 10, id="a", name="name", by="push", waits=False, limit_s=0.5, label="", is_watched=True)
    first.note("answered", 20, id="a", outcome=OK, until=500, fence=7)
    first.note("seen", 30, id="a", until=600)
    second.note("releasing", 40, id="a", until=590)  # the lock was attached there
    second.note("released", 50, id="a", outcome=OK)
    second.note("asked", 60, id="b", name="name")
    first.note("fault", 15, kind="link cut", until=25, processes=["first"])
    for log in (first, second):
        log.close()
    history = read(tmp_path)
    held = Attempt("a", "first", "name", 10, waits=False, limit_s=0.5, is_watched=True, answered=20, outcome=OK)
    held.fence, held.until, held.releasing, held.released, held.release = 7, 600, 40, 50, OK
    assert history.attempts == [held, Attempt("b", "second", "name", 60, outcome=INFO)]
    assert history.faults == [Fault("link cut", 15, 25, processes=frozenset({"first"}))]
    assert history.attempts[0].ends == 40


def test_a_loss_that_is_told_after_the_lock_was_dropped_is_not_why_it_was_released(tmp_path: Path) -> None:
    log = Log(tmp_path, "p")
    log.note("asked", 10, id="a", name="name", by="push")
    log.note("answered", 20, id="a", outcome=OK, until=0, fence=None)
    log.note("released", 30, id="a", outcome=INFO, reason="dropped")
    log.note("lost", 40, id="a", reason="expired")
    log.close()
    (attempt,) = read(tmp_path).attempts
    assert (attempt.reason, attempt.lost) == ("dropped", 40)


def test_half_a_line_of_a_killed_process_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "killed.jsonl").write_text('{"what":"asked","at":1,"process":"killed","id":"a","name":"n"}\n{"what":')
    assert [attempt.id for attempt in read(tmp_path).attempts] == ["a"]


def test_stalls_of_the_machine_and_of_the_named_processes_count_by_what_lies_within() -> None:
    history = History(stalls=[Stall(10, 20), Stall(15, 40), Stall(35, 50, "p"), Stall(0, 100, "another")])
    for since, until, machine, with_p in ((0, 9, 0, 0), (12, 18, 9, 9), (15, 45, 30, 40), (60, 70, 0, 0)):
        assert (machine, with_p) == (history.stalled(since, until), history.stalled(since, until, "p"))
