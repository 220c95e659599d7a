"""Passwords and tokens are never shown, by anything that a user can print, log or pickle.

Rules: a client of each kind, with a password, on a real server, in threads and tasks. What is shown is the text of
each public object and error, with the errors behind it, and each log record. Where an object can be pickled, the pickle
counts, too; that of a handle has the token by purpose.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

import redislock_fast
from redislock_fast.fencing import AsyncGuard, Guard
from redislock_fast.server import Server, free_port
from tests.conftest import AclUser, Connect
from tests.support.clusters import Cluster
from tests.support.waiting import FAR_S
from tests.support.worlds import Blocking, World, waited

pytestmark = pytest.mark.usefixtures("world")

USER = AclUser("canary-user", "canary-password")

Make = Callable[[World, int, str], Any]


def _unwrapped(one: Any) -> Any:
    """The object that users have."""
    return vars(one)["_lock"] if isinstance(one, Blocking) else one


class Shown:
    """Collects what a user gets to see, and what nobody may see.

    Args:
        admin: reads the tokens.
        log: what was logged.
    """

    def __init__(self, admin: Any, log: pytest.LogCaptureFixture) -> None:
        self._admin = admin
        self._log = log
        self._texts: list[str] = []
        self._pickles: list[bytes] = []
        self._tokens: set[bytes] = set()

    def note(self, *objects: object) -> None:
        """Note the texts and the pickles of objects, and the tokens that hold any lock now."""
        for one in map(_unwrapped, objects):
            self._texts += [repr(one), str(one)]
            with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):  # it refuses
                self._pickles.append(pickle.dumps(one))
        for key in self._admin.scan_iter():
            if self._admin.type(key) == b"string":
                self._tokens.add(self._admin.get(key).removesuffix(b"+"))

    def fails(self, call: Callable[..., object], *args: Any, **settings: Any) -> None:
        """Note the error of a call, with all errors behind it."""
        with pytest.raises((RedisError, TypeError, ValueError)) as caught:
            call(*args, **settings)
        error: BaseException | None = caught.value
        while error is not None:
            self._texts += traceback.format_exception(error)
            self.note(error, error.__dict__)
            error = error.__cause__ or error.__context__

    def check(self) -> None:
        """Nothing secret was shown."""
        secrets = [USER.password, *(token[-20:].decode() for token in self._tokens)]
        told = "\n".join([*self._texts, self._log.text, *map(repr, self._log.records)])
        for secret in secrets:
            assert secret not in told
            assert secret.encode().hex() not in told
            assert not any(secret.encode() in one for one in self._pickles)


def _settings(world: World, password: str) -> dict[str, Any]:
    """Of a client, which tries once again at once."""
    kind = Retry if world.in_threads else AsyncRetry
    return {"username": USER.username, "password": password, "retry": kind(NoBackoff(), 1)}


def _options(world: World, port: int, password: str) -> Any:
    return world.connect(port, **_settings(world, password))


def _url(world: World, port: int, password: str) -> Any:
    kind = redis.Redis if world.in_threads else redis.asyncio.Redis
    settings = _settings(world, password)
    url = f"redis://{settings.pop('username')}:{settings.pop('password')}@127.0.0.1:{port}"
    return world.keep(kind.from_url(url, **settings))


def _sentinel(world: World, port: int, password: str) -> Any:
    kind: Any = Sentinel if world.in_threads else AsyncSentinel
    sentinel = kind([], sentinel_kwargs={"password": password})

    async def discover(_: str) -> tuple[str, int]:
        return "127.0.0.1", port

    sentinel.discover_master = (lambda _: ("127.0.0.1", port)) if world.in_threads else discover
    return world.keep(sentinel.master_for("service", **_settings(world, password)))


def _cluster(world: World, port: int, password: str) -> Any:
    kind: Any = redis.RedisCluster if world.in_threads else redis.asyncio.RedisCluster
    return world.keep(kind(host="127.0.0.1", port=port, **_settings(world, password)))


def _make_user(admin: Any) -> None:
    admin.execute_command("ACL", "SETUSER", USER.username, "on", f">{USER.password}", "~*", "&*", "+@all")


@pytest.fixture
def user(server: Server, connect: Connect) -> Iterator[redis.Redis]:
    """Makes the user; gives a client that looks at the server."""
    admin = connect(server.port)
    _make_user(admin)
    yield admin
    admin.acl_deluser(USER.username)


def holders(world: World, client: Any, name: str) -> Any:
    """The report of a lock."""
    return waited(world.ours.holders(client, name))


def show_everything(shown: Shown, world: World, client: Any) -> None:
    """Show all objects, while a lock is held and while it is not, and the errors of their calls."""
    lock = world.lock(client, "{n}lock", timeout=FAR_S, fencing=True)
    locker = world.locker(client)
    guard = (Guard if world.in_threads else AsyncGuard)(client)
    handed = world.lock(client, "{n}handed", timeout=FAR_S)
    assert lock.acquire()
    batch = locker.acquire_many(["{n}a", "{n}b"], FAR_S)
    assert handed.acquire()
    handle = handed.detach()
    shown.note(
        lock, lock.local, getattr(lock.local, "lease", None), locker, locker.lock("{n}x"), batch, guard, repr(handle)
    )
    assert pickle.loads(pickle.dumps(handle)) == handle
    shown.note(world.ours.once(client, "{n}once", timeout=FAR_S))
    other = world.lock(client, "{n}lock", timeout=FAR_S)
    assert not other.acquire(blocking=False)
    shown.note(holders(world, client, "{n}lock"), other, world.lock(client, "{n}linger", timeout=FAR_S, linger=1))
    shown.fails(other.release)
    shown.fails(locker.acquire_many(["{n}a", "{n}c"], FAR_S, all_or_nothing=True).__enter__)
    batch.release()
    lock.release()
    shown.note(lock, batch)


def show_losses(shown: Shown, world: World, client: Any, admin: Any) -> None:
    """Show the errors of calls, and of blocks that end, for locks that were stolen and keys that are no locks."""
    locker = world.locker(client)
    lock = world.lock(client, "{n}lock", timeout=FAR_S, fencing=True)
    assert lock.acquire()
    batch = locker.acquire_many(["{n}a"], FAR_S)
    shown.note()
    for name in ("{n}lock", "{n}a"):
        admin.set(name, "stolen by rlf:0123456789")
    shown.fails(batch.__exit__, None, None, None)
    batch.__exit__(ValueError, ValueError(), None)
    for verb, arguments in (("extend", (1,)), ("reacquire", ()), ("detach", ()), ("release", ())):
        shown.fails(getattr(lock, verb), *arguments)
    admin.delete("{n}lock", "{n}a")
    assert lock.acquire()
    admin.delete("{n}lock")
    lock.__exit__(ValueError, ValueError(), None)
    admin.lpush("{n}list", "x")
    shown.fails(world.lock(client, "{n}list", timeout=FAR_S).acquire)
    admin.delete("{n}list")


@pytest.mark.parametrize("make", [_options, _url, _sentinel], ids=["options", "url", "sentinel"])
def test_no_secret_is_shown(
    world: World, server: Server, user: redis.Redis, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = Shown(user, caplog)
    client = make(world, server.port, USER.password)
    with redislock_fast.profile() as profile:
        show_everything(shown, world, client)
        show_losses(shown, world, client, user)
    shown.note(profile, profile.as_dict())
    shown.check()


def test_no_secret_of_a_cluster_is_shown(
    world: World, cluster: Cluster, cluster_client: redis.RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for node in cluster.admins:
        _make_user(node)
    shown = Shown(cluster_client, caplog)
    show_everything(shown, world, _cluster(world, cluster.port, USER.password))
    show_losses(shown, world, _cluster(world, cluster.port, USER.password), cluster_client)
    for node in cluster.admins:
        node.acl_deluser(USER.username)
    shown.check()


def test_no_secret_of_a_redlock_is_shown(
    world: World, fleet: list[Server], connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    admins = [connect(server.port) for server in fleet[:3]]
    for admin in admins:
        _make_user(admin)
    shown = Shown(admins[0], caplog)
    lock = world.redlock([_options(world, server.port, USER.password) for server in fleet[:3]], timeout=FAR_S)
    assert lock.acquire()
    shown.note(lock, lock.local)
    admins[0].set("name", "stolen")
    admins[1].delete("name")
    for verb, arguments in (("extend", (1,)), ("reacquire", ()), ("release", ())):
        shown.fails(getattr(lock, verb), *arguments)
    refused = [_options(world, server.port, USER.password + "!") for server in fleet[:3]]
    unreachable = [_options(world, free_port(), USER.password) for _ in range(3)]
    for clients in (refused, unreachable):
        fails = world.redlock(clients, timeout=FAR_S)
        shown.fails(fails.acquire)
        shown.note(fails)
    for admin in admins:
        admin.acl_deluser(USER.username)
    shown.check()


@pytest.mark.slow
@pytest.mark.parametrize("make", [_options, _url, _sentinel], ids=["options", "url", "sentinel"])
def test_no_password_is_shown_where_connecting_fails(
    world: World, server: Server, user: redis.Redis, caplog: pytest.LogCaptureFixture, make: Make
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = Shown(user, caplog)
    for port, password in ((server.port, USER.password + "!"), (free_port(), USER.password)):
        client = make(world, port, password)
        lock = world.lock(client, timeout=FAR_S)
        for call in (lock.acquire, partial(world.locker(client).acquire_many, ["a", "b"], FAR_S)):
            shown.fails(call)
        shown.note(lock)
    shown.check()


class _Blocking(redis.Redis):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


class _Asyncio(redis.asyncio.Redis):
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("sends_by_itself", [False, True], ids=["plain client", "client that sends by itself"])
def test_no_token_is_shown_where_the_server_quotes_a_command_that_it_does_not_know(
    world: World,
    spare_server: Callable[..., Server],
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    sends_by_itself: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    server = spare_server("redis-6.2", {f"rename-command {name}": '""' for name in ("EVALSHA", "EVAL")})
    shown = Shown(connect(server.port), caplog)
    client = world.connect(server.port)
    if sends_by_itself:
        client = world.keep((_Blocking if world.in_threads else _Asyncio)(port=server.port))
    lock = world.lock(client, timeout=FAR_S)
    assert lock.acquire()
    batch = world.locker(client).acquire_many(["a", "b"], FAR_S)
    shown.note()
    for call in (lock.release, partial(lock.extend, 1), lock.reacquire, batch.reacquire, batch.release):
        shown.fails(call)
    shown.check()
