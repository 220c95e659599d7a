"""Faults of jobs that run once, while the others wait."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_TESTS = "tests/integration/once/test_waiting.py::"

FAULTS = (
    Fault(
        "job is noted as done after its lock was given back",
        "single.py",
        "            try:\n                self._drive(mark_done(self, self._done_for_ms))\n",
        (
            "            try:\n"
            "                steps = mark_done(self, self._done_for_ms)\n"
            "                super().__exit__(exc_type, exc_value, traceback)\n"
            "                return self._drive(steps)\n"
        ),
        _TESTS + "test_it_is_noted_before_another_one_can_have_the_lock[threads]",
    ),
    Fault(
        "job is run again by one that has waited for it",
        "single.py",
        "            is_done = self._drive(read_done(self._key))  # it may have been done meanwhile\n",
        "            is_done = False\n",
        _TESTS + "test_others_wait_until_the_job_is_done[threads-valkey]",
    ),
    Fault(
        "job that fails counts as done",
        "single.py",
        "if exc_type is None and self._done_for_ms is not None:",
        "if self._done_for_ms is not None:",
        _TESTS + "test_job_that_fails_is_run_by_the_next_one[threads]",
    ),
    Fault(
        "job of a lost lock counts as done",
        "_protocol/lua/done.lua",
        "if value ~= ARGV[1] and value ~= ARGV[1] .. '+' then",
        "if false then",
        _TESTS + "test_job_of_a_lost_lock_is_not_done[threads]",
    ),
    Fault(
        "lock of a job stays with its decorator after an interrupt",
        "single.py",
        "                attempt.drop()\n",
        "",
        "tests/integration/once/test_sharing.py::test_run_that_is_interrupted_frees_the_lock[handled-skip]",
    ),
)
