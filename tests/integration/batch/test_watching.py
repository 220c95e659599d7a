"""Batches that are renewed in the background, and whose losses are reported lock by lock."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, cast

import pytest
import redis
from redis.exceptions import LockNotOwnedError, NoPermissionError

from redislock_fast import LossReason
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.integration.batch.conftest import MakeLocker
from tests.support.clusters import Cluster
from tests.support.helpers import no_threads, wait_until
from tests.support.holding import until_passed
from tests.support.worlds import IN_THREADS, World

TTL_S = 2.0
"""So long that a busy machine does not let a renewal come too late."""
NAMES = ["a", "b", "c"]

pytestmark = pytest.mark.usefixtures("world")


class Told:
    """Notes the calls of `on_lost`."""

    def __init__(self, world: World) -> None:
        self.losses: list[tuple[Any, LossReason]] = []
        self.batches: set[Any] = set()
        self.on_lost = world.callback(self._note)

    def _note(self, batch: Any, name: Any, reason: LossReason) -> None:
        self.batches.add(batch)
        self.losses.append((name, reason))


@pytest.fixture
def told(world: World) -> Told:
    """The losses that the batch of the test reports."""
    return Told(world)


def until_renewed(client: Any, names: list[str], times: int = 2) -> None:
    """Return once the lease of each lock has been set anew so often: its ttl has grown."""
    left_ms: dict[str, int] = {}
    renewals = dict.fromkeys(names, 0)

    def are_renewed() -> bool:
        for name in names:
            now_ms = client.pttl(name)
            renewals[name] += now_ms > left_ms.get(name, now_ms)
            left_ms[name] = now_ms
        return min(renewals.values()) >= times

    wait_until(are_renewed, "the leases are renewed")


@pytest.mark.parametrize("how", ["what is free", "all or nothing"])
def test_a_renewed_batch_is_held_until_its_release(locker: Any, client: redis.Redis, told: Told, how: str) -> None:
    options = {"all_or_nothing": how == "all or nothing", "auto_renew": True, "on_lost": told.on_lost}
    batch = locker.acquire_many(NAMES, TTL_S, **options)
    until_renewed(client, NAMES)
    assert batch.release() == dict.fromkeys(NAMES, True)
    assert (client.keys("?"), told.losses) == ([], [])


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda client: client.delete("b"), LossReason.DELETED),
        (lambda client: client.set("b", "another's"), LossReason.TAKEN),
    ],
    ids=["deleted", "taken"],
)
def test_a_lost_lock_is_reported_once_and_the_others_stay_held(
    locker: Any, client: redis.Redis, told: Told, harm: Callable[[redis.Redis], object], reason: LossReason
) -> None:
    batch = locker.acquire_many(NAMES, TTL_S, auto_renew=True, on_lost=told.on_lost)
    harm(client)
    wait_until(lambda: told.losses, "the loss is told")
    until_renewed(client, ["a", "c"], 1)
    assert batch.release() == {"a": True, "b": False, "c": True}
    assert told.losses == [("b", reason)]
    assert client.keys("?") == ([b"b"] if reason is LossReason.TAKEN else [])


@pytest.mark.slow
def test_a_released_batch_is_renewed_no_more(locker: Any, client: redis.Redis, told: Told) -> None:
    locker.acquire_many(NAMES, TTL_S, auto_renew=True, on_lost=told.on_lost).release()
    until_passed(client, 1.5 * TTL_S)
    assert (client.keys("?"), told.losses) == ([], [])


@pytest.mark.slow
def test_max_hold_ends_the_renewal(locker: Any, client: redis.Redis, told: Told) -> None:
    batch = locker.acquire_many(NAMES, TTL_S, auto_renew=True, max_hold=1.5 * TTL_S, on_lost=told.on_lost)
    wait_until(lambda: len(told.losses) == 3, "renewal ends")
    assert sorted(told.losses) == [(name, LossReason.EXPIRED) for name in NAMES]
    assert batch.release() == dict.fromkeys(NAMES, False)


def test_on_lost_is_told_of_a_batch_that_expires(world: World, locker: Any, told: Told) -> None:
    batch = locker.acquire_many(NAMES, 0.1, on_lost=told.on_lost)
    wait_until(lambda: len(told.losses) == 3, "each loss is told")
    assert sorted(told.losses) == [(name, LossReason.EXPIRED) for name in NAMES]
    assert batch.release() == dict.fromkeys(NAMES, False)
    assert len(told.losses) == 3


def test_a_lost_lock_stays_lost_though_its_key_has_the_token_again(
    locker: Any, client: redis.Redis, told: Told
) -> None:
    batch = locker.acquire_many(NAMES, TTL_S, auto_renew=True, on_lost=told.on_lost)
    token: Any = client.getdel("b")
    wait_until(lambda: told.losses, "the loss is told")
    client.set("b", token, px=60_000)
    assert batch.release() == {"a": True, "b": False, "c": True}
    assert (client.keys("?"), told.losses) == ([], [("b", LossReason.DELETED)])


@pytest.mark.parametrize("call", ["release", "extend", "reacquire"])
def test_a_call_that_finds_a_loss_reports_it(locker: Any, client: redis.Redis, told: Told, call: str) -> None:
    batch = locker.acquire_many(NAMES, 60, auto_renew=True, on_lost=told.on_lost)
    client.set("b", "another's")
    found = batch.extend(60) if call == "extend" else getattr(batch, call)()
    assert found == {"a": True, "b": False, "c": True}
    wait_until(lambda: told.losses, "the loss is told")
    if call != "release":
        assert batch.release() == {"a": True, "c": True}
    assert told.losses == [("b", LossReason.TAKEN)]
    assert client.keys("?") == [b"b"]


def test_a_loss_that_was_found_by_a_release_that_raises_is_reported_by_the_next(
    make_locker: MakeLocker, server: Server, client: redis.Redis, told: Told, acl_user: MakeUser
) -> None:
    user, admin = acl_user(server), cast("Any", client)
    locker = make_locker(server.port, **user.options())
    batch = locker.acquire_many(["mine:a", "yours", "mine:b"], 60, auto_renew=True, on_lost=told.on_lost)
    client.delete("mine:b")
    admin.execute_command("ACL", "SETUSER", user.username, "resetkeys", "~mine:*")
    with pytest.raises(NoPermissionError):
        batch.release()
    admin.execute_command("ACL", "SETUSER", user.username, "~*")
    assert batch.release() == {"yours": True, "mine:b": False}
    wait_until(lambda: told.losses, "the loss is told")
    assert (told.losses, batch.release()) == ([("mine:b", LossReason.DELETED)], {})


def test_a_batch_that_is_extended_by_hand_is_renewed_from_there(locker: Any, client: redis.Redis, told: Told) -> None:
    batch = locker.acquire_many(NAMES, TTL_S, auto_renew=True, on_lost=told.on_lost)
    assert batch.extend(1) == dict.fromkeys(NAMES, True)
    assert batch.reacquire() == dict.fromkeys(NAMES, True)
    until_renewed(client, NAMES)
    assert f"{batch!r}".startswith("<Batch 'a' and 2 more: 3 of 3 held, ")
    assert batch.release() == dict.fromkeys(NAMES, True)
    assert told.losses == []


@pytest.mark.slow
def test_a_batch_whose_reacquire_is_refused_for_one_name_is_renewed_in_time(
    make_locker: MakeLocker, server: Server, client: redis.Redis, told: Told, acl_user: MakeUser
) -> None:
    user, admin, names = acl_user(server), cast("Any", client), ["mine:a", "yours", "mine:b"]
    locker = make_locker(server.port, **user.options())
    batch = locker.acquire_many(names, TTL_S, auto_renew=True, on_lost=told.on_lost)
    batch.extend(60)
    admin.execute_command("ACL", "SETUSER", user.username, "resetkeys", "~mine:*")
    with pytest.raises(NoPermissionError):
        batch.reacquire()
    admin.execute_command("ACL", "SETUSER", user.username, "~*")
    until_renewed(client, names, 1)
    assert batch.release() == dict.fromkeys(names, True)
    assert told.losses == []


def test_leaving_the_block_says_what_was_lost(locker: Any, client: redis.Redis, told: Told) -> None:
    batch = locker.acquire_many(NAMES, 60, auto_renew=True, on_lost=told.on_lost)
    client.delete("b")
    with pytest.raises(LockNotOwnedError, match="'b'"), batch:
        pass
    wait_until(lambda: told.losses, "the loss is told")
    assert told.losses == [("b", LossReason.DELETED)]


def test_a_renewed_batch_that_is_dropped_is_released_with_a_warning(locker: Any, client: redis.Redis) -> None:
    held = [locker.acquire_many(NAMES, 60, auto_renew=True)]

    def is_released() -> bool:
        gc.collect()
        return not client.exists(*NAMES)

    def drop() -> None:
        held.clear()
        wait_until(is_released, "the locks are released")

    with pytest.warns(ResourceWarning, match="was dropped without a release"):
        drop()


def test_what_is_missed_is_not_watched(locker: Any, client: redis.Redis, told: Told) -> None:
    client.set("b", "another's")
    some = locker.acquire_many(NAMES, TTL_S, auto_renew=True, on_lost=told.on_lost)
    none = locker.acquire_many([*NAMES, "d"], TTL_S, all_or_nothing=True, auto_renew=True, on_lost=told.on_lost)
    assert (some.acquired, none.acquired) == (["a", "c"], [])
    until_renewed(client, ["a", "c"], 1)
    assert (some.release(), none.release()) == ({"a": True, "c": True}, {})
    assert (client.keys("?"), told.losses) == ([b"b"], [])


def test_locks_of_a_cluster_are_renewed_on_every_node(world: World, cluster: Cluster) -> None:
    cluster_class = redis.RedisCluster if world.in_threads else redis.asyncio.RedisCluster
    names = [cluster.name() for _ in range(10)]
    client = world.keep(cluster_class(host="127.0.0.1", port=cluster.port))
    told = Told(world)
    batch = world.locker(client).acquire_many(names, TTL_S, auto_renew=True, on_lost=told.on_lost)
    with redis.RedisCluster(host="127.0.0.1", port=cluster.port) as admin:
        until_renewed(admin, names)
    assert batch.release() == dict.fromkeys(names, True)
    assert told.losses == []


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"timeout": 1, "on_lost": 3}, TypeError, "on_lost is not callable: 3"),
        ({"auto_renew": True}, ValueError, "auto_renew needs a timeout"),
        ({"timeout": 1, "max_hold": 5}, ValueError, "it needs auto_renew=True"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_sent(
    locker: Any, client: redis.Redis, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        locker.acquire_many(NAMES, **settings)
    assert client.keys("?") == []


@IN_THREADS  # an event loop renews by itself then
def test_a_batch_for_which_no_renewing_thread_starts_is_not_held(
    make_locker: MakeLocker, valkey: Server, client: redis.Redis
) -> None:
    locker = make_locker(valkey.port)
    with no_threads(), pytest.raises(RuntimeError, match="can't start"):
        locker.acquire_many(NAMES, 60, auto_renew=True)
    wait_until(lambda: client.keys("?") == [], "nothing is held")
