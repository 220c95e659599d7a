"""The model server answers the scripts of several keys as real servers do.

Random sequences of requests go to both, and the replies, values and pushes of both must be equal; of times, only the
order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import hiredis
import pytest
import redis

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol import scripts
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Reacquire, Release
from redislock_fast._protocol.fenced import AcquireFenced, AcquireManyFenced, Fence, RedeemFenced
from redislock_fast._protocol.keys import fence_key, permit_keys, queue_keys
from redislock_fast._protocol.own_token import Redeem
from redislock_fast._protocol.permits import ReleasePermit, Resize, acquire_permit
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue
from redislock_fast._protocol.scripts import (
    ACQUIRE_FENCED,
    ACQUIRE_PERMIT,
    EXTEND,
    FOR_PERMITS,
    LEAVE,
    PASS_ON,
    REACQUIRE,
    REDEEM,
    RELEASE,
    RESIZE,
    WAIT,
)
from redislock_fast._util.tokens import is_ours
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.simulation.keyspace import Connection
from tests.simulation.model import Model
from tests.support.helpers import PATIENCE_S
from tests.support.selection import in_two_runs

KEY = b"name"
_TOKENS = [b"rlf:%011x%d%020x" % (number % 2, number // 2, number) for number in range(4)] + [b"custom"]
_CHANNELS = [b"rlf:%011x" % number for number in range(3)]  # no connection hears the last one
_PLAIN = Capabilities()
_SCRIPTS = (WAIT, PASS_ON, LEAVE, RELEASE, REACQUIRE, REDEEM, EXTEND, ACQUIRE_FENCED)
_SCRIPTS_OF_PERMITS = (ACQUIRE_PERMIT, RESIZE, *FOR_PERMITS.values())
_PERMITS = [b"rlf:%011x2%020x" % (number % 2, number) for number in range(5)]
_ENDED = 1
"""The end, in the server's milliseconds, of a permit that has ended. The others end long after the test."""


def _request(rng: random.Random) -> Args:
    token = rng.choice(_TOKENS)
    ttl_ms = rng.choice((None, 50_000))
    kind = rng.randrange(17)
    if kind < 5:
        awake_ms = rng.choice((9000, 9000, 9000, -9000))
        channel, look_for = rng.choice(_CHANNELS), rng.choice((b"", b"", *_TOKENS))
        if not is_ours(token):
            token = _TOKENS[0]
        return JoinQueue(KEY, token, ttl_ms or 0, b"publish", channel, awake_ms, 60_000, look_for).request(_PLAIN, 0.0)
    if kind < 8:
        return Release(KEY, token, None, contended=rng.random() < 0.6).request(_PLAIN, 0.0)
    if kind == 8:
        return LeaveQueue(KEY, token, rng.random() < 0.5, ttl_ms or 0).request(_PLAIN, 0.0)
    if kind == 9:
        return (b"SET", KEY, token, b"NX", *(() if ttl_ms is None else (b"PX", ttl_ms)))
    if kind == 10:
        return Reacquire(KEY, token, ttl_ms).request(_PLAIN, 0.0)
    if kind == 11:
        return Fence(KEY, token, rng.choice((1, 8))).request(_PLAIN, 0.0)
    if kind in (12, 13):
        return rng.choice((AcquireFenced, AcquireManyFenced))(KEY, token, ttl_ms).request(_PLAIN, 0.0)
    if kind in (14, 15):
        redeem = rng.choice((Redeem, RedeemFenced))
        return redeem(KEY, token, ttl_ms, rng.choice(_TOKENS[:-1])).request(_PLAIN, 0.0)
    return (b"DEL", KEY)


def _request_of_permits(rng: random.Random) -> Args:
    token, ttl_ms, limit = rng.choice(_PERMITS), rng.choice((50_000, 100_000)), rng.randrange(1, 4)
    terms = b"%d/%d" % (ttl_ms, limit)
    kind = rng.randrange(20)
    if kind < 6:
        awake_ms = rng.choice((9000, 9000, 9000, -9000))
        channel, look_for = rng.choice(_CHANNELS), rng.choice((b"", b"", *_PERMITS))
        return JoinQueue(KEY, token, terms, b"publish", channel, awake_ms, 60_000, look_for).request(_PLAIN, 0.0)
    if kind < 9:
        return acquire_permit(limit)(KEY, token, ttl_ms).request(_PLAIN, 0.0)
    if kind < 12:
        return ReleasePermit(KEY, token, None).request(_PLAIN, 0.0)
    if kind < 14:
        return LeaveQueue(KEY, token, rng.random() < 0.5, terms).request(_PLAIN, 0.0)
    if kind == 14:
        return Reacquire(KEY, token, ttl_ms).request(_PLAIN, 0.0)
    if kind == 15:
        return Resize(KEY, rng.choice((None, 1, 2, 4))).request(_PLAIN, 0.0)
    if kind < 19:
        return (b"ZADD", KEY, b"XX", _ENDED, token)
    return rng.choice(((b"DEL", KEY), (b"SET", KEY, b"of another kind")))


def _is_time(number: object) -> bool:
    return isinstance(number, int) and number > 1000


def _without_times(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_without_times(item) for item in reply]
    if isinstance(reply, Exception):
        return "WRONGTYPE" if "WRONGTYPE" in str(reply) else str(reply)
    return "some time" if _is_time(reply) else reply


def _without_arrival(message: Any) -> tuple[bytes, bool]:
    word, _, arrival = message.partition(b"+")
    return word, arrival.isdigit() and len(arrival) == 16


def _span(left_ms: float) -> int:
    """A time from now on, as ttls are chosen; 0 for none and for one that has passed."""
    return max(round(left_ms / 50_000), 0)


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
        for script in (*_SCRIPTS, *_SCRIPTS_OF_PERMITS):
            self._admin.script_load(script.text)

    def play_on_permits(self, requests: list[Args]) -> list[Any]:
        self._admin.flushall()
        pipeline = self._client.pipeline(transaction=False)
        queue, waiters, limit = permit_keys(KEY)
        looks: tuple[Args, ...] = ((b"TIME",), (b"PTTL", KEY), (b"ZRANGE", KEY, 0, -1, b"WITHSCORES"), (b"GET", limit))
        looks += ((b"ZRANGE", queue, 0, -1), (b"HGETALL", waiters), (b"PTTL", queue))
        for request in requests:
            for command in (request, *looks):
                pipeline.execute_command(*command)
        replies = iter(pipeline.execute(raise_on_error=False))
        steps: list[Any] = []
        for reply in replies:
            time, ttl_ms, ends, limit, tokens, fields, queue_ttl_ms = (next(replies) for _ in looks)
            permits = None
            if isinstance(ends, list):
                now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
                permits = {token: _span(ends_at - now_ms) for token, ends_at in ends}
            answer = _without_times(True if reply == b"OK" else reply)
            entries = {name: entry for name, entry in fields.items() if name[:1] == b"t"}
            channels = sorted(name for name in fields if name[:1] == b"c")
            steps.append((answer, permits, _span(ttl_ms), limit, tokens, entries, channels, _is_time(queue_ttl_ms)))
        return [*steps, *map(self._heard, self._pubsubs, _CHANNELS)]

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


def _model(denied: frozenset[str]) -> tuple[Model, Connection, list[Connection]]:
    """A model that knows all scripts, a client, and two connections that take pushes."""
    model = Model(frozenset())
    for script in (*_SCRIPTS, *_SCRIPTS_OF_PERMITS):
        model._cached.add(script.sha)
    model.now_us = 10**15
    client = model.connect(denied)
    listeners = [model.connect() for _ in range(2)]
    for listener, channel in zip(listeners, _CHANNELS, strict=False):
        model.execute((b"HELLO", 3), listener)
        model.execute((b"SUBSCRIBE", channel), listener)
    return model, client, listeners


def _modelled_permits(requests: list[Args], denied: frozenset[str]) -> list[Any]:
    model, client, listeners = _model(denied)
    queue, waiters, limit = permit_keys(KEY)
    steps: list[Any] = []
    for request in requests:
        model.now_us += 7000
        entry = model.entry(KEY)
        reply: Reply
        if request[0] == b"DEL":
            reply = int(entry is not None)
            model.remove(KEY)
        elif request[0] == b"ZADD":
            is_string = entry is not None and entry.value is not None
            reply = hiredis.ReplyError("WRONGTYPE") if is_string else 0
            if entry is not None and request[4] in entry.items:
                entry.items[request[4]] = _ENDED
        else:
            reply = model.execute(request, client)
        entry = model.entry(KEY)
        ends_at_ms = None if entry is None else entry.ends_at_ms
        permits: dict[bytes, Any] = {} if entry is None else entry.items
        is_string = entry is not None and entry.value is not None
        scores, fields = model._items(queue), model._items(waiters)
        resized, kept = model.entry(limit), model.entry(queue)
        steps.append(
            (
                _without_times(True if reply == b"OK" else reply),
                None if is_string else {token: _span(permits[token] - model.now_ms) for token in permits},
                0 if ends_at_ms is None else _span(ends_at_ms - model.now_ms),
                None if resized is None else resized.value,
                sorted(scores, key=lambda token: (scores[token], token)),
                {name: b" ".join(fields[name]) for name in fields if name[:1] == b"t"},
                sorted(name for name in fields if name[:1] == b"c"),
                kept is not None,
            )
        )
    return [*steps, *([_without_arrival(push[2]) for push in listener.inbox] for listener in listeners)]


def _modelled(requests: list[Args], denied: frozenset[str]) -> list[Any]:
    model, client, listeners = _model(denied)
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


_DENIALS = pytest.mark.parametrize(
    "denied", [frozenset(), {"PUBLISH"}, {"PUBSUB"}], ids=lambda denied: f"denied {min(denied, default='')}"
)


@pytest.fixture
def real(server: Server, acl_user: MakeUser, denied: frozenset[str]) -> Iterator[_Real]:
    user = acl_user(server, *(f"-{command.lower()}" for command in denied)).options() if denied else {}
    real = _Real(server, **user)
    yield real
    real.close()


@in_two_runs(range(300), 60)
@_DENIALS
def test_scripts_of_several_keys(real: _Real, denied: frozenset[str], seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        requests = [_request(rng) for _ in range(rng.randrange(3, 25))]
        expected = real.play(requests)
        for step, (was, would_be) in enumerate(zip(expected, _modelled(requests, denied), strict=True)):
            assert would_be == was, f"seed {seed}, request {step}"


@in_two_runs(range(300), 60)
@_DENIALS
def test_scripts_of_a_semaphore(real: _Real, denied: frozenset[str], seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        requests = [_request_of_permits(rng) for _ in range(rng.randrange(3, 35))]
        expected = real.play_on_permits(requests)
        for step, (was, would_be) in enumerate(zip(expected, _modelled_permits(requests, denied), strict=True)):
            assert would_be == was, f"seed {seed}, request {step}"


def test_permit_lasts_through_its_last_millisecond(server: Server) -> None:
    client: Any = redis.Redis(port=server.port)
    looks = "time = {'1700000000', '5999'} redis.call('zadd', permits, now_ms() - ARGV[1], 'token') "
    looks += "return {held('token') and 1 or 0, count_room(1)}"
    text = scripts._text("permits").decode() + looks
    assert client.eval(text, 4, KEY, *permit_keys(KEY), 0) == [1, 0]
    assert client.eval(text, 4, KEY, *permit_keys(KEY), 1) == [0, 1]
    client.close()
