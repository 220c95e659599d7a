"""The floor of a blocking lock: the two round trips that it cannot do without, in C.

Rules: the bytes are those that redislock_fast sends to this server: its native commands where it
has them, the release script otherwise. The C file is compiled on the spot. Must not know: the other
contestants.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import hiredis
import redis

from bench.contestants import LEASE_S, CheckFailedError
from redislock_fast._scripts import RELEASE

if TYPE_CHECKING:
    from typing_extensions import Self

NAMES = {"floor": "blocking", "floor-spinning": "spinning"}
"""What `--only` calls the two floors, and how each waits for its reply."""

_SOURCE = Path(__file__).with_name("floor.c")
_TOKEN_BYTES = 36
_SOCKET_TIMEOUT_S = 10.0


class NoFloorError(Exception):
    """There is no floor here; the message says why."""


@dataclass(frozen=True)
class _Exchange:
    """A request and the one reply that is right."""

    request: bytes
    reply: bytes


class FloorLock:
    """The floor's bytes as a lock, so that the same check can be made of them.

    Args:
        floor: whose server and name it uses.
    """

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._acquire, self._release = floor.exchanges(secrets.token_hex(_TOKEN_BYTES // 2).encode())

    def acquire(self, *, blocking: bool = True) -> bool:
        """Try once: the floor has no waiting."""
        if blocking:
            raise ValueError("the floor has no waiting")
        return self._floor.is_right(self._acquire)

    def release(self) -> None:
        """Give it back.

        Raises:
            CheckFailedError: where it was not held.
        """
        if not self._floor.is_right(self._release):
            raise CheckFailedError("released a lock that it did not hold")

    def __enter__(self) -> Self:
        """Take it."""
        if not self.acquire(blocking=False):
            raise CheckFailedError("somebody else holds the lock")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        self.release()


class Floor:
    """The compiled program and the bytes that it sends.

    Args:
        client: a client of the server to measure on.
        name: the lock's name, which is its key.
        folder: where to put the program.

    Raises:
        NoFloorError: without a C compiler, or where the server wants more than plain TCP.
    """

    def __init__(self, client: redis.Redis, name: str, folder: Path) -> None:
        settings = client.connection_pool.connection_kwargs
        plain = client.connection_pool.connection_class is redis.Connection
        if not plain or settings.get("password") or settings.get("db"):
            raise NoFloorError("only over plain TCP, without a password, in database 0")
        self._host = str(settings.get("host", "localhost"))
        self._port = int(settings.get("port", 6379))
        self._name = name
        self._release_form = _release_form(client)
        self._answers_with_holder = _answers_with_holder(client, name)
        self._program = _compile(folder)

    def exchanges(self, token: bytes) -> tuple[_Exchange, _Exchange]:
        """The acquire and the release with a token."""
        acquire = ("SET", self._name, token, "NX", "PX", str(LEASE_S * 1000))
        if self._answers_with_holder:
            acquired = _Exchange(_pack(*acquire, "GET"), b"$-1\r\n")
        else:
            acquired = _Exchange(_pack(*acquire), b"+OK\r\n")
        head, tail = self._release_form
        return acquired, _Exchange(_pack(*head, self._name, *tail, token), b":1\r\n")

    def is_right(self, exchange: _Exchange) -> bool:
        """Make one exchange on a connection of its own, and say whether the reply was right."""
        with socket.create_connection((self._host, self._port), _SOCKET_TIMEOUT_S) as connection:
            connection.sendall(exchange.request)
            with connection.makefile("rb") as replies:
                return replies.readline() == exchange.reply

    def run(self, seconds: float, waiting: str) -> float:
        """Measure.

        Args:
            seconds: for how long.
            waiting: a value of `NAMES`.

        Returns:
            Pairs per second.

        Raises:
            CheckFailedError: where the server gave any reply but the right ones.
        """
        acquire, release = self.exchanges(secrets.token_hex(_TOKEN_BYTES // 2).encode())
        parts = (acquire.request, acquire.reply, release.request, release.reply)
        done = subprocess.run(
            [str(self._program), self._host, str(self._port), str(seconds), waiting] + [part.hex() for part in parts],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise CheckFailedError(done.stderr.strip())
        return float(done.stdout)


def _pack(*arguments: str | bytes) -> bytes:
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type] # stub: a tuple of one
    return packed


def _compile(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoFloorError("no C compiler")
    program = folder / "floor"
    command = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-o", str(program), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoFloorError(f"floor.c does not compile: {done.stderr}")
    return program


def _release_form(client: redis.Redis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the release request holds before the name, and between it and the token."""
    delifeq, delex = client.execute_command("COMMAND INFO", "DELIFEQ", "DELEX")  # type: ignore[no-untyped-call]
    if delifeq:
        return ("DELIFEQ",), ()
    if delex:
        return ("DELEX",), ("IFEQ",)
    return ("EVALSHA", client.script_load(RELEASE.text), "1"), ()


def _answers_with_holder(client: redis.Redis, name: str) -> bool:
    """Whether the server takes NX and GET together, which it does from Redis 7.0 on."""
    try:
        client.execute_command("SET", name, "probe", "NX", "PX", "1", "GET")  # type: ignore[no-untyped-call]
    except redis.ResponseError:
        return False
    client.delete(name)
    return True
