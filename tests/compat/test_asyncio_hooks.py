"""One suite on redis-py's asyncio Lock and on ours: the methods and scripts that others override, call and stub.

Rules: each test passes on both classes and on every kind of server.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from tests.support.async_helpers import ASYNC_MODULES, AsyncLockClass, in_loop
from tests.support.helpers import run_script

SCRIPTS = ("lua_release", "lua_extend", "lua_reacquire")


@pytest.fixture
def fresh_class(async_lock_class: AsyncLockClass, monkeypatch: pytest.MonkeyPatch) -> AsyncLockClass:
    """The class as it is before its first instance."""
    for name in SCRIPTS:
        monkeypatch.setattr(async_lock_class, name, None)
    return async_lock_class


@pytest.mark.usefixtures("async_lock_class")
def test_scripts_are_none_until_the_first_instance(lock_class_id: str) -> None:
    script = f"""
import redis.asyncio
from {ASYNC_MODULES[lock_class_id].__name__} import Lock
print([getattr(Lock, name) for name in {SCRIPTS}])
Lock(redis.asyncio.Redis(), "name")
print([getattr(Lock, name) is None for name in {SCRIPTS}])
"""
    finished = run_script(script)
    assert ["[None, None, None]", "[False, False, False]"] == finished.stdout.splitlines()
    assert "" == finished.stderr


def test_class_has_script_texts(async_lock_class: AsyncLockClass) -> None:
    for text in (
        async_lock_class.LUA_RELEASE_SCRIPT,
        async_lock_class.LUA_EXTEND_SCRIPT,
        async_lock_class.LUA_REACQUIRE_SCRIPT,
    ):
        assert isinstance(text, str)
        assert "KEYS[1]" in text


@in_loop
async def test_registered_scripts_can_be_called(
    fresh_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock: Any = fresh_class(async_client, "name", timeout=10)
    await lock.acquire()
    token = lock.local.token

    async def call(script: Any, *args: Any) -> Any:
        return await script(keys=["name"], args=args, client=async_client)

    assert 0 == await call(lock.lua_extend, "other", 1000, "0")
    assert 1 == await call(lock.lua_extend, token, 10_000, "0")
    assert 10_000 < client.pttl("name") <= 20_000
    assert 0 == await call(lock.lua_reacquire, "other", 1000)
    assert 1 == await call(lock.lua_reacquire, token, 5_000)
    assert 0 < client.pttl("name") <= 5_000
    assert 0 == await call(lock.lua_release, "other")
    assert 1 == await call(lock.lua_release, token)
    assert not client.exists("name")


@in_loop
async def test_hooks_do_what_their_callers_would(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock: Any = async_lock_class(async_client, "name", timeout=10)
    assert (True, False) == (await lock.do_acquire(b"one"), await lock.do_acquire(b"two"))
    assert b"one" == client.get("name")
    lock.local.token = b"one"
    assert await lock.do_extend(10, False) is True
    assert 10_000 < client.pttl("name") <= 20_000
    assert await lock.do_extend(5, True) is True
    assert 0 < client.pttl("name") <= 5_000
    assert await lock.do_reacquire() is True
    assert 5_000 < client.pttl("name") <= 10_000
    with pytest.raises(LockNotOwnedError):
        await lock.do_release(b"two")
    await lock.do_release(b"one")
    assert not client.exists("name")


@in_loop
async def test_token_put_into_local_makes_the_lock_its_owner(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    holder, heir = (async_lock_class(async_client, "name", timeout=10) for _ in range(2))
    await holder.acquire()
    heir.local.token = holder.local.token
    assert await heir.owned()
    assert await heir.extend(10)
    await heir.release()
    assert heir.local.token is None
    with pytest.raises(LockNotOwnedError):
        await holder.release()


@in_loop
async def test_token_taken_out_of_local_makes_the_lock_unlocked(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock = async_lock_class(async_client, "name")
    await lock.acquire()
    lock.local.token = None
    assert await lock.owned() is False
    with pytest.raises(LockError):
        await lock.release()
    assert client.exists("name")


@in_loop
async def test_do_acquire_of_a_subclass_is_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    tokens: list[bytes] = []

    class Third(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_acquire(self, token: Any) -> bool:
            tokens.append(token)
            return len(tokens) == 3

    lock = Third(async_client, "name", sleep=0.001)
    assert await lock.acquire() is True
    assert 3 == len(tokens)
    assert lock.local.token == tokens[0] == tokens[2]
    assert isinstance(tokens[0], bytes)
    assert not client.exists("name")


@in_loop
async def test_do_acquire_of_a_subclass_is_used_when_waiting_is_limited(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    class Never(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_acquire(self, token: Any) -> bool:
            return False

    assert await Never(async_client, "name", sleep=0.001).acquire(blocking_timeout=0.005) is False
    assert not client.exists("name")


@in_loop
async def test_do_acquire_of_a_subclass_can_call_the_original(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    class Noting(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_acquire(self, token: Any) -> bool:
            await self.redis.set("noted", token)
            return bool(await super().do_acquire(token))

    async with Noting(async_client, "name") as lock:
        assert client.get("noted") == client.get("name") == lock.local.token


@in_loop
async def test_do_release_of_a_subclass_is_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    released: list[bytes] = []

    class Keeping(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_release(self, expected_token: Any) -> None:
            released.append(expected_token)

    lock = Keeping(async_client, "name")
    async with lock:
        token = lock.local.token
    assert [token] == released
    assert token == client.get("name")
    assert lock.local.token is None


@in_loop
async def test_do_release_of_a_subclass_can_call_the_original(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    released: list[bytes] = []

    class Noting(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_release(self, expected_token: Any) -> None:
            await super().do_release(expected_token)
            released.append(expected_token)

    async with Noting(async_client, "name") as lock:
        token = lock.local.token
    assert [token] == released
    assert not client.exists("name")


@in_loop
async def test_do_release_that_raises_lock_error_reaches_the_caller(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    class Refusing(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_release(self, expected_token: Any) -> None:
            raise LockNotOwnedError("refused", lock_name=self.name)

    with pytest.raises(LockNotOwnedError, match="refused"):
        async with Refusing(async_client, "name"):
            pass


@in_loop
async def test_do_extend_of_a_subclass_is_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    calls: list[tuple[Any, Any]] = []

    class Extending(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_extend(self, additional_time: Any, replace_ttl: Any) -> Any:
            calls.append((additional_time, replace_ttl))
            return "extended"

    lock = Extending(async_client, "name", timeout=10)
    await lock.acquire()
    assert "extended" == await lock.extend(1.5)
    assert "extended" == await lock.extend(3, replace_ttl=True)
    assert [(1.5, False), (3, True)] == calls
    assert client.pttl("name") <= 10_000


@in_loop
async def test_do_reacquire_of_a_subclass_is_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    class Reacquiring(async_lock_class):  # type: ignore[valid-type, misc]
        async def do_reacquire(self) -> Any:
            return "reacquired"

    lock = Reacquiring(async_client, "name", timeout=10)
    await lock.acquire()
    assert "reacquired" == await lock.reacquire()


@in_loop
async def test_register_scripts_of_a_subclass_is_called_by_the_constructor(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis
) -> None:
    registered: list[str] = []

    class Registering(async_lock_class):  # type: ignore[valid-type, misc]
        def register_scripts(self) -> None:
            registered.append(self.name)
            super().register_scripts()

    async with Registering(async_client, "name"):
        pass
    assert ["name"] == registered


@in_loop
async def test_hooks_stubbed_on_an_instance_are_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock: Any = async_lock_class(async_client, "name", timeout=10)
    calls: list[tuple[Any, ...]] = []

    def stub(result: Any) -> Any:
        async def called(*arguments: Any) -> Any:
            calls.append(arguments)
            return result

        return called

    lock.do_acquire = stub(True)
    lock.do_extend = stub("extended")
    lock.do_reacquire = stub("reacquired")
    lock.do_release = stub(None)
    assert await lock.acquire() is True
    token = lock.local.token
    assert ("extended", "reacquired") == (await lock.extend(1), await lock.reacquire())
    assert await lock.release() is None
    assert [(token,), (1, False), (), (token,)] == calls
    assert [] == client.keys()


@in_loop
async def test_methods_stubbed_on_an_instance_are_used_by_the_context_manager(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    lock: Any = async_lock_class(async_client, "name")
    calls: list[str] = []

    async def acquire() -> bool:
        calls.append("acquire")
        return True

    async def release() -> None:
        calls.append("release")

    lock.acquire, lock.release = acquire, release
    async with lock:
        assert ["acquire"] == calls
    assert ["acquire", "release"] == calls
    assert [] == client.keys()


@in_loop
async def test_scripts_of_a_subclass_are_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    note = "redis.call('rpush', 'notes', '{}') return 1"

    class Scripted(async_lock_class):  # type: ignore[valid-type, misc]
        lua_release = None
        lua_extend = None
        lua_reacquire = None
        LUA_RELEASE_SCRIPT = note.format("release")
        LUA_EXTEND_SCRIPT = note.format("extend")
        LUA_REACQUIRE_SCRIPT = note.format("reacquire")

    lock = Scripted(async_client, "name", timeout=10)
    await lock.acquire()
    assert await lock.extend(10) is True
    assert await lock.reacquire() is True
    await lock.release()
    assert [b"extend", b"reacquire", b"release"] == client.lrange("notes", 0, -1)
    assert client.exists("name")


@in_loop
async def test_scripts_of_a_subclass_leave_the_base_class_alone(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    class Scripted(async_lock_class):  # type: ignore[valid-type, misc]
        lua_release = None
        LUA_RELEASE_SCRIPT = "return 0"

    with pytest.raises(LockNotOwnedError):
        async with Scripted(async_client, "name"):
            pass
    client.delete("name")
    async with async_lock_class(async_client, "name"):
        pass
    assert not client.exists("name")


@in_loop
async def test_registered_script_replaced_on_a_subclass_is_used(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    class Scripted(async_lock_class):  # type: ignore[valid-type, misc]
        lua_release = async_client.register_script("redis.call('set', 'note', ARGV[1]) return 1")

    lock = Scripted(async_client, "name")
    await lock.acquire()
    token = lock.local.token
    await lock.release()
    assert token == client.get("note") == client.get("name")


@in_loop
async def test_subclass_with_a_constructor_of_its_own(
    async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis, client: redis.Redis
) -> None:
    class Prefixed(async_lock_class):  # type: ignore[valid-type, misc]
        def __init__(self, redis: Any, name: str, **options: Any) -> None:
            super().__init__(redis, f"lock:{name}", **options)
            self.extra = "kept"

    lock: Any = async_client.lock("name", timeout=10, lock_class=Prefixed)
    async with lock:
        assert [b"lock:name"] == client.keys()
        assert "kept" == lock.extra


@in_loop
async def test_attributes_can_be_added(async_lock_class: AsyncLockClass, async_client: redis.asyncio.Redis) -> None:
    lock: Any = async_lock_class(async_client, "name")
    lock.note = "mine"
    assert "mine" == lock.note
    assert {lock: 1}[lock] == 1
    assert lock != async_lock_class(async_client, "name")
