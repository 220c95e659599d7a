"""The bench of a distant server: what passes is delayed and unchanged, and each row has its figures.

Rules: on a real server, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.contestants import OURS, REDIS_PY, AbsentError
from bench.measuring import delay
from redislock_fast.server import Server
from tests.conftest import absent

RTT_MS = 20.0


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    if shutil.which("cc") is None:
        absent("no C compiler here")


def test_everything_arrives_unchanged_and_the_end_too() -> None:
    words = [bytes([65 + number]) * 3_000_000 for number in range(4)]  # more than the sockets hold
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with delay.delayed_url(url, 1.0) as delayed:
            near = socket.create_connection(("127.0.0.1", int(delayed.rpartition(":")[2])))
            far, _ = listener.accept()
            with near, far:
                for sender, receiver in ((near, far), (far, near)):
                    sending = threading.Thread(target=lambda sender=sender: [sender.sendall(value) for value in words])
                    sending.start()
                    with receiver.makefile("rb") as received:
                        assert [received.read(len(value)) for value in words] == words
                    sending.join()
                near.shutdown(socket.SHUT_WR)
                assert far.recv(1) == b""
                far.shutdown(socket.SHUT_WR)
                assert near.recv(1) == b""


def test_each_direction_takes_half_of_the_round_trip() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with delay.delayed_url(url, RTT_MS) as delayed:
            near = socket.create_connection(("127.0.0.1", int(delayed.rpartition(":")[2])))
            far, _ = listener.accept()
            with near, far:
                for sender, receiver in ((near, far), (far, near)):
                    began = time.perf_counter()
                    sender.sendall(b"x")
                    assert receiver.recv(1) == b"x"
                    assert 1000 * (time.perf_counter() - began) >= RTT_MS / 2


def test_each_port_is_reached_by_one_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        listeners = {listener.getsockname()[1]: listener for listener in (one, other)}
        with delay.open_delay(list(listeners), 1.0) as reached:
            for port, listener in listeners.items():
                with socket.create_connection(("127.0.0.1", reached[port])) as near, listener.accept()[0] as far:
                    near.sendall(b"x")
                    assert far.recv(1) == b"x"


def test_only_plain_tcp_is_delayed() -> None:
    with pytest.raises(AbsentError), delay.delayed_url("rediss://127.0.0.1:1", 1.0):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "one"), [("threads", "1 thread"), ("tasks", "1 task")])
def test_command_saves_each_row(kind: str, one: str, valkey: Server, figures: Callable[..., dict[str, Any]]) -> None:
    words = ["--rtt", "0.5,1", "--callers", "1,3", "--kinds", kind, "--rounds", 1, "--seconds", 0.01]
    rows = figures("latency", *words, "--server", valkey.url)["results"]
    assert [(row["rtt_ms"], row["workload"], row["contestant"]) for row in rows] == [
        (rtt_ms, workload, contestant)
        for rtt_ms in (0.5, 1.0)
        for workload in (one, f"3 {kind}")
        for contestant in (REDIS_PY, OURS)
    ]
    for row in rows:
        assert row["acquire_p99_ms"] >= row["acquire_p50_ms"] >= row["rtt_ms"]
    assert {row["acquire_p50_to_redis_py"] for row in rows if row["contestant"] == REDIS_PY} == {1.0}
