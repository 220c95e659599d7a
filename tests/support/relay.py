"""A relay between asyncio clients and a server, in the loop of the test: it splits, spoils and adds replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from redislock_fast.server import Server
from tests.support.async_helpers import eventually


class Relay:
    """Passes bytes on between a port of its own and a server's, until a test spoils them.

    Attributes:
        port: where it listens.
        connections: how many there were.
        writers: to the clients that are connected.
        chunk: how many bytes of a reply are passed on at once.
        spoil: replaces what the server sends next, once.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.connections = 0
        self.chunk = 65536
        self.spoil: Callable[[bytes], bytes] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def before(cls, server: Server) -> AsyncIterator[Relay]:
        """A relay that listens."""
        relay = cls(server.port)
        listener = await asyncio.start_server(relay._serve, "127.0.0.1", 0)
        relay.port = listener.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            listener.close()
            for writer in relay.writers:
                writer.close()
            await eventually(lambda: not relay.writers, "the relay ends")

    def inject(self, data: bytes) -> None:
        """Send the clients what no server has sent."""
        for writer in self.writers:
            writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self.writers.add(writer)
        requests = asyncio.create_task(self._pass_on(reader, server_writer))
        with contextlib.suppress(OSError):
            while data := await server_reader.read(65536):
                if self.spoil is not None:
                    spoil, self.spoil = self.spoil, None
                    data = spoil(data)
                for at in range(0, len(data), self.chunk):
                    writer.write(data[at : at + self.chunk])
                    await asyncio.sleep(0)
        await requests
        for end in (writer, server_writer):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()
        self.writers.discard(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()
