"""The model server answers the scripts of several keys as real servers do.

Random sequences of requests go to both, and the replies, values and pushes of both must be equal; of times, only the
order.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Reacquire, Release
from redislock_fast._protocol.fenced import AcquireFenced, AcquireManyFenced, Fence, RedeemFenced
from redislock_fast._protocol.keys import fence_key, queue_keys
from redislock_fast._protocol.own_token import Redeem
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue
from redislock_fast._protocol.scripts import ACQUIRE_FENCED, EXTEND, LEAVE, PASS_ON, REACQUIRE, REDEEM, RELEASE, WAIT
from redislock_fast._util.tokens import is_ours
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.simulation.model import Model
from tests.support.helpers import PATIENCE_S
from tests.support.selection import in_two_runs

KEY = b"name"
_TOKENS = [b"rlf:%011x%d%020x" % (number % 2, number // 2, number) for number in range(4)] + [b"custom"]
_CHANNELS = [b"rlf:%011x" % number for number in range(3)]  # no connection hears the last one
_PLAIN = Capabilities()
_SCRIPTS = (WAIT, PASS_ON, LEAVE, RELEASE, REACQUIRE, REDEEM, EXTEND, ACQUIRE_FENCED)


def _request(dice: random.Random) -> Args:
    token = dice.choice(_TOKENS)
    ttl_ms = dice.choice((None, 50_000))
    kind = dice.randrange(17)
    if kind < 5:
        awake_ms = dice.choice((9000, 9000, 9000, -9000))
        channel, look_for = dice.choice(_CHANNELS), dice.choice((b"", b"", *_TOKENS))
        if not is_ours(token):
            token = _TOKENS[0]
        return JoinQueue(KEY, token, ttl_ms or 0, b"publish", channel, awake_ms, 60_000, look_for).request(_PLAIN, 0.0)
    if kind < 8:
        return Release(KEY, token, None, contended=dice.random() < 0.6).request(_PLAIN, 0.0)
    if kind == 8:
        return LeaveQueue(KEY, token, dice.random() < 0.5, ttl_ms or 0).request(_PLAIN, 0.0)
    if kind == 9:
        return (b"SET", KEY, token, b"NX", *(() if ttl_ms is None else (b"PX", ttl_ms)))
    if kind == 10:
        return Reacquire(KEY, token, ttl_ms).request(_PLAIN, 0.0)
    if kind == 11:
        return Fence(KEY, token, dice.choice((1, 8))).request(_PLAIN, 0.0)
    if kind in (12, 13):
        return dice.choice((AcquireFenced, AcquireManyFenced))(KEY, token, ttl_ms).request(_PLAIN, 0.0)
    if kind in (14, 15):
        redeem = dice.choice((Redeem, RedeemFenced))
        return redeem(KEY, token, ttl_ms, dice.choice(_TOKENS[:-1])).request(_PLAIN, 0.0)
    return (b"DEL", KEY)


def _is_time(number: object) -> bool:
    return isinstance(number, int) and number > 1000


def _without_times(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_without_times(item) for item in reply]
    return "some time" if _is_time(reply) else reply


def _without_arrival(message: Any) -> tuple[bytes, bool]:
    word, _, arrival = message.partition(b"+")
    return word, arrival.isdigit() and len(arrival) == 16


class _Real:
    """A real server, with two connections that take pushes."""

    def __init__(self, server: Server, **user: str) -> None:
        options: dict[str, Any] = {"port": server.port, **user}
        self._client: Any = redis.Redis(**options, protocol=3)
        self._admin: Any = redis.Redis(port=server.port)
        pubsub: Any = self._admin.pubsub
        self._pubsubs: list[Any] = [pubsub() for _ in range(2)]
        for pubsub, channel in zip(self._pubsubs, _CHANNELS, strict=False):
            pubsub.subscribe(channel)
            pubsub.get_message(timeout=1)
        for script in _SCRIPTS:
            self._admin.script_load(script.text)

    def play(self, requests: list[Args]) -> list[Any]:
        self._admin.flushall()
        pipeline = self._client.pipeline(transaction=False)
        queue, waiters = queue_keys(KEY)
        for request in requests:
            looks = ((b"GET", KEY), (b"HGETALL", fence_key(KEY)), (b"ZRANGE", queue, 0, -1), (b"HGETALL", waiters))
            ttls = ((b"PTTL", key) for key in (KEY, queue, fence_key(KEY)))
            for command in (request, *looks, *ttls):
                pipeline.execute_command(*command)
        replies = iter(pipeline.execute(raise_on_error=False))
        steps: list[Any] = []
        for reply in replies:
            word, numbers, tokens, fields, *left_ms = (next(replies) for _ in range(7))
            entries = {name: entry for name, entry in fields.items() if name[:1] == b"t"}
            channels = sorted(name for name in fields if name[:1] == b"c")
            answer = _without_times(True if reply == b"OK" else reply)
            steps.append((answer, word, numbers, tokens, entries, channels, [*map(_is_time, left_ms)]))
        return [*steps, *map(self._heard, self._pubsubs, _CHANNELS)]

    def _heard(self, pubsub: Any, channel: bytes) -> list[tuple[bytes, bool]]:
        """The messages that were published on the channel so far."""
        self._admin.publish(channel, b"end")
        heard = []
        while (message := pubsub.get_message(timeout=PATIENCE_S))["data"] != b"end":
            heard.append(_without_arrival(message["data"]))
        return heard

    def close(self) -> None:
        for pubsub in self._pubsubs:
            pubsub.close()
        self._client.close()
        self._admin.close()


def _modelled(requests: list[Args], denied: frozenset[str]) -> list[Any]:
    model = Model(frozenset())
    for script in _SCRIPTS:
        model._cached.add(script.sha)
    model.now_us = 10**15
    client = model.connect(denied)
    listeners = [model.connect() for _ in range(2)]
    for listener, channel in zip(listeners, _CHANNELS, strict=False):
        model.execute((b"HELLO", 3), listener)
        model.execute((b"SUBSCRIBE", channel), listener)
    queue, waiters = queue_keys(KEY)
    steps: list[Any] = []
    for request in requests:
        model.now_us += 7000
        reply: Reply
        if request[0] == b"DEL":
            reply = int(model.entry(KEY) is not None)
            model.remove(KEY)
        else:
            reply = model.execute(request, client)
        entry = model.entry(KEY)
        kept = [entry, model.entry(queue), model.entry(fence_key(KEY))]
        scores = model._items(queue)
        fields = model._items(waiters)
        numbers = model._items(fence_key(KEY))
        steps.append(
            (
                _without_times(True if reply == b"OK" else reply),
                None if entry is None else entry.value,
                {name: b"%d" % value if name == b"number" else value for name, value in numbers.items()},
                sorted(scores, key=lambda token: (scores[token], token)),
                {name: b"%d %b %b" % fields[name] for name in fields if name[:1] == b"t"},
                sorted(name for name in fields if name[:1] == b"c"),
                [each is not None and each.ends_at_ms is not None for each in kept],
            )
        )
    return [*steps, *([_without_arrival(push[2]) for push in listener.inbox] for listener in listeners)]


@in_two_runs(range(300), 60)
@pytest.mark.parametrize(
    "denied", [frozenset(), {"PUBLISH"}, {"PUBSUB"}], ids=lambda denied: f"denied {min(denied, default='')}"
)
def test_scripts_of_several_keys(server: Server, acl_user: MakeUser, denied: frozenset[str], seeds: range) -> None:
    user = acl_user(server, *(f"-{command.lower()}" for command in denied)).options() if denied else {}
    real = _Real(server, **user)
    for seed in seeds:
        dice = random.Random(seed)
        requests = [_request(dice) for _ in range(dice.randrange(3, 25))]
        expected = real.play(requests)
        for step, (was, would_be) in enumerate(zip(expected, _modelled(requests, denied), strict=True)):
            assert would_be == was, f"seed {seed}, request {step}"
    real.close()
