"""The rights and capabilities of a server's user, found out by trying them on a scratch lock that nobody else uses.

Nothing is tried in a way that would leave a key without a ttl. The server says first that a command is denied, and says
nothing of keys and channels then. What no other probe has shown of them is guessed to be denied, too, so that one round
of granting is enough.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import hiredis
import redis

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import CLIENT_INFO, HELLO, PROBE, Capabilities
from redislock_fast._protocol.commands import HANDED_OVER
from redislock_fast._protocol.keys import channel_beside, fence_key, queue_keys
from redislock_fast._protocol.operation import TokenOperation
from redislock_fast._protocol.queue import Subscribe
from redislock_fast._protocol.scripts import PASS_ON, RELEASE, WAIT
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._util.tokens import MARKER, identifier_of
from redislock_fast._version import __version__

if TYPE_CHECKING:
    from redislock_fast._cli.connecting import Client

__all__ = ["FENCE", "PERMITS", "QUEUE", "SCRIPTS", "SEEN", "TIDY", "Probes"]

_TTL_MS = 10_000
_PINGS = 21

SCRIPTS = ("eval", "evalsha")
QUEUE = (
    *("hello", "subscribe", *SCRIPTS, "publish", "numsub", "time", "get", "set", "append", "pttl"),
    *("del", "del queue", "zadd queue", "zpopmin queue", "zrange queue", "zrem queue", "zcard queue", "zscore queue"),
    *("hset queue", "hget queue", "hdel queue", "hlen queue", "pexpire queue"),
)
"""The rights for waiting in the queue, by the names of their probes: a command of ACL rules, and on which key."""

PERMITS = (
    *("exists queue", "type queue", "pexpireat queue", "zrangebyscore queue"),
    *(name for name in QUEUE if name not in ("hello", "subscribe", "publish", "numsub", "append")),
)
"""The rights for semaphores. Without those that are missing here of waiting in the queue, waiters poll."""

FENCE = (*SCRIPTS, "get", "set", "hincrby fence", "hset fence", "hmget fence")
SEEN = ("client|list", "client|setinfo", "hmget fence", "zcard queue", "zrange queue", "time", "pttl")
TIDY = ("client|info", "client|kill", "unlink queue", "hscan queue")

_ANSWERED_BY_AN_ERROR = ("evalsha", "client|kill", "client|setinfo", "hset queue", "hset fence", "hincrby fence")
"""Probes which an error other than NOPERM answers, too: no such script, no such connection, an older server. The last
ones have wrong arguments, so that they write nothing.
"""

_ON_THE_LOCK = ("del", "set", "get", "pttl", "pexpire", "append", "delifeq", "delex")
_ON_CHANNELS = ("publish", "subscribe")


class _Ask(TokenOperation):
    """Send requests to the lock's server in one piece; `replies` has the replies, of which some may be errors."""

    is_pipeline = True
    uses_queue = True

    def __init__(self, key: bytes, requests: list[Args]) -> None:
        super().__init__(key, b"")
        self._requests = requests
        self.replies: list[Reply] = []
        self.capabilities = Capabilities()

    def request(self, capabilities: Capabilities, now: float) -> list[Args]:  # noqa: ARG002  # at any time
        self.capabilities = capabilities
        return self._requests

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                self.error_code(reply)  # raises the errors that are to be tried again
        self.replies = replies
        return True


class _Subscribe(Subscribe):
    """Listen on a channel; `reply` is the server's."""

    reply: Reply = None

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        self.reply = reply
        return super().feed(reply, capabilities)


class Probes:
    """Tries everything once.

    Args:
        client: of the server or cluster.
        prefix: how the names of the user's locks begin, and so that of the scratch lock.

    Attributes:
        capabilities: what the server has.
        hello: its reply to `HELLO`; empty where that is denied.
        rules: by the name of a probe that was denied, the ACL rules that allow it.
        guessed: those of them for keys or channels of which no probe has shown anything.
        hands_over: whether one waiter has got the lock from another by the queue.
    """

    def __init__(self, client: Client, prefix: bytes) -> None:
        self._transport = transport_of(client)
        self._key = prefix + secrets.token_hex(8).encode()
        self._prefix = prefix
        self._queue, self._waiters = queue_keys(self._key)
        self._fence = fence_key(self._key)
        self.rules: dict[str, tuple[str, ...]] = {}
        self.guessed: set[str] = set()
        self._failed: set[str] = set()
        self._open: set[str] = set()
        self.hands_over = False
        asked = self._ask([PROBE, HELLO])
        self.capabilities = asked.capabilities
        hello: Any = asked.replies[1]
        self.hello: dict[bytes, Any] = hello if isinstance(hello, dict) else {}
        self._holder, self._waiter = (self._transport.new_token(self._key) for _ in range(2))
        identifier = identifier_of(self._waiter)
        self._is_sharded = self.capabilities.sharded or (not self.hello and isinstance(client, redis.RedisCluster))
        self._channel = channel_beside(self._key, identifier) if self._is_sharded else MARKER + identifier
        self._publish = b"spublish" if self._is_sharded else b"publish"
        for name, reply in zip(("command|info", "hello"), asked.replies, strict=True):
            self._note(name, reply)
        self._try_all()

    def allows(self, *names: str) -> bool:
        """Whether all of these probes have succeeded."""
        return not any(name in self.rules or name in self._failed for name in names)

    def ask(self, *words: bytes) -> Reply:
        """The reply to one more request."""
        return self._ask([words]).replies[0]

    def round_trip_ms(self) -> float:
        """The median of some round trips, in milliseconds."""

        def one() -> float:
            began = time.perf_counter()
            self._ask([(b"PING",)])
            return time.perf_counter() - began

        return statistics.median(one() for _ in range(_PINGS)) * 1000

    def _ask(self, requests: list[Args]) -> _Ask:
        asking = _Ask(self._key, requests)
        self._transport.execute(asking)
        return asking

    @property
    def native(self) -> bytes | None:
        """The native compare-and-delete of the server, whether or not it is allowed; None: there is none."""
        if self.allows("command|info"):
            return self.capabilities.release
        return next((name.upper().encode() for name in ("delifeq", "delex") if name not in self._failed), None)

    def _try_all(self) -> None:
        try:
            self._try(dict(self._harmless()))
            self._subscribe()
            if self.allows("set"):  # else it would make a key without a ttl
                self._try({"append": (b"APPEND", self._key, b"")})
            elif "set" in self.rules:
                self.rules["append"] = ("+append",)
            self._guess()
            if self.allows("set", "del", "del queue", "del fence"):
                self.hands_over = self.allows("subscribe", *SCRIPTS) and self._hand_over()
        finally:
            keys = (self._key, self._queue, self._waiters, self._fence)
            self._ask([*((b"DEL", key) for key in keys), (b"PEXPIRE", self._key, 1), (b"CLIENT", b"TRACKING", b"OFF")])

    def _try(self, requests: dict[str, Args]) -> None:
        for name, reply in zip(requests, self._ask(list(requests.values())).replies, strict=True):
            self._note(name, reply)

    def _note(self, name: str, reply: Reply) -> None:
        text = str(reply) if isinstance(reply, hiredis.ReplyError) else ""
        if text.startswith("NOPERM"):
            self.rules[name] = (self._command_rule(name) if " run " in text else self._place_rule(_place_of(name)),)
            return
        if text and name not in _ANSWERED_BY_AN_ERROR:
            self._failed.add(name)
        if not text.startswith("ERR unknown command"):
            self._open.add(_place_of(name))

    def _command_rule(self, name: str) -> str:
        """The ACL rule that allows the command of a probe."""
        command = name.partition(" ")[0]
        if command == "numsub":
            return "+pubsub|shardnumsub" if self._is_sharded else "+pubsub|numsub"
        return f"+s{command}" if self._is_sharded and command in _ON_CHANNELS else f"+{command}"

    def _place_rule(self, place: str) -> str:
        """The ACL rule that allows the keys or the channels of probes."""
        if place == "channel":
            return "&{*}:rlf:*" if self._is_sharded else "&rlf:*"
        own = self._queue.startswith(b"{" + self._key)
        return f"~{'{' if place == 'queue' and own else ''}{self._prefix.decode(errors='backslashreplace')}*"

    def _guess(self) -> None:
        """Add the rules for keys and channels to those for commands, where no probe has shown that these are open."""
        denied = {rule for rules in self.rules.values() for rule in rules}
        for name, rules in self.rules.items():
            place = _place_of(name)
            rule = self._place_rule(place)
            if place and place not in self._open and rule not in rules:
                self.rules[name] = (*rules, rule)
                self.guessed |= {rule} - denied

    def _harmless(self) -> Iterator[tuple[str, Args]]:
        """Requests that change nothing but the scratch lock, which has a ttl."""
        key, queue, waiters, fence = self._key, self._queue, self._waiters, self._fence
        yield "del", (b"DEL", key)
        yield "set", (b"SET", key, self._holder, b"NX", b"PX", _TTL_MS)
        yield "get", (b"GET", key)
        yield "pttl", (b"PTTL", key)
        yield "pexpire", (b"PEXPIRE", key, _TTL_MS)
        yield "eval", (b"EVAL", b"return 1", 0)
        yield "evalsha", (b"EVALSHA", RELEASE.sha, 1, key, b"")
        yield "delifeq", (b"DELIFEQ", key, b"")
        yield "delex", (b"DELEX", key, b"IFEQ", b"")
        yield "del queue", (b"DEL", queue)
        yield "del fence", (b"DEL", fence)
        yield "time", (b"TIME",)
        yield "wait", (b"WAIT", 0, 1)
        yield "exists queue", (b"EXISTS", queue)
        yield "type queue", (b"TYPE", queue)
        yield "pexpireat queue", (b"PEXPIREAT", queue, 1)
        yield "zrangebyscore queue", (b"ZRANGEBYSCORE", queue, 0, 0)
        yield "zadd queue", (b"ZADD", queue, b"XX", 1, b"")
        yield "zpopmin queue", (b"ZPOPMIN", queue)
        yield "zrange queue", (b"ZRANGE", queue, 0, 0)
        yield "zrem queue", (b"ZREM", queue, b"")
        yield "zcard queue", (b"ZCARD", queue)
        yield "zscore queue", (b"ZSCORE", queue, b"")
        yield "hget queue", (b"HGET", waiters, b"")
        yield "hdel queue", (b"HDEL", waiters, b"")
        yield "hlen queue", (b"HLEN", waiters)
        yield "hscan queue", (b"HSCAN", waiters, 0)
        yield "hset queue", (b"HSET", waiters, b"", b"", b"no value")
        yield "unlink queue", (b"UNLINK", waiters)
        yield "pexpire queue", (b"PEXPIRE", queue, 1)
        yield "get queue", (b"GET", queue)  # this and the next one only show whether the keys are open
        yield "pttl queue", (b"PTTL", queue)
        yield "hmget fence", (b"HMGET", fence, b"token", b"number")
        yield "hset fence", (b"HSET", fence, b"", b"", b"no value")
        yield "hincrby fence", (b"HINCRBY", fence, b"number", b"no number")
        yield "client|info", CLIENT_INFO
        yield "client|list", (b"CLIENT", b"LIST", b"TYPE", b"pubsub")
        yield "client|setinfo", (b"CLIENT", b"SETINFO", b"LIB-VER", __version__)
        yield "client|kill", (b"CLIENT", b"KILL", b"ID", 0)
        yield "client|tracking", (b"CLIENT", b"TRACKING", b"ON", b"OPTIN")
        yield "client|caching", (b"CLIENT", b"CACHING", b"YES")
        yield "publish", (self._publish, self._channel, b"")
        numsub = b"SHARDNUMSUB" if self._is_sharded else b"NUMSUB"
        yield "numsub", (b"PUBSUB", numsub, self._channel)

    def _subscribe(self) -> None:
        listen = b"SSUBSCRIBE" if self._is_sharded else b"SUBSCRIBE"
        subscribing = _Subscribe(self._key, listen, self._channel)
        if self.capabilities.push:
            self._transport.execute(subscribing)
            self._note("subscribe", subscribing.reply)
        elif not self.allows("hello"):  # without it, it cannot be tried
            self.rules["subscribe"] = (self._command_rule("subscribe"),)
        if not subscribing.is_pushed:
            self._failed.add("subscribe")

    def _hand_over(self) -> bool:
        """Let a waiter join the queue, and the holder pass the lock on to it. Returns whether the waiter has it."""
        keys = (self._key, self._queue, self._waiters)
        words = (_TTL_MS, self._publish, self._channel, _TTL_MS, _TTL_MS, b"")
        requests: list[Args] = [
            (b"EVAL", WAIT.text, 3, *keys, self._waiter, *words),
            (b"EVAL", PASS_ON.text, 3, *keys, self._holder),
        ]
        return self._ask(requests).replies[1] == HANDED_OVER


def _place_of(name: str) -> str:
    """The kind of keys or channels that a probe uses; empty where it uses none."""
    command, _, place = name.partition(" ")
    if place:
        return "queue"
    return "lock" if command in _ON_THE_LOCK else "channel" if command in _ON_CHANNELS else ""
