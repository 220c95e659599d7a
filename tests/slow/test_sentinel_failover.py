"""Locks and leaders through the fail-overs of three real sentinels: a primary dies under load, and one is demoted.

Rules: a primary stops writing until all is replicated before it dies: what is not replicated may be lost, which nobody
can help. Each test runs for threads and for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from redislock_fast.server import Server
from tests.support.electing import Candidate
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.sentinels import SERVICE, sentinel_of
from tests.support.waiting import FAR_S, Callers, Guard, Threads, serve, until_queued

_SENTINELS = 3


class Service:
    """A primary, its replica, and three sentinels, two of which must agree.

    Args:
        kind: of server.
        folder: for what the binary is called by.
        opened: closes the servers.
    """

    def __init__(self, kind: str, folder: Path, opened: ExitStack) -> None:
        at_once = {"repl-diskless-sync-delay": "0"}
        self.primary = opened.enter_context(Server(kind, at_once))
        self.replica = opened.enter_context(Server(kind, {**at_once, "replicaof": f"127.0.0.1 {self.primary.port}"}))
        self.admins: dict[int, Any] = {
            server.port: redis.Redis(port=server.port) for server in (self.primary, self.replica)
        }
        options = {
            "sentinel down-after-milliseconds": f"{SERVICE} 600",
            "sentinel failover-timeout": f"{SERVICE} 2000",  # a vain election is repeated after twice that
        }
        self.sentinels = [
            opened.enter_context(sentinel_of(self.primary, folder, 2, options)) for _ in range(_SENTINELS)
        ]
        self._admins: list[Any] = [redis.Redis(port=sentinel.port) for sentinel in self.sentinels]
        wait_until(lambda: all(map(self._knows_all, self._admins)), "the sentinels know one another and the replica")
        self.until_replicated()

    @staticmethod
    def _knows_all(admin: Any) -> bool:
        state = admin.sentinel_master(SERVICE)
        return bool(state["num-other-sentinels"] == _SENTINELS - 1 and state["num-slaves"] == 1)

    def client(self, callers: Callers) -> Any:
        """A patient client of whatever the sentinels call the primary."""
        in_threads = isinstance(callers, Threads)
        module: Any = redis.sentinel if in_threads else redis.asyncio.sentinel
        retry: Any = Retry if in_threads else redis.asyncio.retry.Retry
        sentinel = module.Sentinel([("127.0.0.1", server.port) for server in self.sentinels])
        for asked in sentinel.sentinels:
            callers.keep(asked)
        return callers.keep(
            sentinel.master_for(SERVICE, retry=retry(ConstantBackoff(0.02), int(2 * PATIENCE_S / 0.02)))
        )

    def until_replicated(self) -> None:
        """Return once the replica has all that the primary has."""
        offset = self.admins[self.primary.port].info("replication")["master_repl_offset"]
        replica = self.admins[self.replica.port]
        wait_until(lambda: replica.info("replication").get("slave_repl_offset", -1) >= offset, "all is replicated")

    def kill_primary(self) -> None:
        """End the primary as a crash would, with nothing that is not replicated."""
        self.admins[self.primary.port].execute_command("CLIENT", "PAUSE", int(1000 * PATIENCE_S), "WRITE")
        self.until_replicated()
        self.primary.kill()

    def fail_over(self) -> None:
        """Let the sentinels promote the replica, and demote the primary, which goes on answering.

        They would tell it only some ten seconds later; what it takes until then is lost.
        """
        wait_until(self._begins_to_fail_over, "a sentinel begins with it")
        self.until_failed_over()
        old = self.admins[self.primary.port]
        old.replicaof("127.0.0.1", self.replica.port)
        wait_until(lambda: old.info("replication").get("master_link_status") == "up", "the old primary is a replica")

    def _begins_to_fail_over(self) -> bool:
        try:
            self._admins[0].execute_command("SENTINEL", "FAILOVER", SERVICE)
        except redis.ResponseError as error:
            return str(error).startswith("INPROG")  # NOGOODSLAVE: it has not looked at the replica for too long
        return True

    def until_failed_over(self) -> None:
        """Return once the replica is the primary, by the sentinels' word and its own."""
        replica = self.admins[self.replica.port]
        wait_until(lambda: replica.info("replication")["role"] == "master", "the replica is the primary")
        for admin in self._admins:
            wait_until(lambda: admin.sentinel_master(SERVICE)["port"] == self.replica.port, "a sentinel says so")  # noqa: B023


@pytest.fixture(params=["valkey", "redis"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """A service on each kind of server in turn, for one test."""
    with ExitStack() as opened:
        yield Service(request.param, tmp_path, opened)


FAIL_OVERS: dict[str, Callable[[Service], None]] = {"killed": Service.kill_primary, "demoted": Service.fail_over}


@pytest.mark.parametrize("what", FAIL_OVERS)
def test_held_and_awaited_locks_and_leaders_survive_a_primary_that_is(
    callers: Callers, service: Service, what: str
) -> None:
    holder, *waiters = (callers.contender(service.client(callers), "name", timeout=FAR_S, sleep=0.5) for _ in range(3))
    keeper = callers.contender(service.client(callers), "kept", timeout=FAR_S)
    assert (holder.call("acquire"), keeper.call("acquire")) == (True, True)
    answers = []
    for length, waiter in enumerate(waiters, start=1):
        answers.append(waiter.acquire())
        until_queued(service.admins[service.primary.port], "name", length)
    leader, follower = (Candidate(callers, service.client(callers)) for _ in range(2))
    leader.run().until_leads()
    follower.run()
    until_queued(service.admins[service.primary.port], "beat", 1)
    service.until_replicated()
    FAIL_OVERS[what](service)
    service.until_failed_over()
    assert (leader.election.is_leader, follower.terms) == (True, [])
    callers.run(leader.election.stop)
    follower.until_leads()
    assert follower.terms[0].number > leader.terms[0].number
    callers.run(follower.election.stop)
    assert [one.running.result(PATIENCE_S) for one in (leader, follower)] == [None, None]
    holder.release()
    serve(waiters, answers)
    assert keeper.call("extend", 10) is True
    keeper.release()
    assert service.admins[service.replica.port].keys("*kept*") == []


def test_service_goes_on_after_a_primary_dies_under_load(callers: Callers, service: Service) -> None:
    guards = {"name-0": Guard(), "name-1": Guard()}
    contenders = [callers.contender(service.client(callers), name, timeout=FAR_S, sleep=0.05) for name in [*guards] * 3]

    def use_all() -> list[Any]:
        return [contender.use(guards[contender.lock.name], blocking_timeout=2 * PATIENCE_S) for contender in contenders]

    rounds = [use_all() for _ in range(3)]
    wait_until(lambda: all(each.entries for each in guards.values()), "the load has begun")
    service.kill_primary()
    service.until_failed_over()
    rounds += [use_all()]
    assert [answer.result(3 * PATIENCE_S) for answers in rounds for answer in answers] == [True] * 24
    assert [each.overlaps for each in guards.values()] == [0, 0]


def test_a_demoted_primary_is_asked_once(callers: Callers, service: Service) -> None:
    lock = callers.contender(service.client(callers), "name", timeout=FAR_S)
    assert lock.call("acquire")
    lock.release()
    service.fail_over()
    old, new = (service.admins[server.port] for server in (service.primary, service.replica))
    old.config_resetstat()
    for _ in range(3):
        assert lock.call("acquire")
        assert new.exists("name")
        lock.release()
    assert old.info("commandstats")["cmdstat_set"]["rejected_calls"] == 1
