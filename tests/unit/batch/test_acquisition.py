"""Unit tests: the rounds of a batch, by a clock that stands still between its steps."""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._batch import BatchLease, Plan, acquire_locks, acquisition
from redislock_fast._util.tokens import new_token


def test_last_round_is_begun_early_enough_to_end_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, round_s = 0.0, 0.25
    monkeypatch.setattr(acquisition, "clock", lambda: now_s)
    plan = Plan(["a"], lambda _: ([b"a"], True), timeout=None, blocking_timeout=1.375, sleep=0.5, all_or_nothing=False)
    steps = acquire_locks(BatchLease(plan, new_token))
    pauses_s: list[float] = []
    step = next(steps)
    missed: Any = None
    while missed is None:
        if step.method == "execute":
            step.args[0].results = [False]
            now_s += round_s
        elif step.method == "sleep":
            pauses_s.append(step.args[0])
            now_s += step.args[0]
        try:
            step = steps.send([[0]] if step.method == "split" else None)
        except StopIteration as ended:
            missed = ended.value
    assert missed == [0]
    assert pauses_s == [0.5, 0.125]
    assert now_s == 1.375
