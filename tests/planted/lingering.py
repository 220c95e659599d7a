"""Faults of keys that linger."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_LINGERING = "tests/integration/lingering/test_lingering.py::"
_ENDS = "tests/integration/lingering/test_ends.py::"
_KEY_CACHE_INTERRUPTS = "tests/unit/linger/test_key_cache_interrupts.py::"
_KEYS = "tests/unit/linger/test_key_cache.py::"
_MEET = "tests/unit/linger/test_key_cache_schedules.py::test_two_threads_may_meet_between_any_two_lines"
_WANTED = "tests/integration/lingering/test_wanted.py::"
_STEPS = "tests/unit/linger/test_procedures.py::"
_GIVING_BACK = "tests/unit/linger/test_giving_back.py::"
_STORIES = "tests/simulation/test_lingering.py::test_no_story_breaks_an_invariant[some]"

FAULTS = (
    Fault(
        "key lingers whose token was taken out of its lock",
        "_lease/owner.py",
        "            owner.forget_cached()  # whoever has the former token may hold the lock\n",
        "            pass\n",
        "tests/integration/lingering/test_options.py::"
        "test_a_lock_whose_token_is_taken_out_is_not_of_the_process_any_more",
    ),
    Fault(
        "holder is not told of those that have waited in its process before it",
        "_linger/key_cache.py",
        "if lease.cached is not None and lease.cached.has_waiters:",
        "if False:",
        f"{_WANTED}test_a_waiter_that_came_before_the_holder_of_the_same_process_is_told_too",
    ),
    Fault(
        "lock takes a key that lingers under the name that it had before",
        "_procedures/lock.py",
        "        self._cached = None\n        self._name = name\n",
        "        self._name = name\n",
        f"{_LINGERING}test_a_lock_that_gets_another_name_takes_the_key_of_that_name",
    ),
    Fault(
        "interrupt at the start of a callback ends the watching of a loop's keys",
        "_linger/loop.py",
        "ticks_s = self.tick_s, 2 * self.tick_s",
        "ticks_s = (self.tick_s,)",
        f"{_GIVING_BACK}test_loop_goes_on_watching_where_an_interrupt_strikes_the_callback_at_its_start",
    ),
    Fault(
        "replies to what was given back are not read where no thread can be started",
        "_linger/threads.py",
        "        self._confirm_now()\n",
        "",
        "tests/integration/lock/test_no_threads.py::test_lock_that_cannot_be_renewed_is_not_held[{'linger': 60.0}]",
    ),
    Fault(
        "what a signal handler gives back is left where no thread can be started",
        "_linger/threads.py",
        "            self._confirming.discard(me)\n            self.clean_up_unconfirmed()\n",
        "            self._confirming.discard(me)\n",
        f"{_GIVING_BACK}test_keys_are_given_up_where_no_thread_can_be_started[True]",
    ),
    Fault(
        "task takes a key that lingers for another event loop",
        "_linger/loop.py",
        "if cached is None or not cached.cache.is_here:",
        "if cached is None:",
        "tests/integration/lingering/test_loops.py::test_loops_side_by_side_keep_keys_of_their_own",
    ),
    Fault(
        "key is left to an event loop that has ended",
        "_linger/loop.py",
        "    if cached.cache.is_here and cached.locked_by",
        "    if cached.locked_by",
        "tests/integration/lingering/test_loops.py::test_a_loop_releases_what_another_has_acquired[ended-plain]",
    ),
    Fault(
        "renewed key is left to an event loop that has ended",
        "_procedures/release.py",
        "lock._has_own_hooks() and owner.cached.is_here:",
        "lock._has_own_hooks():",
        "tests/integration/lingering/test_loops.py::test_a_loop_releases_what_another_has_acquired[ended-renewed]",
    ),
    Fault(
        "lock with an overridden hook that has waited in memory lets its key linger",
        "_linger/procedures.py",
        (
            "    if turn is not None and has_lock and not lock._has_own_hooks():\n"
            "        turn.end(owner)\n"
            "        has_lock = False\n"
        ),
        "",
        f"{_STEPS}test_lock_with_an_overridden_hook_that_has_waited_in_memory_asks_the_server_without_the_local_lock",
    ),
    Fault(
        "local caller takes a key that does not outlive its lease",
        "_linger/procedures.py",
        "if lease is None or now > lease.take_until_for(lock._ttl_ms or 0):",
        "if lease is None:",
        f"{_STEPS}test_key_that_would_not_outlive_the_whole_timeout_is_confirmed_first",
    ),
    Fault(
        "confirmed key is believed to live from the reply on",
        "_linger/procedures.py",
        "expires_at = confirm.sent_at + ttl_ms / 1000",
        "expires_at = clock() + ttl_ms / 1000",
        _STORIES,
    ),
    Fault(
        "caller that frees the local lock does not look at the waiters afterwards",
        "_linger/key_cache.py",
        "                    if not (self.waiters and self.try_lock(mine)):\n                        return\n",
        "                    return\n",
        f"{_MEET}[free and join]",
    ),
    Fault(
        "caller that frees the local lock does not look whether the key is wanted",
        "_linger/key_cache.py",
        "while self._is_due and (self.lease, self.wanted_at) != (None, None) and self.if_free(self.drop):",
        "while False:",
        f"{_MEET}[release and wanted]",
    ),
    Fault(
        "all callers of the local lock share one name",
        "_linger/key_cache.py",
        "            holder = object()\n",
        "            holder = KeyCache\n",
        f"{_KEYS}test_one_caller_has_the_local_lock",
    ),
    Fault(
        "end of a turn frees the local lock of another caller",
        "_linger/procedures.py",
        "return holder is not None and (holder is self.waiter or holder is self.expiry)",
        "return holder is self.waiter or holder is self.expiry",
        "tests/unit/linger/test_key_cache_schedules.py::test_end_of_a_turn_frees_the_local_lock_of_no_other_caller",
    ),
    Fault(
        "an acquire takes the expiry of a shared owner for its own",
        "_linger/procedures.py",
        "return holder is not None and (holder is self.waiter or holder is self.expiry)",
        "return type(holder) is tuple or (holder is not None and holder is self.waiter)",
        "tests/integration/lingering/test_sharing.py::test_an_attempt_that_does_not_wait_frees_nothing[threads]",
    ),
    Fault(
        "the last local waiter comes first",
        "_linger/key_cache.py",
        "first = self.waiters[0] if self.waiters else None",
        "first = self.waiters[-1] if self.waiters else None",
        f"{_KEYS}test_waiters_get_the_local_lock_in_the_order_of_their_arrival",
    ),
    Fault(
        "local waiter that has got the local lock leaves without it",
        "_linger/key_cache.py",
        "        if not waiter.give_up():\n            return False\n",
        "        waiter.give_up()\n",
        f"{_KEYS}test_waiter_that_has_got_the_local_lock_cannot_give_it_up",
    ),
    Fault(
        "local lock is given to two where a waiter cannot be removed just now",
        "_linger/key_cache.py",
        "except (ValueError, IndexError):",
        "except ValueError:",
        f"{_KEYS}test_waiter_that_cannot_be_removed_just_now_has_the_local_lock_alone",
    ),
    Fault(
        "key is kept that no message finds any more",
        "_linger/key_cache.py",
        "                found.replace()\n",
        "                pass\n",
        f"{_KEYS}test_key_that_is_made_while_two_threads_forget_the_last_one_is_not_kept",
    ),
    Fault(
        "waiters of a forgotten local lock are not woken",
        "_linger/key_cache.py",
        "        for waiter in self.all_waiters():\n            waiter.wake()\n",
        "",
        f"{_KEYS}test_waiters_of_an_overdue_local_lock_are_woken_and_begin_again",
    ),
    Fault(
        "wanted is not heard while the key is asked for",
        "_linger/key_cache.py",
        "if cached is None or (cached.lease is None and not cached.locked_by):",
        "if cached is None or cached.lease is None:",
        f"{_KEYS}test_key_that_is_wanted_while_it_is_asked_for_is_given_up_by_its_release",
    ),
    Fault(
        "wanted is not heard while the first key of a connection is asked for",
        "_linger/procedures.py",
        "return waiter.channel is not None and registry_of(lock) is not None",
        "return waiter.channel is not None",
        f"{_STEPS}test_wanted_is_heard_before_the_first_key_of_a_connection_is_asked_for",
    ),
    Fault(
        "wanted key is passed on forever",
        "_linger/key_cache.py",
        "self.passes < _MOST_PASSES and ",
        "",
        f"{_KEYS}test_wanted_key_is_passed_on_sixteen_times",
    ),
    Fault(
        "wanted key is passed on for longer than five milliseconds",
        "_linger/key_cache.py",
        " and now < self.wanted_at + _LONGEST_PASSING_S",
        "",
        f"{_KEYS}test_wanted_key_is_passed_on_for_five_milliseconds[0.0051-1]",
    ),
    Fault(
        "sweep forgets that keeping a key did not pay",
        "_linger/key_cache.py",
        "        if now >= self.remembers_until:\n",
        "        if True:\n",
        f"{_KEYS}test_time_for_which_a_key_is_not_kept_doubles_up_to_a_minute[True]",
    ),
    Fault(
        "sweep gives up a key that was taken meanwhile",
        "_linger/key_cache.py",
        "cached.if_free(partial(cached.take_out, due, now))",
        "cached.take_out(due, now)",
        f"{_MEET}[take for good and sweep]",
    ),
    Fault(
        "key of a lost connection lingers where it is released just then",
        "_linger/key_cache.py",
        "                cached.wanted_at = clock()  # a release that",
        "                # a release that",
        f"{_MEET}[release and a lost connection]",
    ),
    Fault(
        "key lingers that nothing watches",
        "_linger/procedures.py",
        "if cached.waiters or must_go or (keeps and not cached.cache.is_watched):",
        "if cached.waiters or must_go:",
        f"{_KEYS}test_release_has_a_key_watched_that_nothing_watches",
    ),
    Fault(
        "interrupted acquire cleans up a key that lingers",
        "_linger/procedures.py",
        ("        if lease is None or lease.token != token:\n            left"),
        ("        if True:\n            left"),
        f"{_STEPS}test_interrupted_acquire_lets_the_key_linger_that_it_has_taken",
    ),
    Fault(
        "flag is taken for known where a key is wanted",
        "_linger/procedures.py",
        "confirm = Reacquire(lock._key, lease.token, ttl_ms)  # no flag",
        "confirm = Reacquire(lock._key, lease.token, ttl_ms, cached.wanted_at is not None)  # no flag",
        f"{_STEPS}test_flag_of_a_key_is_not_taken_for_known_when_another_process_wants_it",
    ),
    Fault(
        "key lingers whose token names another connection",
        "_linger/procedures.py",
        "    if registry is not None and registry.identifier != identifier_of(token):\n",
        "    if False:\n",
        f"{_STEPS}test_key_whose_token_names_another_connection_is_not_kept",
    ),
    Fault(
        "lock object goes on with a replaced key",
        "_linger/threads.py",
        "    if cached is None or not cached.is_current:\n",
        "    if False:\n",
        f"{_LINGERING}test_lock_object_whose_key_was_given_back_lets_it_linger_again[threads]",
    ),
    Fault(
        "forked child has the keys of its parent",
        "_linger/key_cache.py",
        "        self.key_cache.forget()\n",
        "",
        f"{_GIVING_BACK}test_forked_child_leaves_the_keys_to_its_parent[threads]",
    ),
    Fault(
        "lock object of a forked child has its parent's key",
        "_procedures/lock.py",
        "                    self._cached = None  # of the parent\n",
        "",
        _STORIES,
    ),
    Fault(
        "posted release is not cleaned up where its connection was replaced",
        "_linger/key_cache.py",
        "        self.clean_up_unconfirmed(except_of)\n",
        "",
        f"{_GIVING_BACK}test_release_without_a_reply_is_cleaned_up_once_there_is_another_connection[threads]",
    ),
    Fault(
        "posted release that was cleaned up is sent again",
        "_linger/key_cache.py",
        "        if id(leases) not in self._unconfirmed:",
        "        if False:",
        f"{_GIVING_BACK}test_release_that_was_cleaned_up_is_not_sent_again[threads]",
    ),
    Fault(
        "silent connection keeps a posted release",
        "_linger/threads.py",
        "        self._leave_if_unconfirmed()\n",
        "",
        f"{_ENDS}test_a_key_is_given_back_on_a_new_connection_where_the_old_one_is_silent[threads]",
    ),
    Fault(
        "reply to the release of an expired key is waited for",
        "_linger/key_cache.py",
        "any(lease.expires_at > now for leases",
        "any(lease is not None for leases",
        f"{_ENDS}test_nobody_listens_for_the_reply_to_the_release_of_a_key_that_has_expired",
    ),
    Fault(
        "posted release is not watched",
        "_linger/threads.py",
        "        if not (self.key_cache.is_watched or self._watcher or self._confirming):\n",
        "        if False:\n",
        f"{_GIVING_BACK}test_release_that_has_no_reply_yet_is_watched[threads]",
    ),
    Fault(
        "thread that sleeps is not woken by a key that lingers",
        "_linger/threads.py",
        "            woken.release()\n        return",
        "            pass\n        return",
        f"{_GIVING_BACK}test_thread_that_sleeps_is_woken_by_the_next_key_that_lingers",
    ),
    Fault(
        "thread that sleeps does not look for replies",
        "_linger/threads.py",
        "                self._listen(_LONGEST_PARK_S)\n",
        "                pass\n",
        f"{_GIVING_BACK}test_thread_that_sleeps_is_not_woken_by_what_is_given_back",
    ),
    Fault(
        "thread that has ended counts as asleep",
        "_linger/threads.py",
        "        self._watcher.pop(0, None)\n        is_needed",
        "        is_needed",
        f"{_GIVING_BACK}test_thread_that_sleeps_ends_where_no_key_lingers",
    ),
    Fault(
        "interrupted release of a wanted key gives nothing up",
        "_linger/procedures.py",
        ("            except BaseException:  # an interrupt may come before any line\n                cached"),
        ("            except Exception:\n                cached"),
        (
            "tests/integration/lingering/test_interrupted_calls.py::"
            "test_release_of_a_wanted_key_interrupted_at_any_line[KeyboardInterrupt-threads-{}-valkey]"
        ),
    ),
    Fault(
        "acquire interrupted before its steps begin keeps the local lock",
        "_linger/threads.py",
        (
            "    except BaseException as error:  # an interrupt may come before the steps begin\n"
            "        turn.end(owner)\n"
        ),
        "    except BaseException as error:\n",
        (
            "tests/integration/lingering/test_interrupted_calls.py::"
            "test_acquire_of_a_key_of_another_client_interrupted_at_any_line[KeyboardInterrupt-threads-valkey]"
        ),
    ),
    Fault(
        "interrupted local waiter keeps the local lock that was free",
        "_linger/key_cache.py",
        "            if self.locked_by.get(0) is me:\n                self.free()\n            raise\n",
        "            raise\n",
        "tests/unit/linger/test_key_cache_interrupts.py::test_interrupt_at_any_line_leaves_the_local_lock_free[KeyboardInterrupt-_wait_in_turn]",
    ),
    Fault(
        "interrupted release forgets the first local waiter",
        "_linger/key_cache.py",
        "            elif holder is not None and (holder is mine or holder is first):\n                self.unlock()\n",
        "",
        (
            "tests/integration/lingering/test_interrupts.py::"
            "test_interrupt_at_any_line_of_a_release_forgets_no_local_waiter[KeyboardInterrupt]"
        ),
    ),
    Fault(
        "key lingers whose holder has found it lost",
        "_lease/owner.py",
        "            self.cached.lose(token)\n",
        "            pass\n",
        _LINGERING + "test_key_whose_holder_has_found_it_lost_does_not_linger[threads-extend-args0-{}]",
    ),
    Fault(
        "interrupt of an acquire with linger is swallowed",
        "_linger/threads.py",
        "        if not is_fetching(call, turn):",
        "        if False:",
        "tests/integration/lingering/test_interrupts.py::test_interrupt_at_any_line_leaves_the_key_usable[KeyboardInterrupt-_take-free]",
    ),
    Fault(
        "error ends the watching of keys that linger",
        "_linger/threads.py",
        "        except Exception:  # a bug of ours\n",
        "        except MemoryError:\n",
        f"{_GIVING_BACK}test_error_does_not_end_the_watching",
    ),
    Fault(
        "end of a program does not wait for what is being given up",
        "_linger/threads.py",
        "        while self._watcher and clock() < give_up_at:",
        "        while False:",
        f"{_GIVING_BACK}test_end_of_a_program_waits_for_what_the_watching_has_just_taken_out",
    ),
    Fault(
        "exit handler of a program lets a key linger",
        "_linger/threads.py",
        "        if _ended:\n            self._do",
        "        if False:\n            self._do",
        (
            "tests/integration/lingering/test_ends.py::"
            "test_a_program_that_ends_gives_its_keys_back[an exit handler that is called last]"
        ),
    ),
    Fault(
        "waiter is passed over while others leave",
        "_linger/key_cache.py",
        "        for index in range(len(self.waiters) - 1, -1, -1):\n",
        "        for index in range(len(self.waiters)):\n",
        f"{_KEYS}test_all_waiters_that_stay_are_found_while_others_leave",
    ),
    Fault(
        "two threads watch the keys that linger",
        "_linger/threads.py",
        "if self._watcher.setdefault(0, woken) is woken:",
        "if True:",
        f"{_GIVING_BACK}test_one_thread_listens_however_many_are_started",
    ),
    Fault(
        "thread that is woken when it is about to end ends",
        "_linger/threads.py",
        "is_needed = woken.acquire(blocking=False) or self.has_unconfirmed",
        "is_needed = self.has_unconfirmed",
        f"{_GIVING_BACK}test_thread_that_is_woken_when_it_is_about_to_end_goes_on",
    ),
    Fault(
        "key that was taken from its holder is taken in memory",
        "_linger/key_cache.py",
        "            lease.close()  # its holder finds that it is lost\n            cached.replace()\n",
        "            pass\n",
        "tests/integration/lingering/test_broken.py::"
        "test_a_held_key_is_taken_by_no_local_caller_once_it_is_broken[threads-{}]",
    ),
    Fault(
        "lock is broken before its holder's process has given it up",
        "_procedures/breaking.py",
        '        if without_flag(reading.holder or b"") != token:\n            return',
        "        if True:\n            return",
        "tests/unit/procedures/test_breaking.py::test_holder_that_listens_is_told_before_its_lock_is_released",
    ),
    Fault(
        "process of a cluster's client is not told that its lock is to be broken",
        "_protocol/queue.py",
        "(holder.publish.upper(), holder",
        '(b"PUBLISH", holder',
        "tests/integration/cluster/test_lingering.py"
        "::test_a_key_is_given_up_before_the_command_says_that_it_is_broken[threads-valkey-lingers]",
    ),
    Fault(
        "key is taken in memory whose release was interrupted",
        "_linger/key_cache.py",
        "        return self.must_go or (lease is not None and lease.releases > 0)",
        "        return self.must_go",
        (
            "tests/unit/linger/test_key_cache_interrupts.py::"
            "test_interrupted_release_of_a_key_that_is_not_kept_leaves_nothing_to_take[KeyboardInterrupt]"
        ),
    ),
    Fault(
        "interrupted sweep forgets what it has taken out",
        "_linger/key_cache.py",
        "            if due:\n                self.give_up(due, False)\n            raise\n",
        "            raise\n",
        f"{_KEY_CACHE_INTERRUPTS}test_interrupted_sweep_gives_back_what_it_has_taken_out[KeyboardInterrupt]",
    ),
    Fault(
        "key that was given back twice counts as lost",
        "_linger/key_cache.py",
        " and self.releases < 2:",
        ":",
        f"{_GIVING_BACK}test_release_that_was_begun_twice_reports_no_loss[threads]",
    ),
    Fault(
        "interrupt that is an error leaves the key of an acquire",
        "_procedures/acquire.py",
        "_NO_INTERRUPTS = (redis.RedisError,",
        "_NO_INTERRUPTS = (Exception,",
        (
            "tests/integration/lock/test_interrupts.py::"
            "test_acquire_without_an_answer_interrupted_at_any_line[TimeIsUp-threads-{}-valkey]"
        ),
    ),
)
