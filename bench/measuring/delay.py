"""Servers that are further away: `delay.c` stands between them and the bench, in a process of its own."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from bench.contestants import AbsentError
from bench.measuring.compiling import compiled

_SOURCE = Path(__file__).with_name("delay.c")


@contextmanager
def open_delay(ports: Sequence[int], rtt_ms: float, host: str = "127.0.0.1") -> Iterator[dict[int, int]]:
    """Add a round trip to the way to some servers, half of it in each direction.

    Args:
        ports: of the servers.
        rtt_ms: the round trip that is added, in ms.
        host: of the servers.

    Yields:
        By the port of a server, the port on loopback where it is reached with the delay.

    Raises:
        AbsentError: without a C compiler, or on another system than Linux.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        program = compiled(_SOURCE, Path(folder))
        command = [str(program), str(1000 * rtt_ms / 2), host, *map(str, ports)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin:
                yield {port: int(process.stdout.readline()) for port in ports}


@contextmanager
def delayed_url(url: str, rtt_ms: float) -> Iterator[str]:
    """Add a round trip to the way to a server.

    Args:
        url: the server's.
        rtt_ms: the round trip that is added, in ms; 0: nothing stands between.

    Yields:
        The URL where the server is reached with the delay.

    Raises:
        AbsentError: as `open_delay`, and when the server is not reached by plain TCP.
    """
    if not rtt_ms:
        yield url
        return
    parts = urlsplit(url)
    if parts.scheme != "redis":
        raise AbsentError("only a server of plain TCP can be delayed")
    port = parts.port or 6379
    with open_delay([port], rtt_ms, parts.hostname or "localhost") as reached:
        credentials, at, _ = parts.netloc.rpartition("@")
        yield urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{reached[port]}"))
