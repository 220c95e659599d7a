"""How an operation goes through the nodes of a cluster, driven by hand: what is sent with ASKING, which node is asked.

Rules: no nodes and no network.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hiredis
import pytest
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError, MovedError, RedisClusterException
from redis.retry import Retry

from redislock_fast._pipe.base import Bulk
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.operation import NotExecuted, Redirected
from redislock_fast._protocol.pipeline import Pipeline, ReleasePipeline
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue
from redislock_fast._transport.routing import ASKING, Route, next_node
from redislock_fast._util.redis_py import RetryPolicy
from redislock_fast._util.tokens import new_token

MOVED = Redirected("MOVED 5798 127.0.0.1:7001")
ASK = Redirected("ASK 5798 127.0.0.1:7001")
MOVING = NotExecuted("TRYAGAIN", "TRYAGAIN Multiple keys request during rehashing of slot")
DOWN = NotExecuted("CLUSTERDOWN", "CLUSTERDOWN Hash slot not served")
DIALECT = Capabilities()
TOKEN = new_token()


def policy(retries: int = 3) -> RetryPolicy:
    return RetryPolicy(Retry(ConstantBackoff(0.5), retries))


def route(operation: Acquire | Pipeline | None = None, limit_s: float | None = None, retries: int = 3) -> Route:
    return Route(operation or Acquire(b"name", TOKEN, 1000), limit_s, policy(retries))


def test_one_request_follows_asking() -> None:
    plain, acquire = Acquire(b"name", TOKEN, 1000), Acquire(b"name", TOKEN, 1000)
    asking = route(acquire)
    assert asking.pause_s(ASK) == 0
    assert asking.exchange.is_pipeline
    assert asking.exchange.request(DIALECT, 1.0) == [ASKING, plain.request(DIALECT, 1.0)]
    assert asking.exchange.feed([b"OK", b"OK"], DIALECT)
    assert acquire.result


def test_each_of_many_requests_follows_asking() -> None:
    keys = [b"a", b"b"]
    plain, release = ReleasePipeline(keys, TOKEN, None), ReleasePipeline(keys, TOKEN, None)
    asking = route(release)
    asking.pause_s(ASK)
    bulk = plain.request(DIALECT, 1.0)
    assert isinstance(bulk, Bulk)
    first, second = bulk.requests()
    assert asking.exchange.request(DIALECT, 1.0) == [ASKING, first, ASKING, second]
    assert asking.exchange.feed([b"OK", 1] * 2, DIALECT)
    assert release.results == [True, True]


def test_asking_is_for_one_attempt() -> None:
    asking = route()
    asking.pause_s(ASK)
    assert asking.asks
    asking.pause_s(MOVED)
    assert (asking.asks, asking.exchange.is_pipeline) == (False, False)
    named = asking.redirected
    assert isinstance(named, MovedError)
    asking.pause_s(ConnectionError())
    assert asking.redirected is None
    assert asking.is_stale


@pytest.mark.parametrize(("redirection", "is_noted"), [(MOVED, True), (ASK, False)], ids=["MOVED", "ASK"])
def test_slot_that_has_moved_is_noted(redirection: Redirected, is_noted: bool) -> None:
    old, new = SimpleNamespace(server_type="primary"), SimpleNamespace(server_type="primary")
    slots: dict[int, list[object]] = {5798: [old]}
    client: Any = SimpleNamespace(
        get_node=lambda _host, _port: new,
        get_node_from_key=lambda _key: slots[5798][0],
        nodes_manager=SimpleNamespace(slots_cache=slots, remap_host_port=lambda *address: address),
    )
    redirected = route()
    redirected.pause_s(redirection)
    assert next_node(client, redirected, is_fresh=False) is new
    assert next_node(client, route(), is_fresh=False) is (new if is_noted else old)


def test_request_that_is_redirected_without_end_pauses_and_gives_up() -> None:
    lost = route(retries=2)
    pauses = [lost.pause_s(MOVED) for _ in range(18)]
    assert pauses == [0, 0, 0, 0, 0, 0.01, 0, 0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0, None]


def test_many_are_sent_about_for_as_long_as_each_node_settles_some() -> None:
    many = ReleasePipeline([b"%d" % number for number in range(10)], TOKEN, None)
    through = route(many)
    for left in range(10, 0, -1):
        many.request(DIALECT, 1.0)
        moved = hiredis.ReplyError("MOVED 5798 127.0.0.1:7001")
        if left == 1:
            assert many.feed([1], DIALECT)
            break
        with pytest.raises(Redirected):
            many.feed([1, *[moved] * (left - 1)], DIALECT)
        assert through.pause_s(MOVED) == 0
    assert all(many.results)


@pytest.mark.parametrize("trouble", [ConnectionError("gone"), DOWN, RedisClusterException("uncovered")], ids=repr)
def test_without_a_limit_the_retry_policy_decides(trouble: Exception) -> None:
    pauses = [route_pause for each in [route()] for route_pause in (each.pause_s(trouble) for _ in range(4))]
    assert pauses[1:] == [0.5, 0.5, None]
    assert pauses[0] == (0 if isinstance(trouble, ConnectionError) else 0.01)


def test_server_that_says_later_is_asked_until_the_limit() -> None:
    assert [each.pause_s(DOWN) for each in [route(limit_s=60.0)] for _ in range(20)][-1] == 0.5
    assert route(limit_s=0.0).pause_s(DOWN) is None


def test_a_slot_on_the_move_is_waited_for_in_small_pauses() -> None:
    for each in (route(), route(limit_s=60.0)):
        assert {each.pause_s(MOVING) for _ in range(50)} == {0.05}
        assert not each.is_stale
    assert route(limit_s=0.01).pause_s(MOVING) is None


def test_waiter_is_told_that_the_slot_moves_and_leaves_no_place_behind() -> None:
    wait = JoinQueue(b"name", TOKEN, 1000, b"spublish", b"channel", 1000, 1000, b"")
    wait.request(DIALECT, 1.0)
    assert wait.feed(hiredis.ReplyError(str(MOVING)), DIALECT)
    assert (wait.result, wait.denied) == (False, "TRYAGAIN")
    assert wait.to_clean_up(failed=False) == [(b"name", TOKEN)]


def test_leaving_a_queue_on_the_move_frees_the_lock_and_is_done_again() -> None:
    leave = LeaveQueue(b"name", TOKEN)
    leave.request(DIALECT, 1.0)
    assert not leave.feed(hiredis.ReplyError(str(MOVING)), DIALECT)
    assert leave.request(DIALECT, 1.0)[0] == b"EVALSHA"
    assert leave.feed(1, DIALECT)
    assert leave.to_clean_up(failed=False) == [(b"name", TOKEN)]
    assert leave.unsettled
