"""Observers: the server tells them of each new leader, and where it does not, they look again and again.

Rules: real servers; threads and tasks alike. An observer that must be told looks next when the test has long ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import redis

from redislock_fast import Election
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import FAR_S, LATE, Callers, sent_by, until_queued

QUIET_S = 1.0
"""How long the commands of an idle observer are counted, in seconds."""


class Observer:
    """An election object that only observes, beside the test.

    Attributes:
        client: its client.
        seen: the leaders so far.
        ended: its `observe`.
    """

    def __init__(self, callers: Callers, client: Any, sleep: float) -> None:
        self.seen: list[Any] = []
        self.client = client
        self.election = callers.package.Election(client, "beat", sleep=sleep)
        self.ended: Future[Any] = callers.begin(self._observe_task if callers.kind == "tasks" else self._observe)

    def _observe(self) -> None:
        self.seen.extend(self.election.observe())

    async def _observe_task(self) -> None:
        async for leader in self.election.observe():
            self.seen.append(leader)  # one after another

    def until_seen(self, *terms: int) -> None:
        """Return once it has seen the leaders of these terms."""
        wait_until(lambda: self.ended.done() or len(self.seen) >= len(terms), f"the terms {terms} are seen")
        assert [leader.term for leader in self.seen] == list(terms)


@pytest.fixture
def observe(callers: Callers) -> Iterator[Callable[..., Observer]]:
    """Makes observers, which are stopped after the test."""
    made: list[Observer] = []

    def begin(port: int, sleep: float, **options: Any) -> Observer:
        made.append(Observer(callers, callers.client(port, client_name="observer", **options), sleep))
        return made[-1]

    yield begin
    for observer in made:
        callers.run(observer.election.stop)
    assert [observer.ended.result(PATIENCE_S) for observer in made] == [None] * len(made)


Observe = Callable[..., Observer]


class Leaders:
    """Candidates of threads, of which one after the other leads for as long as it is told to."""

    def __init__(self, client: redis.Redis) -> None:
        self._election = Election(client, "beat", timeout=FAR_S, sleep=0.05)
        self._term: Any = None

    def next(self) -> int:
        """End the present term, and begin another one. Returns its number."""
        self.end()
        self._term = self._election.term()
        number: int = self._term.__enter__().number
        return number

    def end(self) -> None:
        """End the present term, if there is one."""
        if self._term is not None:
            self._term.__exit__(None, None, None)
            self._term = None


@pytest.fixture
def leaders(valkey_client: redis.Redis) -> Iterator[Leaders]:
    """Leaders of the election "beat"."""
    made = Leaders(valkey_client)
    yield made
    made.end()


def test_observer_is_told_of_each_leader(observe: Observe, leaders: Leaders, valkey: Server) -> None:
    observer = observe(valkey.port, FAR_S)
    terms = [leaders.next()]
    observer.until_seen(*terms)
    for _ in range(3):
        terms.append(leaders.next())
        observer.until_seen(*terms)


def test_observer_with_nothing_to_see_sends_next_to_nothing(
    observe: Observe, leaders: Leaders, valkey: Server, valkey_client: redis.Redis
) -> None:
    term = leaders.next()
    observer = observe(valkey.port, 0.01)
    observer.until_seen(term)
    wait_until(lambda: valkey_client.info("stats")["tracking_total_keys"], "it is to be told")
    with sent_by(valkey_client, "observer") as sent:
        time.sleep(QUIET_S)
    assert len(sent.commands) <= 8  # it may just begin to look once
    observer.until_seen(term, leaders.next())


@pytest.mark.parametrize("rule", ["-client|tracking", "-client|caching", "-hello"])
def test_observer_looks_where_the_server_does_not_tell(
    rule: str, acl_user: MakeUser, observe: Observe, leaders: Leaders, valkey: Server
) -> None:  # `acl_user` comes first, and so ends last: the server refuses an observer whose user is gone
    observer = observe(valkey.port, 0.01, **acl_user(valkey, rule).options())
    terms = [leaders.next()]
    observer.until_seen(*terms)
    terms.append(leaders.next())
    observer.until_seen(*terms)


def test_observer_that_loses_its_connection_connects_again(
    observe: Observe, leaders: Leaders, valkey: Server, valkey_client: redis.Redis
) -> None:
    observer = observe(valkey.port, 0.01)
    terms = [leaders.next()]
    observer.until_seen(*terms)
    for _ in range(2):
        for row in valkey_client.client_list():
            if row["name"] == "observer":
                valkey_client.client_kill_filter(_id=row["id"])
        terms.append(leaders.next())
        observer.until_seen(*terms)


def test_observer_goes_on_when_the_server_has_lost_its_data(
    observe: Observe, leaders: Leaders, valkey: Server, valkey_client: redis.Redis
) -> None:
    observer = observe(valkey.port, FAR_S)
    first = leaders.next()
    observer.until_seen(first)
    leaders.end()
    valkey_client.flushall()
    assert leaders.next() == 1  # which is not higher than the last one that was seen
    second = leaders.next()
    observer.until_seen(first, second)


def test_observer_is_told_beside_callers_that_wait_on_its_connection(
    observe: Observe, leaders: Leaders, valkey: Server, valkey_client: redis.Redis, callers: Callers
) -> None:
    observer = observe(valkey.port, FAR_S)
    terms = [leaders.next()]
    observer.until_seen(*terms)
    holder, waiter = callers.contenders(2, observer.client, "other", **LATE)
    assert holder.call("acquire")
    answer = waiter.acquire()
    until_queued(valkey_client, "other", 1)
    terms.append(leaders.next())
    observer.until_seen(*terms)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
