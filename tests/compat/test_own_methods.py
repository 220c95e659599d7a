"""Our locks on clients whose own methods send the commands: fakes, prefixes, decoders, mocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import AsyncMock, MagicMock, create_autospec

import fakeredis
import pytest
import redis
import redis.asyncio
from kombu.transport.redis import PrefixedStrictRedis
from redis.exceptions import ConnectionError, LockError, LockNotOwnedError, ResponseError

import redislock_fast
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.worlds import IN_THREADS, World

pytestmark = pytest.mark.usefixtures("world")

PREFIX = "prefix:"
KINDS = {"fakeredis": False, "fakeredis, decoded": True, "prefix": False, "prefix, decoded": True}
"""The kinds of clients, and whether they decode replies."""


def with_prefix(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The words of a command that redis-py's locks send, with the prefix before the key."""
    at = {"SET": 1, "GET": 1, "PTTL": 1, "EVALSHA": 3}.get(args[0])
    return args if at is None else (*args[:at], PREFIX + args[at], *args[at + 1 :])


class Prefixing:
    """Adds a prefix to the keys of the commands that redis-py's locks send, as kombu's client does."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send the command with the prefix."""
        return super().execute_command(*with_prefix(args), **options)  # type: ignore[misc]


class PrefixedRedis(Prefixing, redis.Redis):
    """A client for threads."""


class AsyncPrefixedRedis(Prefixing, redis.asyncio.Redis):  # type: ignore[misc]
    """A client for tasks."""


class Clients:
    """Makes clients of one kind, for the world of the test, and shows what is on their server."""

    def __init__(self, world: World, kind: str, port: int) -> None:
        self._world = world
        options: dict[str, Any] = {"decode_responses": KINDS[kind]}
        self.prefix = ""
        if kind.startswith("fakeredis"):
            options["server"] = server = fakeredis.FakeServer()
            self.client_class: Any = fakeredis.FakeRedis if world.in_threads else fakeredis.FakeAsyncRedis
            self.admin: redis.Redis = fakeredis.FakeRedis(server=server)
        else:
            options["port"] = port
            self.client_class = PrefixedRedis if world.in_threads else AsyncPrefixedRedis
            self.admin = redis.Redis(port=port)
            self.prefix = PREFIX
        self._options = options

    def make(self, client_class: Any = None) -> Any:
        """A new client; of a subclass where one is given."""
        return self._world.keep((client_class or self.client_class)(**self._options))

    def keys(self) -> set[str]:
        """The keys on the server, without those of fences."""
        keys: Any = self.admin.scan_iter()
        return {key.decode() for key in keys if not key.endswith(b":fence")}


@pytest.fixture(params=KINDS)
def clients(request: pytest.FixtureRequest, world: World, server: Server) -> Iterator[Clients]:
    made = Clients(world, request.param, server.port)
    with contextlib.closing(made.admin):
        yield made


def test_lock_is_held_prolonged_and_released(world: World, clients: Clients) -> None:
    lock = world.lock(clients.make(), timeout=10)
    assert lock.acquire()
    assert clients.keys() == {clients.prefix + "name"}
    assert lock.extend(10)
    assert 19_000 < clients.admin.pttl(clients.prefix + "name") <= 20_000
    assert lock.reacquire()
    assert 9_000 < clients.admin.pttl(clients.prefix + "name") <= 10_000
    assert (lock.locked(), lock.owned()) == (True, True)
    lock.release()
    assert clients.keys() == set()


@pytest.mark.parametrize("owner", ["redis-py's", "ours"])
def test_lock_of_redis_py_on_the_same_client_and_ours_exclude_each_other(
    world: World, clients: Clients, owner: str
) -> None:
    client = clients.make()
    locks = [world.lock(client, timeout=10, sleep=0.01), _redis_pys(world, client)]
    held, refused = locks if owner == "ours" else reversed(locks)
    assert held.acquire()
    assert not refused.acquire(blocking=False)
    assert not refused.acquire(blocking_timeout=0.05)
    held.release()
    assert refused.acquire(blocking=False)
    with pytest.raises(LockError):
        held.release()
    refused.release()


def test_waiter_polls_until_the_lock_is_released(world: World, clients: Clients) -> None:
    client = clients.make()
    holder, waiter = world.lock(client), world.lock(client, sleep=0.01, thread_local=False)
    assert holder.acquire()
    answer = world.start(waiter.acquire)
    assert not answer.done()
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert waiter.owned()
    waiter.release()


def test_token_of_a_caller_is_kept_and_shared(world: World, clients: Clients) -> None:
    first, second = (world.lock(clients.make(), timeout=10) for _ in range(2))
    assert first.acquire(token="mine")
    assert not second.acquire(token="another", blocking=False)
    assert clients.admin.get(clients.prefix + "name") == b"mine"
    first.release()
    assert clients.keys() == set()


def test_lock_of_another_token_that_is_no_text_is_refused(world: World, clients: Clients) -> None:
    lock = world.lock(clients.make())
    clients.admin.set(clients.prefix + "name", b"\xff\xfe")
    assert not lock.acquire(blocking=False)
    lock.local.token = b"another"
    with pytest.raises(LockNotOwnedError):
        lock.release()


def test_scripts_are_loaded_again_when_the_server_has_forgotten_them(world: World, clients: Clients) -> None:
    lock = world.lock(clients.make(), timeout=10)
    for _ in range(2):
        assert lock.acquire()
        clients.admin.script_flush()
        lock.release()
    assert clients.keys() == set()


def test_options_work_but_wait_replicas(world: World, clients: Clients) -> None:
    client = clients.make()
    with world.lock(client, timeout=10, fencing=True, auto_renew=True, reentrant=True) as lock:
        assert lock.fence > 0
        assert lock.acquire()
        lock.release()
    assert clients.keys() == set()
    with pytest.raises(ValueError, match=r"'name'.*replicas"):
        world.lock(client, timeout=10, wait_replicas=1, wait_timeout=1)


def test_batch_is_acquired_as_far_as_it_is_free(world: World, clients: Clients) -> None:
    clients.admin.set(clients.prefix + "b", "another's")
    batch = world.locker(clients.make()).acquire_many(["a", "b", "c"], timeout=10)
    assert (set(batch.acquired), set(batch.missed)) == ({"a", "c"}, {"b"})
    batch.release()
    assert clients.keys() == {clients.prefix + "b"}


def test_batch_with_an_error_for_one_lock_leaves_no_lock(world: World, clients: Clients) -> None:
    class Refusing(clients.client_class):  # type: ignore[misc, name-defined]
        def set(self, name: str, *args: Any, **options: Any) -> Any:
            if name == "b":
                raise ResponseError("refused")
            return super().set(name, *args, **options)

    with pytest.raises(ResponseError, match="refused"):
        world.locker(clients.make(Refusing)).acquire_many(["a", "b", "c"], timeout=10)
    wait_until(lambda: clients.keys() == set() and _is_idle(world), "they are cleaned up")


def test_redlock_holds_a_majority(world: World, clients: Clients) -> None:
    apart = [Clients(world, "fakeredis", 0) for _ in range(3)]
    lock = world.redlock([each.make() for each in apart], timeout=10, limit=PATIENCE_S / 2)
    assert lock.acquire()
    assert sum(each.keys() == {"name"} for each in apart) >= 2
    lock.release()
    wait_until(lambda: all(each.keys() == set() for each in apart) and _is_idle(world), "all are released")


def test_acquire_of_unknown_outcome_raises_the_clients_error_and_is_cleaned_up(world: World, clients: Clients) -> None:
    class Breaking(clients.client_class):  # type: ignore[misc, name-defined]
        def set(self, *args: Any, **options: Any) -> Any:
            answer = super().set(*args, **options)
            return self._break(answer) if world.in_threads else self._break_later(answer)

        def _break(self, _: Any) -> Any:
            raise ConnectionError("no reply")

        async def _break_later(self, answer: Any) -> Any:
            return self._break(await answer)

    lock = world.lock(clients.make(Breaking))
    with pytest.raises(ConnectionError, match=r"^no reply"):
        lock.acquire()
    wait_until(lambda: clients.keys() == set() and _is_idle(world), "it is cleaned up")


def test_method_that_one_client_was_given_is_called(world: World, server: Server, client: redis.Redis) -> None:
    plain = world.connect(server.port)
    given = world.keep(type(plain)(connection_pool=plain.connection_pool))
    with world.lock(plain, timeout=10):
        send = given.execute_command
        given.execute_command = lambda *args, **options: send(*with_prefix(args), **options)
        with world.lock(given, timeout=10):
            assert set(client.keys()) == {b"name", PREFIX.encode() + b"name"}
        assert client.keys() == [b"name"]


@IN_THREADS
def test_kombus_prefix_is_added(world: World, server: Server, client: redis.Redis) -> None:
    prefixed = world.keep(PrefixedStrictRedis(port=server.port, global_keyprefix=PREFIX))  # type: ignore[no-untyped-call]
    with redislock_fast.Lock(prefixed, "name", timeout=10):
        assert client.keys() == [PREFIX.encode() + b"name"]
        assert not redis.lock.Lock(prefixed, "name", timeout=10).acquire(blocking=False)
    with redis.lock.Lock(prefixed, "name", timeout=10):
        assert not redislock_fast.Lock(prefixed, "name", timeout=10).acquire(blocking=False)
    assert client.keys() == []


@IN_THREADS
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("make", [lambda: create_autospec(redis.Redis), MagicMock], ids=["autospec", "MagicMock"])
def test_mock_is_called_as_by_redis_pys_lock(make: Callable[[], Any], free: bool) -> None:
    calls: list[list[Any]] = []
    for lock_class in (redis.lock.Lock, redislock_fast.Lock):
        mock = make()
        mock.set.return_value = free
        lock = lock_class(mock, "name", timeout=10)
        assert lock.acquire(blocking=False) is free
        if free:
            lock.release()
        calls.append([(call.args[0], {**call.kwargs}) for call in mock.set.call_args_list])
    assert calls[0] == calls[1] == [("name", {"nx": True, "px": 10_000})]


def test_async_mock_is_called(world: World) -> None:
    if not world.in_threads:
        mock = AsyncMock()
        mock.register_script = MagicMock(return_value=AsyncMock(return_value=1))
        lock = world.lock(mock, timeout=10)
        assert lock.acquire()
        lock.release()
        mock.set.assert_awaited_once()


def _is_idle(world: World) -> bool:
    """Whether nothing runs in the background, which might connect again once the client is closed."""
    if world.in_threads:
        return "redislock_fast-cleanup" not in [thread.name for thread in threading.enumerate()]
    return len(asyncio.all_tasks()) == 1


def _redis_pys(world: World, client: Any) -> Any:
    """A lock of redis-py."""
    return world.lock_class("redis-py")(client, "name", timeout=10, sleep=0.01)
