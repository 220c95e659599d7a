"""Locks under uWSGI, which forks its workers without Python's knowledge: no hook is called in them.

Rules: the real server, as it is by default: a master, which imports the application, and its workers. It forks without
the GIL. A worker waits for that forever if another thread of the master has it then, whatever the thread belongs to. So
the master forks while its other threads sleep.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from redislock_fast.server import Server, free_port
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.holding import KEPT_S, LONG_S
from tests.support.waiting import FAR_S

pytest.importorskip("pyuwsgi")
pytestmark = pytest.mark.slow

WORKERS = 3
USUAL: dict[str, Any] = {"is_used": True, "rounds": 30, "hold_s": 0}

APPLICATION = """
import json, os, threading, time
import redis
from redislock_fast import Lock, holders

settings = json.loads(os.environ["SETTINGS"])
client = redis.Redis(port=int(os.environ["SERVER"]))
lock = Lock(client, "name", **settings["lock"])
if settings["is_used"]:
    with lock:
        pass
    while any(thread.name == "redislock_fast-linger" for thread in threading.enumerate()):  # it wakes up often
        time.sleep(0.01)
    time.sleep(0.1)


def hold():
    with lock:
        most = client.incr("inside")
        holder = holders(client, "name").holder
        time.sleep(settings["hold_s"])
        is_held = lock.owned()
        client.decr("inside")
    return most, is_held, holder.process.pid == os.getpid()


def application(environ, start_response):
    client.incr("arrived")
    while int(client.get("arrived")) < settings["workers"]:  # each request has a worker of its own
        time.sleep(0.001)
    results = {hold() for _ in range(settings["rounds"])}
    start_response("200 OK", [])
    return [json.dumps([os.getpid(), sorted(results)]).encode()]
"""

Run = Callable[..., list[Any]]


@pytest.fixture
def run(tmp_path: Path, valkey: Server) -> Iterator[Run]:
    """Runs the application, and asks all workers at once. Returns their answers."""
    (tmp_path / "application.py").write_text(APPLICATION)
    port = free_port()
    servers: list[subprocess.Popen[bytes]] = []

    def run(*options: str, **settings: Any) -> list[Any]:
        servers.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-c", "import pyuwsgi; pyuwsgi.run()", "--master", "--processes", str(WORKERS)),
                    *("--http-socket", f"127.0.0.1:{port}", "--wsgi-file", "application.py", "--need-app"),
                    *("--disable-logging", *options),
                ],
                cwd=tmp_path,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "SERVER": str(valkey.port),
                    "SETTINGS": json.dumps({"workers": WORKERS, **USUAL, **settings}),
                },
            )
        )
        wait_until(lambda: _is_open(port), "the server runs")
        answers = [start(lambda: _ask(port)) for _ in range(WORKERS)]
        return [answer.result(PATIENCE_S) for answer in answers]

    yield run
    for server in servers:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(PATIENCE_S)


def _is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _ask(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as answer:
        return json.load(answer)


@pytest.mark.parametrize("is_used", [True, False], ids=["used in the master", "unused"])
@pytest.mark.parametrize("lock", [{}, {"linger": 0.2}, {"auto_renew": True}], ids=str)
def test_workers_exclude_each_other(run: Run, lock: dict[str, Any], is_used: bool) -> None:
    answers = run(lock={"timeout": FAR_S, **lock}, is_used=is_used)
    assert len({pid for pid, _ in answers}) == WORKERS
    assert [results for _, results in answers] == [[[1, True, True]]] * WORKERS


def test_workers_of_a_master_that_calls_pythons_hooks(run: Run) -> None:
    answers = run("--py-call-uwsgi-fork-hooks", lock={"timeout": FAR_S})
    assert [results for _, results in answers] == [[[1, True, True]]] * WORKERS


@pytest.mark.parametrize("linger", [None, 0.1])
def test_workers_renew_their_locks(run: Run, linger: float | None) -> None:
    answers = run(lock={"timeout": KEPT_S, "auto_renew": True, "linger": linger}, rounds=1, hold_s=LONG_S)
    assert [results for _, results in answers] == [[[1, True, True]]] * WORKERS
