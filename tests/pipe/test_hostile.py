"""Bytes that a hostile or broken server may write: a pipe tells what hiredis alone makes of them, in bounded memory.

A stream is any mixture of replies and pushes, perhaps with bytes changed, and is cut anywhere. Requests are posted, so
that what the pipe tells can be compared in its order. `test_fuzz.py` tests who gets which reply.

Rules: every test runs on all four pipes, compiled and pure, of threads and of loops.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import hiredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redislock_fast._pipe.base import NOT_ENOUGH, ConnectionBroken, NoReply, Pipe, Reply, is_answer, new_reader
from tests.support.any_pipe import OVER_TLS, THREADS
from tests.support.async_helpers import eventually, run_in_loop
from tests.support.async_peer import PIPES, MakePipe, connected
from tests.support.helpers import run_script
from tests.support.pipes import FOREVER, MESSAGES, PAIRS, Peer

REQUESTS = 6

Told = tuple[list[str], bool]
"""The replies and pushes that a pipe told, in their order; whether the other end closed it, else its bytes broke it."""

Play = Callable[[Iterable[bytes]], Told]

LEAVES: list[bytes] = [
    b"_\r\n", b":0\r\n", b":1\r\n", b":-123456\r\n", b"+OK\r\n", b"+\r\n", b"-ERR no\r\n", b"$-1\r\n", b"$0\r\n\r\n",
    b"$4\r\na\r\nb\r\n", b"$12\r\n0123456789ab\r\n", b"*-1\r\n", b"*0\r\n", b"%0\r\n", b"~0\r\n", b"#t\r\n", b"#f\r\n",
    b",1.5\r\n", b",-inf\r\n", b"(12345678901234567890\r\n", b"=7\r\ntxt:abc\r\n",
]  # fmt: skip
"""Every type of RESP3 that holds no others."""

REPLIES: list[bytes] = [
    *LEAVES, b"*2\r\n:1\r\n*1\r\n*1\r\n_\r\n", b"%2\r\n+a\r\n*1\r\n:1\r\n:2\r\n#t\r\n", b"~2\r\n+a\r\n$1\r\nb\r\n",
    b"*1\r\n%1\r\n+a\r\n~1\r\n:1\r\n",
]  # fmt: skip


def _all_of(parts: list[bytes]) -> bytes:
    return b"".join(parts)


def _grown(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    def holding(kind: bytes, each: int) -> st.SearchStrategy[bytes]:
        return st.lists(inner, max_size=3).map(
            lambda parts: (
                kind + b"%d\r\n" % len(parts) + b"".join(part if each == 1 else b"+k\r\n" + part for part in parts)
            )
        )

    return st.one_of(holding(b"*", 1), holding(b"~", 1), holding(b"%", 2), holding(b">", 1))


VALUES = st.recursive(st.sampled_from(LEAVES), _grown, max_leaves=6)
WHOLE = st.lists(st.one_of(st.sampled_from(LEAVES), VALUES, st.sampled_from(list(MESSAGES)[:8])), max_size=8).map(
    _all_of
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """The pieces of a stream; up to two of its bytes are changed, put in or left out, and it may end anywhere."""
    data = draw(WHOLE)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        data = (
            data[:at]
            + draw(st.sampled_from([b"", b"0", b"9", b"-", b"\r", b"\n", b"$", b"x"]))
            + data[at + draw(st.integers(0, 1)) :]
        )
    return cut(
        data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data,
        draw(st.lists(st.integers(0, 200), max_size=5)),
    )


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """The data in pieces."""
    ends = [*sorted({place for place in places if place < len(data)}), len(data)]
    return [data[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


# ---- what is told ----


def told_by_hiredis(data: bytes) -> Told:
    """The events that a pipe should report for this stream."""
    told: list[str] = []
    reader = new_reader()
    reader.feed(data)
    replies = 0
    while True:
        try:
            item = reader.gets()
        except Exception:  # whatever hiredis raises
            return told, False
        if item is NOT_ENOUGH:
            return told, True
        if isinstance(item, hiredis.PushNotification):
            if is_answer(item):
                return told, False
        else:
            replies += 1
            if replies > REQUESTS:
                return told, False
        told.append(repr(item))


def told_by_threads(make_pair: Callable[[], tuple[Pipe, Peer]], pieces: Iterable[bytes]) -> Told:
    """The events that a pipe of threads reports; this thread alone drives it."""
    told: list[str] = []
    pipe, peer = make_pair()
    pipe.on_push = lambda push: told.append(repr(push))
    box = pipe.mailbox()

    def read(timeout_s: float) -> bool:
        try:
            box.wait(timeout_s)
        except NoReply:
            return True
        except ConnectionBroken:
            return False
        raise AssertionError("nothing tells the mailbox")

    with peer.sock as far:
        for _ in range(REQUESTS):
            pipe.post((b"X",), lambda reply: told.append(repr(reply)))
        for piece in pieces:
            far.sendall(piece)
            if not read(0.0):
                break
        else:
            far.shutdown(socket.SHUT_WR)
            assert not read(FOREVER)
    return told, pipe.closed_by_peer


def told_by_a_loop(make_pipe: MakePipe, loop_kind: str, pieces: Iterable[bytes]) -> Told:
    """The events that a pipe of a loop reports."""
    told: list[str] = []

    def note(reply: Reply | list[Reply]) -> None:
        told.append(repr(reply))

    async def play() -> bool:
        async with connected(make_pipe) as (pipe, peer):
            pipe.on_push = note
            for _ in range(REQUESTS):
                pipe.post((b"X",), note)
            await peer.read(REQUESTS)
            for piece in pieces:
                await peer.answer(piece)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                if pipe.broken:
                    break
            else:
                peer.sock.shutdown(socket.SHUT_WR)
            await eventually(lambda: pipe.broken, "the end is found")
            return pipe.closed_by_peer

    closed_by_peer = run_in_loop(loop_kind, play())
    return told, closed_by_peer


THOROUGH = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("make_pair", PAIRS)
@THOROUGH
@given(pieces=streams())
def test_threads_are_told_what_hiredis_reads(make_pair: Callable[[], tuple[Pipe, Peer]], pieces: list[bytes]) -> None:
    assert told_by_hiredis(_all_of(pieces)) == told_by_threads(make_pair, pieces)


@pytest.mark.parametrize("make_pipe", PIPES)
@THOROUGH
@given(pieces=streams())
def test_tasks_are_told_what_hiredis_reads(make_pipe: MakePipe, each_loop_kind: str, pieces: list[bytes]) -> None:
    assert told_by_hiredis(_all_of(pieces)) == told_by_a_loop(make_pipe, each_loop_kind, pieces)


SIZES: list[bytes] = [
    b"$2\rX", b"$02\r\n", b"$-2\r\n", b"$+2\r\n", b"$\r\n", b"$2 \r\n", b"$3\r\n", b"$1\r\n", b"$2147483647\r\n",
    b"$99999999999999999999\r\n",
]  # fmt: skip

CASES: list[bytes] = [
    *(b">3\r\n$7\r\nmessage\r\n%bch\r\n$1\r\nx\r\n" % size for size in SIZES),
    b">3\r\n$8\r\nsmessage\r\n$00\r\n\r\n$1\r\nx\r\n", b">2\r\n$7\r\nmessage\r\n$2\r\nch\r\n",
    b">3\r\n$7\r\nmessage\r\n>0\r\n>0\r\n", b">1\r\n>1\r\n:1\r\n", b"*1\r\n>1\r\n+message\r\n", b"$-01\r\n", b"$-2\r\n",
    b"*-2\r\n", b"%-2\r\n", b">-1\r\n", b":2\r\r\n", b":\r\n", b":01\r\n", b"_x\r\n", b"#\r\n", b"+OK\n",
    b"*2\r\n:1\r\n", b"$5\r\nab", b"*1\r\n" * 100 + b":1\r\n", b"*1\r\n" * 100_000, b"%1\r\n+k\r\n" * 100 + b":1\r\n",
    b"*0\r\n" * (REQUESTS + 1),
]  # fmt: skip
"""Streams that differ little from a plain reply or a message of a channel, and streams with false lengths."""


def _id(data: bytes) -> str:
    return repr(data[:40])


def _each_byte(data: bytes) -> list[list[bytes]]:
    """The data in pieces of a byte; whole; and in two, cut anywhere. Long data: in pieces for which there is room."""
    if len(data) > 1000:
        return [cut(data, range(0, len(data), 10_000))]
    return [cut(data, range(1, len(data))), *(cut(data, [place]) for place in range(len(data)))]


@pytest.mark.parametrize("make_pair", PAIRS)
@pytest.mark.parametrize("data", [*REPLIES, *MESSAGES, *CASES], ids=_id)
def test_threads_are_told_the_same_wherever_the_stream_is_cut(
    make_pair: Callable[[], tuple[Pipe, Peer]], data: bytes
) -> None:
    stream = b":1\r\n" + data + b"_\r\n"
    for pieces in _each_byte(stream):
        assert told_by_hiredis(stream) == told_by_threads(make_pair, pieces)


@pytest.mark.parametrize("make_pipe", PIPES)
@pytest.mark.parametrize("data", [*REPLIES, *MESSAGES, *CASES], ids=_id)
def test_tasks_are_told_the_same_wherever_the_stream_is_cut(
    make_pipe: MakePipe, each_loop_kind: str, data: bytes
) -> None:
    stream = b":1\r\n" + data + b"_\r\n"
    for pieces in _each_byte(stream)[:1]:
        assert told_by_hiredis(stream) == told_by_a_loop(make_pipe, each_loop_kind, pieces)


# ---- memory ----

HUGE: list[bytes] = [
    b"*1000000000\r\n", b"*1000000000\r\n" * 8, b"~1000000000\r\n", b"%1000000000\r\n", b">1000000000\r\n",
    b"*4294967295\r\n", b"$2147483647\r\n", b"$9223372036854775807\r\n", b"*9223372036854775807\r\n",
    b">3\r\n$7\r\nmessage\r\n$2147483647\r\n", b"*1\r\n" * 9 + b"*1000000000\r\n", b"$2147483647\r\n" + b"x" * 60_000,
]  # fmt: skip
"""Headers that promise billions of entries or bytes."""

MORE_BYTES = 256 << 20


def play_huge(play: Play) -> None:
    """In a process of its own: have a pipe read each header with little memory to get; then one works as before."""
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = used_pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for header in HUGE:
        assert ["1"] == play([b":1\r\n" + header])[0]
    assert (["b'OK'", "[1, None]"], True) == play([b"+OK\r\n*2\r\n:1\r\n_\r\n"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MORE_BYTES >> 11


def main() -> None:
    """Play it as the first argument says: on which kind of pipe, and which implementation."""
    _, kind, implementation = sys.argv
    of_threads = kind in (THREADS, OVER_TLS)
    makers: dict[object, Any] = {each.id: each.values[0] for each in (PAIRS if of_threads else PIPES)}
    if of_threads:
        play_huge(partial(told_by_threads, makers[implementation + kind.removeprefix(THREADS)]))
    else:
        play_huge(partial(told_by_a_loop, makers[implementation], kind))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
@pytest.mark.skipif(
    sysconfig.get_config_var("Py_GIL_DISABLED") == 1, reason="PyList_New crashes there where memory is limited"
)
def test_lengths_that_lie_break_their_connection_alone(pipe_kind: str, implementation: str) -> None:
    done = run_script("from tests.pipe.test_hostile import main; main()", pipe_kind, implementation)
    assert (0, "") == (done.returncode, done.stderr)
