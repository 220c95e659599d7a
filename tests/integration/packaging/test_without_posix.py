"""The pure-Python package where POSIX is missing, as on Windows: what Windows lacks is hidden from an interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from redislock_fast.server import Server
from tests.support.helpers import run_script

PROGRAM = Path(__file__).with_name("portable_program.py")

# The standard library's modules come first: those that are here use POSIX.
_HIDING = """
import asyncio, functools, os, pathlib, runpy, select, signal, socket, ssl, subprocess, sys, tempfile, time, uuid

os.environ["REDISLOCK_FAST_IMPLEMENTATION"] = "python"
for module in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[module] = None
sys.modules["numpy"] = None  # it was built with POSIX and asks for os.uname; fakeredis does without it
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # for the event loop: Windows has its own
for module, names in {
    os: "fork forkpty getpgid getuid killpg pipe2 posix_spawn register_at_fork setsid uname WNOHANG",
    select: "epoll poll",
    signal: "pthread_kill pthread_sigmask setitimer SIGALRM SIGCHLD SIGHUP SIGKILL SIGSTOP SIGUSR1 SIGUSR2",
    socket: "AF_UNIX MSG_DONTWAIT MSG_NOSIGNAL",
    time: "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_fake_server", [False, True])
def test_locks_of_threads_and_tasks_work_without_posix(on_fake_server: bool, valkey: Server) -> None:
    if on_fake_server:
        pytest.importorskip("lupa", reason="fakeredis runs no scripts without it")
    shown = run_script(_HIDING, PROGRAM, *([] if on_fake_server else [valkey.port]))
    assert ("python True True", "") == (shown.stdout.strip(), shown.stderr)
