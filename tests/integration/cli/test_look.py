"""`redislock ls` and `redislock show`: which locks are held, by whom, and who waits for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import redis
import redis.lock

from redislock_fast import Lock, holders
from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.cli.conftest import Command
from tests.support.clusters import Cluster
from tests.support.helpers import PATIENCE_S, start
from tests.support.waiting import FAR_S, until_queued

ODD = b"two\nlines \xff"


@pytest.fixture
def client(valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """A client of the server that the command line finds in the environment."""
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    return connect(valkey.port)


def test_show_tells_the_holder_and_the_queue(
    redislock: Command, client: redis.Redis, valkey: Server, connect: Connect
) -> None:
    with Lock(client, "name", timeout=FAR_S, fencing=True) as lock:
        waiter = Lock(connect(valkey.port), "name", timeout=FAR_S, thread_local=False)
        waiting = start(waiter.acquire)
        until_queued(client, "name", 1)
        report = holders(client, "name")
        [shown] = redislock("show", "name", "--json").objects
        text = redislock("show", "name")
        fence = lock.fence
    assert waiting.result()
    waiter.release()
    holder = shown["holder"]
    assert report.holder is not None
    assert ("name", True, fence, True, 1) == (
        shown["name"], shown["held"], shown["fence"], shown["contended"], shown["waiting"],
    )  # fmt: skip
    assert ("redislock_fast", report.holder.identifier, report.holder.token_id, True, os.getpid()) == (
        holder["kind"], holder["identifier"], holder["token_id"], holder["alive"], holder["process"]["pid"],
    )  # fmt: skip
    assert 0 < shown["ttl_s"] <= FAR_S
    assert [report.waiters[0].token_id] == [one["token_id"] for one in shown["waiters"]]
    assert shown["waiters"][0]["waited_s"] > 0
    assert 0 == text.code
    assert f":{os.getpid()} (alive)" in text.out
    assert report.holder.token_id in text.out  # type: ignore[operator]


def test_show_fails_for_a_free_lock(redislock: Command, client: redis.Redis) -> None:
    outcome = redislock("show", "name", "--json")
    assert (1, "") == (outcome.code, outcome.err)
    assert [False, None] == [outcome.objects[0][word] for word in ("held", "holder")]
    assert (1, True) == ((text := redislock("show", "name")).code, "it is free" in text.out)


def test_ls_lists_locks_and_no_other_keys(redislock: Command, client: redis.Redis) -> None:
    client.set("text", "rlf:text")
    client.set("much", "x" * 100_000)
    client.set("digest", "0123456789abcdef" * 2)
    client.rpush("list", "x")
    theirs = redis.lock.Lock(client, "theirs", timeout=FAR_S)
    with Lock(client, "one", timeout=FAR_S), Lock(client, ODD), theirs:
        listed = redislock("ls", "--json")
        text = redislock("ls")
        matching = redislock("ls", "the*", "--json")
        report = holders(client, "one")
    hint = "redislock: left out, like locks of redis-py and of a Redlock: 2 keys (PATTERN '*' shows them)\n"
    assert (0, hint, "") == (listed.code, listed.err, matching.err)
    assert {"one", r"two\nlines \xff"} == {row["name"] for row in listed.objects}
    [one] = [row for row in listed.objects if row["name"] == "one"]
    assert report.holder is not None
    assert report.holder.token_id == one["holder"]["token_id"]
    assert (os.getpid(), False, 0) == (one["holder"]["process"]["pid"], one["contended"], one["waiting"])
    assert 0 < one["ttl_s"] <= FAR_S
    head, *lines = text.out.splitlines()
    assert ["NAME", "HOLDER", "STATE", "TTL", "WAITING", "TOKEN", "ID"] == head.split()
    assert 2 == len(lines)
    assert [("theirs", "unknown")] == [(row["name"], row["holder"]["kind"]) for row in matching.objects]


def test_pattern_may_have_bytes_that_are_no_text(redislock: Command, client: redis.Redis) -> None:
    with Lock(client, ODD), Lock(client, "other"):
        found = redislock("ls", os.fsdecode(b"*\xff"), "--json")
    assert (0, [r"two\nlines \xff"]) == (found.code, [row["name"] for row in found.objects])


def test_ls_says_that_there_are_no_locks(redislock: Command, client: redis.Redis) -> None:
    empty = redislock("ls")
    client.set("theirs", "0123456789abcdef" * 2)
    theirs = redislock("ls")
    assert (0, "", "redislock: no locks\n") == (empty.code, empty.out, empty.err)
    assert (0, "") == (theirs.code, theirs.out)
    assert ["redislock: no locks", True] == [theirs.err.splitlines()[0], "PATTERN '*' shows them" in theirs.err]
    assert "theirs" in redislock("ls", "*").out


def test_ls_ends_with_its_budget(redislock: Command, client: redis.Redis) -> None:
    client.mset({f"key-{number}": "x" for number in range(3000)})
    with Lock(client, "key-lock", timeout=FAR_S):
        whole, part = redislock("ls", "--json"), redislock("ls", "--json", "--budget", 1000)
    assert (["key-lock"], "") == ([row["name"] for row in whole.objects], whole.err)
    assert "stopped after 1000 keys" in part.err
    assert 2 == redislock("ls", "--budget", 0).code


def test_ls_says_what_its_user_may_not_read(
    redislock: Command, client: redis.Redis, valkey: Server, acl_user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = acl_user(valkey, "resetkeys", "~mine:*", "-client|list")
    monkeypatch.setenv("REDISLOCK_USERNAME", user.username)
    monkeypatch.setenv("REDISLOCK_PASSWORD", user.password)
    with Lock(client, "mine:1", timeout=FAR_S), Lock(client, "other", timeout=FAR_S):
        outcome = redislock("ls", "--json")
    [row] = outcome.objects
    assert ("mine:1", None, None) == (row["name"], row["holder"]["process"], row["holder"]["alive"])
    assert "1 keys could not be read" in outcome.err


@pytest.mark.parametrize("cluster", ["valkey"], indirect=True)
def test_locks_of_a_cluster(redislock: Command, cluster: Cluster, cluster_client: redis.RedisCluster) -> None:
    names = [cluster.name() for _ in range(6)]
    locks = [Lock(cluster_client, name, timeout=FAR_S) for name in names]
    for lock in locks:
        assert lock.acquire()
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    listed = redislock("ls", "--url", url, "--json")
    shown = redislock("show", names[0], "--url", url, "--json")
    for lock in locks:
        lock.release()
    assert set(names) == {row["name"] for row in listed.objects}
    assert os.getpid() == shown.objects[0]["holder"]["process"]["pid"]


@pytest.mark.slow
def test_reader_that_has_enough_is_no_error(client: redis.Redis) -> None:
    words = [sys.executable, "-m", "redislock_fast", "ls"]
    with (
        Lock(client, "name", timeout=FAR_S),
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "" == process.stderr.read()
        assert 0 == process.wait(PATIENCE_S)
