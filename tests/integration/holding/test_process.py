"""Holding a lock in a process that is stopped, killed or forked, or whose GIL is held.

Rules: as in test_holding.
"""

from __future__ import annotations

import threading

import pytest
import redis

from redislock_fast import Lock, LockLostError, LossReason
from redislock_fast.server import Server
from tests.integration.holding.conftest import Held
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, run_script, start, wait_until
from tests.support.holding import (
    BRIEF_S,
    KEPT_S,
    LONG_S,
    RENEWED,
    SLOW_S,
    Holders,
    Losses,
    assert_lost,
    hold_the_gil,
    passing,
    renewed,
    until_passed,
    with_gil,
)
from tests.support.waiting import CALLERS, FAR_S, Peer

FORKS = {
    "threads": """if True:
        import gc, os, signal, sys, time, warnings
        import redis
        from redislock_fast import Lock

        port, ttl_s = int(sys.argv[1]), float(sys.argv[2])
        client = redis.Redis(port=port)
        lock = Lock(client, "name", timeout=ttl_s, auto_renew=True, thread_local=False)
        lock.acquire()

        def hold_one():
            own = Lock(client, "own", timeout=ttl_s, auto_renew=True)
            own.acquire()
            until_ended()
            own.release()
    """,
    "tasks": """if True:
        import asyncio, gc, os, signal, sys, time, warnings
        import redis, redis.asyncio
        from redislock_fast.asyncio import Lock

        port, ttl_s = int(sys.argv[1]), float(sys.argv[2])
        client = redis.Redis(port=port)
        async_client = redis.asyncio.Redis(port=port)
        lock = Lock(async_client, "name", timeout=ttl_s, auto_renew=True, thread_local=False)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(lock.acquire())

        def hold_one():
            async def work():
                own = Lock(async_client, "own", timeout=ttl_s, auto_renew=True)
                await own.acquire()
                await asyncio.get_running_loop().run_in_executor(None, until_ended)
                await own.release()

            asyncio.run(work())
    """,
}
"""Hold a lock, by a process that forks then."""

CHILD = """
        def until_ended():
            give_up = time.monotonic() + 10
            while client.exists("name") and time.monotonic() < give_up:
                time.sleep(0.01)
            print("held" if client.exists("name") else "ended")

        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        print((lock.valid, lock.local.token))
        del lock
        gc.collect()
        hold_one()
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.fixture(params=CALLERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Threads and tasks in turn, in another process."""
    name: str = request.param
    return name


@pytest.mark.slow
def test_lock_that_the_holder_slept_through_is_not_believed(
    valkey: Server, valkey_client: redis.Redis, kind: str
) -> None:
    with Peer(kind, valkey.port, **RENEWED) as peer:
        assert peer.call("acquire")
        peer.freeze()
        wait_until(lambda: not valkey_client.exists("name"), "the lease ends")
        valkey_client.set("name", "another's")
        peer.thaw()
        assert peer.call("remaining") == 0.0
        with pytest.raises(LockLostError):
            peer.call("release")
    assert valkey_client.get("name") == b"another's"


@pytest.mark.slow
def test_process_that_is_killed_is_waited_for_no_longer_than_its_ttl(
    valkey: Server, valkey_client: redis.Redis, kind: str
) -> None:
    waiter = Lock(valkey_client, "name", timeout=FAR_S, sleep=FAR_S, thread_local=False)
    with Peer(kind, valkey.port, **RENEWED) as peer:
        assert peer.call("acquire")
        answer = start(waiter.acquire)
        until_passed(valkey_client, LONG_S)
        assert not answer.done()
        peer.kill()
        assert answer.result(PATIENCE_S) is True


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORKS)
def test_forked_child_keeps_nothing_of_its_parents_alive(valkey: Server, kind: str) -> None:
    """The parent is killed; the child, which renews a lock of its own, lets the parent's end."""
    done = run_script(FORKS[kind] + CHILD, valkey.port, KEPT_S)
    assert (done.stdout, done.stderr) == ("(False, None)\nended\n", "")


@pytest.mark.slow
def test_fork_takes_nothing_from_the_parent(
    in_fork: InFork, hold: Held, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = hold(on_lost=losses, **RENEWED)

    def child() -> str:
        return f"{holder.lock.valid} {holder.lock.lost} {holder.lock.local.token}"

    assert in_fork(child) == "False False None"
    until_passed(valkey_client, LONG_S)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


@with_gil
def test_lock_is_lost_and_told_where_the_gil_is_held_for_longer_than_its_ttl(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(valkey.port, timeout=BRIEF_S, auto_renew=True, on_lost=losses)
    hold_the_gil(2 * BRIEF_S)
    assert (holder.lock.valid, holder.lock.lost) == (False, True)
    assert_lost(holder, losses, LossReason.EXPIRED)


@pytest.mark.slow
@with_gil
def test_lock_is_kept_where_the_gil_is_held_for_less_than_its_renewals_need(
    holders: Holders, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    holder = holders.hold(valkey.port, timeout=SLOW_S, auto_renew=True, on_lost=losses)
    # The connection for renewals is there by then: to make it, the thread of tasks takes the GIL many times.
    wait_until(renewed(lambda: int(valkey_client.pttl("name"))), "it is renewed")
    has_passed = passing(valkey_client, 1.25 * SLOW_S)
    while not has_passed():
        hold_the_gil(SLOW_S / 6)
    assert (losses.reasons, holder.lock.valid, holder.call("owned")) == ([], True, True)


def test_lock_of_a_thread_that_ended_is_released(valkey_client: redis.Redis) -> None:
    lock = Lock(valkey_client, "name", timeout=FAR_S, auto_renew=True)

    def end_holding() -> None:
        holder = threading.Thread(target=lock.acquire)
        holder.start()
        holder.join()  # then it has warned, too
        wait_until(lambda: not valkey_client.exists("name"), "it is released")

    with pytest.warns(ResourceWarning, match="lock 'name' was dropped without a release"):
        end_holding()
