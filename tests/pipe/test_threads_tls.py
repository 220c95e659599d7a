"""The pipe of threads over TLS, compiled and pure: what records, the TLS object and handlers in it may do to callers.

That all else is as on a plain socket, the other tests of pipes show: they run over both. Interrupts at random times are
in `tests/slow/test_interrupt_storm.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from redislock_fast._pipe.base import ConnectionBroken, Forked, NoReply, Pipe, Reply
from redislock_fast._pipe.impl import compiled
from redislock_fast.server import free_port
from tests.support.forks import FORKS
from tests.support.helpers import PATIENCE_S, pause, start, wait_until
from tests.support.pipes import FOREVER, Owner, Peer, TlsEnd, new_pair, tls_contexts, tls_files, tls_pair

SLICE_S = 0.05  # after which a reader looks in any case whether there is something to send


class Interrupted(Exception):
    """The exception of the test's signal handler."""


@pytest.fixture
def records(make_pipe: Callable[[socket.socket], Pipe]) -> Iterator[tuple[Pipe, TlsEnd]]:
    """A pipe over TLS, and an end of its socket that sends the bytes of records as the test says."""
    near, far = socket.socketpair()
    end = TlsEnd(far)
    shaking = start(end.shake_hands)
    pipe = make_pipe(tls_contexts()[0].wrap_socket(near, server_hostname="localhost"))
    shaking.result(PATIENCE_S)
    yield pipe, end
    pipe.close()
    far.close()


# ---- records ----


def test_many_records_that_come_at_once_are_all_read(records: tuple[Pipe, TlsEnd]) -> None:
    pipe, end = records
    replies: list[Reply] = []
    for _ in range(999):
        pipe.post((b"X",), replies.append)
    last = start(lambda: pipe.call((b"X",), FOREVER))
    end.read(1000)
    end.send(b"".join(end.record(b":%d\r\n" % number) for number in range(1000)))
    assert last.result(PATIENCE_S) == 999
    assert replies == list(range(999))


def test_a_caller_gives_up_in_time_within_a_record_and_the_next_gets_its_own(records: tuple[Pipe, TlsEnd]) -> None:
    pipe, end = records
    late = start(lambda: pipe.call((b"ECHO", b"late"), 0.2))
    end.read()
    record = end.record(b"+late\r\n")
    end.send(record[:-1])
    assert isinstance(late.exception(PATIENCE_S), NoReply)
    after = start(lambda: pipe.call((b"ECHO", b"after"), FOREVER))
    end.read()
    end.send(record[-1:] + end.record(b"+after\r\n"))
    assert after.result(PATIENCE_S) == b"after"


@pytest.mark.parametrize("kept", [1, 5, 20])
def test_a_connection_that_ends_within_a_record_loses_what_was_sent(records: tuple[Pipe, TlsEnd], kept: int) -> None:
    pipe, end = records
    call = start(lambda: pipe.call((b"ECHO", b"a"), FOREVER))
    end.read()
    end.send(end.record(b"+a\r\n")[:kept])
    end.sock.close()
    error = call.exception(PATIENCE_S)
    assert isinstance(error, ConnectionBroken)
    assert (error.sent, pipe.broken, pipe.closed_by_peer) == (True, True, True)


def test_a_record_that_was_forged_breaks_the_pipe(records: tuple[Pipe, TlsEnd]) -> None:
    pipe, end = records
    call = start(lambda: pipe.call((b"ECHO", b"a"), FOREVER))
    end.read()
    record = bytearray(end.record(b"+a\r\n"))
    record[-1] ^= 1
    end.send(bytes(record))
    error = call.exception(PATIENCE_S)
    assert isinstance(error, ConnectionBroken)
    assert (error.sent, pipe.broken) == (True, True)


def test_the_end_of_the_session_ends_the_pipe_before_anything_is_sent(records: tuple[Pipe, TlsEnd]) -> None:
    pipe, end = records
    end.close_session()
    threading.Event().wait(0.01)  # a caller that comes later looks first at what has come
    with pytest.raises(ConnectionBroken) as caught:
        pipe.call((b"X",), FOREVER)
    assert not caught.value.sent


# ---- who sends ----


def test_a_caller_wakes_the_listener_that_reads(make_pipe: Callable[[socket.socket], Pipe]) -> None:
    pipe, peer = new_pair(make_pipe, over_tls=True)
    listening = start(lambda: pipe.mailbox().wait(FOREVER))
    answering = start(lambda: _echo_each(peer, 40))
    took_s = []
    for number in range(40):
        pause(0.002)  # the listener blocks
        began = time.monotonic()
        assert pipe.call((b"ECHO", b"%d" % number), FOREVER) == b"%d" % number
        took_s.append(time.monotonic() - began)
    answering.result(PATIENCE_S)
    pipe.close()
    assert isinstance(listening.exception(PATIENCE_S), ConnectionBroken)
    peer.sock.close()
    assert min(took_s) < SLICE_S / 2  # on a busy machine, most may take longer


# ---- what OpenSSL does in between ----


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no program openssl")
@pytest.mark.parametrize(
    ("version", "command"), [("-tls1_3", b"K\n"), ("-tls1_3", b"k\n"), ("-tls1_2", b"r\n")], ids=str
)
def test_new_keys_in_the_middle_of_a_connection_harm_nobody(
    make_pipe: Callable[[socket.socket], Pipe], tmp_path: Path, version: str, command: bytes
) -> None:
    port = free_port()
    certificate = str(tls_files(tmp_path))
    arguments = ["openssl", "s_server", "-accept", f"127.0.0.1:{port}", "-cert", certificate, version]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            pipe = make_pipe(_connected(port))
            for number in range(5):
                call = start(lambda: pipe.call((b"ECHO", b"%d" % number), FOREVER))  # noqa: B023
                while b"ECHO" not in server.stdout.readline():
                    pass
                for data in (command, b":%d\r\n" % number):
                    server.stdin.write(data)
                    server.stdin.flush()
                    threading.Event().wait(0.05)  # the program takes one line at a time
                assert call.result(PATIENCE_S) == number
            pipe.close()
        finally:
            server.kill()


def _echo_each(peer: Peer, count: int) -> None:
    for _ in range(count):
        peer.echo()


def _connected(port: int) -> ssl.SSLSocket:
    found: list[socket.socket] = []

    def connect() -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            found.append(socket.create_connection(("127.0.0.1", port)))
        return bool(found)

    wait_until(connect, "the server listens")
    return tls_contexts()[0].wrap_socket(found[0], server_hostname="localhost")


# ---- handlers in the TLS object ----


class Handled:
    """A TLS socket as the compiled pipe uses one, with what a signal handler does inside of its TLS object.

    An error of the TLS object itself must not come: it would look as one of the handler.

    Attributes:
        handle: is called once, at the next use of `at`; None for never.
    """

    def __init__(self, sock: ssl.SSLSocket, at: str) -> None:
        self.settimeout = sock.settimeout
        self.fileno = sock.fileno
        self.handle: Callable[[], object] | None = None
        self._inner: Any = sock._sslobj  # type: ignore[attr-defined]
        self._at = at

    @property
    def _sslobj(self) -> Handled:
        return self

    def read(self, size: int, buffer: bytearray) -> int:
        got: int = self._inner.read(size, buffer)
        self._handle("read")
        return got

    def write(self, data: bytes) -> int:
        gone: int = self._inner.write(data)
        self._handle("write")
        return gone

    def _handle(self, at: str) -> None:
        handle = self.handle
        if at == self._at and handle is not None:
            self.handle = None
            handle()


MakeHandled = Callable[[str], tuple[Pipe, Handled, Peer]]


@pytest.fixture
def handled_pair() -> Iterator[MakeHandled]:
    """Makes a compiled pipe, its socket, in which a handler runs at a "read" or a "write", and the other end."""
    made: list[tuple[Pipe, ssl.SSLSocket]] = []

    def make(at: str) -> tuple[Pipe, Handled, Peer]:
        if compiled is None:
            pytest.skip("the compiled core is not in use")
        near, far = tls_pair()
        far.sendall(b"x")
        assert near.recv(1) == b"x"  # and what the server sends by itself has been read
        handled = Handled(near, at)
        pipe: Pipe = compiled.Pipe(Owner(near), near.fileno(), 50, handled)
        made.append((pipe, far))
        return pipe, handled, Peer(far)

    yield make
    for pipe, far in made:
        pipe.close()
        far.close()


def echo_once(peer: Peer) -> None:
    with contextlib.suppress(OSError, EOFError):  # the pipe may be broken by then
        peer.echo()


def raising(error: type[BaseException]) -> Callable[[], object]:
    def handle() -> None:
        raise error

    return handle


@pytest.mark.parametrize("at", ["read", "write"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted, TimeoutError, ssl.SSLWantReadError])
def test_an_interrupt_within_the_tls_object_is_raised_and_breaks_the_pipe_alone(
    handled_pair: MakeHandled, at: str, error: type[BaseException], threads: ThreadPoolExecutor
) -> None:
    pipe, handled, peer = handled_pair(at)
    handled.handle = raising(error)
    answering = threads.submit(echo_once, peer)
    with pytest.raises(error):
        pipe.call((b"ECHO", b"a"), FOREVER)
    answering.result(PATIENCE_S)
    with pytest.raises(ConnectionBroken) as caught:
        pipe.call((b"ECHO", b"b"), 1.0)
    assert not caught.value.sent
    assert (pipe.broken, pipe.closed_by_peer) == (True, False)
    with pytest.raises(EOFError):
        peer.read()


@pytest.mark.parametrize("at", ["read", "write"])
def test_an_interrupt_within_the_tls_object_leaves_no_other_caller_waiting(
    handled_pair: MakeHandled, at: str, threads: ThreadPoolExecutor
) -> None:
    pipe, handled, peer = handled_pair(at)
    others: list[Any] = []

    def handle() -> None:
        others.extend(threads.submit(pipe.call, (b"ECHO", b"other"), FOREVER) for _ in range(5))
        threading.Event().wait(0.05)  # they sleep in the pipe now, or find it broken
        raise Interrupted

    handled.handle = handle
    answering = threads.submit(echo_once, peer)
    with pytest.raises(Interrupted):
        pipe.call((b"ECHO", b"a"), FOREVER)
    answering.result(PATIENCE_S)
    errors = [other.exception(PATIENCE_S) for other in others]
    assert [(ConnectionBroken, False)] * 5 == [(type(error), error.sent) for error in errors]


def test_an_interrupt_while_a_post_is_sent_is_raised(handled_pair: MakeHandled) -> None:
    pipe, handled, peer = handled_pair("write")
    handled.handle = raising(Interrupted)
    with pytest.raises(Interrupted):
        pipe.post((b"ECHO", b"posted"))
    with pytest.raises(ConnectionBroken) as caught:
        pipe.call((b"X",), FOREVER)
    assert not caught.value.sent
    assert [[b"ECHO", b"posted"]] == peer.read()


@FORKS
@pytest.mark.parametrize("at", ["read", "write"])
def test_a_call_goes_on_in_the_parent_alone_though_a_handler_forks_within_the_tls_object(
    handled_pair: MakeHandled, at: str, fork: Callable[[], int], threads: ThreadPoolExecutor
) -> None:
    pipe, handled, peer = handled_pair(at)
    told, tell = os.pipe()
    child = -1

    def handle() -> None:
        nonlocal child
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is under test
            child = fork()

    handled.handle = handle
    answering = threads.submit(echo_once, peer)
    outcome: object = None
    try:
        outcome = pipe.call((b"ECHO", b"called"), FOREVER)
    except BaseException as error:
        outcome = error
    finally:
        if child == 0:
            os.write(tell, type(outcome).__name__.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert (b"called", Forked.__name__.encode()) == (outcome, os.read(told, 100))
    answering.result(PATIENCE_S)
    answering = threads.submit(echo_once, peer)
    assert pipe.call((b"ECHO", b"again"), FOREVER) == b"again"
    pipe.close()
    os.close(told)
    os.close(tell)
