"""Faults of the command line."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_GUARD = "tests/unit/cli/test_run.py::"
_LEAD = "tests/integration/cli/test_lead.py::"
_RUN = "tests/integration/cli/test_run.py::"

FAULTS = (
    Fault(
        "command is killed only when its lease has ended",
        "_cli/guard.py",
        "self._kill_at = now + left_s - self._margin_s",
        "self._kill_at = now + left_s",
        f"{_GUARD}test_command_that_ignores_term_is_killed_before_its_lease_ends",
    ),
    Fault(
        "command is left alone after a loss that a renewal finds out",
        "_cli/guard.py",
        "self._kill_at = min(self._kill_at, self._kill_after_loss_at)",
        "",
        f"{_GUARD}test_command_is_told_at_once_and_killed_soon_after_a_loss",
    ),
    Fault(
        "signal that came before the wait for the lock does not end it",
        "_cli/signals.py",
        "for number in self._received:",
        "for number in ():",
        "tests/unit/cli/test_run.py::test_signal_that_came_before_the_wait_ends_it",
    ),
    Fault(
        "signal that came before the command is not passed on",
        "_cli/signals.py",
        "self._received.append(number)",
        "pass",
        "tests/unit/cli/test_run.py::test_signals_are_noted_in_their_order",
    ),
    Fault(
        "exit code is lost where SIGCHLD was ignored",
        "_cli/signals.py",
        "signal.signal(signal.SIGCHLD, _do_nothing)",
        "pass",
        f"{_RUN}test_signal_that_is_ignored_stays_ignored",
    ),
    Fault(
        "signal that was ignored is passed on",
        "_cli/signals.py",
        "if signal.getsignal(number) is not signal.SIG_IGN:",
        "if True:",
        f"{_RUN}test_signal_that_is_ignored_stays_ignored",
    ),
    Fault(
        "signal reaches the command alone",
        "_cli/child.py",
        "os.killpg(self._process.pid, number)",
        "os.kill(self._process.pid, number)",
        f"{_RUN}test_signal_reaches_what_the_command_has_started",
    ),
    Fault(
        "command outlives a process that is killed",
        "_cli/child.py",
        'kill -KILL "-$group"',
        'kill -KILL "$group"',
        f"{_RUN}test_nothing_of_the_command_outlives_a_process_that_is_killed",
    ),
    Fault(
        "lock is released before the least time is over",
        "_cli/run.py",
        "if rest_s <= 0:",
        "if rest_s <= 3600:",
        "tests/integration/cli/test_run.py::test_lock_is_kept_for_the_least_time_that_was_asked_for",
    ),
    Fault(
        "permit of another holder is broken",
        "_procedures/breaking.py",
        "if token_id_of(token) == token_id:",
        "if token:",
        "tests/integration/cli/test_semaphores.py::test_break_takes_one_permit[True]",
    ),
    Fault(
        "command goes on without its permit",
        "_cli/run.py",
        "arguments.limit, **_terms(arguments, guard))",
        "arguments.limit, **{**_terms(arguments, guard), 'on_lost': None})",
        "tests/integration/cli/test_run.py::test_command_is_ended_where_the_permit_is_lost",
    ),
    Fault(
        "command that fails counts as done",
        "_cli/run.py",
        "if code == 0 and isinstance(lock, Lock)",
        "if isinstance(lock, Lock)",
        f"{_RUN}test_command_that_fails_is_run_by_the_next_process",
    ),
    Fault(
        "command is run again by a process that has waited for it",
        "_cli/run.py",
        "if _is_done(client, arguments):  # it was done meanwhile",
        "if False:",
        f"{_RUN}test_others_wait_until_the_command_is_done",
    ),
    Fault(
        "leader's command is not told its term",
        "_cli/lead.py",
        "environment_of(lock.name, term=lock.fence)",
        "environment_of(lock.name)",
        f"{_LEAD}test_command_is_told_its_term",
    ),
    Fault(
        "command is told the term of another election around it",
        "_cli/holding.py",
        "        environment.pop(variable, None)\n",
        "        environment.get(variable, None)\n",
        f"{_LEAD}test_command_is_told_its_term",
    ),
    Fault(
        "leader's command that was told to end is run again",
        "_cli/lead.py",
        "if passed_on & _ENDS or code - 128 in passed_on:",
        "if code - 128 in passed_on:",
        "tests/unit/cli/test_lead.py::test_when_a_command_is_run_again",
    ),
    Fault(
        "what a leader's command has started outlives its term",
        "_cli/lead.py",
        "        guard.end_others(lock, child)\n",
        "",
        f"{_LEAD}test_nothing_of_the_command_outlives_its_term",
    ),
    Fault(
        "leader whose term was lost does not campaign again",
        "_cli/lead.py",
        "        if not guard.has_ended_it:\n            return code\n",
        "        return code\n",
        f"{_LEAD}test_term_that_is_lost_ends_the_command_and_another_one_begins",
    ),
)
