"""The requests of a lock on plain sockets: the upper limit for a lock in Python that sends the same requests.

The requests are packed beforehand, and the replies are hardly parsed: there are no timeouts and no retries. Each
thread has a connection of its own. The tasks of a client share one connection, and their requests of one iteration of
the loop leave together.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis

from bench.contestants import address_of, pack
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.scripts import PASS_ON, WAIT
from redislock_fast._util.tokens import CONTENDED_FLAG, new_token

if TYPE_CHECKING:
    import redis
    import redis.asyncio

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


def connected_to(client: redis.Redis) -> socket.socket:
    """A socket of its own to a client's server, on which no small request waits for the next one."""
    connected = socket.create_connection(address_of(client))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


class BareLock:
    """A lock on a blocking socket of its own, at a server that has DELIFEQ; the name is its key."""

    def __init__(self, client: redis.Redis, name: str, lease_s: int) -> None:
        channel = "bench:" + new_token().decode()
        self._words = _Words(name, channel, lease_s)
        self._was_granted = self._handed_over = False
        self._socket = connected_to(client)
        self._socket.sendall(_greeting(channel))
        self._until(channel.encode())

    def _until(self, sign: bytes) -> None:
        received = b""
        while sign not in received:
            received += self._socket.recv(_ROOM)

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

    async def open(self, client: redis.asyncio.Redis) -> _Connection:
        settings = client.connection_pool.connection_kwargs
        address = str(settings.get("host", "localhost")), int(settings.get("port", 6379))
        self._transport, _ = await self._loop.create_connection(lambda: self, *address)
        greeted = [self._loop.create_future() for _ in range(3)]  # the reply to SUBSCRIBE is a push
        self._asked.extend(greeted)
        self._transport.write(_greeting(self.channel))
        await asyncio.gather(*greeted)
        return self

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if type(reply) is hiredis.PushNotification:
                is_message = reply[0] == b"message"
                answered = self._awaited.pop(reply[2].partition(CONTENDED_FLAG)[0], None) if is_message else None
            else:
                answered = self._asked.popleft()
            if answered is not None:
                answered.set_result(reply)

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


class AsyncBareLock:
    """A lock on the connection that all tasks of a client share."""

    def __init__(self, client: redis.asyncio.Redis, name: str, lease_s: int) -> None:
        self._client = client
        self._of = (name, lease_s)
        self._connection: _Connection | None = None
        self._was_granted = self._handed_over = False

    async def _connect(self) -> _Connection:
        opening = _connections.get(self._client)
        if opening is None:
            opening = _connections[self._client] = asyncio.ensure_future(_Connection().open(self._client))
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
