"""Faults of semaphores that the model server, the simulation and what these have led to find."""

from __future__ import annotations

from tests.planted.fault import Fault

__all__ = ["FAULTS"]

_BY_MODEL = "tests/simulation/test_model.py::test_scripts_of_a_semaphore[valkey-denied -some]"

FAULTS = (
    Fault(
        "one permit more than the limit is granted",
        "_protocol/lua/permits.lua",
        "    return most - size\n",
        "    return most - size + 1\n",
        _BY_MODEL,
    ),
    Fault(
        "permits count as ended by the ttl of the caller that looks",
        "_protocol/lua/permits.lua",
        "'-inf', now_ms() - 1,",
        "'-inf', now_ms() - 1 + (tonumber(ARGV[2]) or 0),",
        _BY_MODEL,
    ),
    Fault(
        "ttl of a semaphore is shortened by the permit that ends first",
        "_protocol/lua/permits.lua",
        "redis.call('pexpireat', permits, ends_at, 'gt')",
        "redis.call('pexpireat', permits, ends_at)",
        _BY_MODEL,
    ),
    Fault(
        "permit ends at the beginning of its last millisecond",
        "_protocol/lua/permits.lua",
        "tonumber(ends_at) >= now_ms()",
        "tonumber(ends_at) > now_ms()",
        "tests/simulation/test_model.py::test_permit_lasts_through_its_last_millisecond[valkey]",
    ),
    Fault(
        "permit is purged in its last millisecond",
        "_protocol/lua/permits.lua",
        "'-inf', now_ms() - 1,",
        "'-inf', now_ms(),",
        "tests/simulation/test_model.py::test_permit_lasts_through_its_last_millisecond[valkey]",
    ),
    Fault(
        "permit is handed over to a waiter whose connection is gone",
        "_protocol/lua/hand_over.lua",
        "is_there = listeners[2] and listeners[2] > 0",
        "is_there = true",
        _BY_MODEL,
    ),
    Fault(
        "release of a permit hands it over to nobody",
        "_protocol/lua/release_waited_permit.lua",
        "return hand_over() and 2 or 1",
        "return 1",
        _BY_MODEL,
    ),
    Fault(
        "attempt takes a permit for which others wait",
        "_protocol/lua/acquire_waited_permit.lua",
        "hand_over()\nif redis.call('exists', queue) == 1 then",
        "if false then",
        _BY_MODEL,
    ),
    Fault(
        "attempt takes a permit for which others wait whom its user may not tell",
        "_protocol/lua/acquire_waited_permit.lua",
        "if redis.call('exists', queue) == 1 then",
        "if false then",
        "tests/simulation/test_model.py::test_scripts_of_a_semaphore[valkey-denied PUBLISH-some]",
    ),
    Fault(
        "renewal grants a permit that has ended",
        "_protocol/lua/renew_permit.lua",
        "if not held(ARGV[1]) then",
        "if false then",
        _BY_MODEL,
    ),
    Fault(
        "server without memory ends permits",
        "_protocol/lua/renew_permit.lua",
        "redis.call('zrem', permits, '')",
        "",
        (
            "tests/integration/semaphore/test_keys.py::"
            "test_a_permit_is_renewed_and_released_while_the_server_has_no_memory_left[threads]"
        ),
    ),
    Fault(
        "operator's limit does not count for waiters",
        "_protocol/lua/permit_policy.lua",
        "    return tonumber(set and (string.match(set, '^%d+$') or -1) or own)\n",
        "    return tonumber(own)\n",
        _BY_MODEL,
    ),
    Fault(
        "higher limit admits nobody",
        "_protocol/lua/resize.lua",
        "local last = hand_over()\n",
        "local last = false\n",
        _BY_MODEL,
    ),
    Fault(
        "waiter does not know when a permit ends",
        "_protocol/lua/permit_policy.lua",
        "return first[2] and math.max(first[2] - now_ms(), 0) or -1",
        "return -1",
        _BY_MODEL,
    ),
    Fault(
        "health check looks for what its own waiter may have, not the first one",
        "_protocol/lua/wait.lua",
        "if is_free(first_terms or ARGV[2]) then",
        "if is_free(ARGV[2]) then",
        _BY_MODEL,
    ),
    Fault(
        "health check takes a permit whose message was lost for a place in the queue",
        "_queue/waiting.py",
        "            elif oldest is not None and wait.has_permit:  #",
        "            elif False:  #",
        "tests/simulation/test_semaphores.py::test_waiter_is_told_of_a_permit_whose_message_was_lost",
    ),
)
