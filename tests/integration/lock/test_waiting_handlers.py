"""A signal handler that waits for a lock, at any place of a call: it gets the lock, and the call and all others go on.

The lock is held by another thread of the process, which needs the same connection, renewer and registries to release
it. Threads alone; the handlers run in the main thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from redislock_fast import Lock
from tests.conftest import Connect, TlsServer
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.interrupts import handled_at
from tests.support.transports import drive_by
from tests.support.waiting import FAR_S, LATE, until_queued

_REGISTRIES = (
    "_queue/waiters.py",
    "_protocol/keys.py",
    "_protocol/claims.py",
    "_transport/base.py",
)
_LEASES = (
    "_procedures/loss.py",
    "_renewal/schedule.py",
    "_lease/lease.py",
    "_lease/holding.py",
    "_lease/owner.py",
    "_lease/prolonging.py",
    "_renewal/threads.py",
    "_transport/threads/starting.py",
)
_PIPE = "_pipe/threads_py.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(100),
    pytest.mark.skipif(sys.getprofile() is not None, reason="somebody else traces"),
]


class _Holder:
    """A thread that holds a lock on options, and releases it when a handler wants it.

    Args:
        client: of the process, for all its threads.
        admin: another client.
    """

    def __init__(self, client: redis.Redis, admin: redis.Redis) -> None:
        self._client = client
        self._admin = admin
        self._wants, self._had = threading.Event(), threading.Event()
        self._is_over = False
        self._work = start(self._hold)
        self.until_held()

    def _lock(self) -> Lock:
        return Lock(self._client, "second", timeout=FAR_S, sleep=0.01, thread_local=False, auto_renew=True)

    def _hold(self) -> None:
        while not self._is_over:
            with self._lock() as lock:
                lock.extend(FAR_S, replace_ttl=True)
                assert self._wants.wait(PATIENCE_S)
                self._wants.clear()
            self._had.wait(PATIENCE_S)
            self._had.clear()

    def until_held(self) -> None:
        """Return once the thread holds the lock."""
        wait_until(lambda: self._admin.exists("second"), "the thread holds the lock")

    def handle(self) -> None:
        """Wait for the lock, as a signal handler of another thread."""
        self._wants.set()
        with self._lock():
            pass
        self._had.set()

    def end(self) -> None:
        """Have the thread end."""
        self._is_over = True
        self._wants.set()
        self._had.set()
        self._work.result(PATIENCE_S)


@pytest.fixture
def server_options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How to connect: to Valkey, or where a test asks for it, by TLS and by the pipe in Python."""
    if getattr(request, "param", "") != "TLS":
        return {"port": request.getfixturevalue("valkey").port}
    drive_by("python", monkeypatch)
    server: TlsServer = request.getfixturevalue("tls_server")
    return {"port": server.port, "ssl": True, "ssl_ca_certs": server.ca_path}


@pytest.fixture
def client(connect: Connect, server_options: dict[str, Any]) -> redis.Redis:
    """The client of all threads, without any time limit."""
    client = connect(**server_options, socket_timeout=None)
    with Lock(client, "name", timeout=FAR_S):  # connects
        pass
    return client


@pytest.fixture
def admin(connect: Connect, server_options: dict[str, Any]) -> redis.Redis:
    """Another client of the same server."""
    return connect(**server_options)


@pytest.fixture
def holder(client: redis.Redis, admin: redis.Redis) -> Iterator[_Holder]:
    """The thread that holds what the handlers wait for."""
    holder = _Holder(client, admin)
    yield holder
    holder.end()


@pytest.fixture
def reader(admin: redis.Redis, client: redis.Redis) -> Iterator[None]:
    """A thread that waits for a lock all the time, and so reads for all."""
    other = Lock(admin, "third", thread_local=False, **LATE)
    assert other.acquire()
    waiting = start(Lock(client, "third", thread_local=False, **LATE).acquire)
    until_queued(admin, "third", 1)
    yield
    other.release()
    assert waiting.result(PATIENCE_S) is True


def _handled_at_each_place(work: Callable[[], object], files: tuple[str, ...], holder: _Holder) -> int:
    """Have a handler wait at each place of the work in turn. Returns how many places there are."""
    number, place = 0, "the first"
    while place:
        number += 1
        holder.until_held()
        place = handled_at(number, work, holder.handle, *files)
    return number


@pytest.mark.usefixtures("reader")
def test_handler_may_wait_at_any_place_of_a_wait(client: redis.Redis, admin: redis.Redis, holder: _Holder) -> None:
    def wait() -> None:
        other = Lock(admin, "name", thread_local=False, **LATE)
        assert other.acquire()

        def release() -> None:
            until_queued(admin, "name", 1)
            other.release()

        releasing = start(release)
        with Lock(client, "name", **LATE):
            pass
        releasing.result(PATIENCE_S)

    assert _handled_at_each_place(wait, _REGISTRIES, holder) > 30


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    "settings",
    [
        {"auto_renew": True},
        {"auto_renew": True, "thread_local": False},
        {"auto_renew": True, "linger": 0.05},
        {"token": "mine"},
    ],
    ids=str,
)
def test_handler_may_wait_at_any_place_of_an_acquire_extend_and_release(
    settings: dict[str, Any], client: redis.Redis, holder: _Holder
) -> None:
    token = settings.pop("token", None)

    def use() -> None:
        lock = Lock(client, "name", timeout=FAR_S, **settings)
        assert lock.acquire(token=token)
        lock.extend(FAR_S, replace_ttl=True)
        lock.release()

    assert _handled_at_each_place(use, (*_REGISTRIES, *_LEASES), holder) > 10


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("server_options", ["TLS"], indirect=True)
def test_handler_may_wait_at_any_place_of_a_call_on_a_tls_connection(client: redis.Redis, holder: _Holder) -> None:
    def use() -> None:
        with Lock(client, "name", timeout=FAR_S):
            pass

    assert _handled_at_each_place(use, (_PIPE,), holder) > 30
