"""Lock objects keep their settings in slots, so that one look at `__dict__` tells whether hooks are overridden there.

Rules: by threads and by tasks, on one server.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.support.waiting import FAR_S, Callers, Threads

SETTINGS: tuple[dict[str, Any], ...] = ({}, {"linger": 1.0}, {"auto_renew": True, "on_lost": print}, {"fencing": True})


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
def test_lock_that_has_been_used_has_an_empty_dict(callers: Callers, valkey: Server, settings: dict[str, Any]) -> None:
    contender = callers.contender(callers.client(valkey.port), "name", timeout=FAR_S, **settings)
    for verb in ("acquire", "reacquire", "release"):
        contender.call(verb)
    assert {} == vars(contender.lock)


def test_lock_that_was_attached_has_an_empty_dict(valkey_client: redis.Redis) -> None:
    lock = redislock_fast.Lock(valkey_client, "name", timeout=FAR_S)
    lock.acquire()
    attached = redislock_fast.Lock.attach(valkey_client, lock.detach())
    with attached:
        assert {} == vars(attached)


def test_lock_of_a_job_has_an_empty_dict(callers: Callers, valkey: Server) -> None:
    module = redislock_fast if isinstance(callers, Threads) else redislock_fast.asyncio
    assert {} == vars(module.once(callers.client(valkey.port), "name", timeout=FAR_S, at_least=0))


@pytest.mark.parametrize("kind", [redislock_fast.Lock, redislock_fast.asyncio.Lock])
@pytest.mark.parametrize("name", ["local", "name", "redis", "timeout"])
def test_subclass_cannot_have_a_property_that_would_not_be_asked(kind: type, name: str) -> None:
    own = property(lambda _lock: "another", lambda _lock, _value: None)
    with pytest.raises(TypeError, match=f"^Prefixed.{name} cannot take the place of Lock.{name}, since "):
        type("Prefixed", (kind,), {name: own})
