"""`once` with `others="wait"`: the first caller runs the job, and the others wait until it is done.

Rules: `FAR_S` never passes during a test; that the others wait is shown by the lock's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakeredis
import pytest
import redis
from redis.exceptions import ResponseError

from redislock_fast import LockLostError, Skipped
from redislock_fast.server import Server
from redislock_fast.testing import assert_no_locks_left
from tests.conftest import MakeUser
from tests.support.helpers import wait_until
from tests.support.holding import until_passed
from tests.support.waiting import FAR_S, until_queued
from tests.support.worlds import IN_THREADS, Blocking, World, awaitable, waited

pytestmark = pytest.mark.usefixtures("world")

DONE = "{migrate}:rlf:done"
CALLERS = 30


def block(world: World, client: Any, **settings: Any) -> Any:
    """A `with` block of the job."""
    settings = {"timeout": FAR_S, "others": "wait", "done_for": FAR_S, **settings}
    made = world.ours.once(client, "migrate", **settings)
    return made if world.in_threads else Blocking(made, world._clients)


def decorated(world: World, client: Any, job: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """The job, decorated. A call that does not run it returns "done"."""
    settings = {"timeout": FAR_S, "others": "wait", "done_for": FAR_S, "on_skip": lambda _: "done", **settings}
    guard = world.ours.once(client, "migrate", **settings)
    if world.in_threads:
        return guard(job)  # type: ignore[no-any-return]
    run = guard(awaitable(job))
    return lambda *args: waited(run(*args))


class Job:
    """A job that goes on until it is told to end.

    Attributes:
        runs: how often it was begun.
        ends: how often it may end.
        error: what it raises at its end.
    """

    def __init__(self) -> None:
        self.runs = self.ends = 0
        self.error: Exception | None = None

    def __call__(self) -> str:
        self.runs += 1
        number, error = self.runs, self.error
        wait_until(lambda: self.ends >= number, "the job may end")
        if error is not None:
            raise error
        return "ran"


def test_others_wait_until_the_job_is_done(world: World, server: Server, client: redis.Redis) -> None:
    job = Job()
    first, *others = (decorated(world, world.connect(server.port), job) for _ in range(4))
    running = world.start(first)
    wait_until(lambda: job.runs == 1, "the first runs")
    waiting = [world.start(run) for run in others]
    until_queued(client, "migrate", 3)
    assert not client.exists(DONE)
    job.ends = 1
    assert [one.result() for one in (running, *waiting)] == ["ran", "done", "done", "done"]
    assert (job.runs, client.exists("migrate")) == (1, 0)
    assert 0 < client.pttl(DONE) <= 1000 * FAR_S


def test_latecomer_does_not_touch_the_lock(world: World, server: Server, client: redis.Redis) -> None:
    assert decorated(world, world.connect(server.port), lambda: "ran")() == "ran"
    client.set("migrate", "another's")  # whom it would wait for
    assert decorated(world, world.connect(server.port), pytest.fail)() == "done"
    with pytest.raises(Skipped, match="'migrate' is done") as caught, block(world, world.connect(server.port)):
        raise AssertionError("it ran")
    assert (caught.value.lock_name, caught.value.holder, caught.value.ttl_s) == ("migrate", None, None)


def test_job_counts_as_done_for_so_long(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    run = decorated(world, world.connect(valkey.port), lambda: "ran", done_for=0.05)
    assert run() == "ran"
    until_passed(valkey_client, 0.1)
    assert run() == "ran"


def test_job_that_fails_is_run_by_the_next_one(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    job = Job()
    job.error = KeyError("the job's own")
    first, *others = (decorated(world, world.connect(valkey.port), job) for _ in range(3))
    running = world.start(first)
    wait_until(lambda: job.runs == 1, "the first runs")
    waiting = [world.start(run) for run in others]
    until_queued(valkey_client, "migrate", 2)
    job.error = None
    job.ends = 1
    with pytest.raises(KeyError, match="the job's own"):
        running.result()
    wait_until(lambda: job.runs == 2, "the next one runs")
    assert not valkey_client.exists(DONE)
    job.ends = 2
    assert sorted([one.result() for one in waiting]) == ["done", "ran"]
    assert job.runs == 2


def test_many_at_once_run_it_once(world: World, server: Server, client: redis.Redis) -> None:
    ran: list[int] = []
    ours = [world.connect(server.port) for _ in range(3)]
    runs = [decorated(world, ours[number % 3], lambda: ran.append(1)) for number in range(CALLERS)]
    results = [running.result() for running in [world.start(run) for run in runs]]
    assert (len(ran), results.count("done")) == (1, CALLERS - 1)


@IN_THREADS
def test_it_is_noted_before_another_one_can_have_the_lock(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    run = block(world, world.connect(valkey.port))
    release, seen = run.release, []

    def look_and_release() -> None:
        seen.append(valkey_client.exists(DONE, "migrate"))
        release()

    run.release = look_and_release
    with run:
        assert run.valid
    assert (seen, valkey_client.exists("migrate")) == ([2], 0)


def test_job_of_a_lost_lock_is_not_done(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    run = decorated(world, world.connect(valkey.port), lambda: valkey_client.set("migrate", "another's"))
    with pytest.raises(LockLostError, match="'migrate'"):
        run()
    assert (valkey_client.get("migrate"), valkey_client.exists(DONE)) == (b"another's", 0)


def test_user_who_may_run_no_script_is_refused_before_the_job(
    world: World, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser
) -> None:
    user = acl_user(valkey, "-eval", "-evalsha")
    with pytest.raises(ResponseError):
        decorated(world, world.connect(valkey.port, **user.options()), pytest.fail)()
    assert not valkey_client.exists("migrate")


def test_job_is_forgotten_by_its_key(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    run = decorated(world, world.connect(valkey.port), lambda: "ran")
    assert [run(), run(), valkey_client.delete(DONE), run()] == ["ran", "done", 1, "ran"]


def test_mark_is_no_lock(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    assert decorated(world, world.connect(valkey.port), lambda: "ran")() == "ran"
    assert_no_locks_left(valkey_client)
    assert valkey_client.keys() == [DONE.encode()]


def test_it_works_on_a_fake(world: World) -> None:
    pytest.importorskip("lupa")  # for the scripts of fakeredis
    fake = fakeredis.FakeRedis(server=fakeredis.FakeServer())
    run = decorated(world, world.client(fake), lambda: "ran")
    assert [run(), run(), fake.exists(DONE)] == ["ran", "done", 1]
