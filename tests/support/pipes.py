"""Helpers of the tests of the pipes of threads: both pipes, and the server's end, driven by the test.

The fixtures that pair them are in `conftest.py`.
"""

from __future__ import annotations

import socket

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

FOREVER = -1.0


class Owner:
    """Owns a socket as a redis-py connection does."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def disconnect(self) -> None:
        self.sock.close()


def compiled_pipe(sock: socket.socket) -> Pipe:
    assert compiled is not None
    pipe: Pipe = compiled.Pipe(Owner(sock), sock.fileno(), 50)
    return pipe


def python_pipe(sock: socket.socket) -> Pipe:
    return threads_py.Pipe(Owner(sock), sock)


MAKERS = [pytest.param(python_pipe, id="python")]
if compiled is not None:
    MAKERS.append(pytest.param(compiled_pipe, id="compiled"))


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
                data = self.sock.recv(65536)
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
