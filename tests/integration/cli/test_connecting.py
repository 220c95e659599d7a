"""How the command line finds its server, and that it repeats no password, whatever goes wrong."""

from __future__ import annotations

import os
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from redislock_fast import LockLostError, Semaphore
from redislock_fast.server import Server, free_port, give_back
from tests.conftest import MakeUser, TlsServer
from tests.integration.cli.conftest import CANARY, Command
from tests.support.clusters import Cluster
from tests.support.helpers import REDIS_PY
from tests.support.sentinels import sentinel_of
from tests.support.waiting import FAR_S

FREE = 1
WRONG = 2
NO_SERVER = 69
REFUSED = 125


LEAVES_SOCKETS = pytest.mark.filterwarnings(
    *["ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"] * (REDIS_PY < (5, 1))
)
"""redis-py 5.0 leaves a unix socket that it cannot connect to the collector."""


@pytest.fixture
def nobody() -> str:
    """The address of no server."""
    port = free_port()
    give_back(port)
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{CANARY}@localhost",
        f"redis:/:{CANARY}@localhost",
        f":{CANARY}@localhost",
        f"redis://:{CANARY}@localhost:port",
        f"redis://:{CANARY}@localhost?no_such_option=1",
        f"redis://localhost?password={CANARY}&db=x",
        f"redis+elsewhere://:{CANARY}@localhost",
        f"unix+cluster://:{CANARY}@/socket",
        f"redis+cluster://:{CANARY}@",
        f"redis+sentinel://:{CANARY}@localhost",
        f"redis+sentinel://:{CANARY}@localhost:port/service",
        f"redis+sentinel://:{CANARY}@localhost/service/database",
    ],
)
def test_wrong_url_is_told_in_one_line(redislock: Command, url: str) -> None:
    outcome = redislock("show", "name", "--url", url)
    assert (WRONG, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert "URL is wrong" in outcome.err


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        (f"redis://:{CANARY}@localhost?socket_timeout=2&unknown={CANARY}", "there is no option 'unknown'"),
        (f"redis+cluster://:{CANARY}@localhost?soket_timeout=2", "there is no option 'soket_timeout'"),
        (f"rediss+sentinel://:{CANARY}@localhost/service/0?bogus=1", "there is no option 'bogus'"),
        (f"unix:///socket?bogus={CANARY}", "there is no option 'bogus'"),
        (f"redis://localhost?password={CANARY}&db=x", "its option 'db' cannot have this value"),
        (f"redis://:{CANARY}@localhost?socket_timeout=-1", "its option 'socket_timeout' cannot have this value"),
        ("redis+cluster://localhost?socket_connect_timeout=inf", "its option 'socket_connect_timeout' cannot have"),
        (f"redis://:?{CANARY}=x@localhost", "it must be like"),
        (f"http://:{CANARY}@localhost?bogus=1", "it must be like"),
    ],
)
def test_wrong_option_of_a_url_is_named(redislock: Command, url: str, fault: str) -> None:
    outcome = redislock("show", "name", "--url", url)
    assert (WRONG, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert f"the URL is wrong: {fault}" in outcome.err


def test_url_of_a_program_that_decodes_serves_the_commands(
    redislock: Command, valkey: Server, valkey_client: redis.Redis
) -> None:
    url = f"{valkey.url}?decode_responses=true"
    permit = Semaphore(valkey_client, "name", 1, timeout=FAR_S).acquire()
    assert permit is not None
    looks = [redislock(*words, "--url", url) for words in (("ls",), ("top", "-n", 1), ("show", "name"))]
    token_id = redislock("show", "name", "--json", "--url", url).objects[0]["holders"][0]["token_id"]
    broken = redislock("break", "name", "--token-id", token_id, "--yes", "--url", url)
    assert [0, 0, 0, 0] == [outcome.code for outcome in (*looks, broken)]
    assert [True, True] == ["1 permits" in look.out for look in looks[:2]]
    with pytest.raises(LockLostError):
        permit.release()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{CANARY}@{{}}",
        f"rediss://:{CANARY}@{{}}",
        f"unix://:{CANARY}@/no/such/socket",
        f"redis+cluster://:{CANARY}@{{}}",
        f"redis+sentinel://:{CANARY}@{{}},{{}}/service",
    ],
)
@LEAVES_SOCKETS
def test_absent_server_is_told_in_one_line(redislock: Command, nobody: str, url: str) -> None:
    outcome = redislock("show", "name", "--url", url.format(nobody, nobody))
    assert (NO_SERVER, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert "no server" in outcome.err


class _Http(socketserver.BaseRequestHandler):
    """Answers as a web server does to what is none of its requests."""

    def handle(self) -> None:
        self.request.recv(1000)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_server_of_another_protocol_is_no_server(redislock: Command) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Http) as web:
        threading.Thread(target=web.serve_forever).start()
        outcome = redislock("show", "name", "--url", f"redis://127.0.0.1:{web.server_address[1]}")
        web.shutdown()
    assert (NO_SERVER, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert "no server" in outcome.err


def test_url_at_a_wrong_place_is_not_quoted(redislock: Command) -> None:
    assert 2 == redislock("--url", f"redis://:{CANARY}@localhost", "ls").code
    assert 2 == redislock(f"redis://:{CANARY}@localhost", "ls").code
    assert 2 == redislock("show", "name", f"redis://:{CANARY} @localhost").code


def test_password_of_the_environment_counts_more_than_that_of_the_url(
    redislock: Command, valkey: Server, acl_user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = acl_user(valkey)
    url = f"redis://{user.username}:{CANARY}@127.0.0.1:{valkey.port}"
    refused = redislock("show", "name", "--url", url)
    assert (NO_SERVER, 1) == (refused.code, len(refused.err.splitlines()))
    monkeypatch.setenv("REDISLOCK_PASSWORD", user.password)
    monkeypatch.setenv("REDISLOCK_URL", url)
    assert FREE == redislock("show", "name").code


def test_password_of_the_environment_may_be_any_bytes(
    redislock: Command,
    valkey: Server,
    valkey_client: Any,
    acl_user: MakeUser,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user = acl_user(valkey)
    valkey_client.execute_command("ACL", "SETUSER", user.username, b">\xff\xfe")
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    monkeypatch.setenv("REDISLOCK_USERNAME", user.username)
    monkeypatch.setenv("REDISLOCK_PASSWORD", os.fsdecode(b"\xff\xfe"))
    assert (FREE, "") == ((shown := redislock("show", "name")).code, shown.err)
    monkeypatch.setenv("REDISLOCK_PASSWORD", os.fsdecode(b"\xff"))
    assert (NO_SERVER, 1) == ((refused := redislock("show", "name")).code, len(refused.err.splitlines()))


def test_user_who_may_not_ask_for_the_own_name_is_told_by_doctor(
    redislock: Command, valkey: Server, acl_user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = acl_user(valkey, "-acl|whoami")
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    monkeypatch.setenv("REDISLOCK_USERNAME", user.username)
    monkeypatch.setenv("REDISLOCK_PASSWORD", user.password)
    assert user.username == redislock("doctor", "--json").objects[0]["user"]


def test_certificates_come_from_the_environment(
    redislock: Command, tls_server: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"rediss://127.0.0.1:{tls_server.port}"
    assert NO_SERVER == redislock("show", "name", "--url", url).code
    monkeypatch.setenv("REDISLOCK_CA_CERTS", tls_server.ca_path)
    assert FREE == redislock("show", "name", "--url", url).code


def test_sentinels_name_the_server(redislock: Command, valkey: Server, tmp_path: Path, nobody: str) -> None:
    with sentinel_of(valkey, tmp_path) as sentinel:
        url = f"redis+sentinel://{nobody},127.0.0.1:{sentinel.port}/service"
        assert FREE == redislock("show", "name", "--url", url).code
        unknown = redislock("show", "name", "--url", f"redis+sentinel://127.0.0.1:{sentinel.port}/other/0")
    assert (NO_SERVER, 1) == (unknown.code, len(unknown.err.splitlines()))


@pytest.mark.parametrize("cluster", ["valkey"], indirect=True)
def test_node_of_a_cluster_says_that_another_one_has_the_key(
    redislock: Command, cluster: Cluster, cluster_client: redis.RedisCluster
) -> None:
    client: Any = cluster_client
    name = next(name for name in map(str, range(1000)) if client.get_node_from_key(name).port != cluster.port)
    outcome = redislock("show", name, "--url", f"redis://127.0.0.1:{cluster.port}")
    assert (REFUSED, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert "use a URL with redis+cluster://" in outcome.err
