"""Replies and pushes of a type or shape that no server gives: none of them is a verdict, and none an error of Python's.

Rules: no server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import ConnectionBroken, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire, Extend, Reacquire, ReadHolder, Release
from redislock_fast._protocol.fenced import AcquireFenced, Fence
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import ReleasePipeline
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue, Subscribe, Watch
from redislock_fast._protocol.replicas import Replicate
from redislock_fast._queue.waiters import WaiterRegistry
from redislock_fast._util.tokens import TokenSource, new_token
from tests.simulation.model import SERVERS
from tests.unit.protocol.test_commands import capabilities_of
from tests.unit.queue.test_waiters import KEY, take

TOKEN = new_token()
OK = b"OK"

ANYTHING: list[Any] = [
    None, True, False, 1.5, b"", OK, b"QUEUED", b"subscribe", 0, 1, 2, 3, -1, -3, 1 << 40, [], {}, {b"a": 1}, [None],
    [[]], [1], [0, b"x"], [1, b"x"], [1, 1], [2, b"x", 1], [1, None, 1], [1, None, b"1"], [0, b"x", 1, 1],
    [3], [3, b"x", 1, 1, 1], [0, b"x", 1, 1, 1], [2, b"x", 1, 1, 1], [1, b"x", 1, 1, 1], [0, 1, 1, 1, 1],
    [b"subscribe", b"c", 1],
]  # fmt: skip

OPERATIONS: dict[str, tuple[Callable[[], Any], Callable[[Any, Capabilities], bool]]] = {
    "acquire": (
        lambda: Acquire(KEY, TOKEN, 1000),
        lambda reply, capabilities: reply is None or (type(reply) is bytes if capabilities.set_get else reply == OK),
    ),
    "acquire own": (
        lambda: AcquireOwn(KEY, TOKEN, 1000),
        lambda reply, capabilities: reply is None or (type(reply) is bytes if capabilities.set_get else reply == OK),
    ),
    "acquire fenced": (
        lambda: AcquireFenced(KEY, TOKEN, 1000),
        lambda reply, _: reply in ([0, b"x"], [2, b"x", 1], [1, None, 1]),
    ),
    "fence": (lambda: Fence(KEY, TOKEN), lambda reply, _: reply in ([0, b"x"], [2, b"x", 1], [1, None, 1])),
    "release": (lambda: Release(KEY, TOKEN, None), lambda reply, _: type(reply) is int and 0 <= reply <= 2),
    "hand over": (
        lambda: Release(KEY, TOKEN, None, contended=True),
        lambda reply, _: type(reply) is int and 0 <= reply <= 3,
    ),
    "reacquire": (
        lambda: Reacquire(KEY, TOKEN, 1000),
        lambda reply, capabilities: (
            reply is None or reply == OK if capabilities.set_ifeq else type(reply) is int and reply in (0, 1)
        ),
    ),
    "extend": (lambda: Extend(KEY, TOKEN, 1000, False, 9.0), lambda reply, _: type(reply) is int and reply in (0, 1)),
    "extend for an unknown time": (lambda: Extend(KEY, TOKEN, 1000, False, None), lambda reply, _: type(reply) is int),
    "look": (lambda: ReadHolder(KEY), lambda reply, _: reply is None or type(reply) is bytes),
    "wait": (
        lambda: JoinQueue(KEY, TOKEN, 1000, b"publish", b"c", 5000, 60_000, b""),
        lambda reply, _: reply in ([1, b"x"], [0, b"x", 1, 1, 1], [2, b"x", 1, 1, 1], [3]),
    ),
    "leave": (lambda: LeaveQueue(KEY, TOKEN), lambda reply, _: reply is None or type(reply) is bytes),
    "subscribe": (
        lambda: Subscribe(KEY, b"SUBSCRIBE", b"c"),
        lambda reply, capabilities: reply is None or type(reply) is bytes or reply == [b"subscribe", b"c", 1],
    ),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_reply_that_no_server_gives_is_no_verdict(name: str, server: str) -> None:
    make, is_right = OPERATIONS[name]
    for reply in ANYTHING:
        operation, capabilities = make(), capabilities_of(server)
        operation.request(capabilities, 1.0)
        if is_right(reply, capabilities):
            operation.feed(reply, capabilities)
            continue
        with pytest.raises(Malformed):
            operation.feed(reply, capabilities)
        assert not operation.result


@pytest.mark.parametrize("replies", [[1, OK, b"x"], [OK, None, b"x"], [OK, OK, 1], [OK, OK, [b"x"]], [None, OK, None]])
def test_watch_takes_no_other_replies(replies: list[Reply]) -> None:
    with pytest.raises(Malformed):
        Watch(KEY).feed(replies, Capabilities())


@pytest.mark.parametrize("replies", [[OK, b"1"], [OK, None], [[], 1]])
def test_replicate_takes_no_other_replies(replies: list[Reply]) -> None:
    operation = Replicate(KEY, TOKEN, 1000, False, 1, 100)
    operation.request(capabilities_of("Valkey 9"), 1.0)
    with pytest.raises(Malformed):
        operation.feed(replies, capabilities_of("Valkey 9"))
    assert not operation.result


@pytest.mark.parametrize("odd", [7, -1, 1.5, [], {}])
def test_no_reply_of_many_counts_where_one_is_malformed(odd: Reply) -> None:
    keys = [b"a", b"b", b"c", b"d"]
    operation, capabilities = ReleasePipeline(keys, TOKEN, 1000), capabilities_of("Valkey 9")
    operation.request(capabilities, 1.0)
    with pytest.raises(Malformed):
        operation.feed([1, hiredis.ReplyError("ERR no"), odd, 1], capabilities)
    assert ([False] * 4, [0, 1, 2, 3]) == (operation.results, operation.unfinished)
    operation.note_unanswered(True)
    asked = operation.request(capabilities, 2.0)
    assert isinstance(asked, list)
    assert [key in words for words, key in zip(asked, keys, strict=True)] == [True] * 4
    assert operation.feed([1] * 4, capabilities)
    assert [True] * 4 == operation.results


@pytest.fixture
def registry() -> WaiterRegistry:
    registry = WaiterRegistry(Capabilities(), TokenSource())
    registry.note_subscription(registry.channel_for(KEY), allowed=True)
    return registry


@pytest.mark.parametrize(
    "push",
    [
        [], [None], [1], [[b"message"]], [b"message"], [b"message", b"c"], [b"message", b"c", None],
        [b"message", b"c", 1], [b"message", b"c", b"x", b"x"], [b"smessage", b"c", [b"x"]], [b"invalidate"],
        [b"invalidate", 1],
        [b"invalidate", b"k"], [b"invalidate", [b"k"], 1], [b"sunsubscribe"], [b"sunsubscribe", b"c"],
        [b"sunsubscribe", [b"c"], 1],
    ],
    ids=repr,
)  # fmt: skip
def test_push_that_no_server_sends_is_a_protocol_error(push: list[Reply], registry: WaiterRegistry) -> None:
    take(registry)
    with pytest.raises(hiredis.ProtocolError):
        registry.take_push(push)


@pytest.mark.parametrize(
    "push",
    [
        [b"message", b"c", b""], [b"smessage", b"c", b"x"], [b"invalidate", None], [b"invalidate", [b"k"]],
        [b"invalidate", []], [b"sunsubscribe", b"c", 0], [b"pong", b"x"], [b"new"],
    ],
    ids=repr,
)  # fmt: skip
def test_other_pushes_are_heard(push: list[Reply], registry: WaiterRegistry) -> None:
    take(registry)
    registry.take_push(push)


@pytest.mark.parametrize("reply", [reply for reply in ANYTHING if type(reply) is not list], ids=repr)
def test_answer_to_a_posted_wait_that_no_server_gives_is_a_protocol_error(
    reply: Reply, registry: WaiterRegistry
) -> None:
    waiter = take(registry)
    with pytest.raises(hiredis.ProtocolError):
        waiter.answer(reply)


def test_a_malformed_reply_counts_as_sent() -> None:
    error = Malformed([b"a secret"])
    assert (True, True) == (isinstance(error, ConnectionBroken), error.sent)
    assert "secret" not in str(error)
