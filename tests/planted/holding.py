"""Faults of held locks: leases, renewal, losses, options."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_HOOKS = "tests/compat/test_hooks.py::"
_STORIES = "tests/simulation/test_holding.py::test_no_story_breaks_an_invariant[some]"

FAULTS = (
    Fault(
        "renewer that could start no thread never tries again",
        "_renewal/threads.py",
        "            self._may_start[:] = [None]\n            raise\n",
        "            raise\n",
        "tests/integration/holding/test_holding.py::test_thread_that_cannot_be_started_fails_one_acquire_only",
    ),
    Fault(
        "renewer that ends forgets what was changed meanwhile",
        "_renewal/threads.py",
        "is_left = (len(self._changed) > 0 or self._schedule.has_listed) and self._takes_start()",
        "is_left = False",
        "tests/unit/renewal/test_schedule.py::test_lease_that_comes_as_the_thread_ends_is_renewed",
    ),
    Fault(
        "lock object releases what its caller has passed on by local.token",
        "_lease/owner.py",
        "            self._forget_lease(owner, lease)\n",
        "            pass\n",
        (
            "tests/integration/holding/test_holding.py::"
            "test_dropped_lock_that_is_not_held_any_more_is_no_matter[threads-local.token]"
        ),
    ),
    Fault(
        "lock object releases what a copy of it holds",
        "_lease/owner.py",
        "    twin._original = lock",
        "    twin._original = None",
        (
            "tests/integration/holding/test_renewers.py::"
            "test_a_copy_holds_the_lock_when_the_object_that_acquired_is_dropped"
        ),
    ),
    Fault(
        "allowance for clock drift is left out",
        "_util/times.py",
        "return 0.01 * lease_s + 0.002",
        "return 0.0",
        (
            "tests/integration/redlock/test_redlock.py::"
            "test_remaining_is_the_ttl_less_what_clocks_may_drift[threads-valkey]"
        ),
    ),
    Fault(
        "lock without the GIL stays held until the garbage collector runs",
        "_lease/holding.py",
        "lock() if LOCALS_WAIT else None",
        "None",
        "tests/integration/holding/test_renewers.py::test_a_dropped_lock_is_released_whose_owner_outlives_it",
    ),
    Fault(
        "ttl is rounded down",
        "_util/times.py",
        "else math.ceil(exact_ms)",
        "else math.floor(exact_ms)",
        "tests/compat/test_fixed_bugs.py::test_extend_below_a_millisecond_is_one_millisecond[threads-ours-valkey]",
    ),
    Fault(
        "lease of a lock without options ignores clock drift",
        "_procedures/lock.py",
        "expires_at - drift_s((self._ttl_ms or 0) / 1000)",
        "expires_at",
        "tests/unit/lease/test_prolonging.py::test_remaining_is_the_ttl_less_what_clocks_may_drift",
    ),
    Fault(
        "extend whose request is under way is not counted",
        "_procedures/prolong.py",
        "        self.begin()\n        self.request = ",
        "        self.request = ",
        "tests/unit/lease/test_prolonging.py::test_shorter_ttl_that_may_be_set_already_is_believed",
    ),
    Fault(
        "extend goes on as if its first request had not left",
        "_procedures/prolong.py",
        "            operation.first_outcome = (connection, reply, interruption)\n",
        "            pass\n",
        "tests/compat/test_fixed_bugs.py::test_lost_reply_of_extend_adds_once[threads-ours-valkey]",
    ),
    Fault(
        "renewal under way undoes what the owner has set",
        "_lease/lease.py",
        "if certainly and not self.touched:",
        "if certainly:",
        "tests/unit/lease/test_lease.py::test_renewal_that_was_under_way_beside_a_call_of_the_owner_prolongs_nothing",
    ),
    Fault(
        "loss is reported twice",
        "_lease/lease.py",
        "if self.loss is not None or (self.over and not by_release):",
        "if self.over and not by_release:",
        "tests/unit/lease/test_lease.py::test_loss_is_noted_once",
    ),
    Fault(
        "released lock is renewed",
        "_lease/lease.py",
        "if self.busy or self.renewing or self.over or self.loss is not None:",
        "if self.busy or self.renewing:",
        "tests/unit/lease/test_lease.py::test_released_or_lost_lock_is_not_renewed",
    ),
    Fault(
        "danger is told when the lease has ended",
        "_lease/lease.py",
        "elif self.danger_at <= now < self.deadline and",
        "elif now >= self.deadline and",
        "tests/unit/lease/test_lease.py::test_danger_begins_with_a_third_of_the_ttl_left",
    ),
    Fault(
        "renewer does not look when the danger begins",
        "_lease/lease.py",
        "return min(retry_at, self.danger_at) if now < self.danger_at else retry_at",
        "return retry_at",
        "tests/unit/lease/test_lease.py::test_renewal_is_tried_again_when_the_danger_begins_and_ends_by_then",
    ),
    Fault(
        "attempt to renew lasts into the danger",
        "_procedures/loss.py",
        "min((first_deadline - now) * _LIMIT, ends_by - now)",
        "(first_deadline - now) * _LIMIT",
        "tests/unit/lease/test_lease.py::test_renewal_is_tried_again_when_the_danger_begins_and_ends_by_then",
    ),
    Fault(
        "lock that cannot be used is ensured to be held",
        "_procedures/lock.py",
        "if held.token is not None and clock() >= self._deadline(held):",
        "if False:",
        (
            "tests/integration/holding/test_near_the_end.py::"
            "test_lock_whose_lease_has_ended_is_not_ensured[threads-plain]"
        ),
    ),
    Fault(
        "acquire does not look at the hooks of one object",
        "_procedures/acquire.py",
        "            and not (lock.__dict__ and lock._overrides_here())\n",
        "",
        f"{_HOOKS}test_hook_stubbed_on_an_instance_that_has_been_used_is_used[threads-ours-valkey]",
    ),
    Fault(
        "release does not look at the hooks of one object",
        "_procedures/release.py",
        "            and not (lock.__dict__ and lock._overrides_here())\n",
        "",
        f"{_HOOKS}test_hook_stubbed_on_an_instance_that_has_been_used_is_used[threads-ours-valkey]",
    ),
    Fault(
        "max_hold is ignored",
        "_lease/lease.py",
        "ttl_ms = min(self.ttl_ms, int((self._ends_at() - now) * 1000)) if self.options.max_hold_s else self.ttl_ms",
        "ttl_ms = self.ttl_ms",
        "tests/unit/lease/test_lease.py::test_renewal_ends_at_max_hold",
    ),
    Fault(
        "renewal that comes too late revives the lease",
        "_procedures/loss.py",
        "if now >= lease.deadline:  # a renewal that came too late does not recreate it",
        "if False:",
        "tests/unit/renewal/test_schedule.py::test_renewal_that_succeeds_after_the_lease_does_not_revive_it",
    ),
    Fault(
        "lost lease is not cleaned up",
        "_renewal/schedule.py",
        "return [lease.record.entry for lease, reason in losses if lease.may_be_left(reason)]",
        "return []",
        "tests/unit/renewal/test_schedule.py::test_lost_lease_is_cleaned_up_where_a_renewal_may_yet_be_executed",
    ),
    Fault(
        "renewal without a reply is taken for a success",
        "_procedures/loss.py",
        "lease.troubled = verdict.held is None",
        "lease.troubled = False",
        "tests/simulation/test_holding.py::test_no_story_breaks_an_invariant[some]",
    ),
    Fault(
        "renewer overlooks a release that begins while it makes the lease",
        "_lease/holding.py",
        "                if self.over or self.held is not held:\n",
        "                if self.held is not held:\n",
        "tests/unit/lease/test_holding.py::test_renewer_takes_back_the_lease_of_what_is_released_meanwhile",
    ),
    Fault(
        "renewer gives a holding the lease of an earlier one",
        "_lease/holding.py",
        "                if self.over or self.held is not held:\n",
        "                if self.over:\n",
        "tests/unit/lease/test_holding.py::test_renewer_takes_back_the_lease_of_an_earlier_holding",
    ),
    Fault(
        "release overlooks the lease of the renewer",
        "_lease/holding.py",
        "        self.over = True\n        return self.lease is None\n",
        "        self.over = True\n        return True\n",
        "tests/unit/lease/test_holding.py::test_release_goes_by_a_lease_that_was_made",
    ),
    Fault(
        "lock that no renewer has seen is not released when it is dropped",
        "_lease/holding.py",
        "            self.renewer.drop(held[0], held[1], held[:2])",
        "            pass",
        "tests/integration/holding/test_by_reply.py::test_dropped_lock_is_released[threads]",
    ),
    Fault(
        "lock that its first reply has granted is not renewed",
        "_procedures/acquire.py",
        "        renewer.list_holding(holding, ttl_ms, expires_at - ttl_ms / 1000)\n",
        "        pass\n",
        "tests/integration/holding/test_by_reply.py::test_each_holding_is_renewed",
    ),
    Fault(
        "dropped lock is not released",
        "_renewal/threads.py",
        "        self._clean_up([entry])\n",
        "",
        "tests/integration/holding/test_holding.py::test_dropped_lock_is_released_with_a_warning[valkey-threads]",
    ),
    Fault(
        "end of several requests that prolong at once is not the earliest",
        "_lease/prolonging.py",
        "return min([self._ends_at, *(one.leaves(self._asked_at) for one in self.under_way)])",
        "return self._ends_at",
        "tests/unit/lease/test_prolonging.py::test_lease_is_believed_to_end_no_later_than_the_servers",
    ),
    Fault(
        "clock of another machine prolongs a lease that is handed on",
        "_lease/handle.py",
        "(min(left_s, self.timeout) if self.timeout else left_s)",
        "left_s",
        "tests/unit/lease/test_handle.py::test_receiver_whose_clock_is_behind_believes_one_ttl_at_most",
    ),
    Fault(
        "forked child releases the lock of its parent",
        "_procedures/lock.py",
        (
            "        if self._local is not threading.local or self._generation != fork.generation():\n"
            "            self._own_anew()\n"
            "        owner: Owner = self._owners.held()\n"
        ),
        "        owner: Owner = self._owners.held()\n",
        "tests/compat/test_fixed_bugs_process.py::test_forked_child_cannot_release_its_parents_lock[announced-ours-valkey]",
    ),
    Fault(
        "thread of a forked child takes from another one what that holds",
        "_procedures/lock.py",
        "if self._generation != generation:  # else another thread was faster, and may hold the lock by now",
        "if True:",
        "tests/unit/lease/test_owner.py::test_thread_that_overtakes_another_one_keeps_what_it_holds[Lock]",
    ),
    Fault(
        "reentered lock is released by its first release",
        "_procedures/lease.py",
        "if lease.depth > 1 and lease_of_callback(lock) is not lease:",
        "if False:",
        "tests/integration/lock/test_by_token.py::test_reentered_lock_is_released_by_the_last_release[threads-str]",
    ),
    Fault(
        "reentrant lock is entered though its release may have been executed",
        "_procedures/lease.py",
        "if lease is None or lease.over or not lease.options.reentrant",
        "if lease is None or not lease.options.reentrant",
        "tests/integration/lock/test_by_token.py::test_lock_whose_release_was_not_heard_of_is_not_reentered[threads]",
    ),
    Fault(
        "loss that the next acquire finds is never reported as expired",
        "_procedures/lease.py",
        ("    if clock() >= lease.deadline:\n        reason = LossReason.EXPIRED\n    if lease.lose(reason):\n"),
        "    if lease.lose(reason):\n",
        "tests/unit/procedures/test_lease.py::test_next_acquire_reports_why_the_lock_was_lost",
    ),
    Fault(
        "callback for a loss releases what another caller holds",
        "_procedures/lease.py",
        "if lost is not None and (owner.held_lease is not lost or owner is not lock._mine()):\n",
        "if False:\n",
        (
            "tests/integration/holding/test_callbacks.py::"
            "test_in_the_callback_the_lock_is_lost[Lock-threads-renewal-release-()-own]"
        ),
    ),
    Fault(
        "circuit breaker never opens",
        "_lease/breaker.py",
        (
            "        except (ConnectionError, TimeoutError):\n"
            "            raise\n"
            "        except BaseException as error:\n"
            "            other = error\n"
        ),
        "        except BaseException as error:\n            other = error\n",
        "tests/integration/lock/test_breaker.py::test_server_that_is_gone_opens_the_circuit[threads]",
    ),
    Fault(
        "interrupt counts as a failure for the circuit breaker",
        "_lease/breaker.py",
        "        except BaseException as error:\n            other = error\n    if other",
        "        except Exception as error:\n            other = error\n    if other",
        "tests/integration/lock/test_breaker.py::test_interrupt_is_no_failure",
    ),
    Fault(
        "lock that too few replicas have is returned",
        "_procedures/acquire.py",
        "if not replicate.result:",
        "if False:",
        "tests/integration/lock/test_replication.py::test_too_few_raise_and_the_lock_is_given_back[valkey-threads]",
    ),
    Fault(
        "acquire that is not completed keeps the key",
        "_procedures/acquire.py",
        "        call.left += drop_failed(lock, call, owner, before)\n        report_failure(",
        "        report_failure(",
        "tests/integration/lock/test_replication.py::test_too_few_raise_and_the_lock_is_given_back[valkey-threads]",
    ),
    Fault(
        "release that fails forgets that it may have been executed",
        "_procedures/release.py",
        "        owner.note_release(operation)\n",
        "",
        (
            "tests/integration/lock/test_sharing.py::"
            "test_release_that_another_has_sent_and_not_heard_of_is_no_loss[threads-valkey]"
        ),
    ),
    Fault(
        "adaptive ttl falls below its initial value after a few holds",
        "_lease/adaptive.py",
        "self.floor if len(ranked_s) == _WINDOW else self.initial",
        "self.floor",
        "tests/unit/lease/test_adaptive.py::test_few_hold_times_never_bring_it_below_the_initial",
    ),
    Fault(
        "once forgets at_least",
        "_procedures/release.py",
        "        if rest_s > 0:",
        "        if False:",
        "tests/integration/once/test_once.py::test_key_is_kept_until_at_least[threads-valkey]",
    ),
    Fault(
        "renewal of a job of once undoes at_least",
        "_procedures/release.py",
        "while lease.renewing:",
        "while False:",
        "tests/unit/procedures/test_once.py::test_run_ends_behind_its_renewal",
    ),
    Fault(
        "cancelled release of a long-lived lock keeps its lease",
        "_procedures/release.py",
        "        if owner.left == token:  # the caller",
        "        if False:  # the caller",
        "tests/integration/metrics/test_storms.py::test_cancelled_releases_of_a_long_lived_lock_leave_nothing[renewed]",
    ),
    Fault(
        "cancelled release of a Redlock keeps its lease",
        "_redlock/procedures.py",
        "        if lease is not None:\n            owner.lease = None\n",
        "        if False:\n            owner.lease = None\n",
        (
            "tests/integration/metrics/test_storms.py::"
            "test_cancelled_releases_of_a_long_lived_lock_leave_nothing[renewed Redlock]"
        ),
    ),
    Fault(
        "owners of cancelled releases stay forever",
        "_lease/task_owner.py",
        "            is_free = owner.token is None or owner.token == owner.left\n",
        "            is_free = owner.token is None\n",
        "tests/integration/metrics/test_storms.py::test_cancelled_releases_of_a_long_lived_lock_leave_nothing[renewed]",
    ),
    Fault(
        "release of a shared lock ends what another thread has acquired since",
        "_procedures/acquire.py",
        "    if owner.is_shared:\n        return False\n",
        "",
        (
            "tests/integration/metrics/test_holdings.py::"
            "test_a_release_ends_no_holding_of_another_thread_that_shares_the_lock"
        ),
    ),
    Fault(
        "interrupt as a holding is reported leaves it counted",
        "_procedures/release.py",
        "    if holding is not None and holding.held is None and holding.counted is not None:\n",
        "    if False:\n",
        "tests/integration/metrics/test_storms.py::test_interrupt_at_any_line_leaves_nothing_counted[plain]",
    ),
    Fault(
        "report of a signal handler waits for a metrics library that it has interrupted",
        "_observe/libraries.py",
        "        if thread in inside:\n            return\n",
        "",
        "tests/unit/observe/test_libraries.py::test_what_a_handler_calls_in_the_midst_of_a_call_is_called_after_it",
    ),
    Fault(
        "loop that hangs keeps its locks",
        "_renewal/off_loop.py",
        "elif watch.stalled_s(now) >= lease.max_stall_s:",
        "elif watch.stalled_s(now) < 0:",
        ("tests/unit/renewal/test_off_loop.py::test_loop_is_stalled_since_the_first_question_that_it_has_not_answered"),
    ),
    Fault(
        "loop counts as stalled though it has answered",
        "_renewal/off_loop.py",
        "            self.call(self._answer)\n",
        "",
        ("tests/unit/renewal/test_off_loop.py::test_loop_is_stalled_since_the_first_question_that_it_has_not_answered"),
    ),
    Fault(
        "release that overtakes a renewal of its task is told as a loss",
        "_procedures/loss.py",
        "        return lease.over\n",
        "        lease.over = False\n        return False\n",
        "tests/unit/renewal/test_off_loop.py::test_release_that_overtakes_a_renewal_is_told_as_no_loss",
    ),
    Fault(
        "locks of a closed loop are renewed",
        "_renewal/off_loop.py",
        "            if watch.is_closed:\n",
        "            if False:\n",
        ("tests/unit/renewal/test_off_loop.py::test_lease_of_a_closed_loop_is_let_go_and_that_of_a_stopped_one_waits"),
    ),
    Fault(
        "locks of a stopped loop are renewed",
        "_renewal/off_loop.py",
        "            elif not watch.is_running:\n",
        "            elif False:\n",
        ("tests/unit/renewal/test_off_loop.py::test_lease_of_a_closed_loop_is_let_go_and_that_of_a_stopped_one_waits"),
    ),
    Fault(
        "lock that a busy loop holds is renewed in the loop",
        "_lease/options.py",
        'self.is_off_loop = self.auto_renew and auto_renew != "loop"',
        "self.is_off_loop = False",
        "tests/integration/holding/test_off_loop.py::test_thread_connects_by_a_unix_socket_and_by_url[asyncio]",
    ),
    Fault(
        "lock is lost where the renewing thread cannot connect",
        "_renewal/off_loop.py",
        "                side.watch.call(self._accept, lease.record)\n",
        "                pass\n",
        (
            "tests/unit/renewal/test_off_loop.py::"
            "test_loop_takes_over_what_a_thread_that_never_connected_could_not_renew"
        ),
    ),
    Fault(
        "task that knows of the loss is cancelled for it",
        "_procedures/lease.py",
        "        lease.task = None\n",
        "        pass\n",
        ("tests/unit/renewal/test_off_loop.py::test_task_that_has_met_the_loss_before_it_is_told_is_not_cancelled"),
    ),
    Fault(
        "question to a loop is noted after it was asked",
        "_renewal/off_loop.py",
        "            self._asked_at = now\n            self.call(self._answer)\n",
        "            self.call(self._answer)\n            self._asked_at = now\n",
        _STORIES,
    ),
    Fault(
        "thread tells of losses in the place of the loop",
        "_renewal/off_loop.py",
        "side.watch.call(side.report_losses, its_losses)",
        "side.report_losses(its_losses)",
        _STORIES,
    ),
    Fault(
        "loss is told that a thread finds out beside the release",
        "_lease/lease.py",
        "if self.loss is not None or (self.over and not by_release):",
        "if self.loss is not None:",
        _STORIES,
    ),
)
