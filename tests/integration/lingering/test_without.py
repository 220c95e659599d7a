"""Where a key cannot linger: `lingers` says so, and the lock works as without `linger`.

Rules: threads and tasks alike. A released key is gone from the server when `release` returns.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any

import fakeredis
import pytest
import redis

from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.lingering.test_lingering import LINGERS
from tests.support.helpers import PATIENCE_S
from tests.support.holding import Holders
from tests.support.waiting import Callers, Contender

FORBIDDEN = [["-subscribe"], ["resetchannels"]]


def _lingers(callers: Callers, lock: Contender) -> bool:
    lingers: bool = callers.run(lambda: lock.lock.lingers)
    return lingers


def _assert_plain(callers: Callers, lock: Contender, other: Contender, admin: Any) -> None:
    """Assert that it does not linger, and that the two locks exclude one another and are handed over."""
    for _ in range(2):
        assert lock.call("acquire") is True
        assert _lingers(callers, lock) is False
        assert other.call("acquire", blocking=False) is False
        waiting = other.acquire(blocking_timeout=PATIENCE_S)
        lock.release()
        assert waiting.result(PATIENCE_S) is True
        other.release()
        assert admin.exists("name") == 0
    assert _lingers(callers, lock) is False


@pytest.mark.parametrize("rules", FORBIDDEN, ids=" ".join)
def test_a_user_that_may_not_listen(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect, acl_user: MakeUser, rules: list[str]
) -> None:
    user = acl_user(valkey, *rules)
    settings = {**LINGERS, "sleep": 0.01}
    lock, other = (holders.on(callers.client(valkey.port, **user.options()), **settings) for _ in range(2))
    _assert_plain(callers, lock, other, connect(valkey.port))


def test_a_client_that_executes_commands_in_its_own_way(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect
) -> None:
    client = callers.client(valkey.port)
    client.execute_command = partial(client.execute_command)
    settings = {**LINGERS, "sleep": 0.01}
    lock, other = holders.on(client, **settings), holders.make(valkey.port, **settings)
    assert lock.call("acquire") is True
    assert _lingers(callers, lock) is False
    lock.release()
    assert connect(valkey.port).exists("name") == 0
    assert other.call("acquire", blocking=False) is True


def test_fakeredis(holders: Holders, callers: Callers) -> None:
    pytest.importorskip("lupa")  # for its scripts
    server = fakeredis.FakeServer()
    kind = fakeredis.FakeRedis if callers.kind == "threads" else fakeredis.FakeAsyncRedis
    settings = {**LINGERS, "sleep": 0.01}
    lock, other = (holders.on(callers.keep(kind(server=server)), **settings) for _ in range(2))
    _assert_plain(callers, lock, other, fakeredis.FakeRedis(server=server))


def test_a_token_of_the_callers_own(holders: Holders, callers: Callers, valkey: Server, connect: Connect) -> None:
    lock = holders.make(valkey.port, **LINGERS)
    for _ in range(2):
        assert lock.call("acquire", token="mine") is True
        assert _lingers(callers, lock) is False
        lock.release()
        assert connect(valkey.port).exists("name") == 0
    assert lock.call("acquire") is True
    assert _lingers(callers, lock) is True


def _assert_never_lingers(callers: Callers, lock: Contender, admin: redis.Redis) -> None:
    for _ in range(2):
        assert lock.call("acquire") is True
        assert _lingers(callers, lock) is False
        lock.release()
        assert admin.exists("name") == 0


def _overriding(lock_class: Any, hook: str) -> Any:
    """A subclass whose hook calls that of the class."""

    def do(self: Any, *args: Any) -> Any:
        return getattr(lock_class, hook)(self, *args)

    return type("Overriding", (lock_class,), {hook: do})


HOOKS = ["do_acquire", "do_release", "do_extend", "do_reacquire"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_a_class_overrides(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect, hook: str
) -> None:
    kind = _overriding(callers.package.Lock, hook)
    lock = callers._contender(kind(callers.client(valkey.port), "name", thread_local=False, **LINGERS))
    _assert_never_lingers(callers, lock, connect(valkey.port))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_is_set_on_the_object_while_its_key_lingers(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect, hook: str
) -> None:
    lock = holders.make(valkey.port, **LINGERS)
    assert lock.call("acquire") is True
    lock.release()
    called = []

    def do(self: Any, *args: Any) -> Any:
        called.append(hook)
        return getattr(callers.package.Lock, hook)(self, *args)

    setattr(lock.lock, hook, MethodType(do, lock.lock))
    assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    assert _lingers(callers, lock) is False
    lock.release()
    assert called == ([hook] if hook in {"do_acquire", "do_release"} else [])
    assert connect(valkey.port).exists("name") == 0


def test_a_release_hook_that_is_set_while_the_key_is_in_memory_is_called_once_a_request_is_sent(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect
) -> None:
    admin = connect(valkey.port)
    lock, other = holders.hold(valkey.port, **LINGERS), holders.make(valkey.port)
    released = []

    def delete(token: bytes) -> Any:
        released.append(admin.get("name") == token)
        admin.delete("name")
        return _nothing() if callers.kind == "tasks" else None

    lock.lock.do_release = delete
    lock.release()
    assert (released, admin.exists("name")) == ([], 1)
    assert other.call("acquire", blocking_timeout=PATIENCE_S) is True
    other.release()
    assert lock.call("acquire") is True
    lock.release()
    assert (released, lock.lock.remaining()) == ([True], 0)


async def _nothing() -> None: ...


@pytest.mark.parametrize("script", ["LUA_RELEASE_SCRIPT", "LUA_EXTEND_SCRIPT", "LUA_REACQUIRE_SCRIPT"])
def test_a_script_of_the_users_own(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect, script: str
) -> None:
    lock_class = callers.package.Lock
    text = getattr(lock_class, script) + "\n-- the user's own"
    lua = {"lua_release": None, "lua_extend": None, "lua_reacquire": None}
    kind = type("Scripted", (lock_class,), {script: text, **lua})
    lock = callers._contender(kind(callers.client(valkey.port), "name", thread_local=False, **LINGERS))
    _assert_never_lingers(callers, lock, connect(valkey.port))
