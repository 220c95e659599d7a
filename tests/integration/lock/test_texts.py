"""What errors and logs say: each names the lock, as a str, and the way out.

The text of an error that redis-py has, too, is redis-py's. A note says more, since Python 3.11.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
import logging
import re
import sys
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.exceptions import LockError, LockNotOwnedError

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import wait_until
from tests.support.waiting import FAR_S
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")

HAS_NOTES = sys.version_info >= (3, 11)
NAME: Any = b"name"
OF_NAME = "of the lock 'name'"


def notes_of(caught: pytest.ExceptionInfo[BaseException]) -> list[str]:
    """The notes of an error."""
    notes: list[str] = getattr(caught.value, "__notes__", [])
    return notes


@pytest.fixture
def unused(connect: Connect) -> redis.Redis:
    """A client without a server: whatever is sent fails."""
    return connect(1)


# ---- while it is used ----


@IN_THREADS
@pytest.mark.parametrize("verb", ["release", "extend", "reacquire"])
def test_another_thread_is_told_of_thread_local(
    world: World, our_lock: Any, valkey_client: redis.Redis, verb: str
) -> None:
    with our_lock(valkey_client, NAME, timeout=FAR_S) as lock, pytest.raises(LockError) as caught:
        world.start(lambda: getattr(lock, verb)(*([1] if verb == "extend" else []))).result()
    assert NAME == caught.value.lock_name
    text = (
        f"{OF_NAME}, which this lock object does not hold for this thread. If another thread has acquired it, "
        "thread_local=False lets all threads use it"
    )
    assert notes_of(caught) == ([text] if HAS_NOTES else [])


@pytest.mark.parametrize("shares", [True, False])
def test_release_of_what_is_not_held_names_the_lock(our_lock: Any, valkey_client: redis.Redis, shares: bool) -> None:
    with pytest.raises(LockError, match="is already unlocked") as caught:
        our_lock(valkey_client, NAME, timeout=FAR_S, thread_local=not shares).release()
    assert [True] * HAS_NOTES == [note.startswith(OF_NAME) for note in notes_of(caught)]
    assert [False] * HAS_NOTES == [shares and "thread_local" in note for note in notes_of(caught)]


@pytest.mark.parametrize("verb", ["release", "extend", "reacquire"])
def test_loss_names_the_lock(our_lock: Any, valkey_client: redis.Redis, verb: str) -> None:
    lock = our_lock(valkey_client, NAME, timeout=FAR_S)
    lock.acquire()
    valkey_client.delete(NAME)
    with pytest.raises(LockNotOwnedError) as caught:
        getattr(lock, verb)(*([1] if verb == "extend" else []))
    assert [OF_NAME] * HAS_NOTES == notes_of(caught)
    assert f"Cannot {verb} a lock that's no longer owned" == str(caught.value)


@pytest.mark.parametrize("options", [{}, {"timeout": FAR_S, "auto_renew": True}], ids=str)
def test_acquire_that_would_wait_for_itself_names_the_way_out(
    world: World, our_lock: Any, valkey_client: redis.Redis, options: dict[str, Any]
) -> None:
    owner = "thread" if world.in_threads else "task"
    text = f"this {owner} holds the lock 'name' and would wait for itself; reentrant=True lets it enter again"
    with our_lock(valkey_client, NAME, **options) as lock, pytest.raises(LockError) as caught:
        lock.acquire()
    assert (text, NAME) == (str(caught.value), caught.value.lock_name)


def test_redlock_that_would_wait_for_itself_names_the_way_out(world: World, fleet: list[Server]) -> None:
    lock = world.redlock([world.connect(server.port) for server in fleet], timeout=FAR_S, auto_renew=True)
    assert lock.acquire()
    with pytest.raises(LockError, match="holds the lock 'name' and would wait for itself; reentrant=True lets"):
        lock.acquire()
    lock.release()


def test_with_that_is_not_entered_names_the_lock(our_lock: Any, valkey_client: redis.Redis) -> None:
    valkey_client.set(NAME, "taken")
    with pytest.raises(LockError) as caught, our_lock(valkey_client, NAME, blocking=False):
        pass
    assert [OF_NAME] * HAS_NOTES == notes_of(caught)
    assert "Unable to acquire lock within the time specified" == str(caught.value)


def test_redlock_that_is_not_entered_names_the_lock(world: World, fleet: list[Server]) -> None:
    for server in fleet:
        with redis.Redis(port=server.port) as client:
            client.set(NAME, "taken")
    lock = world.redlock([world.connect(server.port) for server in fleet], timeout=FAR_S, blocking=False)
    with pytest.raises(LockError) as caught, lock:
        pass
    assert [OF_NAME] * HAS_NOTES == notes_of(caught)


@pytest.mark.parametrize(("taken", "listed"), [(2, ", 'b1'"), (12, ", 'b9' and 2 more")])
def test_batch_that_is_not_entered_names_what_it_has_missed(
    world: World, valkey: Server, valkey_client: redis.Redis, taken: int, listed: str
) -> None:
    names = [f"b{number}".encode() for number in range(taken)]
    for name in names:
        valkey_client.set(name, "taken")
    locker = world.ours.Locker(world.connect(valkey.port))
    batch = waited(locker.acquire_many([b"a", *names], FAR_S, all_or_nothing=True))
    with pytest.raises(LockError, match="Unable to acquire all locks within the time specified") as caught:
        waited(batch.__enter__() if world.in_threads else batch.__aenter__())
    note = "of these locks: 'b0'"
    assert [(True, True)] * HAS_NOTES == [(one.startswith(note), one.endswith(listed)) for one in notes_of(caught)]


def test_logs_name_the_lock(our_lock: Any, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    with our_lock(valkey_client, NAME, timeout=FAR_S, raise_on_release_error=False) as lock:
        lock.release()
    with pytest.raises(KeyError), our_lock(valkey_client, NAME, timeout=FAR_S):
        raise KeyError(valkey_client.set(NAME, "taken"))
    assert all("lock" in text.lower() and "'name'" in text and "b'" not in text for text in caplog.messages)
    assert 2 == len(caplog.messages)


def test_log_of_a_loss_names_the_lock(
    our_lock: Any, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lock = our_lock(valkey_client, NAME, timeout=0.3, auto_renew=True)
    lock.acquire()
    valkey_client.delete(NAME)
    wait_until(lambda: lock.lost and caplog.messages != [], "the loss is found")
    assert ["The lock 'name' was lost: deleted."] == caplog.messages


def test_log_of_a_callback_that_fails_names_the_lock(
    our_lock: Any, valkey_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lock = our_lock(valkey_client, NAME, timeout=0.3, auto_renew=True, on_lost=lambda *_: 1 / 0)
    lock.acquire()
    valkey_client.delete(NAME)
    wait_until(lambda: caplog.messages != [], "the callback was called")
    record = caplog.records[0]
    assert ("on_lost failed for the lock 'name', which was lost (deleted).", logging.ERROR) == (
        record.getMessage(),
        record.levelno,
    )


# ---- when it is made ----


TIMES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sleep": datetime.timedelta(seconds=1)}, TypeError, "sleep is a number of seconds, not timedelta"),
    ({"sleep": -1}, ValueError, "sleep must be a number of seconds from 0, not -1"),
    ({"sleep": True}, TypeError, r"sleep is a number of seconds, not bool: did you mean blocking\?"),
    ({"timeout": True}, TypeError, "timeout is a number of seconds, not bool"),
    ({"timeout": -1}, ValueError, "timeout must be a positive, finite number of seconds, not -1"),
    ({"timeout": datetime.timedelta(seconds=1)}, TypeError, "timeout is a number of seconds, not timedelta"),
    ({"blocking_timeout": "1"}, TypeError, "blocking_timeout is a number of seconds, not str"),
    ({"blocking_timeout": True}, TypeError, "blocking_timeout is a number of seconds, not bool"),
    ({"blocking_timeout": float("nan")}, ValueError, "blocking_timeout must be a number of seconds, not NaN"),
]
OF_LOCKS_ALONE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"linger": True, "timeout": 10}, TypeError, "linger is a number of seconds, not bool"),
    ({"linger": -1, "timeout": 10}, ValueError, "linger must be a positive, finite number of seconds, not -1"),
    ({"linger": True, "timeout": 10, "auto_renew": True}, TypeError, "linger is a number of seconds, not bool"),
]


@pytest.mark.parametrize(("settings", "error", "text"), TIMES + OF_LOCKS_ALONE, ids=str)
def test_impossible_times_are_refused_when_a_lock_is_made(
    world: World, unused: redis.Redis, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        world.ours.Lock(world.client(unused), "name", **settings)
    with pytest.raises(error, match=text):
        world.ours.Locker(world.client(unused)).lock("name", **settings)


@pytest.mark.parametrize(("settings", "error", "text"), TIMES, ids=str)
def test_impossible_times_are_refused_when_a_redlock_is_made(
    world: World, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    clients = [world.connect(port) for port in (1, 2, 3)]
    with pytest.raises(error, match=text):
        world.ours.Redlock(clients, "name", **{"timeout": 10, **settings})


def test_extend_by_a_bool_is_refused(our_lock: Any, valkey_client: redis.Redis) -> None:
    with our_lock(valkey_client, "name", timeout=FAR_S) as lock:
        with pytest.raises(TypeError, match="additional_time is a number of seconds, not bool"):
            lock.extend(True)
        assert lock.owned()


@IN_THREADS
def test_false_is_no_sleep_of_acquire(our_lock: Any, valkey_client: redis.Redis) -> None:
    valkey_client.set("name", "taken")
    with pytest.raises(TypeError, match=r"sleep is a number of seconds, not bool: did you mean blocking\?"):
        our_lock(valkey_client, "name").acquire(False)


def test_times_may_be_numbers_of_any_kind(world: World, unused: redis.Redis) -> None:
    settings: dict[str, Any] = {"sleep": 1, "blocking_timeout": decimal.Decimal(1), "timeout": decimal.Decimal(10)}
    lock = world.ours.Lock(world.client(unused), "name", linger=1, **settings)
    assert (1, 10, False) == (lock.sleep, lock.timeout, lock.locked is None)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("ttl", "timeout"),
        ("expire", "timeout"),
        ("expiry", "timeout"),
        ("acquire_timeout", "blocking_timeout"),
        ("auto_renewal", "auto_renew"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(world: World, unused: redis.Redis, wrong: str, right: str) -> None:
    text = rf"\(\) got an unexpected keyword argument '{wrong}': did you mean '{right}'\?$"
    with pytest.raises(TypeError, match="^Lock" + text):
        world.ours.Lock(world.client(unused), "name", **{wrong: 3})
    with pytest.raises(TypeError, match="^Redlock" + text):
        world.ours.Redlock([world.connect(port) for port in (1, 2, 3)], "name", 10, **{wrong: 3})
    with pytest.raises(TypeError, match=r"^Locker\.acquire_many" + text):
        world.ours.Locker(world.client(unused)).acquire_many(["name"], **{wrong: 3})
    with pytest.raises(TypeError, match="^Lock" + text):
        world.ours.Locker(world.client(unused)).lock("name", **{wrong: 3})


@pytest.mark.parametrize(
    ("wrong", "hint"), [("ttl", ": did you mean 'timeout'?"), ("at_last", ": did you mean 'at_least'?"), ("renew", "")]
)
def test_wrong_names_of_once_lead_to_its_own(world: World, unused: redis.Redis, wrong: str, hint: str) -> None:
    text = f"once() got an unexpected keyword argument '{wrong}'{hint}"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        world.ours.once(world.client(unused), "name", timeout=3, **{wrong: 3})


def test_timeout_of_acquire_leads_to_blocking_timeout(world: World) -> None:
    locks = [
        world.ours.Lock(world.connect(1), "name"),
        world.ours.Redlock([world.connect(port) for port in (1, 2, 3)], "name", timeout=10),
    ]
    for lock in locks:
        text = rf"^{type(lock).__name__}\.acquire\(\) .* 'timeout': did you mean 'blocking_timeout'\?$"
        with pytest.raises(TypeError, match=text):
            lock.acquire(timeout=3)
        assert "timeout" not in inspect.signature(lock.acquire).parameters


def test_missing_arguments_name_the_public_class(world: World) -> None:
    with pytest.raises(TypeError, match=r"^Lock\.__init__\(\) missing 1 required positional argument: 'name'"):
        world.ours.Lock("name")
    with pytest.raises(TypeError, match=r"^Redlock\.__init__\(\) missing 1 required positional argument: 'timeout'"):
        world.ours.Redlock([], "name")
    with pytest.raises(TypeError, match=r"^Locker\.lock\(\) missing 1 required positional argument: 'name'"):
        world.ours.Locker(world.connect(1)).lock()


def test_what_is_no_client_leads_to_the_class_of_clients(world: World) -> None:
    module: Any = redis if world.in_threads else redis.asyncio
    where = module.__name__
    pools = [module.ConnectionPool(), module.BlockingConnectionPool()]
    for pool in pools:
        text = rf"^a lock needs a {where}\.Redis or .*, not {type(pool).__name__}: {where}\.Redis\(connection_pool="
        with pytest.raises(TypeError, match=text):
            world.ours.Lock(pool, "name")
    for other in ("name", None, module.Connection(), module.Sentinel([])):
        with pytest.raises(TypeError, match=rf"^a lock needs a {where}\.Redis or .*, not {type(other).__name__}$"):
            world.ours.Lock(other, "name")


def test_client_of_the_other_kind_leads_to_the_other_function(world: World) -> None:
    other: Any = redis.asyncio.Redis(port=1) if world.in_threads else redis.Redis(port=1)
    package = "redislock_fast.asyncio" if world.in_threads else "redislock_fast"
    text = rf"{package}\.Lock, or {package}\.holders"
    with pytest.raises(TypeError, match=text):
        waited(world.ours.holders(other, "name"))
    with pytest.raises(TypeError, match=text):
        world.ours.Lock(other, "name")
