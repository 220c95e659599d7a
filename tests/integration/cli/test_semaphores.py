"""Semaphores on the command line: `ls`, `show`, `top`, `break` and `limit`. `run` is in test_run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from redislock_fast import Lock, LockLostError, Permit, Semaphore
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.cli.conftest import Command
from tests.support.clusters import Cluster
from tests.support.helpers import PATIENCE_S, start
from tests.support.waiting import FAR_S, until_queued


@pytest.fixture
def client(valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """A client of the server that the command line finds in the environment."""
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    return connect(valkey.port)


@pytest.fixture
def semaphore(client: redis.Redis) -> Semaphore:
    return Semaphore(client, "name", 3, timeout=FAR_S)


@pytest.fixture
def permits(semaphore: Semaphore) -> Iterator[list[Permit]]:
    """Two permits that are held."""
    held = [permit for permit in (semaphore.acquire(), semaphore.acquire()) if permit is not None]
    assert len(held) == 2
    yield held
    for permit in held:
        permit.release()


def test_ls_lists_semaphores_beside_locks(redislock: Command, client: redis.Redis, permits: list[Permit]) -> None:
    client.zadd("board", {"x" * 1000: 4e12, "rlf:": 1})
    with Lock(client, "lock", timeout=FAR_S), Semaphore(client, "limited", 3) as permit:
        permit_of_limited = Semaphore(client, "limited", 3)
        permit_of_limited.resize(1)
        waiting = start(lambda: permit_of_limited.acquire(blocking_timeout=PATIENCE_S))
        until_queued(client, "limited", 1)
        listed = redislock("ls", "--json")
        text = redislock("ls")
        assert permit.valid
    granted = waiting.result(PATIENCE_S)
    assert granted is not None
    granted.release()
    rows = {row["name"]: row for row in listed.objects}
    assert (0, "", {"lock", "limited", "name"}) == (listed.code, listed.err, {*rows})
    seen = ("kind", "holder", "held", "limit", "waiting", "contended")
    assert [rows["name"][field] for field in seen] == ["semaphore", None, 2, None, 0, False]
    assert [rows["limited"][field] for field in seen] == ["semaphore", None, 1, 1, 1, True]
    assert [rows["lock"][field] for field in seen if field != "holder"] == ["lock", None, None, 0, False]
    assert FAR_S / 2 < rows["name"]["ttl_s"] <= FAR_S
    head, *lines = text.out.splitlines()
    assert ["NAME", "HOLDER", "STATE", "TTL", "WAITING", "TOKEN", "ID"] == head.split()
    assert ["limited", "1", "of", "1", "permits"] == lines[0].split()[:5]
    assert (["name", "2", "permits"], 3) == (lines[2].split()[:3], len(lines))


def test_ls_leaves_out_what_has_ended_and_what_may_not_be_read(
    redislock: Command, client: redis.Redis, valkey: Server, acl_user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    permits = [Semaphore(client, name, 1, timeout=FAR_S).acquire() for name in ("ended", "mine", "other")]
    ended: Any = client.zrange("ended", 0, -1)
    client.zadd("ended", {ended[0]: 1})
    user = acl_user(valkey, "resetkeys", "~mine", "~{mine*", "~ended", "~{ended*", "-client|list")
    monkeypatch.setenv("REDISLOCK_USERNAME", user.username)
    monkeypatch.setenv("REDISLOCK_PASSWORD", user.password)
    listed = redislock("ls", "--json")
    assert [row["name"] for row in listed.objects] == ["mine"]
    assert "1 keys could not be read" in listed.err
    client.flushdb()
    for permit in permits:
        assert permit is not None
        with pytest.raises(LockLostError):
            permit.release()


@pytest.mark.parametrize(("rule", "listed"), [("-time", ["lock"]), ("-pttl", ["name"])])
def test_ls_says_where_a_command_is_denied_that_it_needs(
    redislock: Command,
    client: redis.Redis,
    valkey: Server,
    permits: list[Permit],
    acl_user: MakeUser,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    listed: list[str],
) -> None:
    user = acl_user(valkey, rule)
    monkeypatch.setenv("REDISLOCK_USERNAME", user.username)
    monkeypatch.setenv("REDISLOCK_PASSWORD", user.password)
    client.zadd("board", {"x": 1})
    with Lock(client, "lock", timeout=FAR_S):
        outcomes = [redislock("ls", "--json"), redislock("top", "-n", 1)]
        names = [row["name"] for row in outcomes[0].objects]
    assert ([0, 0], listed) == ([outcome.code for outcome in outcomes], names)
    assert "redislock: 1 keys could not be read: this user may not\n" == outcomes[0].err


def test_semaphore_that_may_not_be_read_is_taken_for_no_lock(
    redislock: Command, client: redis.Redis, valkey: Server, permits: list[Permit], acl_user: MakeUser
) -> None:
    user = acl_user(valkey, "-time")
    url = f"redis://{user.username}:{user.password}@127.0.0.1:{valkey.port}"
    shown = redislock("show", "name", "--url", url)
    broken = redislock("break", "name", "--token-id", "0" * 12, "--yes", "--url", url)
    assert [(125, "")] * 2 == [(outcome.code, outcome.out) for outcome in (shown, broken)]
    assert [True, True] == ["'time' command" in outcome.err for outcome in (shown, broken)]


def test_show_tells_holders_their_ends_and_the_queue(
    redislock: Command, client: redis.Redis, semaphore: Semaphore, permits: list[Permit]
) -> None:
    semaphore.resize(2)
    waiting = start(lambda: semaphore.acquire(blocking_timeout=PATIENCE_S))
    until_queued(client, "name", 1)
    [shown] = redislock("show", "name", "--json").objects
    text = redislock("show", "name")
    status = semaphore.status()
    permits.pop().release()
    granted = waiting.result(PATIENCE_S)
    assert granted is not None
    permits.append(granted)
    told = ("kind", "held", "limit", "waiting")
    assert ["semaphore", 2, 2, 1] == [shown[field] for field in told]
    assert [holder.token_id for holder in status.holders] == [one["token_id"] for one in shown["holders"]]
    assert {os.getpid()} == {one["process"]["pid"] for one in shown["holders"] + shown["waiters"]}
    assert all(FAR_S / 2 < one["ttl_s"] <= FAR_S for one in shown["holders"])
    assert shown["waiters"][0]["waited_s"] > 0
    assert (0, "") == (text.code, text.err)
    assert text.out.splitlines()[:3] == ["semaphore  name", "limit      2", "held       2"]
    assert all(f"token id {holder.token_id}" in text.out for holder in status.holders)


def test_show_of_a_semaphore_that_is_free_has_its_limit(
    redislock: Command, client: redis.Redis, semaphore: Semaphore
) -> None:
    assert (1, True) == ((free := redislock("show", "name")).code, "it is free" in free.out)  # as for a lock
    semaphore.resize(7)
    [shown] = (limited := redislock("show", "name", "--json")).objects
    assert (1, "semaphore", 7, 0, []) == (
        limited.code,
        *(shown[field] for field in ("kind", "limit", "held", "holders")),
    )
    client.zadd("board", {"x": 4e12})
    board = redislock("show", "board", "--json").objects[0]
    assert ("lock", None) == (board["kind"], board["holder"]["token_id"])


def test_top_shows_semaphores(redislock: Command, client: redis.Redis, permits: list[Permit]) -> None:
    with Lock(client, "lock", timeout=FAR_S):
        looks = redislock("top", "-n", "2", "--interval", "0.01", "--json").objects
        text = redislock("top", "-n", "1").out
    for look in looks:
        rows = {row["name"]: row for row in look["locks"]}
        assert ({"lock", "name"}, "semaphore", 2) == ({*rows}, rows["name"]["kind"], rows["name"]["held"])
        assert (None, 0) == (rows["name"]["acquisitions_per_s"], rows["name"]["changes_seen"])
    assert "2 permits" in text


@pytest.mark.parametrize("with_waiter", [True, False])
def test_break_takes_one_permit(
    redislock: Command, client: redis.Redis, semaphore: Semaphore, permits: list[Permit], with_waiter: bool
) -> None:
    semaphore.resize(2)
    waiting = start(lambda: semaphore.acquire(blocking_timeout=PATIENCE_S)) if with_waiter else None
    if waiting is not None:
        until_queued(client, "name", 1)
    kept, broken = semaphore.status().holders
    unknown = redislock("break", "name", "--token-id", "0" * 12, "--yes")
    outcome = redislock("break", "name", "--token-id", str(broken.token_id), "--yes", "--json")
    left: list[Any] = [one.token_id for one in semaphore.status().holders]
    assert (1, "redislock: a permit of 'name' is not held with token id '000000000000'\n") == (
        unknown.code,
        unknown.err,
    )
    assert (0, [with_waiter]) == (outcome.code, [one["handed_over"] for one in outcome.objects])
    assert (kept.token_id in left, broken.token_id in left, len(left)) == (True, False, 1 + with_waiter)
    if waiting is not None:
        granted = waiting.result(PATIENCE_S)
        assert granted is not None
        granted.release()
    lost = [permit for permit in list(permits) if not _is_released(permit)]
    assert len(lost) == 1
    permits.clear()


def _is_released(permit: Permit) -> bool:
    """Release it. Returns whether it was held."""
    try:
        permit.release()
    except LockLostError:
        return False
    return True


def test_limit_is_shown_set_and_removed(redislock: Command, client: redis.Redis, semaphore: Semaphore) -> None:
    assert (0, "none\n") == ((unset := redislock("limit", "name")).code, unset.out)
    assert (0, "5\n") == ((made := redislock("limit", "name", 5)).code, made.out)
    assert [{"name": "name", "limit": 5}] == redislock("limit", "name", "--json").objects
    assert 5 == semaphore.status().limit
    assert (0, "none\n") == ((removed := redislock("limit", "name", "none")).code, removed.out)
    assert (3, [{"name": "name", "limit": None}]) == (
        semaphore.status().limit,
        redislock("limit", "name", "--json").objects,
    )
    assert not client.keys()


def test_limit_that_grows_admits_a_waiter(
    redislock: Command, client: redis.Redis, semaphore: Semaphore, permits: list[Permit]
) -> None:
    redislock("limit", "name", 1)
    waiting = start(lambda: semaphore.acquire(blocking_timeout=PATIENCE_S))
    until_queued(client, "name", 1)
    redislock("limit", "name", 3)
    granted = waiting.result(PATIENCE_S)
    assert granted is not None
    granted.release()


@pytest.mark.parametrize("limit", ["0", "-1", "many", "1.5", str(1 << 53)])
def test_limit_is_a_number_above_0(redislock: Command, client: redis.Redis, limit: str) -> None:
    assert 2 == redislock("limit", "name", limit).code


def test_limit_that_is_no_number_is_told(redislock: Command, client: redis.Redis) -> None:
    client.set("{name}:rlf:limit", "text")
    outcome = redislock("limit", "name")
    assert (125, "", "redislock: the limit of the semaphore 'name' is no number, resize sets or removes it\n") == (
        outcome.code,
        outcome.out,
        outcome.err,
    )
    assert (0, "none\n") == ((removed := redislock("limit", "name", "none")).code, removed.out)
    assert not client.keys()


def test_limit_of_a_lock_is_refused(redislock: Command, client: redis.Redis) -> None:
    with Lock(client, "name", timeout=FAR_S):
        outcome = redislock("limit", "name", "3")
    assert (125, "", True) == (outcome.code, outcome.out, "WRONGTYPE" in outcome.err)
    assert not client.keys()


@pytest.mark.parametrize("cluster", ["valkey"], indirect=True)
def test_semaphores_of_a_cluster(redislock: Command, cluster: Cluster, cluster_client: redis.RedisCluster) -> None:
    names = [cluster.name() for _ in range(4)]
    permits = [Semaphore(cluster_client, name, 2, timeout=FAR_S).acquire() for name in names]
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    limited = redislock("limit", names[0], "4", "--url", url)
    listed = redislock("ls", "--url", url, "--json").objects
    [shown] = redislock("show", names[0], "--url", url, "--json").objects
    shown_limit = redislock("limit", names[0], "--url", url)
    assert 0 == redislock("break", names[0], "--token-id", shown["holders"][0]["token_id"], "--yes", "--url", url).code
    redislock("limit", names[0], "none", "--url", url)
    assert [permit is not None and _is_released(permit) for permit in permits] == [False, True, True, True]
    assert (0, "4\n", "4\n") == (limited.code, limited.out, shown_limit.out)
    assert {(name, 4 if name == names[0] else None) for name in names} == {
        (row["name"], row["limit"]) for row in listed
    }
    assert (4, 1) == (shown["limit"], shown["held"])
