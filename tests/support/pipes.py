"""Helpers of the tests of the pipes of threads: both pipes, and the server's end, driven by the test.

The fixtures that pair them are in `conftest.py`.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import hiredis
import pytest

from redislock_fast._pipe import threads_py
from redislock_fast._pipe.base import Pipe, Reply
from redislock_fast._pipe.impl import compiled

MESSAGES: dict[bytes, list[Reply]] = {
    b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$0\r\n\r\n": [b"message", b"ch", b""],
    b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$7\r\na\r\n$1\r\n\r\n": [b"message", b"ch", b"a\r\n$1\r\n"],
    b">3\r\n$8\r\nsmessage\r\n$12\r\n0123456789ab\r\n$1\r\nx\r\n": [b"smessage", b"0123456789ab", b"x"],
    b">3\r\n+message\r\n+ch\r\n:7\r\n": [b"message", b"ch", 7],
    b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$-1\r\n": [b"message", b"ch", None],
    b">3\r\n$7\r\nmessagf\r\n$2\r\nch\r\n$1\r\nx\r\n": [b"messagf", b"ch", b"x"],
    b">4\r\n$8\r\npmessage\r\n$1\r\n*\r\n$2\r\nch\r\n$1\r\nx\r\n": [b"pmessage", b"*", b"ch", b"x"],
    b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n": [b"invalidate", [b"k"]],
    b">3\r\n$7\r\nmessage\r\n$2\r\nch\r\n$1500\r\n%b\r\n" % (b"y" * 1500): [b"message", b"ch", b"y" * 1500],
}
"""Pushes as a server may write them, and as `on_push` gets them."""

PUSH = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"

FOREVER = -1.0


class Owner:
    """Owns a socket as a redis-py connection does."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def disconnect(self) -> None:
        self.sock.close()


def compiled_pipe(sock: socket.socket) -> Pipe:
    assert compiled is not None
    tls = sock if isinstance(sock, ssl.SSLSocket) else None
    pipe: Pipe = compiled.Pipe(Owner(sock), sock.fileno(), 50, tls)
    return pipe


def python_pipe(sock: socket.socket) -> Pipe:
    return threads_py.Pipe(Owner(sock), sock)


_PIPES = {"python": python_pipe} if compiled is None else {"python": python_pipe, "compiled": compiled_pipe}
MAKERS = [pytest.param(maker, id=name) for name, maker in _PIPES.items()]


@cache
def _key_and_certificate() -> tuple[bytes, bytes]:
    """Of the server, in PEM; it has signed itself. By the program: CPython 3.13 without the GIL has no cryptography."""
    if shutil.which("openssl") is None:
        pytest.skip("no program openssl here")
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder) / "key", Path(folder) / "certificate"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
        return key.read_bytes(), certificate.read_bytes()


def tls_files(folder: Path) -> Path:
    """A file with the server's key and certificate."""
    path = folder / "server.pem"
    path.write_bytes(b"".join(_key_and_certificate()))
    return path


@cache
def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What the pipe's end and the server's end of a connection with TLS need."""
    near, far = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        far.load_cert_chain(tls_files(Path(folder)))
    near.load_verify_locations(cadata=_key_and_certificate()[1].decode())
    return near, far


def tls_pair() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """A pair of connected sockets with TLS: the client's end, and the server's."""
    near, far = socket.socketpair()
    of_client, of_server = tls_contexts()
    server = of_server.wrap_socket(far, server_side=True, do_handshake_on_connect=False)
    shaking = threading.Thread(target=server.do_handshake)
    shaking.start()
    client = of_client.wrap_socket(near, server_hostname="localhost")
    shaking.join()
    return client, server


class TlsEnd:
    """The server's end of a connection with TLS, whose records the test sends itself, in pieces or together.

    Args:
        sock: a plain one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(20)
        self._came, self._leaves = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = tls_contexts()[1].wrap_bio(self._came, self._leaves, server_side=True)
        self._parser = hiredis.Reader()

    def shake_hands(self) -> None:
        """Make the session."""
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                self.send(self._leaves.read())
                self._came.write(self.sock.recv(65536))
            else:
                self.send(self._leaves.read())
                return

    def record(self, data: bytes) -> bytes:
        """The record that carries the data."""
        self._session.write(data)
        return self._leaves.read()

    def send(self, records: bytes) -> None:
        """Send what `record` has returned, or a part of it."""
        self.sock.sendall(records)

    def close_session(self) -> None:
        """Say that nothing more will come; the connection stays."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._session.unwrap()
        self.send(self._leaves.read())

    def read(self, count: int = 1) -> list[list[bytes]]:
        """The next requests."""
        requests: list[list[bytes]] = []
        while len(requests) < count:
            request = self._parser.gets()
            if request is not False:
                requests.append(request)
                continue
            try:
                self._parser.feed(self._session.read(65536))
            except ssl.SSLWantReadError:
                self._came.write(self.sock.recv(65536))
        return requests


class Peer:
    """The server's end: reads whole requests, answers when told to."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(20)
        self._parser = hiredis.Reader()

    def read(self, count: int = 1) -> list[list[bytes]]:
        """The next requests.

        Raises:
            EOFError: the other end is closed.
        """
        requests: list[list[bytes]] = []
        while len(requests) < count:
            request = self._parser.gets()
            if request is False:
                try:
                    data = self.sock.recv(65536)
                except ConnectionResetError:  # the other end was closed with something unread, as a ticket of TLS
                    data = b""
                if not data:
                    raise EOFError
                self._parser.feed(data)
            else:
                requests.append(request)
        return requests

    def received(self, data: bytes) -> None:
        """Take bytes that the test itself has read from the socket."""
        self._parser.feed(data)

    def answer(self, data: bytes) -> None:
        self.sock.sendall(data)

    def echo(self, count: int = 1) -> None:
        """Answer the next requests, each with its own last word."""
        for request in self.read(count):
            self.answer(b"+%b\r\n" % request[-1])


def socket_pair(over_tls: bool) -> tuple[socket.socket, socket.socket]:
    """A pair of connected sockets: for a pipe, and for its peer."""
    return tls_pair() if over_tls else socket.socketpair()


def new_pair(make_pipe: Callable[[socket.socket], Pipe], over_tls: bool) -> tuple[Pipe, Peer]:
    """A pipe, and the server's end of its socket."""
    near, far = socket_pair(over_tls)
    return make_pipe(near), Peer(far)


PAIRS = [
    pytest.param(partial(new_pair, maker, over_tls), id=f"{name} over TLS" if over_tls else name)
    for over_tls in (False, True)
    for name, maker in _PIPES.items()
]
"""Make each pipe, over a plain socket and over one with TLS, with its peer."""
