"""Faults of elections."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_TESTS = "tests/integration/election/test_election.py::"
_OBSERVING = "tests/integration/election/test_observing.py::"
_CREDENTIALS = "tests/integration/election/test_credentials.py::"
_FAILOVERS = "tests/integration/election/test_failovers.py::"

FAULTS = (
    Fault(
        "leader that has ended is shown",
        "_protocol/leading.py",
        "if not token or id_ != token_id_of(token).encode():",
        "if not token or id_ is None:",
        "tests/unit/protocol/test_leading.py::test_record_of_a_leader_that_has_ended_is_not_shown[another's]",
    ),
    Fault(
        "late leader overwrites the record of the next one",
        "_protocol/lua/lead.lua",
        "if value ~= ARGV[1] and value ~= ARGV[1] .. '+' then",
        "if false then",
        _TESTS + "test_leader_that_has_ended_meanwhile_is_not_noted[threads]",
    ),
    Fault(
        "leader believes a flag, not the clock",
        "election.py",
        "return term is not None and term.valid",
        "return term is not None and term.number > 0",
        _TESTS + "test_leader_that_does_not_stop_is_no_leader_by_the_clock[threads]",
    ),
    Fault(
        "leader is told to stop after its lease",
        "election.py",
        "on_danger=self._end_in_danger, on_lost=self._note_loss",
        "on_lost=self._note_loss",
        _TESTS + "test_leader_is_told_to_stop_before_its_lease_ends[threads]",
    ),
    Fault(
        "task goes on when its lease has ended",
        "_election/loop.py",
        "            self._task.cancel()\n",
        "            pass\n",
        _TESTS + "test_leader_that_does_not_stop_is_no_leader_by_the_clock[tasks]",
    ),
    Fault(
        "leader that is told to resign gives the lock back while its work goes on",
        "election.py",
        "        self.stopping.set()\n\n    def _end_in_danger",
        "        self.stopping.set()\n        self._lock.release()\n\n    def _end_in_danger",
        _TESTS + "test_lock_is_given_back_when_the_work_has_ended[threads]",
    ),
    Fault(
        "leader that stops while its server is away raises that error",
        "election.py",
        "with Outage(self._election.name).survived():",
        "with contextlib.nullcontext():",
        _TESTS + "test_leader_that_stops_while_its_server_is_away_ends_without_an_error[threads]",
    ),
    Fault(
        "candidate gives up whose primary has no replica to write to",
        "_election/record.py",
        "and not later_code(str(error))",
        "",
        _FAILOVERS + "test_leader_on_the_old_primary_stops_before_another_one_leads_on_the_new_one[tasks-be_cut_off]",
    ),
    Fault(
        "candidate waits forever whose password is wrong",
        "_election/record.py",
        "        except BAD_CREDENTIALS:\n            raise\n",
        "",
        _CREDENTIALS + "test_candidate_whose_password_is_wrong_does_not_wait[threads]",
    ),
    Fault(
        "attempt of a renewal goes on while its leader is to be told to stop",
        "_procedures/loss.py",
        "danger_at - GRACE_S for",
        "danger_at + 1 for",
        "tests/unit/lease/test_lease.py::test_renewal_is_tried_again_when_the_danger_begins_and_ends_by_then",
    ),
    Fault(
        "observed terms do not rise",
        "_election/observing.py",
        "        self._last = leader.term\n",
        "",
        _TESTS + "test_each_leader_is_observed_and_terms_rise[threads]",
    ),
    Fault(
        "observer is not told of a new leader",
        "_election/observing.py",
        "self._is_denied = watch.denied",
        "self._is_denied = True",
        _OBSERVING + "test_observer_is_told_of_each_leader[threads]",
    ),
    Fault(
        "observer that is not told does not look",
        "_election/observing.py",
        "            if watch.denied:\n                break\n",
        "",
        _OBSERVING + "test_observer_looks_where_the_server_does_not_tell[threads--client|tracking]",
    ),
    Fault(
        "lock is read before the record of its leader",
        "_protocol/leading.py",
        """            (b"HMGET", leader_key(self.key), b"id", b"term", b"value", b"since"),
            (b"GET", self.key),
        ]
        return [*requests,""",
        """            (b"GET", self.key),
            (b"HMGET", leader_key(self.key), b"id", b"term", b"value", b"since"),
        ]
        return [*requests,""",
        "tests/unit/protocol/test_leading.py::test_record_is_read_before_the_lock_and_watched",
    ),
    Fault(
        "loss of a term takes the place of a cancel",
        "election.py",
        "            error = failure  # which the loss of the term must not replace: it may be a cancel\n",
        "            del failure\n",
        _TESTS + "test_error_of_on_stopped_ends_the_run_though_the_term_was_lost[threads]",
    ),
    Fault(
        "election leads on after an interrupt",
        "election.py",
        "            term._drop()  # noqa: SLF001  # of this very module\n",
        "",
        _TESTS + "test_run_that_is_interrupted_leaves_nothing[handled]",
    ),
    Fault(
        "term is entered again, and its lock given back while its work goes on",
        "election.py",
        "        if self._has_started:\n            raise",
        "        if False:\n            raise",
        _TESTS + "test_term_that_has_begun_is_not_entered_again[threads]",
    ),
)
