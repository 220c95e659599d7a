"""A relay that makes loopback a network: whatever passes leaves so much later, in both directions.

`python -m bench.relay 0.001 7000 7001` prints the ports where these two are reached, and ends with its standard input.

Rules: a process of its own, which takes no time from who is measured; bytes are never changed, and nothing waits for
what comes behind it.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

_HOST = "127.0.0.1"
_PIECE_BYTES = 65536


@contextmanager
def open_relay(ports: Sequence[int], delay_s: float) -> Iterator[dict[int, int]]:
    """Start a relay.

    Args:
        ports: of servers on loopback.
        delay_s: how much later everything leaves, in each direction, in seconds.

    Yields:
        By the server's port, the one where it is reached through the relay.
    """
    command = [sys.executable, "-m", __name__, str(delay_s), *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin:
            yield dict(zip(ports, map(int, process.stdout.readline().split()), strict=True))


async def _relay(delay_s: float, ports: list[int]) -> None:
    servers = [await asyncio.start_server(partial(_join, delay_s, port), _HOST, 0) for port in ports]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _join(delay_s: float, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there, back = await asyncio.open_connection(_HOST, port)
    await asyncio.gather(_pass_on(delay_s, reader, back), _pass_on(delay_s, there, writer))


async def _pass_on(delay_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    late: deque[bytes] = deque()
    while data := await reader.read(_PIECE_BYTES):
        late.append(data)
        loop.call_later(delay_s, lambda: writer.write(late.popleft()))  # the oldest, whichever timer is first
    loop.call_later(delay_s, writer.close)


if __name__ == "__main__":
    # select counts microseconds; epoll, which a loop has by default, rounds up to whole milliseconds.
    asyncio.SelectorEventLoop(selectors.SelectSelector()).run_until_complete(
        _relay(float(sys.argv[1]), [int(port) for port in sys.argv[2:]])
    )
    os._exit(0)  # the connections end with it, each without a word
