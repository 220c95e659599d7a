"""Fixtures of locks that callers contend for on one server: `scene`, `valkey_scene`, `mortal_scene`, `holder`.

What a test gets:

- `scene.server`, and `scene.client`: the test's own client of it, which is none of the callers'.
- `scene.connect()`: a client for the callers, who are threads or tasks: `scene.callers`.
- `scene.contender()`: a lock of such a client; `scene.contenders(3)`: three of one client.
- `scene.holder()`: a lock that is held; `scene.holder_and(2)`: one that is held, and two others of its client.
- `scene.wait(waiter)`: let it wait. Returns its answer, a future, once it stands in the queue.
- `scene.queued()`, `scene.until_queued(2)`: how many wait for the lock.
- `holder`, a fixture of its own: a lock of `scene.client` that is held.

All locks have the name "name", and neither expire nor make health checks while a test runs (`LATE`), unless the test
gives settings. So a waiter that must be notified hangs where it is not.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest
import redis

from redislock_fast import Lock
from redislock_fast.server import Server
from tests.support.helpers import many
from tests.support.waiting import LATE, Callers, Contender, queue_up, queued, until_queued

if TYPE_CHECKING:
    from tests.conftest import Connect  # which imports the fixtures


class Scene:
    """See the module.

    Attributes:
        callers: threads or tasks.
        server: the server.
        client: the test's own client.
    """

    def __init__(self, callers: Callers, server: Server, client: redis.Redis) -> None:
        self.callers = callers
        self.server = server
        self.client = client

    def connect(self, port: int | None = None, /, **options: Any) -> Any:
        """A client for the callers, of the server or of what listens on this port before it."""
        return self.callers.client(self.server.port if port is None else port, **options)

    def contender(self, client: Any = None, name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock on this client, or on one of its own."""
        return self.callers.contender(self.connect() if client is None else client, name, **(settings or LATE))

    def contenders(self, count: int, client: Any = None, name: str = "name", **settings: Any) -> list[Contender]:
        """So many locks on this client, or on a new one that they share."""
        return self.callers.contenders(count, self.connect() if client is None else client, name, **(settings or LATE))

    def holder(self, client: Any = None, name: str | bytes = "name", **settings: Any) -> Contender:
        """A lock that is held."""
        holder = self.contender(client, name, **settings)
        assert holder.call("acquire")
        return holder

    def holder_and(self, count: int, client: Any = None, **settings: Any) -> list[Contender]:
        """A lock that is held, and so many others on the same client."""
        contenders = self.contenders(1 + count, client, **settings)
        assert contenders[0].call("acquire")
        return contenders

    def wait(self, waiter: Contender, **arguments: Any) -> Future[Any]:
        """Let it acquire with these arguments. Returns its answer once it stands in the queue."""
        (answer,) = self.queue_up([waiter], **arguments)
        return answer

    def queue_up(self, waiters: list[Contender], **arguments: Any) -> list[Future[Any]]:
        """Let them wait, one after another. Returns their answers."""
        return queue_up(waiters, self.client, **arguments)

    def queued(self) -> int:
        """How many wait."""
        return queued(self.client, "name")

    def until_queued(self, length: int) -> None:
        """Return once so many wait."""
        until_queued(self.client, "name", length)


@pytest.fixture
def holder(client: redis.Redis) -> Lock:
    """A lock of the test's own client, held; it is for threads, and its calls block a loop."""
    lock = Lock(client, "name", thread_local=False, **LATE)
    assert lock.acquire()
    return lock


@pytest.fixture
def scene(callers: Callers, server: Server, client: redis.Redis) -> Scene:
    """Threads and tasks at each kind of server in turn."""
    return Scene(callers, server, client)


@pytest.fixture
def valkey_scene(callers: Callers, valkey: Server, valkey_client: redis.Redis) -> Scene:
    """Threads and tasks at Valkey, for tests to which the kind of server does not matter."""
    return Scene(callers, valkey, valkey_client)


@pytest.fixture
def mortal_scene(callers: Callers, mortal_server: Server, connect: Connect) -> Scene:
    """Threads and tasks at a server of the test's own, of each kind in turn, whose restart `client` outlasts."""
    return Scene(callers, mortal_server, connect(mortal_server.port, retry=many()))
