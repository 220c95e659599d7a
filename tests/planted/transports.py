"""Faults of connecting, retries, cleanup, clusters and drivers."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_THREADS = "tests/integration/transport/test_threads.py::"
_ASYNCIO_CANCEL = "tests/integration/lock/test_asyncio_cancel.py::"
_CLOSING_SERVERS = "tests/integration/waiting/test_closing_servers.py::"
_DRIVERS = "tests/unit/transport/test_drivers.py::"

FAULTS = (
    Fault(
        "client that is closed takes the connection from its waiters",
        "_transport/base.py",
        " or (connection.registry and connection.registry.has_waiters):",
        ":",
        "tests/integration/transport/test_closing.py::test_client_that_is_closed_takes_no_connection_from_a_waiter",
    ),
    Fault(
        "client that is closed keeps its lock connection",
        "_transport/base.py",
        "        self._closes = True\n        self.close_if_idle()",
        "        self._closes = True",
        "tests/integration/transport/test_closing.py::test_clients_that_are_closed_leave_no_connection",
    ),
    Fault(
        "connection that was in use when its client was closed stays open",
        "_linger/threads.py",
        "    _part_of(server).watch_until_rest()\n    server.close_if_idle()",
        "    _part_of(server).watch_until_rest()",
        "tests/integration/transport/test_closing.py::test_clients_that_are_closed_leave_no_connection",
    ),
    Fault(
        "lock stays at the server of a pool that was replaced",
        "_procedures/lock.py",
        "if pool is not None and self._redis.connection_pool is not pool:",
        "if False:",
        "tests/compat/test_pools.py::test_lock_goes_with_a_client_whose_pool_is_replaced",
    ),
    Fault(
        "lock does not see that a pool makes connections in its own way",
        "_transport/kinds.py",
        "    if _connects_by_itself(pool_class):\n",
        "    if False:\n",
        "tests/compat/test_pools.py::test_pool_class_with_a_method_of_its_own",
    ),
    Fault(
        "key that lingers is taken in memory after the pool was replaced",
        "_procedures/lock.py",
        ("        self._cached = None\n        self._redis = client"),
        "        self._redis = client",
        "tests/compat/test_pools.py::test_lock_with_options_goes_with_the_pool",
    ),
    Fault(
        "renewal ends unseen where the pool is replaced",
        "_procedures/lock.py",
        "self._former, self._transport = (self._transport, self._pool), transport",
        "self._transport = transport",
        "tests/compat/test_pools.py::test_lock_that_is_renewed_is_not_lost_with_its_pool",
    ),
    Fault(
        "request is tried more often than the retry policy allows",
        "_transport/base.py",
        "if 0 <= retries < self.failures or (ends_at is not None and clock() + pause_s >= ends_at):",
        "if ends_at is not None and clock() + pause_s >= ends_at:",
        "tests/unit/transport/test_drivers.py::test_the_first_retry_leaves_at_once_and_the_policy_says_when_to_give_up",
    ),
    Fault(
        "connection with waiters stays at the primary of before",
        "_transport/base.py",
        "        if connection is not None and primary not in (None, connection.address):\n",
        "        if False:\n",
        (
            "tests/integration/sentinel/test_sentinel.py::"
            "test_a_primary_that_moved_is_left_for_the_new_one_beside_a_waiter[threads-valkey]"
        ),
    ),
    Fault(
        "waiter of one node raises an error of our own for a slot that moves",
        "_transport/threads/server.py",
        "                raise (error if self.is_routed else redis_error(str(error))) from None\n",
        "                raise error\n",
        (
            "tests/integration/cluster/test_moving.py::"
            "test_waiter_of_a_client_of_one_node_gets_redis_pys_error_for_a_slot_that_moves[threads-valkey]"
        ),
    ),
    Fault(
        "what has moved to another node takes all that is to be undone with it",
        "_transport/threads/cleanup.py",
        "                unanswered = sorted(set(cleaning_up.unfinished).difference(cleaning_up.redirected))\n",
        "                unanswered = []\n",
        (
            "tests/integration/cluster/test_moving.py::"
            "test_what_has_moved_from_a_clients_only_node_keeps_nothing_else_from_being_undone[threads-valkey]"
        ),
    ),
    Fault(
        "server that answers later is asked again at once",
        "_transport/base.py",
        "                pause_s = max(pause_s, LATER_PAUSE_S)\n",
        "",
        "tests/unit/transport/test_drivers.py::test_a_server_that_answers_later_is_not_asked_without_a_pause",
    ),
    Fault(
        "pause between two attempts ends after the deadline",
        "_transport/base.py",
        "if 0 <= retries < self.failures or (ends_at is not None and clock() + pause_s >= ends_at):",
        "if 0 <= retries < self.failures:",
        "tests/unit/transport/test_drivers.py::test_no_pause_lasts_longer_than_the_callers_time",
    ),
    Fault(
        "reply is waited for beyond the deadline",
        "_util/times.py",
        "return bounded_s if reply_s < 0 else min(reply_s, bounded_s)",
        "return reply_s",
        "tests/unit/transport/test_drivers.py::test_a_reply_is_waited_for_until_the_servers_or_the_callers_time_is_up",
    ),
    Fault(
        "connection without authentication is replaced again and again",
        "_transport/base.py",
        "                retries = 1\n",
        "                retries = -1\n",
        "tests/unit/transport/test_drivers.py::test_a_connection_on_which_nothing_is_executed_is_replaced_once",
    ),
    Fault(
        "cleanup does not leave behind the request on its connection",
        "_transport/cleanup.py",
        "            for connection in unanswered:\n",
        "            for connection in []:\n",
        "tests/integration/transport/test_threads.py::test_undo_goes_behind_what_was_sent_before[python-valkey]",
    ),
    Fault(
        "old connection may execute a request after its cleanup",
        "_transport/cleanup.py",
        "for ending in list(self.endings):",
        "for ending in []:",
        "tests/integration/transport/test_cleanup.py::test_acquire_that_arrives_late_takes_nothing[threads-valkey]",
    ),
    Fault(
        "key that is being cleaned up is taken with the same token",
        "_transport/cleanup.py",
        "return [entry for entry in pending if entry in taken]",
        "return []",
        "tests/unit/transport/test_cleanup.py::test_key_that_is_set_again_with_its_token_is_cleaned_up_first",
    ),
    Fault(
        "node of a cluster does not know the cluster's callers after a fork",
        "_transport/threads/cluster.py",
        "            self.inside = cluster.inside\n\n    def begin_part",
        "            super().forget_inside()\n\n    def begin_part",
        "tests/unit/transport/test_drivers.py::test_forked_cluster_and_its_node_share_a_new_set_of_callers",
    ),
    Fault(
        "key that is being cleaned up is passed over while others are removed",
        "_transport/cleanup.py",
        "pending = self.pending.copy()",
        "pending = self.pending",
        "tests/unit/transport/test_cleanup.py::test_entry_is_found_while_another_thread_removes_those_before_it",
    ),
    Fault(
        "cleanup that fails is forgotten",
        "_transport/threads/cleanup.py",
        "            self.pending += postponed\n",
        "",
        "tests/integration/transport/test_cleanup.py::test_undoing_survives_what_users_code_raises[threads-valkey]",
    ),
    Fault(
        "cleanup waits for a thread that cannot be started",
        "_transport/cleanup.py",
        "            self.server.post_cleanup(entries)\n",
        "            pass\n",
        (
            "tests/integration/lock/test_no_threads.py::"
            "test_lock_that_cannot_be_renewed_is_not_held[{'thread_local': False}]"
        ),
    ),
    Fault(
        "interrupt while a timeout is handled leaves the key",
        "_procedures/acquire.py",
        "    lock._transport.clean_up([(lock._key, one) for one in dict.fromkeys(tokens)])\n",
        "",
        (
            "tests/integration/lock/test_interrupts.py::"
            "test_acquire_without_an_answer_interrupted_at_any_line[KeyboardInterrupt-threads-{}-valkey]"
        ),
    ),
    Fault(
        "interrupt at the return of an acquire that lingers looks like a loss",
        "_linger/procedures.py",
        "        call.is_kept = True\n        keep_acquired",
        "        keep_acquired",
        (
            "tests/slow/test_linger_interrupts.py::"
            "test_another_process_gets_a_key_whose_holder_is_interrupted[KeyboardInterrupt-{'auto_renew': True}]"
        ),
    ),
    Fault(
        "interrupt while a connection is made lets no other caller connect",
        "_transport/threads/server.py",
        (
            "            try:  # noqa: SIM105  # an interrupt inside of `suppress` would leave the lock taken\n"
            "                self._connecting.release()\n"
            "            except RuntimeError:  # an interrupt may come before the lock is taken\n"
            "                pass\n"
        ),
        "            with contextlib.suppress(RuntimeError):\n                self._connecting.release()\n",
        (
            "tests/integration/lock/test_interrupted_starts.py::"
            "test_interrupt_at_any_place_of_connecting_lets_others_connect"
        ),
    ),
    Fault(
        "forked child cleans up for its parent",
        "_transport/threads/cleanup.py",
        "self.pending, self.endings, self._unheard = [], set(), set()",
        "self.endings, self._unheard = set(), set()",
        "tests/integration/transport/test_threads.py::test_forget_drops_the_parents_unfinished_business[announced]",
    ),
    Fault(
        "forked child uses the connection of its parent",
        "_transport/threads/server.py",
        "connection, self.connection = self.connection, None",
        "connection = self.connection",
        f"{_THREADS}test_forget_in_a_forked_child_leaves_the_parents_connection[announced-python]",
    ),
    Fault(
        "lost request counts as never sent",
        "_transport/base.py",
        "operation.note_unanswered(trouble.sent)",
        "operation.note_unanswered(False)",
        "tests/compat/test_fixed_bugs.py::test_lost_reply_of_acquire_is_an_acquired_lock[threads-ours-valkey]",
    ),
    Fault(
        "interrupted request counts as answered",
        "_transport/base.py",
        (
            "            operation.note_unanswered(True)\n"
            "            unanswered.append(connection)\n"
            "        return False\n"
        ),
        "            pass\n        return False\n",
        f"{_ASYNCIO_CANCEL}test_acquire_cancelled_while_the_server_is_frozen_leaves_no_key[asyncio-True-_by_cancel]",
    ),
    Fault(
        "demoted primary is asked again and again",
        "_transport/base.py",
        'if trouble.code in ("READONLY", NOAUTH):',
        "if trouble.code == NOAUTH:",
        "tests/integration/sentinel/test_sentinel.py::test_a_demoted_primary_is_left_for_the_new_one[valkey]",
    ),
    Fault(
        "silent connection is used again",
        "_transport/base.py",
        "if 0 <= self.timeout_s <= connection.pipe.silence_s:",
        "if False:",
        f"{_THREADS}test_silence_for_the_socket_timeout_leaves_the_connection[python]",
    ),
    Fault(
        "caller that runs out of time closes the connection of all",
        "_transport/base.py",
        "if 0 <= self.timeout_s <= connection.pipe.silence_s:",
        "if True:",
        f"{_THREADS}test_a_callers_own_limit_leaves_the_connection_to_the_others[python]",
    ),
    Fault(
        "redirections are followed without end",
        "_transport/routing.py",
        "if self._redirections <= _REDIRECTIONS:",
        "if True:",
        "tests/unit/transport/test_routing.py::test_request_that_is_redirected_without_end_pauses_and_gives_up",
    ),
    Fault(
        "ASK is followed without ASKING",
        "_transport/routing.py",
        "return _Asking(self._operation) if self.asks else self._operation",
        "return self._operation",
        "tests/unit/transport/test_routing.py::test_one_request_follows_asking",
    ),
    Fault(
        "TRYAGAIN counts as a stale topology",
        "_transport/routing.py",
        "            return self._if_allowed(-1, _MOVING_PAUSE_S, self._moving_until)\n",
        (
            "            self.is_stale = True\n"
            "            return self._if_allowed(-1, _MOVING_PAUSE_S, self._moving_until)\n"
        ),
        "tests/unit/transport/test_routing.py::test_a_slot_on_the_move_is_waited_for_in_small_pauses",
    ),
    Fault(
        "TRYAGAIN uses up the retries",
        "_transport/routing.py",
        'self.is_stale = not (isinstance(trouble, NotExecuted) and trouble.code == "TRYAGAIN")',
        "self.is_stale = True",
        "tests/unit/transport/test_routing.py::test_a_slot_on_the_move_is_waited_for_in_small_pauses",
    ),
    Fault(
        "slot that has moved is looked for at its old node each time",
        "_transport/routing.py",
        "                    slots[redirected.slot_id] = [node]\n",
        "                    pass\n",
        "tests/unit/transport/test_routing.py::test_slot_that_has_moved_is_noted",
    ),
    Fault(
        "node that ASK names is looked for at its own address, not where the client reaches it",
        "_transport/routing.py",
        "client.get_node(*client.nodes_manager.remap_host_port(redirected.host, redirected.port))",
        "client.get_node(redirected.host, redirected.port)",
        (
            "tests/integration/cluster/test_moving.py::test_a_client_that_reaches_the_nodes_at_other_addresses_"
            "follows_the_slot[threads-valkey-before it has moved]"
        ),
    ),
    Fault(
        "topology of a silent cluster is waited for beyond the caller's time",
        "_transport/threads/cluster.py",
        "        reading.wait(limit_s)\n",
        "        reading.wait(None)\n",
        (
            "tests/integration/cluster/test_cluster.py::test_a_silent_cluster_is_waited_for_until_the_callers_time_ends"
            "[threads-valkey-topology to be read again]"
        ),
    ),
    Fault(
        "fork in a signal handler goes on with the operation of the parent",
        "_transport/threads/driver.py",
        "if fork.generation() != generation:  # by a signal handler, between two steps",
        "if False:",
        "tests/unit/transport/test_drivers.py::test_steps_in_which_a_signal_handler_forks_end_in_the_child",
    ),
    Fault(
        "driver does not clean up what the steps leave",
        "_transport/threads/driver.py",
        "        if to_clean_up:\n            transport.clean_up(to_clean_up)\n",
        "        pass\n",
        "tests/unit/transport/test_drivers.py::test_entries_of_steps_are_cleaned_up_when_they_have_ended",
    ),
    Fault(
        "lease counts from the reply in threads",
        "_transport/threads/server.py",
        "        call.sent_at = clock()\n        return connection.pipe.ask(request, timeout_s, self.inside)\n",
        (
            "        reply = connection.pipe.ask(request, timeout_s, self.inside)\n"
            "        call.sent_at = clock()\n        return reply\n"
        ),
        "tests/unit/transport/test_begin.py::test_lease_counts_from_the_time_before_the_request",
    ),
    Fault(
        "lease counts from the reply in tasks",
        "asyncio/lock.py",
        "None if ttl_ms is None else call.sent_at + ttl_ms / 1000",
        "None if ttl_ms is None else call.sent_at + 5 + ttl_ms / 1000",
        "tests/unit/transport/test_begin.py::test_lease_counts_from_the_time_before_the_request",
    ),
    Fault(
        "first request takes no account of the caller's time",
        "_transport/threads/server.py",
        "self.timeout_s if call.wait_s is None else reply_within_s(call.wait_s, self.timeout_s)",
        "self.timeout_s",
        (
            "tests/integration/lock/test_deadline.py::"
            "test_frozen_server_is_waited_for_no_longer_than_the_deadline[threads-True-0.001]"
        ),
    ),
    Fault(
        "cancelled task leaves its key",
        "_transport/loop/cleanup.py",
        "            self.tidy(operation, unanswered, failed=True)\n",
        "            pass\n",
        f"{_ASYNCIO_CANCEL}test_acquire_cancelled_while_the_server_is_frozen_leaves_no_key[asyncio-True-_by_cancel]",
    ),
    Fault(
        "subscription that no push answers is believed",
        "_transport/threads/server.py",
        "if subscribing.result and not subscribing.is_pushed:",
        "if False:",
        "tests/compat/test_fake_server.py::test_server_that_answers_a_subscription_without_a_push_is_polled[threads]",
    ),
    Fault(
        "connection is replaced before it is known how to end it",
        "_transport/base.py",
        "        successor = tokens.successor()\n",
        "        self.connection = None\n        successor = tokens.successor()\n",
        f"{_DRIVERS}test_who_finds_no_connection_has_the_tokens_of_the_next_and_ends_the_last",
    ),
    Fault(
        "two threads give one connection up, and the next one with it",
        "_transport/base.py",
        "with self._giving_up:",
        "with contextlib.nullcontext():",
        f"{_DRIVERS}test_connection_that_another_thread_has_made_meanwhile_is_not_given_up",
    ),
    Fault(
        "request for which the server closes connections is sent forever",
        "_transport/base.py",
        "if len(self._lost) >= MOST_LOSSES:",
        "if False:",
        f"{_CLOSING_SERVERS}test_waiter_gets_the_lock_by_polling[threads-valkey-SUBSCRIBE]",
    ),
    Fault(
        "server whose connections break has no queue any more",
        "_transport/base.py",
        "if registry.is_proven or not (registry.is_tried or operation.uses_queue):",
        "if not (registry.is_tried or operation.uses_queue):",
        f"{_CLOSING_SERVERS}test_waiter_queues_though_connections_break_again_and_again[threads-valkey]",
    ),
    Fault(
        "interrupts of the reading thread end the use of the queue",
        "_transport/base.py",
        "        if not connection.pipe.closed_by_peer:\n",
        "        if False:\n",
        f"{_DRIVERS}test_two_connections_in_a_row_that_the_peer_closes_for_the_queue_end_its_use",
    ),
    Fault(
        "request refused beside a subscription after a lost connection is given up",
        "_transport/base.py",
        "        return isinstance(trouble, NotExecuted) and trouble.code == SUBSCRIBED\n",
        "        return False\n",
        f"{_DRIVERS}test_request_refused_beside_a_subscription_is_sent_again_whatever_failed_before",
    ),
    Fault(
        "contended lock is handed over where the server does not know the script",
        "_protocol/commands.py",
        'if self._step == "pass on" and not capabilities.queues:',
        "if False:",
        f"{_CLOSING_SERVERS}test_holder_releases_a_lock_for_which_others_queue[threads-valkey]",
    ),
)
