"""`once` as a decorator and as a block, for threads and for tasks.

Rules: `FAR_S` never passes during a test; that a time has passed is shown by the server's clock.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import LockLostError, LossReason, Skipped
from redislock_fast.inspection import Participant
from redislock_fast.server import Server
from tests.conftest import MakeUser
from tests.support.async_helpers import async_once as async_no_retries
from tests.support.helpers import once as no_retries
from tests.support.helpers import wait_until
from tests.support.holding import KEPT_S, LONG_S, Losses, until_passed
from tests.support.waiting import FAR_S
from tests.support.worlds import Blocking, World, awaitable, waited

pytestmark = pytest.mark.usefixtures("world")

AT_LEAST_S = 3 * FAR_S

BAD_INPUT = [
    ({"timeout": 0}, ValueError, "timeout"),
    ({"timeout": -1}, ValueError, "timeout"),
    ({"timeout": None}, TypeError, "timeout"),
    ({"timeout": "60"}, TypeError, "timeout"),
    ({"at_least": -1}, ValueError, "at_least"),
    ({"at_least": float("nan")}, ValueError, "at_least"),
    ({"at_least": float("inf")}, ValueError, "at_least"),
    ({"at_least": "55"}, TypeError, "at_least"),
    ({"on_skip": "skip"}, TypeError, "on_skip"),
    ({"on_lost": "lose"}, TypeError, "on_lost"),
    ({"token": 17}, TypeError, "token"),
    ({"others": "run"}, ValueError, "others"),
    ({"others": "wait"}, ValueError, "done_for"),
    ({"done_for": 60}, ValueError, "others"),
    ({"others": "wait", "done_for": 0}, ValueError, "done_for"),
    ({"others": "wait", "done_for": "60"}, TypeError, "done_for"),
    ({"others": "wait", "done_for": 60, "at_least": 1}, ValueError, "at_least"),
]


def block(world: World, client: Any, **settings: Any) -> Any:
    """A `with` block of the job."""
    made = world.ours.once(client, "nightly", **{"timeout": FAR_S, **settings})
    return made if world.in_threads else Blocking(made, world._clients)


def decorated(world: World, client: Any, job: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """The job, decorated: a call runs it or skips it."""
    guard = world.ours.once(client, "nightly", **{"timeout": FAR_S, **settings})
    if world.in_threads:
        return guard(job)  # type: ignore[no-any-return]
    run_once = guard(awaitable(job))
    return lambda *args, **kwargs: waited(run_once(*args, **kwargs))


def described(holder: Participant | None) -> tuple[Any, ...] | None:
    """Who a holder is, without times."""
    if holder is None:
        return None
    return holder.kind, holder.identifier, None if holder.process is None else holder.process.pid


def test_job_runs_and_releases_its_lock(world: World, server: Server, client: redis.Redis) -> None:
    run = decorated(world, world.connect(server.port), lambda *args, **kwargs: (args, kwargs, client.exists("nightly")))
    for _ in range(2):
        assert run(1, two=2) == ((1,), {"two": 2}, 1)
        assert not client.exists("nightly")


def test_key_is_kept_until_at_least(world: World, server: Server, client: redis.Redis) -> None:
    run = decorated(world, world.connect(server.port), lambda: client.incr("runs"), at_least=AT_LEAST_S)
    assert (run(), run()) == (1, None)
    assert 1000 * FAR_S < client.pttl("nightly") <= 1000 * AT_LEAST_S


def test_at_least_may_be_shorter_than_the_timeout(world: World, server: Server, client: redis.Redis) -> None:
    with block(world, world.connect(server.port), timeout=AT_LEAST_S, at_least=FAR_S):
        assert client.pttl("nightly") > 1000 * FAR_S
    assert 0 < client.pttl("nightly") <= 1000 * FAR_S


def test_job_that_took_longer_than_at_least_frees_the_lock(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    with block(world, world.connect(valkey.port), at_least=0.01):
        until_passed(valkey_client, 0.05)
    assert not valkey_client.exists("nightly")


@pytest.mark.slow
def test_lock_is_renewed_while_the_job_runs(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    with block(world, world.connect(valkey.port), timeout=KEPT_S, at_least=0.01) as run:
        until_passed(valkey_client, LONG_S)
        assert run.valid
        assert run.owned()


@pytest.mark.parametrize("at_least", [0, AT_LEAST_S], ids=["released", "kept"])
def test_job_that_raises_ends_as_one_that_does_not(
    world: World, valkey: Server, valkey_client: redis.Redis, at_least: float
) -> None:
    def fail() -> None:
        raise KeyError("the job's own")

    run = decorated(world, world.connect(valkey.port), fail, at_least=at_least)
    with pytest.raises(KeyError, match="the job's own"):
        run()
    assert bool(valkey_client.exists("nightly")) is bool(at_least)


# ---- skipped ----


def test_block_that_is_skipped_raises_who_runs_it(world: World, server: Server) -> None:
    ours = world.connect(server.port)
    with block(world, ours):
        expected = waited(world.ours.holders(ours, "nightly")).holder
        with pytest.raises(Skipped, match="'nightly'") as caught, block(world, world.connect(server.port)):
            raise AssertionError("it ran")
    assert expected.process.pid == os.getpid()
    assert (caught.value.lock_name, described(caught.value.holder)) == ("nightly", described(expected))
    assert caught.value.ttl_s is not None
    assert 0 < caught.value.ttl_s <= FAR_S


def test_worker_that_has_run_the_job_is_known_until_at_least(world: World, valkey: Server) -> None:
    ours = world.connect(valkey.port)
    with block(world, ours, at_least=AT_LEAST_S) as run:
        holder = waited(world.ours.holders(ours, "nightly")).holder
        assert run.valid
    skips: list[Skipped] = []
    decorated(world, world.connect(valkey.port), pytest.fail, on_skip=skips.append)()
    assert [described(skipped.holder) for skipped in skips] == [described(holder)]


def test_what_on_skip_returns_is_the_result(world: World, valkey: Server) -> None:
    ours = world.connect(valkey.port)
    run = decorated(world, ours, pytest.fail, on_skip=lambda skipped: skipped.lock_name)
    with block(world, ours):
        assert run() == "nightly"


def test_holder_is_unknown_where_looking_is_forbidden(
    world: World, valkey: Server, valkey_client: redis.Redis, acl_user: MakeUser
) -> None:
    user = acl_user(valkey, "-get")
    valkey_client.set("nightly", "another's")
    ours = world.connect(valkey.port, **user.options())
    with pytest.raises(Skipped) as caught, block(world, ours):
        raise AssertionError("it ran")
    assert (caught.value.holder, caught.value.ttl_s) == (None, None)


def test_job_that_raises_skipped_was_not_skipped(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    def begin_another() -> None:
        with block(world, world.connect(valkey.port)):
            raise AssertionError("it ran")

    run = decorated(world, world.connect(valkey.port), begin_another, on_skip=lambda _: pytest.fail("it was not"))
    with pytest.raises(Skipped):
        run()
    assert not valkey_client.exists("nightly")


def test_skipped_is_a_lock_error(world: World) -> None:
    assert issubclass(Skipped, redislock_fast.LockError)


# ---- lost ----


@pytest.mark.parametrize("at_least", [0, AT_LEAST_S], ids=["released", "kept"])
@pytest.mark.parametrize("successor", [None, b"another's"], ids=["deleted", "taken"])
def test_lock_that_was_lost_is_told_behind_the_job(
    world: World, valkey: Server, valkey_client: redis.Redis, losses: Losses, successor: bytes | None, at_least: float
) -> None:
    reason = LossReason.TAKEN if successor else LossReason.DELETED
    ours = world.connect(valkey.port)

    def lose() -> None:
        valkey_client.delete("nightly")
        if successor:
            valkey_client.set("nightly", successor)

    run = decorated(world, ours, lose, at_least=at_least, on_lost=world.callback(losses))
    with pytest.raises(LockLostError, match="'nightly'") as caught:
        run()
    wait_until(lambda: losses.reasons, "the loss is told")
    assert ([caught.value.reason], valkey_client.get("nightly")) == (losses.reasons, successor)
    assert losses.reasons == [reason]


# ---- tokens ----


def test_run_that_is_tried_again_with_its_token_is_let_in(
    world: World, valkey: Server, valkey_client: redis.Redis
) -> None:
    task_id = "task-1"
    ran: list[str] = []

    def run_task() -> Any:
        run = decorated(
            world, world.connect(valkey.port), lambda: ran.append(task_id), at_least=AT_LEAST_S, token=lambda: task_id
        )
        return run()

    run_task()
    run_task()
    task_id = "task-2"
    run_task()
    assert ran == ["task-1", "task-1"]
    assert valkey_client.get("nightly") == b"task-1"


@pytest.mark.parametrize("token", ["task-1", b"task-1"])
def test_block_takes_a_token(world: World, valkey: Server, valkey_client: redis.Redis, token: str | bytes) -> None:
    with block(world, world.connect(valkey.port), token=token):
        assert valkey_client.get("nightly") == b"task-1"
    assert not valkey_client.exists("nightly")


def test_decorator_refuses_one_token_for_all_runs(world: World, valkey: Server) -> None:
    with pytest.raises(TypeError, match=r"'nightly'.*token"):
        decorated(world, world.connect(valkey.port), pytest.fail, token="task-1")


# ---- bad input ----


@pytest.fixture
def nowhere(world: World) -> Any:
    """A client without a server: whatever is sent raises."""
    return world.connect(1)


@pytest.mark.parametrize(("settings", "error", "what"), BAD_INPUT, ids=repr)
def test_bad_input_is_refused_by_the_name_of_the_lock(
    world: World, nowhere: Any, settings: dict[str, Any], error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=f"'nightly'.*{what}"):
        block(world, nowhere, **settings)


@pytest.mark.parametrize("name", [None, 17, ["nightly"], print])
def test_name_that_is_no_text_is_refused(world: World, nowhere: Any, name: Any) -> None:
    with pytest.raises(TypeError, match="name"):
        world.ours.once(nowhere, name, timeout=FAR_S)


def test_timeout_must_be_given(world: World, nowhere: Any) -> None:
    with pytest.raises(TypeError, match="timeout"):
        world.ours.once(nowhere, "nightly")


def test_client_of_the_other_kind_is_refused(world: World) -> None:
    other: Any = redis.asyncio.Redis() if world.in_threads else redis.Redis()
    with pytest.raises(TypeError, match=r"'nightly'.*asyncio"):
        world.ours.once(other, "nightly", timeout=FAR_S)


async def _coroutine() -> None:
    """A job for tasks."""


def _function() -> None:
    """A job for threads."""


def _generator() -> Any:
    yield


async def _async_generator() -> Any:
    yield


def test_function_of_another_kind_is_refused(world: World, nowhere: Any) -> None:
    for job in (_generator, _async_generator, _coroutine if world.in_threads else _function):
        with pytest.raises(TypeError, match=f"'nightly'.*{job.__name__}"):
            world.ours.once(nowhere, "nightly", timeout=FAR_S)(job)


def test_object_that_is_called_as_a_coroutine_function_is_one(world: World, nowhere: Any) -> None:
    class Object:
        async def __call__(self) -> None:
            pass

    decorate = world.ours.once(nowhere, "nightly", timeout=FAR_S)
    if world.in_threads:
        with pytest.raises(TypeError, match=r"'nightly'.*a coroutine function"):
            decorate(Object())
    else:
        assert inspect.iscoroutinefunction(decorate(Object()))


def test_nothing_is_sent_before_the_first_run(world: World) -> None:
    retry = no_retries() if world.in_threads else async_no_retries()
    run = decorated(world, world.connect(1, retry=retry), lambda: pytest.fail("it ran"))
    with pytest.raises(ConnectionError):
        run()
