"""Servers that are further away: `delay.c`, compiled here, stands between them and the bench, in its own process."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from bench.contestants import AbsentError

_SOURCE = Path(__file__).with_name("delay.c")


@contextmanager
def open_delay(ports: Sequence[int], rtt_ms: float, host: str = "127.0.0.1") -> Iterator[dict[int, int]]:
    """Add a round trip to the way to some servers, half of it in each direction.

    Yields, by the port of a server, the port on loopback where it is reached so. Raises `AbsentError` without a C
    compiler, or on another system than Linux.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        program = compiled(_SOURCE, Path(folder))
        command = [str(program), str(1000 * rtt_ms / 2), host, *map(str, ports)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield {port: int(process.stdout.readline()) for port in ports}  # it ends with its standard input


@contextmanager
def delayed_url(url: str, rtt_ms: float) -> Iterator[str]:
    """Yield the URL where the server is reached with a round trip more; with 0 ms, its own.

    Raises `AbsentError` as `open_delay`, and when the server is not reached by plain TCP.
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


def compiled(source: Path, folder: Path) -> Path:
    """Compile a program of one file into the folder, and return its path; raise `AbsentError` where that fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise AbsentError("no C compiler")
    program = folder / source.stem
    command = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AbsentError(f"{source.name} does not compile: {done.stderr}")
    return program
