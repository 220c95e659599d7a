"""Arguments that cannot be meant are refused when a lock is made, and what a lock says of itself.

Rules: nothing is sent for what is refused: no server is there.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import redis

from redislock_fast import Handle
from redislock_fast.server import Server
from tests.support.worlds import World, waited

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"timout": 3}, r"^Lock\(\) got an unexpected keyword argument 'timout': did you mean 'timeout'\?$"),
        ({"auto_renw": True}, r"^Lock\(\) .*: did you mean 'auto_renew'\?$"),
        ({"colour": 3}, r"^Lock\(\) got an unexpected keyword argument 'colour'$"),
        ({"adaptive": 3}, "unexpected keyword argument 'adaptive'"),
        ({"metrics": 3}, r"metrics needs record_acquisition\(\), which int"),
        ({"sleep": "a"}, "sleep is a number of seconds"),
        ({"blocking": "no"}, "blocking is a bool"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(world: World, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        world.lock(world.connect(1), **settings)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"timout": 3}, r"^Redlock\(\) got an unexpected keyword argument 'timout': did you mean 'timeout'\?$"),
        ({"fencing": True}, r"^Redlock\(\) got an unexpected keyword argument 'fencing'"),
        ({"sleep": "a"}, "sleep is a number of seconds, not str"),
        ({"blocking": "no"}, "blocking is a bool, not 'no'"),
        ({"metrics": 3}, r"metrics needs record_acquisition\(\), which int"),
    ],
    ids=str,
)
def test_redlock_refuses_what_cannot_be_meant(world: World, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        world.ours.Redlock([world.connect(port) for port in (1, 2, 3)], "name", **{"timeout": 10, **settings})


def test_acquire_refuses_text_for_blocking(world: World) -> None:
    locks = [
        world.lock(world.connect(1), timeout=10),
        world.redlock([world.connect(port) for port in (1, 2, 3)], timeout=10),
    ]
    for lock in locks:
        with pytest.raises(TypeError, match="blocking is a bool, not 'no'"):
            lock.acquire(blocking="no")


@pytest.mark.parametrize("name", ["Lock", "Redlock"])
def test_signatures_spell_out_every_option(world: World, name: str) -> None:
    parameters = inspect.signature(getattr(world.ours, name)).parameters
    assert {"timeout", "auto_renew", "on_lost", "reentrant", "breaker", "metrics"} <= set(parameters)
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}


@pytest.mark.parametrize("given", ["name", "timeout"])
def test_attach_takes_name_and_timeout_from_the_handle(world: World, given: str) -> None:
    handle = Handle("name", b"token", 10.0, None)
    with pytest.raises(TypeError, match=f"Lock.attach\\(\\) takes no '{given}'"):
        world.ours.Lock.attach(world.connect(1), handle, **{given: 3})


def test_one_client_is_no_list_of_servers(world: World) -> None:
    with pytest.raises(TypeError, match="servers is a list of clients, one for each server, not Redis"):
        world.ours.Redlock(world.connect(1), "name", timeout=10)


def test_repr_of_a_lock_tells_its_state_and_no_token(world: World, valkey: Server) -> None:
    client = world.connect(valkey.port)
    lock = world.ours.Lock(client, "name", timeout=60)
    assert "<Lock 'name': not held>" == repr(lock)
    waited(lock.acquire())
    assert re.fullmatch(r"<Lock 'name': held, 5\d\.\d{3} s left>", repr(lock))
    waited(lock.release())
    assert "<Lock 'name': not held>" == repr(lock)


def test_repr_of_a_lock_that_does_not_expire(world: World, valkey: Server) -> None:
    lock = world.ours.Lock(world.connect(valkey.port), b"name")
    waited(lock.acquire())
    assert "<Lock b'name': held>" == repr(lock)
    waited(lock.release())


def test_repr_of_a_redlock_tells_its_name(world: World) -> None:
    redlock = world.ours.Redlock([world.connect(port) for port in (1, 2, 3)], "name", timeout=10)
    assert "<Redlock 'name': not held>" == repr(redlock)


def test_repr_of_a_batch_tells_what_is_held(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    valkey_client.set("b", "other")
    locker = world.ours.Locker(world.connect(valkey.port))
    batch = waited(locker.acquire_many(["a", "b", "c"], 60))
    assert re.fullmatch(r"<Batch 'a' and 2 more: 2 of 3 held, (59|60)\.\d{3} s left>", repr(batch))
    waited(batch.release())
    assert "<Batch 'a' and 2 more: 0 of 3 held>" == repr(batch)
