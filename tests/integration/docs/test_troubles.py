"""The page of symptoms: what its headings quote is what users see, with threads and with tasks."""

from __future__ import annotations

import gc
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis

from redislock_fast import LockError, LockLostError, LockNotOwnedError, Skipped
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import ROOT, wait_until
from tests.support.waiting import FAR_S, HEARD_S
from tests.support.worlds import Blocking, World

pytestmark = pytest.mark.usefixtures("world")

PAGE = (ROOT / "docs" / "how-to" / "troubles.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)


def deleted(world: World, client: Any, admin: redis.Redis) -> str:
    lock = world.lock(client, timeout=FAR_S)
    lock.acquire()
    admin.delete("name")
    with pytest.raises(LockNotOwnedError) as raised:
        lock.release()
    return str(raised.value)


def lost(world: World, client: Any, admin: redis.Redis) -> str:
    lock = world.lock(client, timeout=FAR_S, auto_renew=True)
    lock.acquire()
    admin.delete("name")
    with pytest.raises(LockLostError) as raised:
        lock.release()
    return str(raised.value)


def unlocked(world: World, client: Any, _admin: redis.Redis) -> str:
    lock = world.lock(client, timeout=FAR_S)
    with lock:
        pass
    with pytest.raises(LockError) as raised:
        lock.release()
    return str(raised.value)


def not_in_time(world: World, client: Any, admin: redis.Redis) -> str:
    admin.set("name", "another's")
    with pytest.raises(LockError) as raised, world.lock(client, blocking_timeout=HEARD_S):
        pass
    return str(raised.value)


def skipped(world: World, client: Any, admin: redis.Redis) -> str:
    admin.set("name", "another's")
    run = world.ours.once(client, "name", timeout=FAR_S)
    with pytest.raises(Skipped) as raised, run if world.in_threads else Blocking(run, world._clients):
        pass
    return str(raised.value)


def dropped(world: World, client: Any, admin: redis.Redis) -> str:
    kept = [world.lock(client, timeout=FAR_S, auto_renew=True)]
    kept[0].acquire()

    def drop() -> None:
        kept.clear()
        gc.collect()
        wait_until(lambda: not admin.exists("name"), "the lock is released")

    with pytest.warns(ResourceWarning) as warned:
        drop()
    return str(warned[0].message)


def of_another_kind(world: World, _client: Any, admin: redis.Redis) -> str:
    import redis.asyncio

    import redislock_fast

    lock_class: Any = redislock_fast.Lock
    with pytest.raises(TypeError) as raised:
        lock_class(redis.asyncio.Redis(), "name")
    return str(raised.value)


def pickled(world: World, client: Any, _admin: redis.Redis) -> str:
    lock = world.ours.Lock(client, "name")
    with pytest.raises(TypeError) as raised:
        pickle.dumps(lock)
    return str(raised.value)


SEEN: dict[str, Callable[[World, Any, redis.Redis], str]] = {
    "Cannot release a lock that's no longer owned": deleted,
    "which was lost": lost,
    "Cannot release a lock that's not owned or is already unlocked": unlocked,
    "Unable to acquire lock within the time specified": not_in_time,
    "the job was not run": skipped,
    "was dropped without a release": dropped,
    "this is an asyncio client": of_another_kind,
    "cannot be pickled": pickled,
}
"""What shows each text to a user."""


@pytest.mark.parametrize("text", SEEN)
def test_what_a_heading_quotes_is_what_a_user_sees(text: str, world: World, valkey: Server, connect: Connect) -> None:
    assert text in SEEN[text](world, world.connect(valkey.port), connect(valkey.port))


def test_all_quotes_are_seen(world: World) -> None:
    assert {quote for heading in HEADINGS for quote in re.findall(r'"([^"]+)"', heading)} == set(SEEN)
