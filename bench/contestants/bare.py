"""The requests of a lock on plain sockets: the upper limit for a lock in Python that sends the same requests.

The requests are packed beforehand, and the replies are hardly parsed: there are no timeouts and no retries. Only
`BareHolding` keeps a lease and makes a new token for each acquire. Each thread has a connection of its own. The tasks
of a client share one connection, and their requests of one iteration of the loop leave together.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis

from bench.contestants.commands import Commands
from bench.contestants.packing import pack
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.scripts import PASS_ON, WAIT
from redislock_fast._util.tokens import CONTENDED_FLAG, new_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis
    import redis.asyncio

__all__ = ["AsyncBareLock", "BareBatch", "BareHolding", "BareLock"]

_KEPT_MS = 3_600_000
_ROOM = 65536


class _Words:
    """The requests of one waiter, packed."""

    def __init__(self, name: str, channel: str, lease_s: int) -> None:
        self.token = token = new_token()
        key = name.encode()
        ttl_ms = lease_s * 1000
        three_keys = (3, key, *queue_keys(key), token)
        waiting = (ttl_ms, "publish", channel, _KEPT_MS, _KEPT_MS, "")
        self.acquire = pack("SET", key, token, "NX", "PX", ttl_ms)
        self.wait = pack("EVALSHA", WAIT.sha, *three_keys, *waiting)
        self.release = pack("DELIFEQ", key, token)
        self.pass_on = pack("EVALSHA", PASS_ON.sha, *three_keys)


def _greeting(channel: str) -> bytes:
    scripts = b"".join(pack("SCRIPT", "LOAD", script.text) for script in (WAIT, PASS_ON))
    return pack("HELLO", 3) + scripts + pack("SUBSCRIBE", channel)


def _connected(client: redis.Redis) -> socket.socket:
    connected = Commands(client).connect()
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


class BareLock:
    """A lock on a blocking socket of its own.

    Args:
        client: of the server, which has DELIFEQ.
        name: of the lock, which is its key.
        lease_s: the ttl, in seconds.
    """

    def __init__(self, client: redis.Redis, name: str, lease_s: int) -> None:
        channel = "bench:" + new_token().decode()
        self._words = _Words(name, channel, lease_s)
        self._was_granted = self._handed_over = False
        self._socket = _connected(client)
        self._socket.sendall(_greeting(channel))
        self._until(channel.encode())

    def _until(self, sign: bytes) -> None:
        heard = b""
        while sign not in heard:
            heard += self._socket.recv(_ROOM)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock, or wait for it."""
        if not (self._handed_over and blocking):  # after a hand-over another waiter holds the lock
            self._socket.sendall(self._words.acquire)
            if self._socket.recv(_ROOM) == b"+OK\r\n":
                return True
        if blocking:
            self._socket.sendall(self._words.wait)
            self._until(self._words.token + CONTENDED_FLAG)
            self._was_granted = True
        return blocking

    def release(self) -> None:
        """Release the lock, or hand it over."""
        if not self._was_granted:
            self._socket.sendall(self._words.release)
            if self._socket.recv(_ROOM) == b":1\r\n":
                return
        self._was_granted = False
        self._socket.sendall(self._words.pass_on)
        self._handed_over = self._socket.recv(_ROOM) == b":2\r\n"

    def __enter__(self) -> object:
        """Acquire the lock."""
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self.release()


class _Owner(threading.local):
    """The token and the lease of a thread."""

    token: bytes | None = None
    contended: bytes | None = None
    expiry: tuple[bytes, float] | None = None


class BareHolding(BareLock):
    """A `BareLock` with a new token for each acquire, kept for each thread, as redis-py's interface needs it.

    The arguments are those of `BareLock`.
    """

    def __init__(self, client: redis.Redis, name: str, lease_s: int) -> None:
        super().__init__(client, name, lease_s)
        self.local = _Owner()
        self._lease_s = lease_s
        words = self._words
        requests = (words.acquire, words.wait, words.release, words.pass_on)
        self._acquire, self._wait, self._release, self._pass_on = (one.split(words.token) for one in requests)

    def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock, or wait for it."""
        local = self.local
        token = new_token()
        sent_at = time.monotonic()
        if not (self._handed_over and blocking):
            self._socket.sendall(token.join(self._acquire))
            if self._socket.recv(_ROOM) == b"+OK\r\n":
                local.expiry = (token, sent_at + self._lease_s)
                local.token = token
                return True
        if blocking:
            self._socket.sendall(token.join(self._wait))
            self._until(token + CONTENDED_FLAG)
            local.expiry = (token, sent_at + self._lease_s)
            local.contended = local.token = token
        return blocking

    def release(self) -> None:
        """Release the lock, or hand it over."""
        local = self.local
        token = local.token
        assert token is not None
        if local.contended != token:
            self._socket.sendall(token.join(self._release))
            if self._socket.recv(_ROOM) == b":1\r\n":
                local.token = None
                return
        self._socket.sendall(token.join(self._pass_on))
        self._handed_over = self._socket.recv(_ROOM) == b":2\r\n"
        local.token = None


class BareBatch:
    """Locks on a blocking socket, requested in one write.

    Args:
        client: of the server, which has DELIFEQ.
        lease_s: the ttl of the locks, in seconds.
    """

    def __init__(self, client: redis.Redis, lease_s: int) -> None:
        self._lease_s = lease_s
        self._names: Sequence[str] = ()
        self._socket = _connected(client)

    def _prepare(self, names: Sequence[str]) -> None:
        words = [_Words(name, "", self._lease_s) for name in names]
        self._acquire = b"".join(value.acquire for value in words)
        self._release = b"".join(value.release for value in words)
        self._names = names

    def _ask(self, requests: bytes) -> bytes:
        self._socket.sendall(requests)
        heard = self._socket.recv(_ROOM)
        while heard.count(b"\r\n") < len(self._names):
            heard += self._socket.recv(_ROOM)
        return heard

    def acquire(self, names: Sequence[str], /) -> int:
        """Acquire the free locks, and return their number."""
        if names is not self._names:
            self._prepare(names)
        return self._ask(self._acquire).count(b"+OK")

    def release(self) -> int:
        """Release the locks, and return how many were held."""
        return self._ask(self._release).count(b":1")


class _Connection(asyncio.Protocol):
    """The connection that all tasks of a client share."""

    def __init__(self) -> None:
        self.channel = "bench:" + new_token().decode()
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._requests: list[bytes] = []
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._awaited: dict[bytes, asyncio.Future[Any]] = {}
        self._transport: Any = None

    async def open(self, client: redis.asyncio.Redis) -> None:
        settings = client.connection_pool.connection_kwargs
        address = str(settings.get("host", "localhost")), int(settings.get("port", 6379))
        self._transport, _ = await self._loop.create_connection(lambda: self, *address)
        greeted = [self._loop.create_future() for _ in range(3)]  # the reply to SUBSCRIBE is a push
        self._asked.extend(greeted)
        self._transport.write(_greeting(self.channel))
        await asyncio.gather(*greeted)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if type(reply) is hiredis.PushNotification:
                told = (
                    self._awaited.pop(reply[2].partition(CONTENDED_FLAG)[0], None) if reply[0] == b"message" else None
                )
            else:
                told = self._asked.popleft()
            if told is not None:
                told.set_result(reply)

    def ask(self, request: bytes) -> asyncio.Future[Any]:
        if not self._requests:
            self._loop.call_soon(self._flush)
        self._requests.append(request)
        asked = self._loop.create_future()
        self._asked.append(asked)
        return asked

    def _flush(self) -> None:
        self._transport.write(b"".join(self._requests))
        self._requests.clear()

    def grant(self, token: bytes) -> asyncio.Future[Any]:
        self._awaited[token] = granted = self._loop.create_future()
        return granted


_connections: weakref.WeakKeyDictionary[Any, asyncio.Task[_Connection]] = weakref.WeakKeyDictionary()


async def _opened(client: redis.asyncio.Redis) -> _Connection:
    connection = _Connection()
    await connection.open(client)
    return connection


class AsyncBareLock:
    """A lock on the connection that all tasks of a client share; the arguments are those of `BareLock`."""

    def __init__(self, client: redis.asyncio.Redis, name: str, lease_s: int) -> None:
        self._client = client
        self._of = (name, lease_s)
        self._connection: _Connection | None = None
        self._was_granted = self._handed_over = False

    async def _connect(self) -> _Connection:
        opening = _connections.get(self._client)
        if opening is None:
            opening = _connections[self._client] = asyncio.ensure_future(_opened(self._client))
        connection = self._connection = await opening
        name, lease_s = self._of
        self._words = _Words(name, connection.channel, lease_s)
        return connection

    async def acquire(self, *, blocking: bool = True) -> bool:
        """Acquire the lock, or wait for it."""
        connection = self._connection or await self._connect()
        words = self._words
        if not (self._handed_over and blocking) and await connection.ask(words.acquire) == b"OK":
            return True
        if blocking:
            granted = connection.grant(words.token)
            answer = await connection.ask(words.wait)
            if answer[0] != 1:
                await granted
            self._was_granted = True
        return blocking

    async def release(self) -> None:
        """Release the lock, or hand it over."""
        assert self._connection is not None
        if not self._was_granted and await self._connection.ask(self._words.release) == 1:
            return
        self._was_granted = False
        self._handed_over = await self._connection.ask(self._words.pass_on) == 2
