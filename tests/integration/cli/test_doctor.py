"""`redislock doctor`: it finds out how locks will work, names what to grant, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.integration.cli.conftest import Command, Outcome
from tests.support.clusters import Cluster
from tests.support.helpers import capabilities_of, wait_until

FEW_RIGHTS = ("resetkeys", "~lock:*", "resetchannels", "-@dangerous", "-@scripting")


def feature(outcome: Outcome, name: str) -> dict[str, Any]:
    """What was found out about one feature."""
    [report] = outcome.objects
    [found] = [one for one in report["features"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


def is_clean(client: redis.Redis) -> bool:
    """Whether no key is left on the server."""
    return not client.keys()


def test_everything_works_for_a_user_with_all_rights(redislock: Command, server: Server, client: redis.Redis) -> None:
    outcome = redislock("doctor", "--url", server.url, "--json")
    [report] = outcome.objects
    release = capabilities_of(server).release
    assert (0, "", True, None) == (outcome.code, outcome.err, report["ok"], report["grant"])
    assert ("queue", True, []) == tuple(feature(outcome, "waiting")[word] for word in ("mode", "ok", "missing"))
    assert (release or b"script").decode() == feature(outcome, "release")["mode"]
    assert ("default", "standalone") == (report["user"], report["server"]["mode"])
    assert report["round_trip_ms"] > 0
    wait_until(lambda: is_clean(client), "nothing is left")


def test_what_is_missing_is_told_and_is_all_that_is_needed(
    redislock: Command, server: Server, client: redis.Redis, acl_user: MakeUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = acl_user(server, *FEW_RIGHTS)
    monkeypatch.setenv("REDISLOCK_USERNAME", user.username)
    monkeypatch.setenv("REDISLOCK_PASSWORD", user.password)
    before = redislock("doctor", "--url", server.url, "--prefix", "lock:", "--json")
    text = redislock("doctor", "--url", server.url, "--prefix", "lock:")
    [report] = before.objects
    assert (1, False, 1) == (before.code, report["ok"], text.code)
    assert ("refused", False) == (feature(before, "fencing")["mode"], feature(before, "fencing")["ok"])
    assert f"ACL SETUSER {user.username}" in report["grant"]
    assert report["grant"] in text.out
    assert {"&rlf:*", "+eval", "+evalsha", "~{lock:*"} <= set(report["grant"].split())
    client.execute_command(*report["grant"].split())  # type: ignore[no-untyped-call]
    after = redislock("doctor", "--url", server.url, "--prefix", "lock:", "--json")
    assert (0, None) == (after.code, after.objects[0]["grant"])
    wait_until(lambda: is_clean(client), "nothing is left")


@pytest.mark.parametrize(
    "rules",
    [
        "-@all",
        "-@all resetkeys resetchannels",
        "-@all resetkeys ~lock:* resetchannels +set +get",
        "-command -@write",
        "-set -append resetkeys",
        "-del -unlink -hset -hincrby -append",
        "-hello -subscribe -publish resetchannels",
        "-@pubsub resetchannels",
        "-@write -@hash -@sortedset resetkeys ~lock:*",
    ],
)
def test_one_round_of_granting_is_enough(
    redislock: Command, server: Server, client: redis.Redis, acl_user: MakeUser, rules: str
) -> None:
    user = acl_user(server, *rules.split())
    url = f"redis://{user.username}:{user.password}@127.0.0.1:{server.port}"
    before = redislock("doctor", "--url", url, "--prefix", "lock:", "--json")
    grant = before.objects[0]["grant"].split()
    guessed = before.err.split("denied: ")[1].split(".")[0].split() if before.err else []
    if rules == "-@all":  # this one has all keys and channels, which cannot be found out
        assert {"~lock:*", "~{lock:*"} <= set(guessed)
        grant = [rule for rule in grant if rule not in guessed]
    client.execute_command(*grant)  # type: ignore[no-untyped-call]
    after = redislock("doctor", "--url", url, "--prefix", "lock:", "--json")
    assert (1, 0, None, "") == (before.code, after.code, after.objects[0]["grant"], after.err)
    wait_until(lambda: is_clean(client), "nothing is left")


@pytest.mark.parametrize(
    ("rule", "name", "mode"),
    [
        ("-set", "acquire", "refused"),
        ("-delifeq", "release", "script"),
        ("-command|info", "release", "script"),
        ("-eval", "waiting", "tracking"),
        ("-zadd", "waiting", "tracking"),
        ("-del", "waiting", "tracking"),
        ("-publish", "waiting", "tracking"),
        ("-zrangebyscore", "semaphores", "refused"),
        ("-pexpireat", "semaphores", "refused"),
        ("-hincrby", "fencing", "refused"),
        ("-subscribe", "linger", "off"),
        ("-client|list", "holders", "partly known"),
        ("-client|kill", "tidying up", "by ttl"),
        ("-wait", "replicas", "refused"),
    ],
)
def test_a_missing_right_costs_its_feature(
    redislock: Command, valkey: Server, connect: Connect, acl_user: MakeUser, rule: str, name: str, mode: str
) -> None:
    user = acl_user(valkey, rule)
    url = f"redis://{user.username}:{user.password}@127.0.0.1:{valkey.port}"
    outcome = redislock("doctor", "--url", url, "--json")
    found = feature(outcome, name)
    assert (1, mode, False) == (outcome.code, found["mode"], found["ok"])
    assert f"+{rule[1:]}" in found["missing"]
    wait_until(lambda: is_clean(connect(valkey.port)), "nothing is left")


def test_keys_of_other_names_are_a_hint(redislock: Command, valkey: Server, acl_user: MakeUser) -> None:
    user = acl_user(valkey, "resetkeys", "~lock:*", "~{lock:*")
    url = f"redis://{user.username}:{user.password}@127.0.0.1:{valkey.port}"
    assert "--prefix" in redislock("doctor", "--url", url).err
    assert (0, "") == ((outcome := redislock("doctor", "--url", url, "--prefix", "lock:")).code, outcome.err)


def test_server_that_may_evict_locks_is_told(redislock: Command, spare_server: Callable[..., Server]) -> None:
    server = spare_server("valkey", {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    outcome = redislock("doctor", "--url", server.url, "--json")
    found = feature(outcome, "memory")
    assert (1, "allkeys-lru", "noeviction") == (outcome.code, found["mode"], found["best"])


@pytest.mark.parametrize("cluster", ["valkey"], indirect=True)
def test_cluster(redislock: Command, cluster: Cluster) -> None:
    outcome = redislock("doctor", "--url", f"redis+cluster://127.0.0.1:{cluster.port}", "--json")
    assert (0, "queue") == (outcome.code, feature(outcome, "waiting")["mode"])
    assert "cluster" == outcome.objects[0]["server"]["mode"]
