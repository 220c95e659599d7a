"""Servers that break the protocol: each call of a pipe gets its own reply or `ConnectionBroken`, and nothing else.

A story is what callers do in some rounds, and how the peer answers: in any encoding and in any pieces, with at most one
fault, after which no call gets a reply. The faults are replies that nobody has asked for, subscriptions that nobody
has asked for, and bytes that are no RESP. Locks are then played against a server whose replies are of any type.

Rules: every test runs on all four pipes, compiled and pure, of threads and of loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import hiredis
import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

import redislock_fast.asyncio
from redislock_fast._pipe.base import Args, ConnectionBroken, NoReply, Pipe
from tests.support.async_helpers import eventually, run_in_loop
from tests.support.async_peer import PIPES, MakePipe, connected, within
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.pipes import FOREVER, PAIRS, Peer

LOST = "lost"

TAGGED: list[bytes] = [
    b"+%b\r\n", b"*2\r\n+%b\r\n:1\r\n", b"%%1\r\n+%b\r\n#t\r\n", b"-ERR %b\r\n", b"*1\r\n*1\r\n+%b\r\n",
    b">2\r\n+invalidate\r\n*1\r\n+k\r\n+%b\r\n", b"~1\r\n+%b\r\n",
]  # fmt: skip
"""Replies that tell whose they are, one of them with a push in front."""

PLAIN: list[bytes] = [b"_\r\n", b":0\r\n", b":1\r\n", b"+OK\r\n", b"$-1\r\n", b",1.5\r\n", b"#f\r\n"]
"""Replies that do not."""

SUBSCRIBED = b">3\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n:1\r\n"

MALFORMED: list[bytes] = [
    b"?\r\n", b"x", b":x\r\n", b":99999999999999999999999\r\n", b"$-7\r\n", b"$x\r\n", b"*-7\r\n", b"#x\r\n", b",x\r\n",
    b"*9223372036854775807\r\n", b"%1\r\n*0\r\n+a\r\n", b"_x\r\n", b"\x00", b"\r\n",
]  # fmt: skip
"""Bytes that no server writes where a reply begins, and what hiredis makes a TypeError of."""

SURPLUS: list[bytes] = [b"+surplus\r\n", b":1\r\n", b"_\r\n", b"*0\r\n", b"-ERR surplus\r\n", b":1\r\n:1\r\n"]


def subscribed(kind: bytes, channel: bytes) -> bytes:
    return SUBSCRIBED % (len(kind), kind, len(channel), channel)


STRAYS: list[bytes] = [
    subscribed(b"subscribe", b"stray"), subscribed(b"ssubscribe", b"stray"), b">1\r\n+subscribe\r\n",
    b">3\r\n+subscribe\r\n_\r\n:1\r\n", b">3\r\n+ssubscribe\r\n*0\r\n:1\r\n",
]  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The calls of one caller.

    Attributes:
        kind: "call", "many", "post" or "subscribe".
        requests: one, but for many.
        replies: to each, as they are written.
    """

    kind: str
    requests: tuple[Args, ...]
    replies: tuple[bytes, ...]


@dataclass(frozen=True)
class MajorityRound:
    """Calls that are under way together, and what the peer sends when it has read them all.

    Attributes:
        calls: theirs.
        fault: the bytes that are wrong; empty for none.
        at: before which reply they come; those of a surplus come behind the last one.
        cuts: where the stream is cut into pieces.
    """

    calls: tuple[Call, ...]
    fault: bytes
    at: int
    cuts: tuple[int, ...]

    def pieces(self, requests: list[list[bytes]]) -> Iterator[bytes]:
        """The bytes that the peer sends after it has read these requests in this order."""
        reply_to = {call.requests[at][1]: call.replies[at] for call in self.calls for at in range(len(call.requests))}
        stream = [reply_to[request[1]] for request in requests]
        stream.insert(min(self.at, len(stream)), self.fault)
        data = b"".join(stream)
        begin = 0
        for cut in sorted({cut % (len(data) + 1) for cut in self.cuts} | {len(data)}):
            if cut > begin:
                yield data[begin:cut]
                begin = cut

    def safe(self, requests: list[list[bytes]]) -> set[bytes]:
        """The words of the requests that are answered before the fault."""
        answered = requests[: self.at] if self.fault else requests
        return {request[1] for request in answered}


@st.composite
def rounds(draw: st.DrawFn) -> list[MajorityRound]:
    """Some rounds, the last of them, or none, with a fault, and another one behind it."""
    count = draw(st.integers(1, 3))
    kinds = st.sampled_from(["call", "call", "many", "post", "subscribe", "ssubscribe"])
    story = []
    for number in range(count + 1):
        calls = []
        for place in range(draw(st.integers(1, 4))):
            kind = draw(kinds)
            words = [
                b"%d.%d.%d" % (number, place, at) for at in range(draw(st.integers(1, 5)) if kind == "many" else 1)
            ]
            calls.append(_call(draw, kind, words))
        fault, at = b"", 99
        if number == count - 1:
            fault = draw(st.sampled_from([b"", *SURPLUS, *STRAYS, *MALFORMED]))
            at = 99 if fault in SURPLUS else draw(st.integers(0, 6))
        story.append(MajorityRound(tuple(calls), fault, at, tuple(draw(st.lists(st.integers(0, 400), max_size=6)))))
    return story


def _call(draw: st.DrawFn, kind: str, words: list[bytes]) -> Call:
    if kind in ("subscribe", "ssubscribe"):
        channel = words[0]
        answers = [subscribed(kind.encode(), channel), b"-NOPERM %b\r\n" % channel]
        return Call("subscribe", ((kind.upper().encode(), channel),), (draw(st.sampled_from(answers)),))
    replies = []
    for word in words:
        reply = draw(st.sampled_from([*TAGGED, *PLAIN]))
        replies.append(reply % word if reply in TAGGED else reply)
    return Call(kind, tuple((b"ECHO", word) for word in words), tuple(replies))


def comparable(reply: Any) -> object:
    """A reply, so that two are equal that say the same."""
    if isinstance(reply, hiredis.ReplyError):
        return ("error", str(reply))
    return [comparable(entry) for entry in reply] if isinstance(reply, list) else (type(reply), reply)


def parsed(reply: bytes) -> object:
    """The reply as it is told, without the push in front."""
    reader = hiredis.Reader()
    reader.feed(reply)
    first = reader.gets()
    return comparable(
        reader.gets() if isinstance(first, hiredis.PushNotification) and first[0] == b"invalidate" else first
    )


def judge(round_: MajorityRound, requests: list[list[bytes]], outcomes: list[object], is_over: bool) -> None:
    """See that each call got its own reply, or was lost where that may be."""
    safe = set() if is_over else round_.safe(requests)
    for call, outcome in zip(round_.calls, outcomes, strict=True):
        own = [parsed(reply) for reply in call.replies]
        expected = own if call.kind in ("many", "post") else own[0]
        if all(request[1] in safe for request in call.requests):
            assert expected == outcome
        else:
            assert outcome == LOST


# ---- threads ----


class ThreadCallers:
    """Plays a story on a pipe of threads."""

    def __init__(self, make_pair: Callable[[], tuple[Pipe, Peer]]) -> None:
        self._pipe, self._peer = make_pair()

    def play(self, story: list[MajorityRound]) -> None:
        is_over = False
        try:
            for round_ in story:
                posted: list[list[object]] = [[] for _ in round_.calls]
                futures = [  # a ThreadPoolExecutor may leave a call for a thread that waits in another one
                    start(partial(self._do, call, replies)) for call, replies in zip(round_.calls, posted, strict=True)
                ]
                requests: list[list[bytes]] = []
                if not is_over:
                    requests = self._peer.read(sum(len(call.requests) for call in round_.calls))
                    with contextlib.suppress(OSError):  # the pipe has gone at the fault
                        for piece in round_.pieces(requests):
                            self._peer.answer(piece)
                    self._read_until(round_.fault, posted, round_)
                outcomes: list[object] = [future.result(PATIENCE_S) for future in futures]
                for at, call in enumerate(round_.calls):
                    if call.kind == "post":
                        outcomes[at] = posted[at] or LOST
                judge(round_, requests, outcomes, is_over)
                is_over = is_over or round_.fault != b""
                assert is_over == self._pipe.broken
        finally:
            self._peer.sock.close()
            self._pipe.close()

    def _do(self, call: Call, posted: list[object]) -> object:
        try:
            if call.kind == "post":
                self._pipe.post(call.requests[0], lambda reply: posted.append(comparable(reply)))
                return None
            if call.kind == "many":
                return comparable(self._pipe.call_many(list(call.requests), FOREVER))
            return comparable(self._pipe.call(call.requests[0], FOREVER))
        except ConnectionBroken:
            return LOST

    def _read_until(self, fault: bytes, posted: list[list[object]], round_: MajorityRound) -> None:
        """Read what nobody waits for."""
        wanted = sum(call.kind == "post" for call in round_.calls)

        def is_read() -> bool:
            try:
                self._pipe.mailbox().wait(0.01)
            except NoReply:
                pass
            except ConnectionBroken:
                return True
            return not fault and sum(map(bool, posted)) == wanted

        wait_until(is_read, "what was sent is read")


# ---- loops ----


async def play_in_loop(make_pipe: MakePipe, story: list[MajorityRound]) -> None:
    """Play a story on a pipe of a loop."""
    is_over = False
    async with connected(make_pipe) as (pipe, peer):

        async def do(call: Call, posted: list[object]) -> object:
            try:
                if call.kind == "post":
                    pipe.post(call.requests[0], lambda reply: posted.append(comparable(reply)))
                    return None
                if call.kind == "many":
                    return comparable(await pipe.call_many(list(call.requests), FOREVER))
                return comparable(await pipe.call(call.requests[0], FOREVER))
            except ConnectionBroken:
                return LOST

        for round_ in story:
            posted: list[list[object]] = [[] for _ in round_.calls]
            tasks = [asyncio.ensure_future(do(*each)) for each in zip(round_.calls, posted, strict=True)]
            requests: list[list[bytes]] = []
            if not is_over:
                requests = await peer.read(sum(len(call.requests) for call in round_.calls))
                with contextlib.suppress(OSError):  # the pipe has gone at the fault
                    for piece in round_.pieces(requests):
                        await peer.answer(piece)
                        await asyncio.sleep(0)
            outcomes: list[Any] = list(await within(asyncio.gather(*tasks)))
            is_over = is_over or round_.fault != b""
            if is_over:
                await eventually(lambda: pipe.broken, "the fault is found")
            for at, call in enumerate(round_.calls):
                if call.kind == "post":
                    if not is_over:
                        await eventually(lambda replies=posted[at]: bool(replies), "the reply is told")  # type: ignore[misc]
                    outcomes[at] = posted[at] or LOST
            judge(round_, requests, outcomes, is_over and not round_.fault)
            assert is_over == pipe.broken


PATIENT = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("make_pair", PAIRS)
@PATIENT
@given(story=rounds())
def test_threads_get_their_own_reply_or_none(
    make_pair: Callable[[], tuple[Pipe, Peer]], story: list[MajorityRound]
) -> None:
    ThreadCallers(make_pair).play(story)


@pytest.mark.parametrize("make_pipe", PIPES)
@PATIENT
@given(story=rounds())
def test_tasks_get_their_own_reply_or_none(make_pipe: MakePipe, loop_kind: str, story: list[MajorityRound]) -> None:
    run_in_loop(loop_kind, play_in_loop(make_pipe, story))


# ---- locks ----

ODD: list[bytes] = [
    *PLAIN, b":2\r\n", b":-7\r\n", b"$0\r\n\r\n", b"+odd\r\n", b"*0\r\n", b"*1\r\n:1\r\n", b"*2\r\n:1\r\n+x\r\n",
    b"*3\r\n:1\r\n_\r\n:1\r\n", b"*5\r\n:0\r\n+x\r\n:1\r\n:1\r\n:1\r\n", b"%1\r\n+a\r\n:1\r\n", b"#t\r\n",
    b"*1\r\n*1\r\n_\r\n", b">0\r\n", b">1\r\n:1\r\n", b">2\r\n+message\r\n+c\r\n", b">3\r\n+message\r\n+c\r\n:1\r\n",
    b">2\r\n+invalidate\r\n:1\r\n", b">3\r\n+sunsubscribe\r\n*0\r\n:1\r\n", *STRAYS, *MALFORMED,
]  # fmt: skip
"""Replies and pushes of any type, for requests of any kind."""


class OddServer(threading.Thread):
    """Lets any client connect, and answers what it asks then with the next of the replies, over and over.

    Who may touch what: `port` is fixed; the rest belongs to the thread.
    """

    def __init__(self, replies: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._replies = itertools.cycle(replies)

    def run(self) -> None:
        connections: dict[socket.socket, hiredis.Reader] = {}
        with contextlib.suppress(OSError):
            while True:
                for sock in select.select([self._listener, *connections], [], [])[0]:
                    if sock is self._listener:
                        connections[sock.accept()[0]] = hiredis.Reader()
                        continue
                    if not self._serve(sock, connections[sock]):
                        del connections[sock]
                        sock.close()
        for sock in connections:
            sock.close()

    def _serve(self, sock: socket.socket, reader: hiredis.Reader) -> bool:
        try:
            data = sock.recv(65536)
            reader.feed(data)
            while (request := reader.gets()) is not False:
                sock.sendall(self._reply_to(request))
        except OSError:
            return False
        return data != b""

    def _reply_to(self, request: list[bytes]) -> bytes:
        match request[0].upper():
            case b"HELLO":
                return b"%2\r\n+mode\r\n+standalone\r\n+proto\r\n:3\r\n"
            case b"COMMAND":
                return b"*3\r\n*1\r\n+delifeq\r\n_\r\n*1\r\n+lmpop\r\n"
            case b"CLIENT":
                return b"+id=1 addr=127.0.0.1:1\r\n" if request[1] == b"INFO" else b"+OK\r\n"
        return next(self._replies)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.join()
        self._listener.close()


def _client_options(port: int) -> dict[str, Any]:
    return {"port": port, "socket_timeout": 0.3, "retry": Retry(NoBackoff(), 1)}


@pytest.mark.slow
@PATIENT
@given(replies=st.lists(st.sampled_from(ODD), min_size=1, max_size=6))
def test_locks_of_threads_raise_errors_of_redis_alone(replies: list[bytes]) -> None:
    server = OddServer(replies)
    server.start()
    try:
        with redis.Redis(**_client_options(server.port)) as client:
            lock = redislock_fast.Lock(client, "name", timeout=10)
            take = partial(lock.acquire, blocking_timeout=0.05)
            for verb in (take, partial(lock.extend, 1), lock.reacquire, lock.release):
                with contextlib.suppress(redis.RedisError):
                    verb()
            locker = redislock_fast.Locker(client)
            with contextlib.suppress(redis.RedisError):
                locker.acquire_many(["a", "b", "c"], timeout=10, blocking_timeout=0).release()
    finally:
        server.close()


@pytest.mark.slow
@PATIENT
@given(replies=st.lists(st.sampled_from(ODD), min_size=1, max_size=6))
def test_locks_of_tasks_raise_errors_of_redis_alone(replies: list[bytes]) -> None:
    async def play() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        async with redis.asyncio.Redis(
            **{**_client_options(server.port), "retry": AsyncRetry(NoBackoff(), 1)}
        ) as client:
            lock = redislock_fast.asyncio.Lock(client, "name", timeout=10)
            take = partial(lock.acquire, blocking_timeout=0.05)
            for verb in (take, partial(lock.extend, 1), lock.reacquire, lock.release):
                with contextlib.suppress(redis.RedisError):
                    await verb()
        assert told == []

    server = OddServer(replies)
    server.start()
    try:
        run_in_loop("asyncio", play())
    finally:
        server.close()
