"""Unit tests: the rounds of a batch, by a clock that stands still between its steps."""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._batch import BatchLease, Plan, acquiring, acquisition
from redislock_fast._procedures.steps import Execute, Sleep, Split
from redislock_fast._util.tokens import new_token


def test_last_round_is_begun_early_enough_to_end_by_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, round_s = 0.0, 0.25
    monkeypatch.setattr(acquisition, "clock", lambda: now_s)
    plan = Plan(["a"], lambda _: ([b"a"], True), timeout=None, blocking_timeout=1.375, sleep=0.5, all_or_nothing=False)
    steps = acquiring(BatchLease(plan, new_token))
    pauses_s: list[float] = []
    step = next(steps)
    missed: Any = None
    while missed is None:
        if isinstance(step, Execute):
            step.operation.results = [False]  # type: ignore[attr-defined]  # a pipeline
            now_s += round_s
        elif isinstance(step, Sleep):
            pauses_s.append(step.seconds)
            now_s += step.seconds
        try:
            step = steps.send([[0]] if isinstance(step, Split) else None)
        except StopIteration as ended:
            missed = ended.value
    assert missed == [0]
    assert pauses_s == [0.5, 0.125]
    assert now_s == 1.375
