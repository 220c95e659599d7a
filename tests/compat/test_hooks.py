"""One suite on redis-py's Locks and on ours: the methods and scripts that other projects override, call and stub.

Rules: each test passes on both classes, in threads and in each kind of loop, and on every kind of server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from tests.conftest import Connect
from tests.support.async_helpers import ASYNC_MODULES
from tests.support.helpers import MODULES, LockClass, run_script
from tests.support.worlds import IN_THREADS, World, awaitable, waited

pytestmark = pytest.mark.usefixtures("world")

SCRIPTS = ("lua_release", "lua_extend", "lua_reacquire")


@pytest.fixture
def fresh_class(lock_class: LockClass, monkeypatch: pytest.MonkeyPatch) -> LockClass:
    """The class as it is before its first instance."""
    for name in SCRIPTS:
        monkeypatch.setattr(lock_class, name, None)
    return lock_class


def test_scripts_are_none_until_the_first_instance(world: World, lock_class_id: str) -> None:
    module = (MODULES if world.in_threads else ASYNC_MODULES)[lock_class_id].__name__
    client = "redis" if world.in_threads else "redis.asyncio"
    script = f"""
import {client}
from {module} import Lock
print([getattr(Lock, name) for name in {SCRIPTS}])
Lock({client}.Redis(), "name")
print([getattr(Lock, name) is None for name in {SCRIPTS}])
"""
    finished = run_script(script)
    assert ["[None, None, None]", "[False, False, False]"] == finished.stdout.splitlines()
    assert "" == finished.stderr


def test_class_has_script_texts(lock_class: LockClass) -> None:
    for text in (lock_class.LUA_RELEASE_SCRIPT, lock_class.LUA_EXTEND_SCRIPT, lock_class.LUA_REACQUIRE_SCRIPT):
        assert isinstance(text, str)
        assert "KEYS[1]" in text


def test_registered_scripts_can_be_called(world: World, fresh_class: LockClass, client: redis.Redis) -> None:
    lock: Any = fresh_class(client, "name", timeout=10)
    lock.acquire()
    token = lock.local.token

    def call(script: Any, *args: Any) -> Any:
        return waited(script(keys=["name"], args=args, client=world.client(client)))

    assert 0 == call(lock.lua_extend, "other", 1000, "0")
    assert 1 == call(lock.lua_extend, token, 10_000, "0")
    assert 10_000 < client.pttl("name") <= 20_000
    assert 0 == call(lock.lua_reacquire, "other", 1000)
    assert 1 == call(lock.lua_reacquire, token, 5_000)
    assert 0 < client.pttl("name") <= 5_000
    assert 0 == call(lock.lua_release, "other")
    assert 1 == call(lock.lua_release, token)
    assert not client.exists("name")


def test_hooks_do_what_their_callers_would(lock_class: LockClass, client: redis.Redis) -> None:
    lock: Any = lock_class(client, "name", timeout=10)
    assert (True, False) == (lock.do_acquire(b"one"), lock.do_acquire(b"two"))
    assert b"one" == client.get("name")
    lock.local.token = b"one"
    assert lock.do_extend(10, False) is True
    assert 10_000 < client.pttl("name") <= 20_000
    assert lock.do_extend(5, True) is True
    assert 0 < client.pttl("name") <= 5_000
    assert lock.do_reacquire() is True
    assert 5_000 < client.pttl("name") <= 10_000
    with pytest.raises(LockNotOwnedError):
        lock.do_release(b"two")
    lock.do_release(b"one")
    assert not client.exists("name")


def test_token_put_into_local_makes_the_lock_its_owner(lock_class: LockClass, client: redis.Redis) -> None:
    holder, heir = lock_class(client, "name", timeout=10), lock_class(client, "name", timeout=10)
    holder.acquire()
    heir.local.token = holder.local.token
    assert heir.owned()
    assert heir.extend(10)
    heir.release()
    assert heir.local.token is None
    with pytest.raises(LockNotOwnedError):
        holder.release()


def test_token_taken_out_of_local_makes_the_lock_unlocked(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    lock.acquire()
    lock.local.token = None
    assert lock.owned() is False
    with pytest.raises(LockError):
        lock.release()
    assert client.exists("name")


@pytest.mark.parametrize("kind", [SimpleNamespace, threading.local])
def test_local_may_be_an_object_of_the_callers(
    lock_class: LockClass, client: redis.Redis, kind: Callable[[], Any]
) -> None:
    holder, heir = lock_class(client, "name", timeout=10), lock_class(client, "name", timeout=10)
    holder.acquire()
    heir.local = kind()
    heir.local.token = holder.local.token
    assert heir.owned()
    given = kind()
    given.token = heir.local.token
    heir.local = given
    assert (client.get("name"), True) == (heir.local.token, heir.extend(10))
    heir.release()
    assert heir.local.token is None
    assert heir.acquire()
    heir.release()


@IN_THREADS
def test_local_patched_on_an_instance_is_restored(lock_class: LockClass, client: redis.Redis) -> None:
    holder = lock_class(client, "name", timeout=10)
    holder.acquire()
    with mock.patch.object(holder, "local", SimpleNamespace(token=b"another")):
        assert holder.owned() is False
    assert holder.owned() is True
    holder.release()


def test_do_acquire_of_a_subclass_is_used(lock_class: LockClass, client: redis.Redis) -> None:
    tokens: list[bytes] = []

    class Third(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            tokens.append(token)
            return len(tokens) == 3

    lock = Third(client, "name", sleep=0.001)
    assert lock.acquire() is True
    assert 3 == len(tokens)
    assert lock.local.token == tokens[0] == tokens[2]
    assert isinstance(tokens[0], bytes)
    assert not client.exists("name")


def test_do_acquire_of_a_subclass_is_used_when_waiting_is_limited(lock_class: LockClass, client: redis.Redis) -> None:
    class Never(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            return False

    assert Never(client, "name", sleep=0.001).acquire(blocking_timeout=0.005) is False
    assert not client.exists("name")


def test_do_acquire_of_a_subclass_can_call_the_original(lock_class: LockClass, client: redis.Redis) -> None:
    class Noting(lock_class):  # type: ignore[valid-type, misc]
        def do_acquire(self, token: Any) -> bool:
            client.set("noted", token)
            return bool(waited(super().do_acquire(token)))

    with Noting(client, "name") as lock:
        assert client.get("noted") == client.get("name") == lock.local.token


def test_do_release_of_a_subclass_is_used(lock_class: LockClass, client: redis.Redis) -> None:
    released: list[bytes] = []

    class Keeping(lock_class):  # type: ignore[valid-type, misc]
        def do_release(self, expected_token: Any) -> None:
            released.append(expected_token)

    lock = Keeping(client, "name")
    with lock:
        token = lock.local.token
    assert [token] == released
    assert token == client.get("name")
    assert lock.local.token is None


def test_do_release_of_a_subclass_can_call_the_original(lock_class: LockClass, client: redis.Redis) -> None:
    released: list[bytes] = []

    class Noting(lock_class):  # type: ignore[valid-type, misc]
        def do_release(self, expected_token: Any) -> None:
            waited(super().do_release(expected_token))
            released.append(expected_token)

    with Noting(client, "name") as lock:
        token = lock.local.token
    assert [token] == released
    assert not client.exists("name")


def test_do_release_that_raises_lock_error_reaches_the_caller(lock_class: LockClass, client: redis.Redis) -> None:
    class Refusing(lock_class):  # type: ignore[valid-type, misc]
        def do_release(self, expected_token: Any) -> None:
            raise LockNotOwnedError("refused", lock_name=self.name)

    with pytest.raises(LockNotOwnedError, match="refused"), Refusing(client, "name"):
        pass


def test_do_extend_of_a_subclass_is_used(lock_class: LockClass, client: redis.Redis) -> None:
    calls: list[tuple[Any, Any]] = []

    class Extending(lock_class):  # type: ignore[valid-type, misc]
        def do_extend(self, additional_time: Any, replace_ttl: Any) -> Any:
            calls.append((additional_time, replace_ttl))
            return "extended"

    lock = Extending(client, "name", timeout=10)
    lock.acquire()
    assert "extended" == lock.extend(1.5)
    assert "extended" == lock.extend(3, replace_ttl=True)
    assert [(1.5, False), (3, True)] == calls
    assert client.pttl("name") <= 10_000


def test_do_reacquire_of_a_subclass_is_used(lock_class: LockClass, client: redis.Redis) -> None:
    class Reacquiring(lock_class):  # type: ignore[valid-type, misc]
        def do_reacquire(self) -> Any:
            return "reacquired"

    lock = Reacquiring(client, "name", timeout=10)
    lock.acquire()
    assert "reacquired" == lock.reacquire()


def test_register_scripts_of_a_subclass_is_called_by_the_constructor(
    lock_class: LockClass, client: redis.Redis
) -> None:
    registered: list[str] = []

    class Registering(lock_class):  # type: ignore[valid-type, misc]
        def register_scripts(self) -> None:
            registered.append(self.name)
            super().register_scripts()

    with Registering(client, "name"):
        pass
    assert ["name"] == registered


def test_hooks_stubbed_on_an_instance_are_used(lock_class: LockClass, client: redis.Redis) -> None:
    lock: Any = lock_class(client, "name", timeout=10)
    calls: list[tuple[Any, ...]] = []

    def stub(result: Any) -> Any:
        def called(*arguments: Any) -> Any:
            calls.append(arguments)
            return result

        return called

    lock.do_acquire = stub(True)
    lock.do_extend = stub("extended")
    lock.do_reacquire = stub("reacquired")
    lock.do_release = stub(None)
    assert lock.acquire() is True
    token = lock.local.token
    assert ("extended", "reacquired") == (lock.extend(1), lock.reacquire())
    assert lock.release() is None
    assert [(token,), (1, False), (), (token,)] == calls
    assert [] == client.keys()


def test_methods_stubbed_on_an_instance_are_used_by_the_context_manager(
    lock_class: LockClass, client: redis.Redis
) -> None:
    lock: Any = lock_class(client, "name")
    calls: list[str] = []

    def acquire() -> bool:
        calls.append("acquire")
        return True

    lock.acquire = acquire
    lock.release = lambda: calls.append("release")
    with lock:
        assert ["acquire"] == calls
    assert ["acquire", "release"] == calls
    assert [] == client.keys()


def test_scripts_of_a_subclass_are_used(lock_class: LockClass, client: redis.Redis) -> None:
    note = "redis.call('rpush', 'notes', '{}') return 1"

    class Scripted(lock_class):  # type: ignore[valid-type, misc]
        lua_release = None
        lua_extend = None
        lua_reacquire = None
        LUA_RELEASE_SCRIPT = note.format("release")
        LUA_EXTEND_SCRIPT = note.format("extend")
        LUA_REACQUIRE_SCRIPT = note.format("reacquire")

    lock = Scripted(client, "name", timeout=10)
    lock.acquire()
    assert lock.extend(10) is True
    assert lock.reacquire() is True
    lock.release()
    assert [b"extend", b"reacquire", b"release"] == client.lrange("notes", 0, -1)
    assert client.exists("name")


def test_scripts_of_a_subclass_leave_the_base_class_alone(lock_class: LockClass, client: redis.Redis) -> None:
    class Scripted(lock_class):  # type: ignore[valid-type, misc]
        lua_release = None
        LUA_RELEASE_SCRIPT = "return 0"

    with pytest.raises(LockNotOwnedError), Scripted(client, "name"):
        pass
    client.delete("name")
    with lock_class(client, "name"):
        pass
    assert not client.exists("name")


def test_registered_script_replaced_on_a_subclass_is_used(
    world: World, lock_class: LockClass, client: redis.Redis
) -> None:
    class Scripted(lock_class):  # type: ignore[valid-type, misc]
        lua_release = world.client(client).register_script("redis.call('set', 'note', ARGV[1]) return 1")

    lock = Scripted(client, "name")
    lock.acquire()
    token = lock.local.token
    lock.release()
    assert token == client.get("note") == client.get("name")


def test_subclass_with_a_constructor_of_its_own(world: World, lock_class: LockClass, client: redis.Redis) -> None:
    class Prefixed(lock_class):  # type: ignore[valid-type, misc]
        def __init__(self, redis: Any, name: str, **options: Any) -> None:
            super().__init__(redis, f"lock:{name}", **options)
            self.extra = "kept"

    lock = world.client(client).lock("name", timeout=10, lock_class=Prefixed)
    with lock:
        assert [b"lock:name"] == client.keys()
        assert "kept" == lock.extra


def test_attributes_can_be_added(lock_class: LockClass, client: redis.Redis) -> None:
    lock: Any = lock_class(client, "name")
    lock.note = "mine"
    assert "mine" == lock.note
    assert {lock: 1}[lock] == 1
    assert lock != lock_class(client, "name")


def test_hook_stubbed_on_an_instance_that_has_been_used_is_used(lock_class: LockClass, client: redis.Redis) -> None:
    lock: Any = lock_class(client, "name", timeout=10)
    lock.note = "an attribute of the user's own overrides nothing"
    with lock:
        assert [b"name"] == client.keys()
    lock.do_release = lambda _token: None
    assert lock.acquire()
    lock.release()
    assert 1 == client.delete("name")
    lock.do_acquire = lambda _token: True
    assert lock.acquire()
    assert [] == client.keys()


def test_hooks_patched_on_a_class_are_used_until_the_patch_ends(
    world: World, lock_class: LockClass, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook: Any = (lambda function: function) if world.in_threads else awaitable
    lock: Any = lock_class(client, "name", timeout=10)
    with monkeypatch.context() as patch:
        patch.setattr(lock_class, "do_acquire", hook(lambda _lock, _token: True))
        patch.setattr(lock_class, "do_release", hook(lambda _lock, _token: None))
        with lock:
            assert [] == client.keys()
    with lock:
        assert [b"name"] == client.keys()
    assert [] == client.keys()


@IN_THREADS
@pytest.mark.parametrize(("setting", "value"), [("name", "other"), ("timeout", 5), ("sleep", 1.0), ("redis", None)])
def test_settings_patched_on_an_instance_are_restored(
    lock_class: LockClass, client: redis.Redis, connect: Connect, setting: str, value: Any
) -> None:
    lock = lock_class(client, "name", timeout=10)
    before = getattr(lock, setting)
    patched = connect(1) if setting == "redis" else value
    with mock.patch.object(lock, setting, patched):
        assert patched == getattr(lock, setting)
    assert before == getattr(lock, setting)
    with lock:
        assert [b"name"] == client.keys()
