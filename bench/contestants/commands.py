"""The requests that redislock_fast sends for an uncontended acquire and release, and their correct replies.

As in the package, these are native commands where the server has them, and the release script otherwise.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import redis

from bench.contestants import LEASE_S, AbsentError, CheckFailedError
from bench.contestants.packing import pack
from redislock_fast._protocol.scripts import RELEASE

if TYPE_CHECKING:
    from typing_extensions import Self

_TOKEN_BYTES = 36
_SOCKET_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Exchange:
    """A request and its correct reply."""

    request: bytes
    reply: bytes


class Commands:
    """The requests that suit a server, and its address.

    Args:
        client: of the server.

    Attributes:
        host: of the server.
        port: of the server.

    Raises:
        AbsentError: when the server needs more than plain TCP.
    """

    def __init__(self, client: redis.Redis) -> None:
        settings = client.connection_pool.connection_kwargs
        plain = client.connection_pool.connection_class is redis.Connection
        if not plain or settings.get("password") or settings.get("db"):
            raise AbsentError("only over plain TCP, without a password, in database 0")
        self.host = str(settings.get("host", "localhost"))
        self.port = int(settings.get("port", 6379))
        self._release_form = _release_form(client)
        self._answers_with_holder = _answers_with_holder(client)

    def acquire(self, name: str, token: str) -> tuple[str, ...]:
        """The acquire, as words."""
        words = ("SET", name, token, "NX", "PX", str(LEASE_S * 1000))
        return (*words, "GET") if self._answers_with_holder else words

    def release(self, name: str, token: str) -> tuple[str, ...]:
        """The release, as words."""
        head, tail = self._release_form
        return (*head, name, *tail, token)

    def exchanges(self, name: str, token: str) -> tuple[Exchange, Exchange]:
        """The acquire of a free lock, and its release by the owner."""
        acquired = b"$-1\r\n" if self._answers_with_holder else b"+OK\r\n"
        return (
            Exchange(pack(*self.acquire(name, token)), acquired),
            Exchange(pack(*self.release(name, token)), b":1\r\n"),
        )

    def is_right(self, exchange: Exchange) -> bool:
        """Make one exchange on a connection of its own, and return whether the reply was correct."""
        with self.connect() as connection:
            connection.sendall(exchange.request)
            with connection.makefile("rb") as replies:
                return replies.readline() == exchange.reply

    def connect(self) -> socket.socket:
        """Open a connection to the server."""
        return socket.create_connection((self.host, self.port), _SOCKET_TIMEOUT_S)


class BareLock:
    """The requests as a lock, so that the check of a lock can be applied to them.

    Args:
        commands: of the server.
        name: of the lock, which is its key.
    """

    def __init__(self, commands: Commands, name: str) -> None:
        self._commands = commands
        self._acquire, self._release = commands.exchanges(name, new_token())

    def acquire(self, *, blocking: bool = True) -> bool:
        """Try once; there is no waiting."""
        if blocking:
            raise ValueError("bare commands have no waiting")
        return self._commands.is_right(self._acquire)

    def release(self) -> None:
        """Release the lock.

        Raises:
            CheckFailedError: when it was not held.
        """
        if not self._commands.is_right(self._release):
            raise CheckFailedError("released a lock that it did not hold")

    def __enter__(self) -> Self:
        """Acquire the lock."""
        if not self.acquire(blocking=False):
            raise CheckFailedError("another owner holds the lock")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self.release()


def new_token() -> str:
    """Make a token as long as the tokens of the package."""
    return secrets.token_hex(_TOKEN_BYTES // 2)


def _release_form(client: redis.Redis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of the release before the name, and those between the name and the token."""
    delifeq, delex = client.execute_command("COMMAND INFO", "DELIFEQ", "DELEX")  # type: ignore[no-untyped-call]
    if delifeq:
        return ("DELIFEQ",), ()
    if delex:
        return ("DELEX",), ("IFEQ",)
    return ("EVALSHA", client.script_load(RELEASE.text), "1"), ()


def _answers_with_holder(client: redis.Redis) -> bool:
    """Whether the server accepts NX and GET together, as Redis does since 7.0."""
    probe = f"bench:probe:{new_token()}"
    try:
        client.execute_command("SET", probe, "probe", "NX", "PX", "1", "GET")  # type: ignore[no-untyped-call]
    except redis.ResponseError:
        return False
    client.delete(probe)
    return True
