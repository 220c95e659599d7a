"""A signal handler in the middle of the pure-Python pipe, at any step, which raises or waits for another thread.

Nobody hangs, and each is told what is known. A trace function runs the handler before each instruction. That is more
than signals do, which strike at some of them only, and at the more the older the interpreter is.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from redislock_fast._pipe import resp_py, threads_py
from redislock_fast._pipe.base import ConnectionBroken, NoReply, Pipe, Reply
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.pipes import FOREVER, Peer, new_pair, python_pipe

pytestmark = pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")

_PIPE_FILES = {module.__file__ for module in (threads_py, resp_py)}


class Interrupted(BaseException):
    """The exception of the interrupt."""


def interrupt() -> None:
    """What a signal handler does that raises."""
    raise Interrupted


def handled_at(number: int, work: Callable[[], object], handle: Callable[[], object]) -> bool:
    """Run a handler before the n-th instruction of the work in the pipe's files.

    Returns False where there are fewer. The handler's `Interrupted` ends the work. No garbage is collected meanwhile:
    an interrupt in the finalizer of an earlier pipe would only be printed.
    """
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
            handle()
        return on_instruction

    sys._getframe().f_trace_opcodes = True  # 3.12 looks whether there is such a frame only when tracing is set
    gc.disable()
    sys.settrace(on_call)
    try:
        work()
    except Interrupted:
        pass
    finally:
        sys.settrace(None)
        gc.enable()
    return count >= number


class Server:
    """Echoes at the other ends of the pipes that it makes, in threads, until they are closed.

    Who closes a socket that another thread is about to read lets that thread read from whichever gets its number.

    Attributes:
        goes_on: set it to have the requests "held" answered.
    """

    def __init__(self) -> None:
        self.goes_on = threading.Event()
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
                (request,) = peer.read()
                if request[-1] == b"held":
                    self.goes_on.wait(PATIENCE_S)
                peer.answer(b"+%b\r\n" % request[-1])
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


def _have_a_listener_read(pipe: Pipe) -> None:
    """Have another thread read until the pipe is broken."""
    box, has_read = pipe.mailbox(), threading.Event()

    def listen() -> None:
        with contextlib.suppress(ConnectionBroken):
            box.wait(FOREVER)

    start(listen)
    pipe.post((b"ECHO", b"read"), lambda _: has_read.set())
    assert has_read.wait(PATIENCE_S)


def _call(pipe: Pipe) -> None:
    pipe.call((b"ECHO", b"interrupted"), FOREVER)


def _call_many(pipe: Pipe) -> None:
    pipe.call_many([(b"ECHO", b"one"), (b"ECHO", b"two")], FOREVER)


def _post(pipe: Pipe) -> None:
    pipe.post((b"ECHO", b"interrupted"))


def _close(pipe: Pipe) -> None:
    pipe.close()


def _listen(pipe: Pipe) -> None:
    box = pipe.mailbox()
    pipe.post((b"ECHO", b"interrupted"), box.put)
    box.wait(FOREVER)


def _put(pipe: Pipe) -> None:
    pipe.mailbox().put(b"interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("use", [_call, _post, _close, _listen, _put])
@pytest.mark.parametrize("listens", [False, True], ids=["alone", "beside a listener"])
def test_an_interrupt_at_any_instruction_leaves_nobody_waiting(
    server: Server, use: Callable[[Pipe], object], listens: bool
) -> None:
    for number in range(1, 5000):
        pipe = server.pipe()
        box = pipe.mailbox()
        listener = start(lambda: box.wait(FOREVER)) if listens else None  # noqa: B023
        was_interrupted = handled_at(number, lambda: use(pipe), interrupt)  # noqa: B023
        answer = is_told(lambda: pipe.call((b"ECHO", b"next"), FOREVER))  # noqa: B023
        assert answer in (b"next", "lost")
        assert (answer == "lost") == pipe.broken
        if listener is not None:
            with contextlib.suppress(ConnectionBroken):
                pipe.post((b"ECHO", b"told"), box.put)
            assert is_told(lambda: listener.result(PATIENCE_S)) in (b"told", "lost")  # noqa: B023
        pipe.close()
        server.close()
        if not was_interrupted:
            assert number > 20
            return


@pytest.mark.slow
@pytest.mark.parametrize("use", [_call, _call_many, _post, _listen, _put, _close])
def test_a_handler_at_any_instruction_may_wait_for_a_call_of_another_thread(
    server: Server, use: Callable[[Pipe], object]
) -> None:
    answers: list[object] = []
    number, was_handled = 0, True
    while was_handled:
        pipe = server.pipe()
        _have_a_listener_read(pipe)

        def handle() -> None:
            answers.append(is_told(lambda: pipe.call((b"ECHO", b"other"), FOREVER)))  # noqa: B023

        while was_handled and not pipe.broken:
            number += 1
            was_handled = handled_at(number, lambda: use(pipe), handle)  # noqa: B023
        pipe.close()
        server.close()
    assert number > 20
    assert len(answers) == number - 1
    assert set(answers) <= ({b"other", "lost"} if use is _close else {b"other"})


@pytest.mark.slow
@pytest.mark.parametrize("use", [_call, _call_many, _post, _listen])
def test_a_call_that_begins_at_any_instruction_of_another_is_answered(
    server: Server, use: Callable[[Pipe], object]
) -> None:
    pipe = server.pipe()
    others: list[Future[Reply]] = []

    def handle() -> None:
        other = start(lambda: pipe.call((b"ECHO", b"other"), FOREVER))
        wait_until(lambda: other.done() or pipe._arrived, "it has arrived")  # type: ignore[attr-defined]
        others.append(other)

    number = 1
    while handled_at(number, lambda: use(pipe), handle):
        assert is_told(lambda: others[-1].result(PATIENCE_S)) == b"other"
        number += 1
    assert not pipe.broken
    assert number > 20


@pytest.mark.slow
def test_an_heir_that_gives_up_at_any_instruction_hands_on(server: Server) -> None:
    pipe = server.pipe()

    def handle() -> None:
        server.goes_on.set()
        assert is_told(lambda: lead.result(PATIENCE_S)) == b"held"

    def give_up() -> None:
        with contextlib.suppress(NoReply):
            pipe.call((b"ECHO", b"late"), 0.0)

    number, was_handled = 0, True
    while was_handled:
        number += 1
        server.goes_on.clear()
        lead = start(lambda: pipe.call((b"ECHO", b"held"), FOREVER))
        wait_until(lambda: pipe._sleeps, "it reads")  # type: ignore[attr-defined]
        was_handled = handled_at(number, give_up, handle)
        server.goes_on.set()
        assert is_told(lambda: pipe.call((b"ECHO", b"next"), FOREVER)) == b"next"
        assert is_told(lambda: lead.result(PATIENCE_S)) == b"held"  # noqa: B023
    assert number > 20


def test_an_heir_that_is_interrupted_before_it_reads_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # As greenlets are whose time limits end: each of them may be the heir by then.
    pipe, peer = new_pair(python_pipe, False)
    sleep, struck = threads_py.Slot.sleep, threading.Event()

    def sleep_and_be_interrupted(slot: threads_py.Slot, timeout_s: float) -> None:
        sleep(slot, timeout_s)
        if slot.is_lead and not struck.is_set():
            struck.set()
            raise Interrupted

    monkeypatch.setattr(threads_py.Slot, "sleep", sleep_and_be_interrupted)
    calls = []
    for word in (b"lead", b"heir", b"other"):
        calls.append(start(partial(pipe.call, (b"ECHO", word), FOREVER)))
        assert peer.read() == [[b"ECHO", word]]
    lead, heir, other = calls
    peer.answer(b"+lead\r\n")
    assert lead.result(PATIENCE_S) == b"lead"
    with pytest.raises(Interrupted):
        heir.result(PATIENCE_S)
    peer.answer(b"+heir\r\n+other\r\n")
    assert other.result(PATIENCE_S) == b"other"
    assert not pipe.broken
    pipe.close()
    peer.sock.close()
