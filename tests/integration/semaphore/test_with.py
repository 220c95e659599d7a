"""Blocks and calls: `with` of one object for any number of callers, `release`, handles, `limited`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import pickle
import warnings
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError

import redislock_fast
import redislock_fast.asyncio
from redislock_fast import Handle, LockLostError
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.async_helpers import eventually
from tests.support.helpers import PATIENCE_S, run_script, start, wait_until
from tests.support.permits import QUEUE, ends_of, held, new_tokens, run_acquire
from tests.support.waiting import FAR_S, LATE
from tests.support.worlds import IN_THREADS, World, awaitable, waited

pytestmark = pytest.mark.usefixtures("world")


NO_PERMIT = r"semaphore 'name': this (thread|task) has no permit"


def lose_and_fail(admin: redis.Redis) -> None:
    """Take all permits from their holders, and raise."""
    lose(admin)
    raise ZeroDivisionError


@pytest.fixture
def semaphore(world: World, valkey: Server) -> Any:
    """A semaphore for three."""
    return world.semaphore(world.connect(valkey.port), 3, **LATE)


@pytest.fixture
def admin(valkey_client: redis.Redis) -> redis.Redis:
    """A client that looks on."""
    return valkey_client


def lose(admin: redis.Redis) -> None:
    """Take all permits from their holders."""
    admin.delete("name")


# ---- with ----


def test_blocks_of_one_caller_are_nested(semaphore: Any, admin: redis.Redis) -> None:
    with semaphore as outer, semaphore as inner:
        assert (len(ends_of(admin)), outer.valid, inner.valid) == (2, True, True)
        with semaphore:
            assert semaphore.acquire(blocking=False) is None
        assert len(ends_of(admin)) == 2
    assert (outer.valid, inner.valid, admin.keys()) == (False, False, [])


def test_one_object_serves_many_callers(world: World, semaphore: Any, admin: redis.Redis) -> None:
    done: list[bool] = []

    def work() -> None:
        for _ in range(5):
            with semaphore as permit:
                done.append(permit.valid and held(admin) <= 3)

    for each in [world.start(work) for _ in range(8)]:
        each.result(PATIENCE_S)
    assert done == [True] * 40
    assert admin.keys() == []


def test_a_permit_that_was_released_in_its_block_is_left_without_an_error(semaphore: Any, admin: redis.Redis) -> None:
    with semaphore as permit:
        permit.release()
        assert admin.keys() == []
    with semaphore:
        semaphore.release()
        assert admin.keys() == []
    with semaphore as outer:
        with semaphore as inner:
            outer.release()
            assert (outer.valid, inner.valid) == (False, True)
        assert admin.keys() == []


def test_an_error_in_a_block_releases_the_permit(semaphore: Any, admin: redis.Redis) -> None:
    with pytest.raises(ZeroDivisionError), semaphore:
        raise ZeroDivisionError
    assert admin.keys() == []


def test_a_loss_is_raised_at_the_end_of_a_block_unless_the_block_has_raised(semaphore: Any, admin: redis.Redis) -> None:
    with pytest.raises(LockLostError, match="permit of the semaphore 'name'"), semaphore:
        lose(admin)
    with pytest.raises(ZeroDivisionError), semaphore:
        lose_and_fail(admin)
    with semaphore as permit:
        assert permit.valid
    assert admin.keys() == []


def test_a_permit_is_a_context_of_its_own(semaphore: Any, admin: redis.Redis) -> None:
    with semaphore.acquire() as permit:
        assert (permit.valid, permit.name) == (True, "name")
    assert admin.keys() == []
    with pytest.raises(LockError, match="Cannot enter a permit of the semaphore 'name' that was released"), permit:
        pass


def test_a_block_that_gets_no_permit_raises(world: World, valkey: Server, admin: redis.Redis) -> None:
    run_acquire(admin, new_tokens(1)[0], limit=1)
    semaphore = world.semaphore(world.connect(valkey.port), 1, blocking_timeout=1, **LATE)
    with pytest.raises(LockError, match="Unable to acquire a permit") as caught, semaphore:
        pass
    assert caught.value.lock_name == "name"


def test_a_block_that_another_caller_leaves_gives_its_permit_back(
    world: World, semaphore: Any, admin: redis.Redis
) -> None:
    world.beside(semaphore.__enter__)  # that thread or task is gone
    assert held(admin) == 1
    world.beside(lambda: semaphore.__exit__(None, None, None))
    wait_until(lambda: admin.keys() == [], "it is released")


def test_blocks_that_other_callers_leave_give_one_permit_back_each(
    world: World, semaphore: Any, admin: redis.Redis
) -> None:
    semaphore.__enter__()
    for _ in range(2):
        world.beside(semaphore.__enter__)
    for left in (2, 1, 0):
        assert held(admin) == left + 1
        (world.beside if left else lambda work: work())(lambda: semaphore.__exit__(None, None, None))
        assert held(admin) == left
    with pytest.raises(LockError, match=NO_PERMIT):
        semaphore.__exit__(None, None, None)


@contextlib.contextmanager
def entered(semaphore: Any) -> Any:
    """A block in a generator, as a fixture or a dependency of a web framework has it."""
    with semaphore as permit:
        yield permit


@IN_THREADS
def test_a_generator_that_another_thread_closes_gives_its_permit_back(
    world: World, semaphore: Any, admin: redis.Redis
) -> None:
    blocks = [entered(semaphore) for _ in range(2)]
    for block in blocks:
        start(block.__enter__).result(PATIENCE_S)
    assert held(admin) == 2
    for block in blocks:
        start(functools.partial(block.__exit__, None, None, None)).result(PATIENCE_S)
    assert admin.keys() == []


@IN_THREADS
def test_a_generator_that_another_task_closes_gives_its_permit_back(valkey: Server, admin: redis.Redis) -> None:
    async def hold(semaphore: redislock_fast.asyncio.Semaphore) -> AsyncGenerator[None]:
        async with semaphore:
            yield

    async def scenario() -> None:
        async with redis.asyncio.Redis(port=valkey.port) as client:
            generator = hold(redislock_fast.asyncio.Semaphore(client, "name", 1, timeout=FAR_S))
            await anext(generator)
            assert held(admin) == 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # nobody may wait while a generator is closed
                await asyncio.create_task(generator.aclose())
            await eventually(lambda: not admin.keys(), "it is given back")

    asyncio.run(scenario())


# ---- release ----


def test_release_gives_back_the_callers_last_permit(world: World, semaphore: Any, admin: redis.Redis) -> None:
    first, second = semaphore.acquire(), semaphore.acquire()
    with pytest.raises(LockError, match=NO_PERMIT):
        world.beside(semaphore.release)
    semaphore.release()
    assert (first.valid, second.valid) == (True, False)
    semaphore.release()
    assert admin.keys() == []
    with pytest.raises(LockError, match=NO_PERMIT):
        semaphore.release()


def test_any_caller_may_release_a_permit_and_only_once(world: World, semaphore: Any, admin: redis.Redis) -> None:
    permit, other = semaphore.acquire(), semaphore.acquire()
    world.beside(permit.release)
    assert (permit.valid, other.valid, held(admin)) == (False, True, 1)
    with pytest.raises(LockError, match="Cannot release a permit of the semaphore 'name' that was released"):
        permit.release()
    assert held(admin) == 1
    semaphore.release()  # the other one: the first is not the caller's any more
    assert admin.keys() == []


def test_only_one_of_many_callers_releases_a_permit(world: World, semaphore: Any, admin: redis.Redis) -> None:
    for _ in range(10):
        kept, permit = semaphore.acquire(), semaphore.acquire()
        outcomes = []
        for release in [world.start(permit.release) for _ in range(4)]:
            try:
                outcomes.append(release.result(PATIENCE_S))
            except LockError as error:
                outcomes.append(type(error))
        assert sorted(map(str, outcomes)) == sorted([*[str(LockError)] * 3, "None"])
        assert held(admin) == 1
        kept.release()


def test_a_permit_that_was_released_says_so(semaphore: Any) -> None:
    permit = semaphore.acquire()
    assert 0 < permit.remaining() <= FAR_S
    assert (permit.valid, permit.lost) == (True, False)
    permit.ensure_held()
    assert "held" in repr(permit)
    permit.release()
    assert (permit.valid, permit.lost, permit.remaining()) == (False, False, 0.0)
    for call in (permit.ensure_held, permit.detach):
        with pytest.raises(LockError, match="a permit of the semaphore 'name' that was released"):
            call()
    assert repr(permit) == "<Permit of 'name': not held>"
    assert "rlf" not in repr(semaphore) + repr(permit)


# ---- handles ----


def test_a_permit_moves_with_its_handle(world: World, valkey: Server, semaphore: Any, admin: redis.Redis) -> None:
    permit = semaphore.acquire()
    (token,) = ends_of(admin)
    handle = Handle.from_dict(permit.detach().to_dict())
    assert (permit.valid, handle.token, held(admin)) == (False, token, 1)
    with pytest.raises(LockError):
        semaphore.release()
    other = world.semaphore(world.connect(valkey.port), 3, **LATE)
    attached = other.attach(pickle.loads(pickle.dumps(handle)))
    attached.ensure_held()
    assert 0 < attached.remaining() <= FAR_S
    other.release()
    assert (attached.valid, admin.keys()) == (False, [])


def test_a_name_of_bytes_is_the_same(world: World, valkey: Server, semaphore: Any, admin: redis.Redis) -> None:
    handle = semaphore.acquire().detach()
    other = world.semaphore(world.connect(valkey.port), 3, b"name", **LATE)
    other.attach(handle).release()
    assert admin.keys() == []


ATTACHER = """
import sys, json, redis
from redislock_fast import Handle, Semaphore
semaphore = Semaphore(redis.Redis(port=int(sys.argv[1])), "name", 3, timeout=60)
with semaphore.attach(Handle.from_dict(json.loads(sys.argv[2]))) as permit:
    print(permit.valid)
"""


def test_another_process_releases_an_attached_permit(valkey: Server, semaphore: Any, admin: redis.Redis) -> None:
    handle = semaphore.acquire().detach()
    assert run_script(ATTACHER, valkey.port, json.dumps(handle.to_dict())).stdout == "True\n"
    assert admin.keys() == []


def test_an_attached_permit_is_renewed(world: World, valkey: Server, admin: redis.Redis) -> None:
    semaphore = world.semaphore(world.connect(valkey.port), 3, timeout=1.5, sleep=FAR_S)
    permit = semaphore.attach(semaphore.acquire().detach())
    (end,) = ends_of(admin).values()
    wait_until(lambda: list(ends_of(admin).values()) > [end], "it is renewed")
    permit.release()


def test_the_ttl_of_a_handle_is_that_of_its_permit_alone(
    world: World, valkey: Server, semaphore: Any, admin: redis.Redis
) -> None:
    brief = world.semaphore(world.connect(valkey.port), 3, timeout=FAR_S / 2)
    attached = brief.attach(semaphore.acquire().detach())
    assert FAR_S / 2 < attached.remaining() <= FAR_S
    attached.release()
    permits = [brief.acquire() for _ in range(2)]
    assert [True, True] == [0 < permit.remaining() <= FAR_S / 2 for permit in permits]
    assert admin.pttl("name") <= 1000 * FAR_S / 2
    for permit in permits:
        permit.release()


def test_a_handle_of_something_else_is_refused(
    world: World, valkey: Server, semaphore: Any, admin: redis.Redis
) -> None:
    permit = semaphore.acquire()
    handle = permit.detach()
    lock = world.lock(world.connect(valkey.port), "lock", timeout=FAR_S)
    lock.acquire()
    of_lock = lock.detach()
    renamed = Handle("other", handle.token, handle.timeout, handle.expires_at)
    with pytest.raises(TypeError):
        semaphore.attach("name")
    with pytest.raises(ValueError, match="'other', not of the semaphore 'name'"):
        semaphore.attach(renamed)
    with pytest.raises(ValueError, match="lock 'name'"):
        semaphore.attach(Handle("name", of_lock.token, of_lock.timeout, of_lock.expires_at))
    with pytest.raises(ValueError, match="semaphore 'name'"):
        world.ours.Lock.attach(world.connect(valkey.port), handle)
    assert sorted(admin.keys()) == [b"lock", b"name"]
    semaphore.attach(handle).release()
    lock_again = world.ours.Lock.attach(world.connect(valkey.port), of_lock)
    waited(lock_again.release())
    assert admin.keys() == []


# ---- limited ----


def limited(world: World, client: Any, name: Any, limit: int, **settings: Any) -> Callable[[Any], Callable[..., Any]]:
    """`limited` for a function that blocks, which is called like one."""
    if world.in_threads:
        return redislock_fast.limited(client, name, limit, **settings)

    decorator = redislock_fast.asyncio.limited(client, name, limit, **settings)

    def decorate(job: Any) -> Any:
        decorated = decorator(functools.wraps(job)(awaitable(job)))
        return functools.wraps(job)(lambda *args, **kwargs: waited(decorated(*args, **kwargs)))

    return decorate


def test_each_value_of_a_template_has_a_semaphore_of_its_own(world: World, valkey: Server, admin: redis.Redis) -> None:
    seen = []

    @limited(world, world.connect(valkey.port), "export:{user.name}:{kind}:{rest[0]:03d}", 1)
    def export(user: Any, *rest: int, kind: str = "pdf", **more: Any) -> int:
        seen.extend(admin.keys())
        return len(rest)

    @limited(world, world.connect(valkey.port), "plain", 1)
    def plain(*args: Any) -> Any:
        seen.extend(admin.keys())
        return args

    assert export.__name__ == "export"
    assert export(world_user(), 7) == 1
    assert export(world_user(), 8, 9, kind="{csv}", other=1) == 2
    assert plain(1, 2) == (1, 2)
    assert seen == [b"export:anna:pdf:007", b"export:anna:{csv}:008", b"plain"]
    assert admin.keys() == []


def world_user() -> Any:
    """A user."""
    return SimpleNamespace(name="anna")


def test_methods_are_limited(world: World, valkey: Server, admin: redis.Redis) -> None:
    class Service:
        def __init__(self, name: str) -> None:
            self.name = name

        @limited(world, world.connect(valkey.port), "{self.name}:{job}", 1)
        def run(self, job: int) -> Any:
            return admin.keys()

    assert (Service("a").run(1), Service("b").run(job=2)) == ([b"a:1"], [b"b:2"])


def test_a_call_beyond_the_limit_waits_or_is_given_to_on_full(world: World, valkey: Server, admin: redis.Redis) -> None:
    (token,) = new_tokens(1)
    run_acquire(admin, token, limit=1)
    client = world.connect(valkey.port)
    errors: list[LockError] = []
    full = limited(world, client, "name", 1, on_full=errors.append)(lambda: 1)
    assert (full(), [str(error) for error in errors]) == (
        None,
        ["Unable to acquire a permit within the time specified"],
    )
    told = limited(world, client, "name", 1, on_full=lambda _: "later", blocking_timeout=0.02)(lambda: 1)
    assert told() == "later"
    refused = limited(world, client, "name", 1, blocking=False)(lambda: 1)
    with pytest.raises(LockError, match="permit"):
        refused()
    waits = limited(world, client, "name", 1, sleep=0.05)(lambda: 1)
    waiting = world.start(waits)
    wait_until(lambda: admin.zcard(QUEUE) == 1, "it waits")
    admin.zrem("name", token)
    assert waiting.result(PATIENCE_S) == 1
    assert admin.keys() == []


def test_the_error_of_a_call_is_raised_and_its_permit_released(
    world: World, valkey: Server, admin: redis.Redis
) -> None:
    @limited(world, world.connect(valkey.port), "name", 1)
    def fails(number: int) -> float:
        return 1 / number

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fails(0)
    with pytest.raises(TypeError):
        fails()
    assert (fails(1), admin.keys()) == (1.0, [])


def test_many_names_are_limited_at_the_same_time(world: World, valkey: Server, admin: redis.Redis) -> None:
    @limited(world, world.connect(valkey.port), "n{number}", 1)
    def held_names(number: int) -> bool:
        return bool(admin.exists(f"n{number}"))

    assert [held_names(number) for number in range(1100)] == [True] * 1100
    assert admin.keys() == []


@pytest.mark.parametrize(
    ("name", "error"),
    [("{user}", ValueError), ("{}", ValueError), ("{0}", ValueError), ("{job", ValueError), (b"name", TypeError)],
    ids=repr,
)
def test_a_wrong_template_is_refused_when_the_function_is_decorated(
    world: World, valkey: Server, name: Any, error: type[Exception]
) -> None:
    decorate = limited(world, world.connect(valkey.port), name, 1)

    def work(job: int) -> None:
        pass

    with pytest.raises(error):
        decorate(work)


@IN_THREADS
def test_a_parameter_that_a_partial_function_has_no_more_is_refused(valkey: Server, connect: Connect) -> None:
    def work(job: int) -> None:
        pass

    with pytest.raises(ValueError, match="has no parameter 'job'"):
        redislock_fast.limited(connect(valkey.port), "{job}", 1)(functools.partial(work, 1))


def test_wrong_settings_are_refused_when_the_decorator_is_made(world: World, valkey: Server) -> None:
    client = world.connect(valkey.port)
    for wrong in ({"limit": 0}, {"timeout": 0}, {"unknown": 1}, {"on_full": 5}):
        arguments: dict[str, Any] = {"limit": 1, **wrong}
        with pytest.raises((TypeError, ValueError)):
            limited(world, client, "name", **arguments)


def test_a_function_of_the_other_kind_is_refused(world: World, valkey: Server) -> None:
    client = world.connect(valkey.port)

    async def task() -> None:
        pass

    def plain() -> None:
        pass

    class Object:
        async def __call__(self) -> None:
            pass

    decorator = world.ours.limited(client, "name", 1)
    for other in (task, Object()) if world.in_threads else (plain,):
        with pytest.raises(TypeError, match="function"):
            decorator(other)
