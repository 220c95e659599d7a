"""Attempts of unknown outcome, and the cleanup of what they leave.

Rules: on ours alone, by threads and by tasks. Faults are real: the proxy loses requests and replies. Where an order is
pinned, nothing is undone in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis.credentials import CredentialProvider

from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.async_helpers import async_few
from tests.support.helpers import PATIENCE_S, few, run_script, wait_until
from tests.support.proxy import Proxy
from tests.support.scenes import Scene
from tests.support.transports import at_end_of_cleanup, clean_up, stop_cleanup
from tests.support.waiting import Callers, Contender, Threads, awake_s

StartServer = Callable[..., Server]

# A caller's own token comes back


@pytest.fixture
def nothing_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server cannot be asked to undo anything just now."""
    stop_cleanup(monkeypatch)


def client_of(callers: Callers, proxy: Proxy, **options: Any) -> Any:
    """A client that soon gives up."""
    return callers.client(proxy.port, retry=few() if isinstance(callers, Threads) else async_few(), **options)


def acquire_in_vain(proxy: Proxy, contender: Contender) -> None:
    """Acquire with a token whose SET is executed, its reply lost, and then the server is away for a while."""
    contender.call("locked")
    proxy.refuse()
    proxy.drop_reply("SET")
    with pytest.raises(redis.ConnectionError):
        contender.call("acquire", token="mine", blocking=False)
    proxy.accept()


@pytest.mark.usefixtures("nothing_in_the_background")
def test_own_token_that_comes_back_takes_the_lock_anew(scene: Scene, proxy: Proxy) -> None:
    contender = scene.contender(client_of(scene.callers, proxy), timeout=60)
    acquire_in_vain(proxy, contender)
    assert scene.client.get("name") == b"mine"
    scene.client.pexpire("name", 5_000)
    assert contender.call("acquire", token="mine", blocking=False) is True
    assert scene.client.pttl("name") > 50_000
    contender.release()
    assert scene.client.keys() == []


@pytest.mark.usefixtures("nothing_in_the_background")
def test_own_token_that_comes_back_in_vain_leaves_the_lock_alone(callers: Callers, spare_server: StartServer) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy, redis.Redis(port=server.port) as client:
        contender = callers.contender(client_of(callers, proxy))
        acquire_in_vain(proxy, contender)
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.OutOfMemoryError):
            contender.call("acquire", token="mine", blocking=False)
        assert client.get("name") == b"mine"


class Credentials(CredentialProvider):
    """They cannot be had for a while.

    Attributes:
        failures: how often they will not be had.
    """

    failures = 0

    def get_credentials(self) -> tuple[str, str]:
        if self.failures:
            self.failures -= 1
            raise LookupError
        return "default", "any"


def test_undoing_survives_what_users_code_raises(scene: Scene, proxy: Proxy) -> None:
    credentials = Credentials()
    contender = scene.contender(client_of(scene.callers, proxy, credential_provider=credentials), timeout=60)
    contender.call("locked")
    credentials.failures = 3
    proxy.drop_reply("SET")
    with pytest.raises(LookupError):
        contender.call("acquire", blocking=False)
    wait_until(lambda: not scene.client.exists("name"), "it is undone")
    assert credentials.failures == 0


def test_what_is_left_while_the_undoing_thread_ends_is_undone(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, go_on = threading.Event(), threading.Event()

    def end_slowly() -> None:
        done.set()
        go_on.wait(PATIENCE_S)

    at_end_of_cleanup(end_slowly, monkeypatch)
    for name in ("first", "second"):
        client.set(name, "mine")
        clean_up(client, [(name.encode(), b"mine")])
        wait_until(lambda: not client.exists(name), "it is undone")  # noqa: B023
        assert done.wait(PATIENCE_S)
    go_on.set()


def test_program_that_ends_undoes_what_is_to_be_undone(server: Server, client: redis.Redis) -> None:
    script = """
import sys
import redis
from redislock_fast import Lock
from tests.support.transports import clean_up_at_exit
client = redis.Redis(port=int(sys.argv[1]))
lock = Lock(client, "name", timeout=60)
lock.acquire()
clean_up_at_exit(client, [(b"name", lock.local.token)])
"""
    finished = run_script(script, server.port)
    assert (0, "", []) == (finished.returncode, finished.stderr, client.keys())


@pytest.mark.slow
def test_program_that_ends_waits_for_no_server_that_is_gone(spare_server: StartServer) -> None:
    script = """
import sys
import redis
from tests.support.transports import clean_up
clean_up(redis.Redis(port=int(sys.argv[1])), [(b"name", b"token")])
"""
    gone = spare_server()
    gone.close()
    finished = run_script(script, gone.port)
    assert (0, "") == (finished.returncode, finished.stderr)


# The server goes on reading from a connection that was given up

SILENCE_S = 0.6
"""After so long a connection is given up: a busy machine must connect anew in that time, too."""


def test_acquire_that_arrives_late_takes_nothing(scene: Scene, proxy: Proxy) -> None:
    contender = scene.contender(client_of(scene.callers, proxy, socket_timeout=SILENCE_S))
    contender.call("locked")
    proxy.stall()
    assert contender.call("acquire", blocking=False) is True
    contender.release()
    proxy.thaw()
    assert scene.client.ping()  # by then the server has read what was stalled, too
    assert scene.client.keys() == []


def test_release_that_arrives_late_spares_a_holder_with_the_same_token(scene: Scene, proxy: Proxy) -> None:
    contender = scene.contender(client_of(scene.callers, proxy, socket_timeout=SILENCE_S))
    assert contender.call("acquire", token="mine")
    proxy.stall()
    contender.release()
    assert contender.call("acquire", token="mine", blocking=False) is True
    proxy.thaw()
    assert scene.client.ping()
    assert contender.call("owned")


def test_wait_that_arrives_late_leaves_nobody_in_the_queue(scene: Scene, proxy: Proxy) -> None:
    holder = scene.holder(timeout=None)
    waiter = scene.contender(client_of(scene.callers, proxy, socket_timeout=SILENCE_S), sleep=0.05)
    answer = scene.wait(waiter)
    heard = awake_s(scene.client, "name").keys()
    proxy.stall()
    wait_until(lambda: awake_s(scene.client, "name").keys() - heard, "it listens on a new connection")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    proxy.thaw()
    assert scene.client.ping()
    assert scene.client.keys() == []


def test_user_that_may_not_end_connections_goes_on_without(scene: Scene, acl_user: MakeUser) -> None:
    contender = scene.contender(scene.connect(**acl_user(scene.server, "-client").options()), timeout=None)
    for _ in range(2):
        assert contender.call("acquire", blocking=False) is True
        contender.release()
        scene.client.client_kill_filter(_type="normal", skipme=True)
