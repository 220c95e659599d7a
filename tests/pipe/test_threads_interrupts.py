"""An interrupt in the middle of the pure-Python pipe, at any step: nobody hangs, and each is told what is known.

A trace function raises it before each instruction. That is more than signals do, which strike at some of them only,
and at the more the older the interpreter is.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from redislock_fast._pipe import queues_py, resp_py, threads_py
from redislock_fast._pipe.base import ConnectionBroken, Pipe
from tests.support.helpers import PATIENCE_S, start
from tests.support.pipes import FOREVER, Peer, python_pipe

pytestmark = pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")

_PIPE_FILES = {module.__file__ for module in (threads_py, queues_py, resp_py)}


class Interrupted(BaseException):
    """The exception of the interrupt."""


def interrupted_at(number: int, work: Callable[[], object]) -> bool:
    """Interrupt the work before the n-th instruction in the pipe's files. Returns False where there are fewer."""
    count = 0

    def on_call(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in _PIPE_FILES:
            return None
        frame.f_trace = on_instruction  # else 3.13 forgets the next line
        frame.f_trace_opcodes = True
        return on_instruction

    def on_instruction(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "opcode"
        if event == "opcode" and count == number:
            sys.settrace(None)
            frame.f_trace = None
            raise Interrupted
        return on_instruction

    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether there is such a frame only when tracing is set
    sys.settrace(on_call)
    try:
        work()
    except Interrupted:
        pass
    finally:
        sys.settrace(None)
    return count >= number


class Server:
    """Echoes at the other ends of the pipes that it makes, in threads, until they are closed.

    Who closes a socket that another thread is about to read lets that thread read from whichever gets its number.
    """

    def __init__(self) -> None:
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def pipe(self) -> Pipe:
        ours, theirs = socket.socketpair()
        self._ends += [ours, theirs]
        thread = threading.Thread(target=self._echo, args=(Peer(theirs),), daemon=True)
        thread.start()
        self._threads.append(thread)
        return python_pipe(ours)

    def _echo(self, peer: Peer) -> None:
        try:
            while True:
                peer.echo()
        except (OSError, EOFError):
            pass

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # it is closed
                end.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join(PATIENCE_S)
        while self._ends:
            self._ends.pop().close()


@pytest.fixture
def server() -> Iterator[Server]:
    """The peer of the pipes."""
    running = Server()
    yield running
    running.close()


def is_told(work: Callable[[], object]) -> object:
    """Its reply, or "lost" for a broken connection; any other error is raised."""
    try:
        return start(work).result(PATIENCE_S)
    except ConnectionBroken:
        return "lost"


def _call(pipe: Pipe) -> None:
    pipe.call((b"ECHO", b"interrupted"), FOREVER)


def _post(pipe: Pipe) -> None:
    pipe.post((b"ECHO", b"interrupted"))


def _close(pipe: Pipe) -> None:
    pipe.close()


def _listen(pipe: Pipe) -> None:
    box = pipe.mailbox()
    pipe.post((b"ECHO", b"interrupted"), box.tell)
    box.wait(FOREVER)


def _tell(pipe: Pipe) -> None:
    pipe.mailbox().tell(b"interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("use", [_call, _post, _close, _listen, _tell])
@pytest.mark.parametrize("listens", [False, True], ids=["alone", "beside a listener"])
def test_an_interrupt_at_any_instruction_leaves_nobody_waiting(
    server: Server, use: Callable[[Pipe], object], listens: bool
) -> None:
    for number in range(1, 5000):
        pipe = server.pipe()
        box = pipe.mailbox()
        listener = start(lambda: box.wait(FOREVER)) if listens else None  # noqa: B023
        was_interrupted = interrupted_at(number, lambda: use(pipe))  # noqa: B023
        answer = is_told(lambda: pipe.call((b"ECHO", b"next"), FOREVER))  # noqa: B023
        assert answer in (b"next", "lost")
        assert (answer == "lost") == pipe.broken
        if listener is not None:
            with contextlib.suppress(ConnectionBroken):
                pipe.post((b"ECHO", b"told"), box.tell)
            assert is_told(lambda: listener.result(PATIENCE_S)) in (b"told", "lost")  # noqa: B023
        pipe.close()
        server.close()
        if not was_interrupted:
            assert number > 20
            return
