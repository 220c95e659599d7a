"""Faults of acquiring and of waiting."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_RECOVERY = "tests/integration/waiting/test_recovery.py::"
_WAITERS = "tests/unit/queue/test_waiters.py::"

FAULTS = (
    Fault(
        "waiter does without the queue whose connection another thread subscribes",
        "_queue/waiters.py",
        "            channel = self.channel_of(key)  # again",
        "            pass  # again",
        f"{_WAITERS}test_waiter_queues_whose_connection_is_subscribed_by_another_thread_meanwhile",
    ),
    Fault(
        "attempt asks a holder of another library to give the key up",
        "_util/tokens.py",
        "return token[_KIND] == LISTENS and is_ours(token)",
        "return token[_KIND] == LISTENS",
        (
            "tests/integration/waiting/test_mixed.py::"
            "test_attempt_that_does_not_wait_is_not_in_the_queue_while_redis_py_holds_the_lock[threads-valkey-1]"
        ),
    ),
    Fault(
        "lock that changes while the watch is armed is not read again",
        "_queue/waiting.py",
        "                if watches and watch.value != wait.value:\n                    continue\n",
        "",
        "tests/unit/queue/test_waiters.py::test_lock_that_changed_before_the_watch_was_armed_is_asked_for_again",
    ),
    Fault(
        "old grant is taken without a renewal",
        "_queue/waiting.py",
        "if ttl_ms is None or now - message.since <= ttl_ms * _SPENT / 1000:",
        "if True:",
        f"{_RECOVERY}test_lock_that_was_waited_for_longer_than_its_ttl_is_fresh[threads-valkey]",
    ),
    Fault(
        "request to leave the queue overtakes the text of its script",
        "_queue/waiters.py",
        "            with contextlib.suppress(ConnectionBroken):\n                self.node.post(",
        (
            "            self.registry.has_left.add(kind)\n"
            "            with contextlib.suppress(ConnectionBroken):\n"
            "                self.node.post("
        ),
        f"{_WAITERS}test_text_of_the_script_for_leaving_is_sent_before_others_do_without_it",
    ),
    Fault(
        "grant of an earlier place in the queue is taken",
        "_queue/waiters.py",
        "return type(message) is Grant and (not self.arrival or float(message.arrival or 0) >= self.arrival)",
        "return type(message) is Grant",
        "tests/unit/queue/test_waiters.py::test_grant_of_an_earlier_place_in_the_queue_is_not_taken",
    ),
    Fault(
        "waiting that fails leaves its place in the queue",
        "_queue/waiting.py",
        "            except BaseException:\n                waiter.withdraw()\n                raise\n",
        "",
        "tests/unit/queue/test_waiters.py::test_waiting_that_fails_leaves_the_queue",
    ),
    Fault(
        "waiter whose time is up stays in the queue",
        "_queue/waiting.py",
        "is_over:\n                    return (yield from self._leave(waiter, self.limit_s())) or TIME_UP",
        "is_over:\n                    return TIME_UP",
        "tests/integration/waiting/test_giving_up.py::test_a_waiter_that_gives_up_leaves_the_queue[threads-valkey]",
    ),
    Fault(
        "waiter whose time is up is given new time to leave the queue",
        "_queue/waiting.py",
        "is_over:\n                    return (yield from self._leave(waiter, self.limit_s())) or TIME_UP",
        "is_over:\n                    return (yield from self._leave(waiter, 0.0)) or TIME_UP",
        f"{_WAITERS}test_waiter_that_is_woken_long_after_its_deadline_leaves_within_its_deadline",
    ),
    Fault(
        "acquire that is refused after its deadline joins the queue",
        "_procedures/acquire.py",
        ("        if not contended and limit.is_over:\n            return False\n"),
        "",
        "tests/unit/procedures/test_acquisition.py::test_acquire_that_is_refused_after_its_deadline_asks_no_more",
    ),
    Fault(
        "grant that comes with the end of the time is dropped",
        "_queue/waiting.py",
        "return (yield from self._found(waiter, leave.value)) if leave.result else None",
        "return None",
        "tests/integration/waiting/test_giving_up.py::test_time_that_is_up_with_the_grant_on_its_way[threads-valkey]",
    ),
    Fault(
        "waiter that loses its connection keeps its token",
        "_queue/waiting.py",
        (
            "        if outcome is BROKEN and queues:\n"
            "            self.token = waiter.node.new_token(self.key, kind_of(self.token))\n"
        ),
        "",
        "tests/unit/queue/test_waiters.py::test_waiter_that_loses_its_connection_starts_again_with_a_new_token",
    ),
    Fault(
        "waiters that have all lost their places are not woken",
        "_queue/waiting.py",
        "                waiter.wake_others()\n",
        "                pass\n",
        "tests/unit/queue/test_waiters.py::test_health_check_that_finds_the_places_of_all_lost_wakes_the_others",
    ),
    Fault(
        "waiter of a moving slot asks again without a pause",
        "_queue/waiting.py",
        "if wait.denied == MOVING:",
        "if False:",
        "tests/unit/queue/test_waiters.py::test_waiter_in_a_slot_that_moves_tries_once_and_pauses",
    ),
    Fault(
        "health check is never due",
        "_queue/waiters.py",
        "if due_at is None or now < due_at:",
        "if True:",
        f"{_WAITERS}test_only_the_first_look_is_put_off_and_none_after_a_grant_that_only_a_look_has_found",
    ),
    Fault(
        "no other waiter makes the health checks when the poller leaves",
        "_queue/waiters.py",
        "        if self.poller is waiter:\n",
        "        if False:\n",
        "tests/unit/queue/test_waiters.py::test_the_shortest_interval_looks_and_of_equals_the_last",
    ),
    Fault(
        "waiter that has left stays in the queue by a late reply",
        "_queue/waiters.py",
        "        if self.waiters.get(waiter.token) is not waiter:\n            self.dequeue(waiter)\n",
        "",
        "tests/unit/queue/test_waiters.py::test_late_reply_brings_back_no_waiter_that_has_left",
    ),
    Fault(
        "waiter that comes as the last one leaves is alone",
        "_queue/waiters.py",
        "            if key_queue.waiters:  # another has come meanwhile\n",
        "            if False:\n",
        "tests/unit/queue/test_waiters.py::test_waiter_that_comes_as_the_last_one_leaves_shares_its_key_queue",
    ),
    Fault(
        "poller does not learn that the lease of the holder ends sooner",
        "_queue/waiters.py",
        "            poller.reckon()\n",
        "            pass\n",
        f"{_WAITERS}test_seat_that_looks_is_told_when_another_hears_of_a_lease_that_ends_sooner",
    ),
    Fault(
        "lease of a grant counts from the arrival of the message",
        "_queue/waiters.py",
        "since = max(waiter.since, waiter.key_queue.since)",
        "since = clock()",
        "tests/simulation/test_waiting.py::test_no_story_breaks_an_invariant[some]",
    ),
    Fault(
        "push for one lock wakes the waiters of all locks",
        "_queue/waiters.py",
        "for waiter in self._waiters() if keys is None or waiter.key in keys]",
        "for waiter in self._waiters()]",
        "tests/unit/queue/test_waiters.py::test_change_of_keys_wakes_the_waiters_of_these_keys",
    ),
    Fault(
        "flush of the server wakes no waiter",
        "_queue/waiters.py",
        "for waiter in self._waiters() if keys is None or waiter.key in keys]",
        "for waiter in self._waiters() if keys is not None and waiter.key in keys]",
        "tests/unit/queue/test_waiters.py::test_change_of_keys_wakes_the_waiters_of_these_keys",
    ),
    Fault(
        "grant is dropped when the acquire is cancelled",
        "_procedures/acquire.py",
        "        call.left += [(lock._key, token) for token in left_by_waiting(waiting, owner)]\n",
        "",
        "tests/integration/waiting/test_giving_up.py::test_dropped_at_any_point_of_waiting[valkey-asyncio]",
    ),
    Fault(
        "interrupted acquire leaves its key",
        "_procedures/acquire.py",
        "if must_clean_up_interrupted(call):",
        "if False:",
        (
            "tests/integration/waiting/test_giving_up.py::"
            "test_dropped_while_a_hook_that_has_the_lock_does_more[valkey-asyncio]"
        ),
    ),
    Fault(
        "deadline of a poller is ignored",
        "_procedures/acquire.py",
        "if not call.deadline.allows(pause_s):",
        "if False:",
        "tests/compat/test_waiting.py::test_blocking_timeout_sleeps_until_the_next_sleep_would_pass_it[threads-ours]",
    ),
    Fault(
        "token that is being cleaned up is used again",
        "_procedures/acquire.py",
        ("        call.token = lock._next_token(None)\n    if call.deadline.wait_s"),
        ("        pass\n    if call.deadline.wait_s"),
        (
            "tests/integration/lock/test_sharing.py::"
            "test_attempt_that_is_being_undone_does_not_wait_under_its_token[threads-valkey]"
        ),
    ),
    Fault(
        "lock that its own holder waits for is waited for without end",
        "_procedures/acquire.py",
        ("        and is_held_with(attempt.holder, owner.token)\n    ):\n"),
        ("        and False\n    ):\n"),
        (
            "tests/compat/test_fixed_bugs.py::"
            "test_acquire_again_while_held_raises_instead_of_waiting_for_ever[threads-ours-valkey]"
        ),
    ),
    Fault(
        "ticket is not redeemed",
        "_queue/waiting.py",
        "        if type(message) is Grant and self.own is None:\n",
        "        if type(message) is Grant:\n",
        ("tests/integration/waiting/test_mixed.py::test_a_chosen_token_waits_in_the_queue_by_a_ticket[threads-valkey]"),
    ),
    Fault(
        "ticket that was lost is used again",
        "_queue/waiting.py",
        "        return Grant(grant.value, redeem.sent_at) if redeem.result else BROKEN\n",
        "        return Grant(grant.value, redeem.sent_at) if redeem.result else None\n",
        "tests/unit/queue/test_waiters.py::test_waiter_whose_ticket_was_lost_starts_again_with_a_new_one",
    ),
    Fault(
        "release of a caller's own token looks for no waiters",
        "_queue/waiters.py",
        "owner.contended = None if self.value is token and is_ours(token) else token",
        "owner.contended = None if self.value is token else token",
        "tests/integration/waiting/test_mixed.py"
        "::test_lock_that_was_taken_over_with_the_chosen_token_is_handed_over[threads-valkey]",
    ),
    Fault(
        "interrupt in the first request is dropped, and the acquire goes on",
        "_procedures/acquire.py",
        "(connection, reply, interruption))",
        "(connection, reply, None))",
        "tests/integration/lock/test_interrupts.py::test_acquire_interrupted_at_any_line[KeyboardInterrupt-threads-{}-valkey]",
    ),
    Fault(
        "interrupt before the first request is dropped, and the acquire goes on",
        "_procedures/acquire.py",
        ("        if interruption is not None:\n            raise interruption\n        return\n"),
        "        return\n",
        "tests/integration/lock/test_interrupts.py::test_acquire_interrupted_at_any_line[KeyboardInterrupt-threads-{}-valkey]",
    ),
    Fault(
        "refused caller makes a second attempt before it queues",
        "_procedures/acquire.py",
        "        call.is_refused = True\n",
        "",
        (
            "tests/integration/waiting/test_waiting.py::"
            "test_waiter_makes_one_attempt_before_it_queues[threads-valkey-renewed]"
        ),
    ),
    Fault(
        "caller that was refused in time leaves what it has asked for",
        "_transport/threads/driver.py",
        "        return end.value\n",
        "        to_clean_up = None\n        return end.value\n",
        f"{_RECOVERY}test_time_that_is_up_where_the_request_to_leave_is_lost[threads-valkey-granted]",
    ),
)
