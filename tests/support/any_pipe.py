"""A pipe of either kind, called in one way, so that one text tests the pipes of threads and of loops.

Rules: conftest.py imports the fixtures. The peer is the other end of a socket pair in the test's own hands. Calls of
threads leave in any order, unless the test waits until the peer has read the first.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from redislock_fast._pipe.base import Args, Bulk, ConnectionBroken, OnPush, OnReply
from redislock_fast._pipe.impl import compiled
from redislock_fast._pipe.loop_py import LoopPipe, new_pipe
from tests.support.async_helpers import LOOP_KINDS
from tests.support.helpers import PATIENCE_S
from tests.support.pipes import FOREVER, Peer, compiled_pipe, python_pipe, socket_pair
from tests.support.waiting import Callers, Tasks, Threads

THREADS = "threads"
OVER_TLS = "threads over TLS"


class AnyPipe:
    """Calls a pipe, each time in a thread or task of its own.

    Args:
        callers: what runs the calls.
        pipe: of threads, or of the loop of these tasks.
    """

    def __init__(self, callers: Callers, pipe: Any) -> None:
        self._callers = callers
        self._pipe = pipe

    @property
    def broken(self) -> bool:
        """Whether the connection is broken."""
        return self._pipe.broken is True

    @property
    def closed_by_peer(self) -> bool:
        """Whether the other end, or the network, ended the connection."""
        return self._pipe.closed_by_peer is True

    def call(self, args: Args, timeout_s: float = FOREVER) -> Future[Any]:
        """Begin to send a request."""
        return self._callers.begin(lambda: self._pipe.call(args, timeout_s))

    def echo(self, value: bytes, timeout_s: float = FOREVER) -> Future[Any]:
        """Begin to have a word echoed."""
        return self.call((b"ECHO", value), timeout_s)

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float = FOREVER) -> Future[Any]:
        """Begin to send requests in one piece."""
        return self._callers.begin(lambda: self._pipe.call_many(requests, timeout_s))

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        """Send a request for whose reply nobody waits."""
        self._callers.run(lambda: self._pipe.post(args, on_reply))

    def on_push(self, on_push: OnPush) -> None:
        """Have this told every push."""
        self._pipe.on_push = on_push

    def close(self) -> None:
        """Close the pipe."""
        self._callers.run(self._pipe.close)


AnyPair = tuple[AnyPipe, Peer]


def outcomes(*answers: Future[Any]) -> list[object]:
    """For each call its reply, or for `ConnectionBroken` whether the request was sent, or the class of its error."""
    return [_outcome(answer) for answer in answers]


def _outcome(answer: Future[Any]) -> object:
    error = answer.exception(PATIENCE_S)
    if error is None:
        return answer.result()
    return error.sent if isinstance(error, ConnectionBroken) else type(error)


@pytest.fixture(params=[THREADS, OVER_TLS, *LOOP_KINDS])
def pipe_kind(request: pytest.FixtureRequest) -> str:
    """Pipes of threads and of each kind of loop in turn."""
    kind: str = request.param
    if kind not in (THREADS, OVER_TLS, "asyncio"):
        pytest.importorskip(kind)
    return kind


@pytest.fixture(params=["python", "compiled"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Both implementations of a pipe in turn."""
    name: str = request.param
    if name == "compiled" and compiled is None:
        pytest.skip("the compiled core is not in use")
    return name


@pytest.fixture
def any_pair(pipe_kind: str, implementation: str) -> Iterator[AnyPair]:
    """A pipe, and the server's end of its socket."""
    near, far = socket_pair(pipe_kind == OVER_TLS)
    if pipe_kind in (THREADS, OVER_TLS):
        callers: Callers = Threads()
        pipe: Any = (python_pipe if implementation == "python" else compiled_pipe)(near)
    else:
        callers = Tasks(pipe_kind)
        pipe = callers.run(lambda: _loop_pipe(near, implementation))
    with callers, far:
        running = AnyPipe(callers, pipe)
        yield running, Peer(far)
        running.close()


async def _loop_pipe(sock: socket.socket, implementation: str) -> Any:
    _, writer = await asyncio.open_connection(sock=sock)
    transport: Any = writer.transport
    return (LoopPipe if implementation == "python" else new_pipe)(transport, writer)
