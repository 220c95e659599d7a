"""Faults of the scripts that run on the server."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_FENCED = "tests/integration/fencing/test_fenced.py::"

FAULTS = (
    Fault(
        "waiter overtakes others once the server's clock was set back",
        "_protocol/lua/wait.lua",
        "    arrival = last + 1\n",
        "",
        (
            "tests/integration/waiting/test_waiting.py::"
            "test_a_waiter_comes_last_though_the_servers_clock_was_set_back[threads-valkey]"
        ),
    ),
    Fault(
        "waiter is told before it has the key",
        "_protocol/lua/hand_over.lua",
        "            local given = is_there and admit(token, terms)\n",
        "            redis.pcall(publish, channel, token .. '+' .. first[2])\n"
        "            local given = is_there and admit(token, terms)\n",
        (
            "tests/integration/waiting/test_degraded.py::"
            "test_a_waiter_is_told_of_no_lock_that_the_holder_could_not_give_it[threads-valkey-set]"
        ),
    ),
    Fault(
        "release deletes a lock that has another token",
        "_protocol/lua/release.lua",
        "if value == ARGV[1] or (value == marked and ARGV[2] ~= '1') then",
        "if value then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "release deletes a lock for which others wait",
        "_protocol/lua/release.lua",
        "if value == ARGV[1] or (value == marked and ARGV[2] ~= '1') then",
        "if value == ARGV[1] or value == marked then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "extend prolongs a lock that has another token",
        "_protocol/lua/extend.lua",
        "if value ~= ARGV[1] and value ~= marked then",
        "if not value then",
        "tests/compat/test_parity.py::test_lost_lock_raises_not_owned[threads-ours-valkey-taken with a ttl]",
    ),
    Fault(
        "reacquire prolongs a lock that has another token",
        "_protocol/lua/reacquire.lua",
        "if value == ARGV[1] or value == marked then",
        "if value then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "extend that is sent again adds twice",
        "_protocol/lua/extend.lua",
        "if ARGV[4] then",
        "if false then",
        "tests/compat/test_fixed_bugs.py::test_lost_reply_of_extend_adds_once[threads-ours-valkey]",
    ),
    Fault(
        "waiter does not set the contended flag",
        "_protocol/lua/lock_policy.lua",
        "        redis.call('append', lock, '+')\n",
        "",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "waiter that asks again loses its place",
        "_protocol/lua/wait.lua",
        "redis.call('zadd', queue, 'nx', arrival, token)",
        "redis.call('zadd', queue, arrival, token)",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "contended flag is set on a value that another library made",
        "_protocol/lua/lock_policy.lua",
        "    if #holder ~= 36 or string.sub(holder, 1, 4) ~= 'rlf:' then",
        "    if false then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "sleeping waiter stays at the head of the queue",
        "_protocol/lua/wait.lua",
        "if awake_until and tonumber(awake_until) >= now_ms then",
        "if awake_until then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "waiter takes a free lock before others that came first",
        "_protocol/lua/wait.lua",
        "    local last, own = hand_over(token)\n",
        "    local last, own = false, nil\n",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "queue is served last come, first served",
        "_protocol/lua/hand_over.lua",
        "redis.call('zpopmin', queue)",
        "redis.call('zpopmax', queue)",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "lock is handed over to a waiter whose connection is gone",
        "_protocol/lua/hand_over.lua",
        "is_there = listeners[2] and listeners[2] > 0",
        "is_there = true",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "own token is put in the place of another's",
        "_protocol/lua/redeem.lua",
        "else\n    return {0}\nend",
        "else\n    value, answer = token, {1}\nend",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "holder by its own token keeps an earlier number",
        "_protocol/lua/redeem.lua",
        "if not is_new and noted[1] == token then",
        "if noted[1] == token then",
        "tests/integration/fencing/test_locks.py"
        "::test_lock_that_is_taken_again_with_the_same_token_has_a_higher_number[threads-valkey-push]",
    ),
    Fault(
        "field of a waiter stays behind when the lock is handed over to it",
        "_protocol/lua/hand_over.lua",
        "redis.pcall('hdel', waiters, 't' .. token)",
        "if not is_there then redis.pcall('hdel', waiters, 't' .. token) end",
        "tests/integration/waiting/test_waiting.py::test_a_waiter_that_has_the_lock_leaves_no_field_of_its_token",
    ),
    Fault(
        "lock that is handed over never expires",
        "_protocol/lua/lock_policy.lua",
        "redis.call('set', lock, value, 'px', ttl_ms)",
        "redis.call('set', lock, value)",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "lock that is handed over loses the contended flag",
        "_protocol/lua/lock_policy.lua",
        "    value = token .. '+'",
        "    value = token",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "waiter that gives up keeps a lock that was granted meanwhile",
        "_protocol/lua/leave.lua",
        "    if hand_over() == nil then",
        "    if false then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "waiter that gives up stays in the queue",
        "_protocol/lua/leave.lua",
        "redis.call('zrem', queue, token)\n",
        "",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "hand-over does not compare the token",
        "_protocol/lua/pass_on.lua",
        "if held(ARGV[1]) then",
        "if redis.call('get', lock) then",
        "tests/simulation/test_model.py::test_scripts_of_several_keys[valkey-denied -some]",
    ),
    Fault(
        "fenced acquire takes a lock that another holds",
        "_protocol/lua/acquire_fenced.lua",
        "if value or ttl_ms == '' then",
        "if ttl_ms == '' then",
        f"{_FENCED}test_acquire_of_a_held_lock_names_the_holder_and_counts_nothing[valkey]",
    ),
    Fault(
        "two holders get the same fence",
        "_protocol/lua/acquire_fenced.lua",
        "redis.call('hincrby', fence, 'number', count)",
        "redis.call('hincrby', fence, 'number', 0) + count",
        "tests/integration/fencing/test_fenced.py::test_each_holder_has_a_higher_number[valkey]",
    ),
    Fault(
        "holder that asks again gets another fence",
        "_protocol/lua/acquire_fenced.lua",
        "noted[1] == token and noted[2] - count + 1 or next_number()",
        "next_number()",
        f"{_FENCED}test_acquire_of_what_another_holds_with_the_same_token_fails[valkey]",
    ),
    Fault(
        "guard compares fences as texts",
        "_protocol/lua/guard.lua",
        "tonumber(highest) > tonumber(fence)",
        "highest > fence",
        (
            "tests/integration/fencing/test_guards.py::"
            "test_lower_fence_than_one_that_has_written_is_refused[threads-valkey-[9, 10, 9, 10]-9 10 9<10 10 ]"
        ),
    ),
    Fault(
        "guard forgets the highest fence",
        "_protocol/lua/guard.lua",
        "        redis.call('set', note, fence)\n",
        "",
        "tests/integration/fencing/test_guards.py::test_paused_holder_is_refused[threads-valkey]",
    ),
)
