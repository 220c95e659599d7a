"""Where the clock of a server or a client is set forward and back: locks, permits and terms keep what is promised.

Rules: a real server whose clock of the day the test sets, by a preloaded library. Leases whose end must not come by
itself are long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from redislock_fast import Election, Lock, Semaphore
from redislock_fast.server import KINDS, Server, find_binary
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.stepped import SteppedClock
from tests.support.waiting import FAR_S

STEP_S = 2 * FAR_S
"""A step that skips the end of each lease."""

LEASE_S = 9.0
"""The ttl of what is renewed: a third of it passes until a loss is found out."""


class Stepped:
    """A server whose clock is set, and clients of it.

    Attributes:
        clock: the server's.
    """

    def __init__(self, clock: SteppedClock, server: Server) -> None:
        self.clock = clock
        self._server = server
        self._clients: list[redis.Redis] = []

    def client(self) -> redis.Redis:
        """A client."""
        self._clients.append(redis.Redis(port=self._server.port))
        return self._clients[-1]

    def close(self) -> None:
        """Close all."""
        for client in self._clients:
            client.close()
        self._server.close()


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Stepped]:
    """The first server here whose clock can be set."""
    clock = SteppedClock(tmp_path)
    for binary in filter(None, map(find_binary, KINDS)):
        clock.set_to(0)
        made = Stepped(clock, Server(clock.wrapped(binary)))
        try:
            client = made.client()
            before = client.time()[0]
            clock.set_to(1000)
            if client.time()[0] >= before + 1000:
                clock.set_to(0)
                yield made
                return
        finally:
            made.close()
    pytest.skip("no server here loads the library that sets its clock")


def test_locks_end_early_where_the_clock_is_set_forward(stepped: Stepped) -> None:
    first, second = (Lock(stepped.client(), "name", timeout=FAR_S, thread_local=False) for _ in range(2))
    assert first.acquire()
    assert not second.acquire(blocking=False)
    stepped.clock.set_to(STEP_S)
    wait_until(lambda: second.acquire(blocking=False), "the server looks at its clock")
    assert first.valid  # by its own clock: it does not know so far
    assert not first.owned()
    second.release()


def test_locks_last_longer_where_the_clock_is_set_back(stepped: Stepped) -> None:
    first, second = (Lock(stepped.client(), "name", timeout=FAR_S, thread_local=False) for _ in range(2))
    assert first.acquire()
    stepped.clock.set_to(-STEP_S)
    client = stepped.client()
    wait_until(lambda: client.ttl("name") > STEP_S, "the server looks at its clock")
    assert not second.acquire(blocking=False)
    first.release()
    assert second.acquire(blocking=False)
    second.release()


@pytest.mark.slow
def test_permits_end_early_where_the_clock_is_set_forward_and_their_holders_are_told(stepped: Stepped) -> None:
    semaphores = [Semaphore(stepped.client(), "name", 2, timeout=LEASE_S) for _ in range(2)]
    permits = [semaphores[0].acquire(blocking=False) for _ in range(2)]
    assert semaphores[1].acquire(blocking=False) is None
    stepped.clock.set_to(STEP_S)
    others = [semaphores[1].acquire() for _ in range(2)]
    assert None not in others  # beside the two that do not know so far
    assert semaphores[1].acquire(blocking=False) is None
    for permit in permits:
        assert permit is not None
        wait_until(partial(getattr, permit, "lost"), "its holder is told")
        assert not permit.valid
    for other in others:
        assert other is not None
        assert other.valid
        other.release()


def test_permits_last_longer_where_the_clock_is_set_back_and_none_is_added(stepped: Stepped) -> None:
    semaphores = [Semaphore(stepped.client(), "name", 2, timeout=FAR_S) for _ in range(2)]
    permits = [semaphores[0].acquire(blocking=False) for _ in range(2)]
    stepped.clock.set_to(-STEP_S)
    assert semaphores[1].acquire(blocking=False) is None
    assert permits[0] is not None
    permits[0].release()
    last = semaphores[1].acquire(blocking=False)
    assert last is not None
    assert semaphores[1].acquire(blocking=False) is None
    last.release()
    assert permits[1] is not None
    permits[1].release()
    assert stepped.client().exists("name") == 0


@pytest.mark.slow
def test_terms_rise_while_the_clock_is_set_forward_and_back(stepped: Stepped) -> None:
    elections = [Election(stepped.client(), "beat", timeout=LEASE_S, sleep=0.05) for _ in range(2)]
    first = elections[0].term().__enter__()
    stepped.clock.set_to(STEP_S)
    second = elections[1].term().__enter__()  # as the lease of the first has been skipped
    assert second.number > first.number
    assert first.stopping.wait(PATIENCE_S)
    wait_until(lambda: not elections[0].is_leader, "the first one knows")
    assert elections[1].is_leader
    with pytest.raises(redis.exceptions.LockError):
        first.__exit__(None, None, None)
    stepped.clock.set_to(-STEP_S)
    leader: Any = elections[0].leader()
    assert (leader.term, leader.since_s) == (second.number, 0.0)
    second.__exit__(None, None, None)
    with elections[0].term() as third:
        assert third.number > second.number


LEADER = """
import sys, time, redis
from redislock_fast import Election
client = redis.Redis(port=int(sys.argv[1]))
with Election(client, "beat", timeout=60).term() as term:
    for step in sys.stdin:
        print(term.valid, not term.stopping.is_set(), round(time.time()), flush=True)
"""


@pytest.mark.slow
def test_leader_does_not_count_by_its_clock_of_the_day(valkey: Server, tmp_path: Path) -> None:
    clock = SteppedClock(tmp_path)
    command = [sys.executable, "-c", LEADER, str(valkey.port)]
    environment = {**os.environ, **clock.environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as leader:
        assert leader.stdin is not None
        assert leader.stdout is not None
        times = []
        for step_s in (0, 3600, -3600):
            clock.set_to(step_s)
            leader.stdin.write("look\n")
            leader.stdin.flush()
            valid, goes_on, seconds = leader.stdout.readline().split()
            assert (valid, goes_on) == ("True", "True")
            times.append(int(seconds))
        leader.stdin.close()
        assert leader.wait(PATIENCE_S) == 0
    if times[1] - times[0] < 3000:
        pytest.skip("the program does not load the library: it is static")
    assert times[1] - times[2] > 7000
