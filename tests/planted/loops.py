"""Faults of the transport for event loops."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

FAULTS = (
    Fault(
        "error of uvloop for a connection that has ended is none of the connection",
        "_util/redis_py.py",
        "        if isinstance(error, RuntimeError) and str(error).endswith(_CONNECTION_ENDED):\n",
        "        if False:\n",
        "tests/integration/lock/test_asyncio_faults.py::test_connection_that_ends_between_the_requests_of_redis_py_is_made_again[valkey-uvloop]",
    ),
    Fault(
        "cleanup of a loop that fails is forgotten",
        "_transport/loop/cleanup.py",
        "            unanswered = cleaning_up.unfinished\n",
        "            unanswered = []\n",
        "tests/integration/transport/test_cleanup.py::test_undoing_survives_what_users_code_raises[tasks-valkey]",
    ),
    Fault(
        "lock of a task is renewed once",
        "_renewal/loop.py",
        ("        for lease in due:\n            self.keep(lease)\n        self._clean_up(late)\n"),
        "        self._clean_up(late)\n",
        "tests/integration/holding/test_renewers.py::test_cancel_of_all_tasks_of_the_loop_ends_no_renewal[loop]",
    ),
    Fault(
        "loop that is closed by hand does not wait for its requests",
        "_transport/loop/end.py",
        "                _drain(sock)\n",
        "                pass\n",
        "tests/integration/lock/test_asyncio_cancel.py::test_loop_closed_by_hand_leaves_no_key_of_an_acquire_that_was_cancelled[frozen-uvloop]",
    ),
    Fault(
        "connection of a collected client is closed before its requests are read",
        "_transport/loop/end.py",
        "        if pipe.broken or pipe.is_idle:\n",
        "        if True:\n",
        "tests/integration/lock/test_asyncio_cancel.py::test_what_was_sent_on_the_connection_of_a_collected_client_is_executed[asyncio]",
    ),
    Fault(
        "interrupted acquire of a task leaves its token noted",
        "_procedures/acquire.py",
        ("        end_count(owner.holding)\n    if owner.token == token:\n"),
        ("        end_count(owner.holding)\n    if False:\n"),
        "tests/integration/lock/test_interrupts.py::test_interrupt_just_behind_the_noting[KeyboardInterrupt-tasks-warm-usual-valkey]",
    ),
    Fault(
        "task that waits hears no end of its time",
        "_transport/loop/server.py",
        ("                if not rest_s:\n                    mailbox.put(None)\n                elif rest_s"),
        "                if rest_s and rest_s",
        "tests/integration/waiting/test_giving_up.py::test_waiter_that_is_not_the_poller_sleeps_until_it_gives_up",
    ),
    Fault(
        "task is not cancelled for a loss",
        "_renewal/loop.py",
        "        if lease.options.cancel_on_lost and task is not None",
        "        if False and task is not None",
        "tests/integration/holding/test_asyncio.py::test_holding_task_is_cancelled_for_a_loss",
    ),
    Fault(
        "task that finds a loss by its own call is cancelled as well",
        "_renewal/loop.py",
        " and task is not asyncio.current_task():\n",
        ":\n",
        "tests/integration/holding/test_asyncio.py::test_task_that_finds_the_loss_itself_is_not_cancelled_as_well",
    ),
    Fault(
        "task that is releasing is cancelled for a loss",
        "_renewal/loop.py",
        "        task = None if holder is None or lease.over else holder()\n",
        "        task = None if holder is None else holder()\n",
        "tests/integration/holding/test_asyncio.py::test_task_that_has_a_helper_release_is_not_cancelled",
    ),
    Fault(
        "lock that a task has dropped is not released",
        "_renewal/loop.py",
        "            self._loop.call_soon_threadsafe(self._clean_up, [entry])\n",
        "            pass\n",
        "tests/integration/holding/test_holding.py::test_dropped_lock_is_released_with_a_warning",
    ),
    Fault(
        "loop that runs within a step is not the running one",
        "_pipe/loop.pyx",
        "stepping_in and run_now() == stepping_in:",
        "stepping != NULL:",
        "tests/pipe/test_running_loop.py::test_another_loop_that_runs_within_a_step_is_the_running_one",
    ),
    Fault(
        "task that acquires or extends holds by another task's token",
        "_procedures/prolong.py",
        ("    owner = lock._taken()\n    lost = lease_of_callback(lock)\n"),
        ("    owner = lock._held()\n    lost = lease_of_callback(lock)\n"),
        "tests/integration/lock/test_asyncio_loops.py::test_acquire_or_extend_does_not_hold_by_another_task",
    ),
    Fault(
        "attached lock is entered by two tasks",
        "_procedures/lock.py",
        ("        held = self._taken()\n        if held.token is not self._attached"),
        ("        held = self._held()\n        if held.token is not self._attached"),
        "tests/integration/lock/test_asyncio_loops.py::test_attached_lock_is_not_entered_by_another_task",
    ),
    Fault(
        "token that a task sets replaces another task's",
        "_lease/owner.py",
        "self._owners.taken()",
        "self._owners.held()",
        "tests/integration/lock/test_asyncio_loops.py::test_token_that_a_task_sets_is_its_own",
    ),
    Fault(
        "task may use one of several locks that others hold",
        "_lease/task_owner.py",
        "            if len(holding) == 1:\n",
        "            if holding:\n",
        "tests/integration/lock/test_asyncio_loops.py::test_refusal_is_logged_where_two_tasks_hold",
    ),
    Fault(
        "release that begins late releases what was acquired since",
        "_procedures/release.py",
        "    if owner.token is not None and owner.holding_id != holding_id:\n",
        "    if False:\n",
        "tests/integration/lock/test_asyncio_loops.py::test_release_that_begins_late_does_not_release_what_was_acquired_since[asyncio-plain]",
    ),
    Fault(
        "connections end before the generators that hold locks",
        "_transport/loop/end.py",
        "        if closing:\n",
        "        if False:\n",
        "tests/integration/lock/test_asyncio_loops.py::test_end_of_the_loop_closes_the_generator_that_holds[lingers-asyncio]",
    ),
)
