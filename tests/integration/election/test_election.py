"""Elections: one leads, it is told in time to stop, and the next one leads; who leads is known to all.

Rules: real servers; threads and tasks alike, unless a test says which.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import LockError

import redislock_fast
from redislock_fast import Election, LockLostError
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import eventually
from tests.support.electing import Candidate
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.interrupts import each_line, handled, interrupted_at
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, Callers, Guard, until_queued

BRIEF_S = 3.0
"""The ttl of a leader that is to lose its term."""


@pytest.fixture
def stand(callers: Callers, valkey: Server) -> Iterator[Callable[..., Candidate]]:
    """Makes candidates, on a client each, and stops them after the test."""
    made: list[Candidate] = []

    def make(port: int = valkey.port, **settings: Any) -> Candidate:
        made.append(Candidate(callers, callers.client(port), **settings))
        return made[-1]

    yield make
    for candidate in made:
        callers.run(candidate.election.stop)
    for candidate in made:
        if hasattr(candidate, "running"):
            assert candidate.running.exception(PATIENCE_S) is None


Stand = Callable[..., Candidate]


def test_one_leads_and_a_leader_that_resigns_is_followed_by_the_next(
    stand: Stand, valkey_client: redis.Redis, callers: Callers
) -> None:
    first = stand().run()
    first.until_leads()
    second = stand().run()
    until_queued(valkey_client, "beat", 1)
    assert (first.election.is_leader, second.election.is_leader) == (True, False)
    callers.run(second.election.resign)  # it does not lead
    for leader, follower, count in ((first, second, 1), (second, first, 2), (first, second, 2)):
        callers.run(leader.election.resign)
        follower.until_leads(count)
        assert not leader.election.is_leader
        until_queued(valkey_client, "beat", 1)
    numbers = sorted(term.number for one in (first, second) for term in one.terms)
    assert len(set(numbers)) == len(numbers) == 4
    assert [term.number for term in first.terms] == [numbers[0], numbers[2]]
    assert first.told == [
        *[(what, numbers[0]) for what in ("started", "stopped")],
        *[(what, numbers[2]) for what in ("started", "stopped")],
    ]
    assert second.told[-1] == ("started", numbers[3])
    assert not any(term.valid for term in first.terms)


def test_stopped_election_ends_whether_it_leads_or_waits(stand: Stand, callers: Callers, valkey_client: Any) -> None:
    leader = stand().run()
    leader.until_leads()
    waits = stand().run()
    until_queued(valkey_client, "beat", 1)
    for one in (waits, leader):
        callers.run(one.election.stop)
        assert one.running.result(PATIENCE_S) is None
    assert (waits.told, [what for what, _ in leader.told]) == ([], ["started", "stopped"])
    assert not valkey_client.exists("beat")
    with pytest.raises(LockError, match="No term of the election 'beat' begins: it was stopped"):
        enter(callers, leader.election)


def enter(callers: Callers, election: Any) -> Any:
    """Enter and leave a block of a term. Returns the term."""
    term = election.term()

    async def block() -> None:
        async with term:
            assert (election.is_leader, term.valid) == (True, True)

    def with_block() -> None:
        with term:
            assert (election.is_leader, term.valid) == (True, True)

    callers.run(block if callers.kind == "tasks" else with_block)
    return term


def test_term_of_a_block_ends_with_it(stand: Stand, callers: Callers, valkey_client: redis.Redis) -> None:
    candidate = stand()
    terms = [enter(callers, candidate.election) for _ in range(2)]
    assert (candidate.election.is_leader, [term.valid for term in terms]) == (False, [False, False])
    assert 0 < terms[0].number < terms[1].number
    assert all(term.stopping.is_set() for term in terms)
    assert [what for what, _ in candidate.told] == ["started", "stopped"] * 2
    assert not valkey_client.exists("beat")


def test_term_that_has_begun_is_not_entered_again(stand: Stand, callers: Callers, valkey_client: redis.Redis) -> None:
    def enter_again(term: Any) -> None:
        with pytest.raises(LockError, match="No term of the election 'beat' begins: this one has begun already"):
            term.__enter__()
        assert term.valid
        candidate.election.stop()

    async def enter_again_in_a_task(term: Any) -> None:
        with pytest.raises(LockError, match="No term of the election 'beat' begins: this one has begun already"):
            await term.__aenter__()
        assert term.valid
        candidate.election.stop()

    candidate = stand()
    candidate.run(enter_again_in_a_task if callers.kind == "tasks" else enter_again)
    assert candidate.running.result(PATIENCE_S) is None
    assert [what for what, _ in candidate.told] == ["started", "stopped"]
    assert not valkey_client.exists("beat")


def test_error_of_the_work_ends_the_term_and_the_run(stand: Stand, valkey_client: redis.Redis) -> None:
    def fail(_term: Any) -> None:
        raise OSError("work")

    candidate = stand()
    candidate.run(fail)
    assert str(candidate.running.exception(PATIENCE_S)) == "work"
    del candidate.running
    assert [what for what, _ in candidate.told] == ["started", "stopped"]
    assert not valkey_client.exists("beat")


def test_on_stopped_is_called_though_on_started_raises(
    callers: Callers, valkey: Server, valkey_client: redis.Redis
) -> None:
    told: list[str] = []

    def fail(_term: Any) -> None:
        told.append("started")
        raise OSError("on_started")

    election = callers.package.Election(
        callers.client(valkey.port), "beat", FAR_S, on_started=fail, on_stopped=lambda _: told.append("stopped")
    )
    running = callers.begin(lambda: election.run(lambda _: told.append("led")))
    assert str(running.exception(PATIENCE_S)) == "on_started"
    assert told == ["started", "stopped"]
    assert not valkey_client.exists("beat")


def test_lost_lock_of_the_work_is_an_error_of_the_work(stand: Stand) -> None:
    def fail(_term: Any) -> None:
        raise LockLostError("another", "another")

    candidate = stand()
    candidate.run(fail)
    assert isinstance(candidate.running.exception(PATIENCE_S), LockLostError)
    del candidate.running


def test_lock_is_given_back_when_the_work_has_ended(stand: Stand, callers: Callers) -> None:
    told, ends = Future[None](), Future[None]()

    async def work_task(term: Any) -> None:
        await term.stopping.wait()
        told.set_result(None)
        await asyncio.wrap_future(ends)
        term.ensure_held()
        election.stop()

    def work(term: Any) -> None:
        term.stopping.wait()
        told.set_result(None)
        ends.result(PATIENCE_S)
        term.ensure_held()
        election.stop()

    first, second = stand(), stand()
    election = first.election
    first.run(work_task if callers.kind == "tasks" else work)
    wait_until(lambda: first.election.is_leader, "it leads")
    second.run()
    callers.run(election.resign)
    told.result(PATIENCE_S)
    assert (election.is_leader, second.election.is_leader) == (True, False)
    ends.set_result(None)
    second.until_leads()
    assert first.running.result(PATIENCE_S) is None


def test_leader_that_resigns_before_it_knows_that_it_leads_hands_over(
    stand: Stand, valkey: Server, valkey_client: redis.Redis, callers: Callers
) -> None:
    """Its record can be read, and the reply to it has not come."""
    with Proxy(valkey.port) as proxy:
        first, second = stand(proxy.port, value="first"), stand(value="second")
        number = enter(callers, first.election).number  # it is connected, and the server has the script
        proxy.hold_from("EVALSHA", nth=2)  # the first one acquires
        first.run()
        wait_until(lambda: second.call("leader"), "its record is written")
        assert (second.call("leader").value, first.terms) == ("first", [])
        callers.run(first.election.resign)
        second.run()
        until_queued(valkey_client, "beat", 1)
        proxy.resume()
        second.until_leads()
    assert [(term.number, term.stopping.is_set()) for term in first.terms] == [(number + 1, True)]
    assert first.told[2:] == [("started", number + 1), ("stopped", number + 1)]


# Who leads


def test_leader_that_has_ended_meanwhile_is_not_noted(
    stand: Stand, valkey: Server, valkey_client: redis.Redis, callers: Callers
) -> None:
    """Another one leads before it hears that it was elected."""
    with Proxy(valkey.port) as proxy:
        late, other = stand(proxy.port, value="late"), stand(value="other")
        enter(callers, late.election)  # it is connected
        proxy.hold()
        late.run()
        wait_until(lambda: valkey_client.exists("beat"), "it was elected")
        valkey_client.delete("beat")
        other.run().until_leads()
        proxy.resume()
        until_queued(valkey_client, "beat", 1)
        assert other.call("leader").value == "other"
        callers.run(late.election.stop)
        assert late.running.result(PATIENCE_S) is None


def test_leader_is_known_to_all(stand: Stand, callers: Callers, server: Server, connect: Connect) -> None:
    candidate, other = stand(server.port, value="http://a:8000"), stand(server.port)
    assert other.call("leader") is None
    candidate.run()
    candidate.until_leads()
    leader = other.call("leader")
    assert (leader.term, leader.value) == (candidate.terms[0].number, "http://a:8000")
    assert leader.process.pid == os.getpid()
    assert 0 <= leader.since_s < FAR_S
    assert "rlf" not in repr(leader)
    callers.run(candidate.election.stop)
    candidate.running.result(PATIENCE_S)
    assert other.call("leader") is None
    connect(server.port).set("beat", "another's")
    assert other.call("leader") is None


def test_each_leader_is_observed_and_terms_rise(stand: Stand, callers: Callers, valkey_client: redis.Redis) -> None:
    seen: list[Any] = []
    observer = stand(sleep=0.01)

    async def observe() -> None:
        async for leader in observer.election.observe():
            seen.append(leader)  # noqa: PERF401  # one after another

    def observe_here() -> None:
        seen.extend(observer.election.observe())

    observing = callers.begin(observe if callers.kind == "tasks" else observe_here)
    told: list[Any] = []

    def until_observed(count: int) -> None:
        wait_until(lambda: len(seen) == count == len(told), f"{count} are observed")

    both = [stand(value="a"), stand(value="b", on_new_leader=told.append)]
    both[0].run()
    both[0].until_leads()
    both[1].run()
    until_queued(valkey_client, "beat", 1)
    for count in range(1, 4):
        until_observed(count)
        until_queued(valkey_client, "beat", 1)
        leader = both[(count - 1) % 2]
        leader.until_leads((count + 1) // 2)  # it may be observed before it knows itself
        callers.run(leader.election.resign)
    until_observed(4)
    assert [leader.value for leader in seen] == ["a", "b", "a", "b"]
    assert [leader.term for leader in seen] == sorted({leader.term for leader in seen})
    assert [leader.term for leader in told] == [leader.term for leader in seen]
    callers.run(observer.election.stop)
    assert observing.result(PATIENCE_S) is None


# The end of a term against the leader's will


@pytest.mark.slow
def test_leader_is_told_to_stop_before_its_lease_ends(
    spare_server: Callable[..., Server], stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    server, endangered = spare_server(), list[Any]()
    leader = stand(server.port, timeout=BRIEF_S, on_danger=endangered.append).run()
    leader.until_leads()
    follower = stand(server.port, timeout=BRIEF_S).run()
    server.signal(signal.SIGSTOP)
    wait_until(lambda: leader.left_s, "its work has ended")
    assert 0 < leader.left_s[0] <= BRIEF_S / 3
    wait_until(lambda: endangered, "it is told")
    leader.until_ended()
    assert not leader.election.is_leader
    wait_until(lambda: "waits until its server is there again" in caplog.text, "that is logged")
    server.signal(signal.SIGCONT)
    first = leader.terms[0]
    wait_until(lambda: leader.terms[1:] + follower.terms, "one of them leads")
    assert (leader.terms[1:] + follower.terms)[0].number > first.number
    assert endangered[0] is first


def test_leader_that_stops_while_its_server_is_away_ends_without_an_error(
    spare_server: Callable[..., Server], stand: Stand, callers: Callers
) -> None:
    server = spare_server()
    leader = stand(server.port).run()
    leader.until_leads()
    server.kill()
    callers.run(leader.election.stop)
    assert leader.running.exception(FAR_S) is None
    assert [what for what, _ in leader.told] == ["started", "stopped"]
    assert not leader.election.is_leader


@pytest.mark.slow
def test_leader_that_does_not_stop_is_no_leader_by_the_clock(
    spare_server: Callable[..., Server], stand: Stand, callers: Callers
) -> None:
    """In a thread nothing can end it; a task is cancelled while it still leads."""
    server, left_s, terms = spare_server(), [], []
    release = Future[None]()

    async def cancelled(term: Any) -> None:
        terms.append(term)
        try:
            await asyncio.sleep(FAR_S)
        except asyncio.CancelledError:
            left_s.append(term.remaining())
            raise

    def goes_on(term: Any) -> None:
        terms.append(term)
        release.result(PATIENCE_S)
        left_s.append(term.remaining())

    leader = stand(server.port, timeout=BRIEF_S).run(cancelled if callers.kind == "tasks" else goes_on)
    wait_until(lambda: terms, "it leads")
    server.signal(signal.SIGSTOP)
    if callers.kind == "threads":
        wait_until(lambda: not leader.election.is_leader, "its lease ends")
        assert terms[0].stopping.is_set()
        release.set_result(None)
    wait_until(lambda: left_s, "the work ends")
    assert (0 < left_s[0] <= BRIEF_S / 3) == (callers.kind == "tasks")
    server.signal(signal.SIGCONT)
    wait_until(lambda: len(terms) > 1, "it leads again")
    if callers.kind == "tasks":  # it does not look at `stopping`
        leader.running.cancel()
        del leader.running


@pytest.mark.slow
def test_leader_whose_lock_was_deleted_is_told_and_campaigns_again(
    stand: Stand, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    leader = stand(timeout=BRIEF_S).run()
    leader.until_leads()
    valkey_client.delete("beat")
    leader.until_leads(2)
    assert [what for what, _ in leader.told] == ["started", "stopped", "started"]
    assert "The election 'beat' goes on: " in caplog.text


def test_error_of_on_stopped_ends_the_run_though_the_term_was_lost(
    callers: Callers, valkey: Server, valkey_client: redis.Redis
) -> None:
    told: list[int] = []

    def fail(term: Any) -> None:
        told.append(term.number)
        if len(told) > 1:
            election.stop()
        raise OSError("on_stopped")

    def lead(_term: Any) -> Any:
        valkey_client.delete("beat")
        return asyncio.sleep(0) if callers.kind == "tasks" else None

    election = callers.package.Election(callers.client(valkey.port), "beat", timeout=FAR_S, on_stopped=fail)
    running = callers.begin(lambda: election.run(lead))
    assert str(running.exception(PATIENCE_S)) == "on_stopped"
    assert len(told) == 1


def test_run_of_a_task_that_is_cancelled_in_on_stopped_ends_though_the_term_was_lost(
    valkey: Server, valkey_client: redis.Redis
) -> None:
    async def scenario() -> tuple[bool, int]:
        told: list[int] = []

        async def cancel(term: redislock_fast.asyncio.Term) -> None:
            told.append(term.number)
            task.cancel()
            election.stop()
            await asyncio.sleep(0)

        async def lead(_term: redislock_fast.asyncio.Term) -> None:
            valkey_client.delete("beat")

        async with redis.asyncio.Redis(port=valkey.port) as client:
            election = redislock_fast.asyncio.Election(client, "beat", timeout=FAR_S, on_stopped=cancel)
            task = asyncio.ensure_future(election.run(lead))
            await asyncio.wait([task])
            return task.cancelled(), len(told)

    assert asyncio.run(scenario()) == (True, 1)


@pytest.mark.slow
def test_block_of_a_task_that_is_ended_says_why(spare_server: Callable[..., Server]) -> None:
    server = spare_server()

    async def work(election: redislock_fast.asyncio.Election, left_s: list[float]) -> None:
        async with election.term() as term:
            server.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(FAR_S)
            finally:
                left_s.append(term.remaining())

    async def scenario() -> tuple[list[float], int]:
        left_s: list[float] = []
        async with redis.asyncio.Redis(port=server.port) as client:
            election = redislock_fast.asyncio.Election(client, "beat", timeout=BRIEF_S)
            with pytest.raises(LockLostError, match="The term of the election 'beat' was lost: server gone"):
                await work(election, left_s)
            server.signal(signal.SIGCONT)
        task = asyncio.current_task()
        assert task is not None
        return left_s, task.cancelling() if sys.version_info >= (3, 11) else 0

    (left_s,), cancels = asyncio.run(scenario())
    assert 0 < left_s < BRIEF_S / 3
    assert cancels == 0


def test_block_of_a_task_that_another_cancels_is_cancelled(valkey: Server) -> None:
    async def scenario() -> tuple[bool, bool]:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            election = redislock_fast.asyncio.Election(client, "beat")
            task = asyncio.ensure_future(election.run(lambda term: term.stopping.wait()))
            while not election.is_leader:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled(), await election.leader() is None

    assert asyncio.run(scenario()) == (True, True)


async def _waits_and_leads(
    election: redislock_fast.asyncio.Election, server: Server, caplog: pytest.LogCaptureFixture
) -> bool:
    """Whether it leads once its server is there again, which is away for a while, as it logs."""
    leads = asyncio.Event()

    async def lead(term: Any) -> None:
        leads.set()
        await term.stopping.wait()

    caplog.clear()
    server.kill()
    running = asyncio.ensure_future(election.run(lead))
    await eventually(lambda: "waits until its server is there again" in caplog.text, "that is logged")
    server.start()
    leading = asyncio.ensure_future(leads.wait())
    await asyncio.wait([running, leading], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, leading):
        task.cancel()
    await asyncio.wait([running, leading])
    return running.cancelled() and leads.is_set()


def test_an_election_waits_for_its_server_in_one_event_loop_after_the_other(
    spare_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = spare_server()
    client = redis.asyncio.Redis(port=server.port, retry=Retry(NoBackoff(), 0))
    election = redislock_fast.asyncio.Election(client, "beat")
    for _ in range(2):
        assert asyncio.run(_waits_and_leads(election, server, caplog))
    election.stop()


def _lead_and_stop(election: Election) -> None:
    """Lead once."""
    election.run(lambda _: election.stop())


@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody else traces")
@pytest.mark.parametrize("at", [interrupted_at, handled])
def test_run_that_is_interrupted_leaves_nothing(valkey_client: redis.Redis, at: Callable[..., str]) -> None:
    for strike in each_line(15, at):
        election = Election(valkey_client, "beat", timeout=FAR_S, on_started=str, on_stopped=str)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a lock that no term has got is dropped
            place = strike(partial(_lead_and_stop, election), "election.py", "_election/record.py")
            wait_until(
                lambda: gc.collect() >= 0 and not valkey_client.exists("beat"), f"it is free after one at {place}"
            )
        assert not election.is_leader
        election.stop()
        with pytest.raises(LockError, match="it was stopped"), election.term():  # not: it leads already
            pass


_PROCESS = """
import sys, redis, redislock_fast
election = redislock_fast.Election(redis.Redis(port=int(sys.argv[1])), "beat", timeout=1.5, sleep=0.1)
def lead(term):
    print(term.number, flush=True)
    term.stopping.wait()
election.run(lead)
"""


@pytest.mark.slow
def test_killed_leader_is_followed(valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    command = [sys.executable, "-c", _PROCESS, str(valkey.port)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    seen = []
    try:
        while processes:
            wait_until(lambda: (leader := Election(admin, "beat").leader()) and leader.term not in seen, "one leads")
            leader = Election(admin, "beat").leader()
            assert leader is not None
            assert leader.process is not None
            (process,) = (one for one in processes if one.pid == leader.process.pid)
            seen.append(leader.term)
            assert process.stdout is not None
            assert process.stdout.readline() == f"{leader.term}\n"
            process.kill()
            process.communicate()
            processes.remove(process)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert seen == sorted(set(seen))


def test_forked_child_of_a_leader_campaigns_for_itself(
    valkey: Server, valkey_client: redis.Redis, in_fork: InFork
) -> None:
    election = Election(valkey_client, "beat", timeout=FAR_S)

    def child() -> str:
        seen = [election.is_leader]
        valkey_client.delete("beat")  # that its parent leads no more
        with election.term() as term:
            seen += [election.is_leader, term.valid]
        return str(seen)

    with pytest.raises(LockLostError), election.term():
        assert in_fork(child) == "[False, True, True]"


@pytest.mark.slow
def test_at_most_one_leads_while_many_resign_and_fail(stand: Stand, callers: Callers, valkey: Server) -> None:
    guard, numbers = Guard(), []

    async def lead_task(term: Any) -> None:
        with guard:
            numbers.append(term.number)
            await asyncio.sleep(0.005)
            assert term.valid

    def lead(term: Any) -> None:
        with guard:
            numbers.append(term.number)
            term.stopping.wait(0.005)
            assert term.valid

    def until_numbered(count: int) -> None:
        wait_until(lambda: len(numbers) >= count, f"{count} terms begin", 3 * PATIENCE_S)

    with Proxy(valkey.port) as proxy:
        many = [stand(proxy.port if at % 2 else valkey.port, timeout=5) for at in range(4)]
        for candidate in many:
            candidate.run(lead_task if callers.kind == "tasks" else lead)
        until_numbered(50)
        proxy.cut()
        until_numbered(100)
        proxy.cut()
        until_numbered(150)
        for candidate in many:
            callers.run(candidate.election.stop)
        for candidate in many:
            assert candidate.running.exception(PATIENCE_S) is None
            assert [what for what, _ in candidate.told] == ["started", "stopped"] * (len(candidate.told) // 2)
    assert (guard.overlaps, numbers) == (0, sorted(set(numbers)))


# Bad input


def test_bad_input_is_refused_at_once(callers: Callers, valkey: Server) -> None:
    client, election = callers.client(valkey.port), callers.package.Election
    for settings, error, text in (
        ({"value": "é" * 513}, ValueError, "must have 1024 bytes at most, not 1026"),
        ({"value": b"bytes"}, TypeError, "must be a str, not bytes"),
        ({"on_stopped": 3}, TypeError, "on_stopped is not callable: 3"),
        ({"timeout": None}, ValueError, "auto_renew needs a timeout"),
        ({"timeout": -1}, ValueError, "timeout"),
    ):
        with pytest.raises(error, match=text):
            election(client, "beat", **settings)
    assert "does not lead" in repr(election(client, "beat", value="é" * 512))


# Clusters


@pytest.mark.slow
def test_leader_of_a_cluster_is_known(cluster_client: redis.RedisCluster) -> None:
    for name in ("elected", "{tag}:elected", b"\xff elected"):
        election = Election(cluster_client, name, value="here")
        with election.term() as term:
            leader = election.leader()
        assert leader is not None
        assert (leader.term, leader.value, election.leader()) == (term.number, "here", None)
