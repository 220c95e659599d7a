"""Faults of Redlocks."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_REDLOCK = "tests/unit/redlock/test_redlock.py::"

FAULTS = (
    Fault(
        "half of the servers is a majority",
        "_redlock/rounds.py",
        "self._quorum = count // 2 + 1",
        "self._quorum = count // 2",
        "tests/unit/redlock/test_redlock.py::test_more_than_half_of_the_servers_decide",
    ),
    Fault(
        "lease of a Redlock ignores clock drift",
        "_redlock/rounds.py",
        "return ttl_s - drift_s(ttl_s)",
        "return ttl_s",
        "tests/unit/redlock/test_redlock.py::test_lease_is_valid_for_its_ttl_less_what_clocks_may_drift",
    ),
    Fault(
        "server that has not answered is not cleaned up",
        "_redlock/rounds.py",
        "if self.sent[index] and self.votes[index] is not False",
        "if self.votes[index]",
        f"{_REDLOCK}test_attempt_without_a_majority_is_cleaned_up_wherever_it_may_have_set_the_key",
    ),
    Fault(
        "majority that agrees after the lease holds the lock",
        "_redlock/rounds.py",
        "if not self.agreed or now >= self.valid_until:",
        "if not self.agreed:",
        "tests/unit/redlock/test_redlock.py::test_majority_that_agrees_after_the_lease_does_not_hold_the_lock",
    ),
    Fault(
        "release at a server that does not answer is given up",
        "_redlock/rounds.py",
        "    must_execute = True\n",
        "    must_execute = False\n",
        "tests/integration/redlock/test_faults.py::test_release_that_is_lost_unread_is_done_again[threads-valkey]",
    ),
    Fault(
        "lease of a shorter ttl is believed to be the old one",
        "_redlock/lease.py",
        "self.times = times = (min(self.valid_until, now + valid_s(ttl_ms)), min(self.ends_at, now + ttl_ms / 1000))",
        "times = self.times",
        f"{_REDLOCK}test_request_that_sets_a_shorter_ttl_shortens_the_lease_before_it_is_answered",
    ),
    Fault(
        "of two requests that prolong at once the longer lease is believed",
        "_redlock/lease.py",
        "self.times = (min(times[0], round_.valid_until), min(times[1], round_.ends_at))",
        "self.times = (round_.valid_until, round_.ends_at)",
        f"{_REDLOCK}test_of_two_requests_that_set_the_lease_at_once_the_shorter_lease_is_certain",
    ),
    Fault(
        "Redlock of an acquire under way is another caller's",
        "_redlock/lease.py",
        "return majority if majority is not None and majority.token == owner.token else None",
        "return majority",
        (
            "tests/integration/redlock/test_redlock.py::"
            "test_lock_of_an_acquire_under_way_is_no_other_callers[valkey-plain-threads]"
        ),
    ),
    Fault(
        "interrupted Redlock leaves its keys",
        "_redlock/procedures.py",
        "        lock._quorum.clean_up_round(call.attempt)\n",
        "",
        "tests/unit/redlock/test_redlock.py::test_interrupted_redlock_is_cleaned_up",
    ),
    Fault(
        "Redlock whose acquire raises an error keeps its keys",
        "redlock.py",
        "            clean_up_after(self, call)\n            raise\n",
        "            raise\n",
        "tests/integration/redlock/test_holding.py::test_thread_that_cannot_be_started_fails_one_acquire_only",
    ),
    Fault(
        "interrupted Redlock of a task leaves its keys",
        "asyncio/redlock.py",
        "            clean_up_after(self, call)\n            raise\n",
        "            raise\n",
        "tests/unit/redlock/test_redlock.py::test_interrupted_redlock_of_a_task_is_cleaned_up",
    ),
    Fault(
        "release of a Redlock that goes on after an interrupt is refused when it is repeated",
        "_redlock/procedures.py",
        "doubtful = before.may_be_done",
        "doubtful = False",
        (
            "tests/integration/lock/test_interrupts.py::"
            "test_release_of_a_redlock_interrupted_at_any_line_can_be_repeated[KeyboardInterrupt-threads-{}-valkey]"
        ),
    ),
    Fault(
        "extend that is agreed to after the lease revives the Redlock",
        "_redlock/procedures.py",
        "if round_.agreed and clock() < majority.valid_until:",
        "if round_.agreed:",
        "tests/unit/redlock/test_redlock.py::test_extend_that_a_majority_agrees_to_counts_while_the_lease_is_valid",
    ),
    Fault(
        "rest of a lost Redlock is not given back",
        "_redlock/procedures.py",
        "        yield ask_servers(lock._quorum, release_round(lock, majority))\n        raise",
        "        raise",
        (
            "tests/integration/redlock/test_redlock.py::"
            "test_lost_lock_is_not_prolonged_and_its_rest_is_given_back[threads-valkey-extend]"
        ),
    ),
    Fault(
        "renewal without a majority of replies is taken for a loss",
        "_redlock/lease.py",
        "True if round_.agreed else False if round_.refused else None",
        "bool(round_.agreed)",
        "tests/unit/redlock/test_redlock.py::test_renewal_that_a_majority_does_not_answer_is_tried_again",
    ),
    Fault(
        "release whose connection broke is not done again",
        "_redlock/quorum.py",
        "            server.clean_up([(operation.key, operation.token)])\n",
        "            pass\n",
        "tests/integration/redlock/test_faults.py::test_release_that_is_lost_unread_is_done_again[threads-valkey]",
    ),
    Fault(
        "failed attempt of a Redlock is not cleaned up",
        "_redlock/quorum.py",
        "            if entries:\n                self._clean_up(round_, entries)\n",
        "",
        "tests/integration/redlock/test_redlock.py::test_a_minority_is_given_back[threads-valkey]",
    ),
    Fault(
        "server out of reach is connected to in each round",
        "_redlock/quorum.py",
        "return self.trouble is not None and now < self.retry_at",
        "return False",
        "tests/unit/redlock/test_redlock.py::test_server_that_could_not_be_reached_is_left_alone_for_a_while",
    ),
    Fault(
        "server that does not answer is asked without end",
        "_redlock/quorum.py",
        "return len(self.unanswered) >= _MOST_UNANSWERED",
        "return False",
        "tests/integration/redlock/test_faults.py::test_frozen_server_is_not_owed_ever_more[threads-valkey]",
    ),
)
