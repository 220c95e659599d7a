"""Faults of requests, and of what replies mean."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_BY_TOKEN = "tests/integration/lock/test_by_token.py::"

FAULTS = (
    Fault(
        "release fails where the native command is refused",
        "_protocol/commands.py",
        "        if self._native:\n            self._refusal_code = code\n            return False\n",
        "",
        "tests/unit/protocol/test_commands.py::test_release_goes_on_with_the_script_where_the_native_command_is_refused",
    ),
    Fault(
        "acquire sets a key that another holds",
        "_protocol/commands.py",
        'return (b"SET", key, token, b"NX", b"PX", ttl_ms, b"GET"), None',
        'return (b"SET", key, token, b"PX", ttl_ms, b"GET"), None',
        "tests/unit/protocol/test_commands.py::test_acquire_request",
    ),
    Fault(
        "lease counts from the last request of an acquire",
        "_protocol/commands.py",
        "        if not self.sent_at:\n            self.sent_at = now\n        if self._looking:",
        "        self.sent_at = now\n        if self._looking:",
        "tests/unit/protocol/test_commands.py::test_acquire_finds_its_own_token_after_a_lost_reply",
    ),
    Fault(
        "acquire takes an equal token of another holder for its own",
        "_protocol/commands.py",
        "self.result = self.unsettled and is_held_with(reply, self.token)",
        "self.result = is_held_with(reply, self.token)",
        "tests/unit/protocol/test_commands.py::test_acquire_does_not_take_an_equal_token_that_it_did_not_set",
    ),
    Fault(
        "acquire that is sent again does not find its own token",
        "_protocol/commands.py",
        "self.result = self.unsettled and is_held_with(reply, self.token)",
        "self.result = False",
        "tests/unit/protocol/test_commands.py::test_acquire_finds_its_own_token_after_a_lost_reply",
    ),
    Fault(
        "acquire of unknown outcome leaves its key",
        "_protocol/commands.py",
        "return [(self.key, self.token)] if self.unsettled and not self.result else []",
        "return []",
        "tests/unit/protocol/test_pipeline.py::test_many_undoes_what_its_machines_undo",
    ),
    Fault(
        "release that is sent again forgets that the first may have been executed",
        "_protocol/commands.py",
        "self.result = reply > 0 or (self.unsettled and self.valid)",
        "self.result = reply > 0",
        "tests/unit/protocol/test_commands.py::test_release_that_finds_nothing_after_a_loss",
    ),
    Fault(
        "release that left after the lease is taken for a success",
        "_protocol/commands.py",
        "self.result = reply > 0 or (self.unsettled and self.valid)",
        "self.result = reply > 0 or self.unsettled",
        "tests/unit/protocol/test_commands.py::test_release_that_finds_nothing_after_a_loss",
    ),
    Fault(
        "break takes the lock from any holder",
        "_procedures/breaking.py",
        "if not token or token_id_of(token) != token_id:",
        "if not token:",
        "tests/unit/procedures/test_breaking.py::test_nothing_is_released_for_another_holder",
    ),
    Fault(
        "native release ignores the contended flag",
        "_protocol/commands.py",
        'if self._step == "delete" and (reply == 2 or (reply == 0 and self._native and is_ours(self.token))):',
        'if self._step == "delete" and reply == 2:',
        "tests/unit/protocol/test_contended.py::test_release_hands_a_marked_lock_over",
    ),
    Fault(
        "native reacquire ignores the contended flag",
        "_protocol/commands.py",
        "if reply is None and self._native and self._value is self.token and is_ours(self.token):",
        "if False:",
        "tests/unit/protocol/test_contended.py::test_reacquire_of_a_marked_lock_keeps_the_mark",
    ),
    Fault(
        "renewal creates a key that is gone",
        "_protocol/commands.py",
        'return (b"SET", self.key, self._value, b"IFEQ", self._value, b"PX", self.ttl_ms)',
        'return (b"SET", self.key, self._value, b"PX", self.ttl_ms)',
        "tests/unit/protocol/test_commands.py::test_reacquire_request",
    ),
    Fault(
        "extend that is sent again has no limit",
        "_protocol/commands.py",
        "if not self.unsettled or self._replace:",
        "if True:",
        "tests/unit/protocol/test_commands.py::test_extend_caps_what_it_sends_again",
    ),
    Fault(
        "acquire with a token of the caller cleans up what another caller may hold",
        "_protocol/own_token.py",
        "        return []\n",
        "        return [(self.key, self.token)] if self.unsettled else []\n",
        "tests/unit/protocol/test_own_token.py::test_set_of_unknown_outcome_leaves_the_earlier_lock_alone",
    ),
    Fault(
        "lock that is found with the token of the caller keeps its old lease",
        "_protocol/own_token.py",
        "self.sent_at = renewal.sent_at",
        "pass",
        "tests/unit/protocol/test_own_token.py::test_lock_that_is_held_with_the_token_has_its_lease_anew",
    ),
    Fault(
        "late reply to an acquire with a token of the caller is ignored",
        "_protocol/claims.py",
        "            self._claim.take()\n",
        "            pass\n",
        f"{_BY_TOKEN}test_acquire_that_is_given_up_gives_back_what_it_has_taken[valkey-threads-by_time-plain]",
    ),
    Fault(
        "what an acquire takes after another with its token has released is left",
        "_protocol/claims.py",
        "            self._claims.join(operation, self._entry)\n",
        "            pass\n",
        f"{_BY_TOKEN}test_what_an_attempt_takes_after_another_has_released_is_undone[valkey-tasks-60.0]",
    ),
    Fault(
        "reader waits for a caller that has the mutex of a claim",
        "_protocol/claims.py",
        "self.mutex.acquire(blocking=False)",
        "self.mutex.acquire()",
        "tests/unit/protocol/test_claims.py::test_late_reply_waits_for_no_caller",
    ),
    Fault(
        "key that another acquire with the same token holds is cleaned up",
        "_protocol/claims.py",
        "return self._is_taken and not self._is_held and not self.under_way",
        "return self._is_taken",
        f"{_BY_TOKEN}test_acquire_that_fails_leaves_the_lock_of_another_with_the_token[valkey-threads-by_time-plain]",
    ),
    Fault(
        "fenced acquire takes an equal token of another holder for its own",
        "_protocol/fenced.py",
        "verdict == TAKEN or (verdict == HELD and self.unsettled)",
        "verdict in (TAKEN, HELD)",
        (
            "tests/unit/protocol/test_fenced.py::"
            "test_acquire_finds_its_own_token_after_a_lost_reply_only[never sent-unmarked]"
        ),
    ),
    Fault(
        "replica that lacks the lock counts",
        "_protocol/replicas.py",
        "self.result = counted >= self._wanted",
        "self.result = True",
        "tests/integration/lock/test_replication.py::test_too_few_raise_and_the_lock_is_given_back[valkey-threads]",
    ),
    Fault(
        "answer of a demoted primary is raised at once",
        "_protocol/operation.py",
        '"NOREPLICAS", "READONLY", NOAUTH',
        '"NOREPLICAS", NOAUTH',
        "tests/unit/protocol/test_replies.py::test_errors_that_mean_later",
    ),
    Fault(
        "request that is refused beside a subscription is not sent again",
        "_protocol/operation.py",
        "            if SUBSCRIBED in text:\n",
        "            if False:\n",
        (
            "tests/compat/test_fake_server.py::"
            "test_request_that_is_refused_beside_the_subscription_of_another_caller_is_sent_again[threads]"
        ),
    ),
    Fault(
        "script that a moving slot refuses is sent again forever",
        "_protocol/operation.py",
        'if later.code == "TRYAGAIN":',
        "if False:",
        "tests/unit/transport/test_routing.py::test_waiter_is_told_that_the_slot_moves_and_leaves_no_place_behind",
    ),
    Fault(
        "waiter of a moving slot leaves its earlier place in the queue",
        "_protocol/queue.py",
        "self.unsettled = True  # an earlier request may have joined the queue",
        "pass",
        "tests/unit/transport/test_routing.py::test_waiter_is_told_that_the_slot_moves_and_leaves_no_place_behind",
    ),
    Fault(
        "place in the queue of unknown outcome is not cleaned up",
        "_protocol/queue.py",
        "return [(self.key, self.token)] if self.unsettled else []",
        "return []",
        "tests/unit/protocol/test_queue.py::test_wait_of_unknown_outcome_is_undone_either_way",
    ),
    Fault(
        "cleanup deletes a lock for which others wait",
        "_protocol/queue.py",
        "            requests.append(leave.request(capabilities, 0.0))\n",
        "",
        "tests/unit/protocol/test_queue.py::test_undo_needs_no_cached_script",
    ),
    Fault(
        "queue of a lock is in another hash slot",
        "_protocol/keys.py",
        'return b"{%b}:rlf" % key',
        'return b"%b:rlf" % key',
        "tests/unit/protocol/test_keys.py::test_awkward_names_share_their_slot_with_what_stands_beside_them",
    ),
    Fault(
        "forked child draws the tokens of its parent",
        "_util/tokens.py",
        "self._stock: list[bytes] = []",
        'self._stock: list[bytes] = getattr(self, "_stock", [])',
        "tests/integration/lock/test_process.py::test_forked_children_draw_other_tokens[announced-ours-valkey]",
    ),
    Fault(
        "connection has the channel of the one before it, whose waiters are gone",
        "_util/tokens.py",
        "        number = (int(self.identifier[_STEM_BYTES:], 16) + 1) % _NUMBERS\n",
        "        number = int(self.identifier[_STEM_BYTES:], 16)\n",
        "tests/unit/util/test_tokens.py::test_connections_one_after_the_other_have_identifiers_with_one_stem",
    ),
    Fault(
        "report of a lock shows a part of a caller's own token",
        "_protocol/report.py",
        "        if not _MADE_HERE.fullmatch(token):  # nothing of another's token may be shown\n",
        '        if not token.startswith(b"rlf:"):\n',
        "tests/integration/lock/test_holders.py::test_no_token_is_shown[threads-valkey-rlf:canarycanarycanarycanarycanaryca]",
    ),
    Fault(
        "report of a lock calls a process dead that may not tell of itself",
        "_protocol/report.py",
        " and is_of_connection(identifier)\n",
        "\n",
        "tests/integration/lock/test_holders.py::test_holder_that_may_not_tell_of_itself_is_not_called_dead[threads-valkey]",
    ),
    Fault(
        "lock that an acquire found by its own token is cleaned up when the acquire fails",
        "_procedures/acquire.py",
        "return [(lock._key, token)] if call.own_token is None or took else []",
        "return [(lock._key, token)]",
        f"{_BY_TOKEN}test_acquire_that_fails_after_it_found_the_lock_leaves_it[threads-valkey]",
    ),
    Fault(
        "lock that an acquire took with its own token stays when the acquire fails",
        "_procedures/acquire.py",
        "return [(lock._key, token)] if call.own_token is None or took else []",
        "return [(lock._key, token)] if call.own_token is None else []",
        f"{_BY_TOKEN}test_acquire_that_fails_after_it_took_the_lock_gives_it_back[threads-valkey]",
    ),
)
