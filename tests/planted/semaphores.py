"""Faults of semaphores: their scripts, and the permits of each caller."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_TESTS = "tests/integration/semaphore/"
_LUA = "_protocol/lua/"

FAULTS = (
    Fault(
        "permits are purged by another's ttl",
        _LUA + "permits.lua",
        "'-inf', now_ms() - 1, 'limit', 0, 50)",
        "'-inf', now_ms() + 60000, 'limit', 0, 50)",
        _TESTS + "test_keys.py::test_a_short_permit_does_not_end_a_long_one[threads-valkey]",
    ),
    Fault(
        "permits end by a clock that is not the server's",
        _LUA + "permits.lua",
        "    local ends_at = now_ms() + ttl_ms\n",
        "    local ends_at = now_ms() + 3600000 + ttl_ms\n",
        _TESTS + "test_keys.py::test_each_permit_has_an_end_of_its_own_by_the_servers_clock[threads-valkey]",
    ),
    Fault(
        "permits are counted beside their set",
        _LUA + "permits.lua",
        "    size = size or redis.call('zcard', permits)\n",
        "    size = size or redis.call('incr', permits .. ':count') - 1\n",
        _TESTS + "test_limit.py::test_no_more_than_the_limit_hold[threads-valkey-2]",
    ),
    Fault(
        "a short permit shortens the ttl of all",
        _LUA + "permits.lua",
        "        redis.call('pexpireat', permits, ends_at, 'gt')\n",
        "        redis.call('pexpireat', permits, ends_at)\n",
        _TESTS + "test_keys.py::test_the_ttl_of_the_key_is_the_latest_end_and_never_shortened[threads-valkey]",
    ),
    Fault(
        "permit is granted to a waiter that does not listen",
        _LUA + "hand_over.lua",
        "                is_there = listeners[2] and listeners[2] > 0\n",
        "                is_there = true\n",
        _TESTS + "test_keys.py::test_a_waiter_that_was_killed_leaves_nothing_after_the_others[threads-valkey]",
    ),
    Fault(
        "released permit is not handed over",
        _LUA + "release_waited_permit.lua",
        "return hand_over() and 2 or 1",
        "return 1",
        _TESTS
        + "test_limit.py::test_waiters_of_several_connections_get_permits_in_the_order_of_arrival[threads-valkey]",
    ),
    Fault(
        "one more than the limit may hold",
        _LUA + "permits.lua",
        "    return most - size\n",
        "    return most - size + 1\n",
        _TESTS + "test_limit.py::test_no_more_than_the_limit_hold[threads-valkey-2]",
    ),
    Fault(
        "caller that does not wait overtakes the queue",
        _LUA + "acquire_waited_permit.lua",
        "hand_over()\nif redis.call('exists', queue) == 1 then -- nobody is overtaken\n    room = 0\nend\n",
        "",
        _TESTS + "test_limit.py::test_a_caller_that_does_not_wait_overtakes_nobody[threads-valkey]",
    ),
    Fault(
        "renewal brings back a permit that has ended",
        _LUA + "renew_permit.lua",
        "if not held(ARGV[1]) then\n    return 0\nend\n",
        "",
        _TESTS + "test_holding.py::test_a_lost_permit_is_told_once_with_its_reason[threads-valkey-permit deleted]",
    ),
    Fault(
        "higher limit admits nobody that waits",
        _LUA + "resize.lua",
        "local last = hand_over()\n",
        "local last = false\n",
        _TESTS + "test_limit.py::test_a_higher_limit_admits_waiters_at_once[threads-valkey]",
    ),
    Fault(
        "waiter of a key that became a string stays in the queue",
        _LUA + "permit_policy.lua",
        "redis.pcall('zcard', permits)",
        "redis.call('zcard', permits)",
        _TESTS + "test_keys.py::test_a_waiter_leaves_the_queue_of_a_key_that_has_become_a_string[threads-valkey]",
    ),
    Fault(
        "permits of a task that has ended are kept",
        "_semaphore/callers.py",
        "weakref.ref(task, of_tasks.pop)",
        "weakref.ref(task)",
        _TESTS + "test_holding.py::test_the_permit_of_a_thread_or_task_that_has_ended_is_released[asyncio-True]",
    ),
    Fault(
        "permit without renewal stays when it is dropped",
        "semaphore.py",
        "ignore_loss if on_lost is None and not auto_renew else on_lost",
        "on_lost",
        _TESTS + "test_holding.py::test_the_permit_of_a_thread_or_task_that_has_ended_is_released[threads-False]",
    ),
    Fault(
        "block that another thread leaves keeps its permit",
        "_semaphore/callers.py",
        "            permit, entered = self.open.popitem()\n",
        "            return None\n",
        _TESTS + "test_with.py::test_a_block_that_another_caller_leaves_gives_its_permit_back[threads]",
    ),
    Fault(
        "permit stays where the end of its block is interrupted",
        "semaphore.py",
        "        except BaseException as error:\n            self._drop()\n",
        "        except BaseException as error:\n",
        _TESTS + "test_holding.py::test_an_error_at_the_end_of_a_block_that_has_raised_is_logged[threads]",
    ),
    Fault(
        "permit whose acquire was interrupted as it ended is kept",
        "semaphore.py",
        "            permit._drop()  # noqa: SLF001  # as above\n            raise\n",
        "            raise\n",
        _TESTS
        + "test_interrupts.py::test_an_interrupt_at_any_line_leaves_nothing[threads-KeyboardInterrupt-acquire-True]",
    ),
    Fault(
        "permit of a block that was interrupted as it began is kept",
        "semaphore.py",
        "            if permit is not None:  # an interrupt: nobody will leave the block\n",
        "            if permit is None:\n",
        _TESTS
        + "test_interrupts.py::test_an_interrupt_at_any_line_leaves_nothing[threads-KeyboardInterrupt-enter-True]",
    ),
    Fault(
        "permit of a limited call that was interrupted is kept",
        "semaphore.py",
        "                    permit._drop()  # noqa: SLF001  # of this very module\n",
        "                    pass\n",
        _TESTS + "test_interrupts.py::test_an_interrupt_of_a_limited_call_leaves_nothing[handled]",
    ),
    Fault(
        "caller's other permits stay after an interrupted release",
        "semaphore.py",
        "        if not latest._lock:  # noqa: SLF001  # of this very module\n",
        "        if False:\n",
        _TESTS + "test_interrupts.py::test_an_interrupt_at_any_line_leaves_nothing"
        "[threads-KeyboardInterrupt-release_all-True]",
    ),
    Fault(
        "permit of an open block ends with the thread that has entered it",
        "_semaphore/callers.py",
        "        self.open[permit] = entered\n",
        "",
        _TESTS + "test_holding.py::test_the_permit_of_an_open_block_is_not_dropped_with_its_thread_or_task[threads]",
    ),
    Fault(
        "permit is not released while its keys move",
        "_protocol/permits.py",
        '(b"ZREM", self.key, self.token) if self._is_moving else self.queue_script(RELEASE_PERMIT)',
        "self.queue_script(RELEASE_PERMIT)",
        "tests/unit/protocol/test_permits.py::test_while_the_keys_move_nothing_can_be_had_and_a_permit_is_removed",
    ),
)
