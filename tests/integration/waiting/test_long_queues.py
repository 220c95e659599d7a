"""Queues with thousands of waiters that are gone: each script does a limited part of the work, and the next goes on.

Rules: what a script did is read from the queue, never from a clock.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.scenes import Scene
from tests.support.transports import run_pass_on_script, run_wait_script

QUEUE, WAITERS = "{name}:rlf:queue", "{name}:rlf:waiters"
_DEAD = 1000
_MOST_PASSES = 50
_MOST_FIELDS = 1000  # that one script looks at: 200, and what shares their places


def queue_up_the_dead(client: redis.Redis, channels: int = 1) -> None:
    """Let waiters whose processes are gone be the first in the queue."""
    tokens = [f"rlf:{number:032x}" for number in range(_DEAD)]
    client.zadd(QUEUE, {token: number for number, token in enumerate(tokens)})
    fields = {f"t{token}": f"1000 publish rlf:gone{number % channels}" for number, token in enumerate(tokens)}
    client.hset(WAITERS, mapping=fields)  # type: ignore[arg-type]


def test_a_release_passes_over_a_limited_number_of_waiters_and_the_client_goes_on(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    answer = waiter.acquire()
    wait_until(lambda: scene.client.zcard(QUEUE) == 1, "it waits")
    queue_up_the_dead(scene.client)
    value = scene.client.get("name")
    assert isinstance(value, bytes)
    assert run_pass_on_script(scene.client, value[:-1]) == 3
    assert scene.client.zcard(QUEUE) == _DEAD + 1 - _MOST_PASSES
    assert scene.client.get("name") == value
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert scene.client.keys() == []


def test_a_lock_that_was_deleted_is_taken_by_a_waiter_behind_many_that_are_gone(scene: Scene) -> None:
    _, waiter = scene.holder_and(1, timeout=None)
    answer = scene.wait(waiter)
    queue_up_the_dead(scene.client, channels=_DEAD)
    scene.client.delete("name")
    assert answer.result(PATIENCE_S) is True
    waiter.release()


def test_a_waiter_that_has_the_lock_leaves_no_field_of_its_token(scene: Scene) -> None:
    holder, waiter = scene.holder_and(1)
    answer = waiter.acquire()
    wait_until(lambda: scene.client.zcard(QUEUE) == 1, "it waits")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert [] == [field for field in scene.client.hgetall(WAITERS) if field[:1] in (b"t", "t")]
    waiter.release()


@pytest.mark.parametrize("is_awake", [False, True], ids=["processes that are gone", "processes that wait"])
def test_a_health_check_drops_old_fields_in_pieces(client: redis.Redis, is_awake: bool) -> None:
    awake_until_ms = int(1000 * time.time()) + (1_000_000 if is_awake else -1)
    client.hset(WAITERS, mapping={f"c{number}": awake_until_ms for number in range(10 * _MOST_FIELDS)})
    client.set("name", "another's")
    token = b"rlf:" + 32 * b"0"
    client.config_resetstat()
    before = client.hlen(WAITERS)
    run_wait_script(client, token)
    assert before + 2 - _MOST_FIELDS < client.hlen(WAITERS) <= before + 2
    while not is_awake and client.hlen(WAITERS) > 103:  # else pytest's own time limit ends the test
        run_wait_script(client, token)
    calls = client.info("commandstats")  # of all fields at once: never
    assert "cmdstat_hgetall" not in calls


@pytest.mark.parametrize("command", ["hscan", "unlink"])
def test_a_lock_is_handed_over_where_the_scripts_may_not_tidy_up(
    server: Server, acl_user: MakeUser, client: redis.Redis, command: str
) -> None:
    options: dict[str, Any] = {"port": server.port, **acl_user(server, f"-{command}").options()}
    token = b"rlf:" + 32 * b"0"
    with redis.Redis(**options) as restricted:
        client.hset(WAITERS, mapping={f"c{number}": 0 for number in range(_MOST_FIELDS)})
        assert run_wait_script(restricted, token) == [1, token + b"+"]
        assert run_pass_on_script(restricted, token) == 1
    assert client.get("name") is None
