"""One suite on redis-py's Locks and on ours, for threads and for asyncio: the surface, ownership, expiry, errors.

Rules: each test passes on both classes, in threads and in each kind of loop, and on every kind of server; what redis-py
does wrong is in test_fixed_bugs, what is special to asyncio in test_asyncio_parity.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, LockNotOwnedError

from tests.support.helpers import REDIS_PY, TAKES_RAISE_ON_RELEASE_ERROR, LockClass, in_thread, settings_of
from tests.support.worlds import IN_THREADS, Blocking, World

pytestmark = pytest.mark.usefixtures("world")

REQUIRED = inspect.Parameter.empty
CONSTRUCTOR = [
    ("self", REQUIRED),
    ("redis", REQUIRED),
    ("name", REQUIRED),
    ("timeout", None),
    ("sleep", 0.1),
    ("blocking", True),
    ("blocking_timeout", None),
    ("thread_local", True),
    ("raise_on_release_error", True),
]
LAST_OF_CLIENT_LOCK = (False,) if TAKES_RAISE_ON_RELEASE_ERROR else ()
"""What `client.lock()` takes behind `thread_local`."""

SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "register_scripts": [("self", REQUIRED)],
    "acquire": [("self", REQUIRED), ("sleep", None), ("blocking", None), ("blocking_timeout", None), ("token", None)],
    "do_acquire": [("self", REQUIRED), ("token", REQUIRED)],
    "locked": [("self", REQUIRED)],
    "owned": [("self", REQUIRED)],
    "release": [("self", REQUIRED)],
    "do_release": [("self", REQUIRED), ("expected_token", REQUIRED)],
    "extend": [("self", REQUIRED), ("additional_time", REQUIRED), ("replace_ttl", False)],
    "do_extend": [("self", REQUIRED), ("additional_time", REQUIRED), ("replace_ttl", REQUIRED)],
    "reacquire": [("self", REQUIRED)],
    "do_reacquire": [("self", REQUIRED)],
    "__enter__": [("self", REQUIRED)],
    "__exit__": [("self", REQUIRED), ("exc_type", REQUIRED), ("exc_value", REQUIRED), ("traceback", REQUIRED)],
}


def assert_signature(method: Callable[..., Any], expected: list[tuple[str, Any]]) -> None:
    """It takes these, and nothing else but by keyword."""
    parameters = inspect.signature(method).parameters.values()
    positional = [p for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    added = [p for p in parameters if p not in positional]
    assert expected == [(p.name, p.default) for p in positional]
    assert all(p.kind is p.VAR_KEYWORD or (p.kind is p.KEYWORD_ONLY and p.default is not p.empty) for p in added)


@pytest.mark.usefixtures("raise_on_release_error")
@IN_THREADS
def test_signature_of_the_constructor(lock_class: LockClass) -> None:
    assert_signature(lock_class.__init__, CONSTRUCTOR)


@IN_THREADS
@pytest.mark.parametrize("method", SIGNATURES)
def test_signature(lock_class: LockClass, method: str) -> None:
    assert_signature(getattr(lock_class, method), SIGNATURES[method])


@pytest.mark.usefixtures("raise_on_release_error")
def test_attributes_hold_what_the_constructor_was_given(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", 10, 0.2, False, 3, False, False)
    assert lock.redis is client
    expected = ("name", 10, 0.2, False, 3, False, False)
    assert expected == settings_of(lock)
    assert isinstance(lock.local, SimpleNamespace)


@pytest.mark.usefixtures("raise_on_release_error")
def test_attributes_have_redis_pys_defaults(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    expected = (None, 0.1, True, None, True, True, None)
    actual = (
        lock.timeout,
        lock.sleep,
        lock.blocking,
        lock.blocking_timeout,
        lock.thread_local,
        lock.raise_on_release_error,
        lock.local.token,
    )
    assert expected == actual


def test_attributes_can_be_changed_after_construction(lock_class: LockClass, client: redis.Redis) -> None:
    client.set("second", "taken")
    lock = lock_class(client, "first", timeout=10)
    lock.name = "second"
    lock.blocking = False
    assert not lock.acquire()
    client.delete("second")
    lock.timeout = 100
    assert lock.acquire()
    assert 10_000 < client.pttl("second") <= 100_000
    assert not client.exists("first")
    lock.release()


def test_client_can_be_changed_after_construction(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    with redis.Redis(port=client.connection_pool.connection_kwargs["port"], db=1) as other:
        lock.redis = other
        assert lock.acquire()
        assert (0, 1) == (client.exists("name"), other.exists("name"))
        lock.release()
        assert not other.exists("name")


@pytest.mark.usefixtures("raise_on_release_error")
@IN_THREADS
def test_client_lock_makes_the_given_class(lock_class: LockClass, client: redis.Redis) -> None:
    lock = client.lock("name", 10, 0.2, False, 3, lock_class, False, *LAST_OF_CLIENT_LOCK)
    assert type(lock) is lock_class
    assert ("name", 10, 0.2, False, 3, False, not LAST_OF_CLIENT_LOCK) == settings_of(lock)


def test_acquire_sets_the_name_to_the_token(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    assert lock.acquire(blocking=False) is True
    assert isinstance(lock.local.token, bytes)
    assert lock.local.token == client.get("name")
    assert [b"name"] == client.keys()
    assert -1 == client.ttl("name")


def test_release_deletes_the_key_and_forgets_the_token(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    lock.acquire()
    assert lock.release() is None  # type: ignore[func-returns-value]
    assert lock.local.token is None
    assert [] == client.keys()


def test_acquire_of_a_taken_lock_returns_false(lock_class: LockClass, client: redis.Redis) -> None:
    first, second = lock_class(client, "name"), lock_class(client, "name")
    assert first.acquire(blocking=False)
    assert second.acquire(blocking=False) is False
    assert second.local.token is None
    assert first.local.token == client.get("name")
    first.release()
    assert second.acquire(blocking=False) is True


def test_acquire_again_without_blocking_returns_false_while_held(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    assert lock.acquire(blocking=False)
    token = lock.local.token
    assert lock.acquire(blocking=False) is False
    assert token == lock.local.token == client.get("name")
    lock.release()


@pytest.mark.parametrize("timeout_s", [10, 10.0, 9.5])
def test_timeout_is_the_keys_expiry(lock_class: LockClass, client: redis.Redis, timeout_s: float) -> None:
    lock = lock_class(client, "name", timeout=timeout_s)
    assert lock.acquire()
    assert 8_000 < client.pttl("name") <= timeout_s * 1000
    lock.release()


def test_copy_shares_the_client_and_the_ownership(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    twin = copy.copy(lock)
    assert twin.redis is client
    assert twin.owned()
    twin.release()
    assert not client.exists("name")


def test_copy_of_a_subclass_shares_what_it_has_in_slots(lock_class: LockClass, client: redis.Redis) -> None:
    class Noted(lock_class):  # type: ignore[misc, valid-type]  # a variable
        __slots__ = ("__private", "not_set", "note")

        def keep(self, private: str) -> None:
            self.__private = private

        def kept(self) -> str:
            return self.__private

    class Single(Noted):
        __slots__ = "single"  # noqa: PLC0205  # one name, as a text

        @property
        def sleep(self) -> float:
            return 0.05

        @sleep.setter
        def sleep(self, seconds: float) -> None:
            if "sleeps" in vars(self):
                raise AttributeError
            self.__dict__["sleeps"] = True

    lock: Any = Single(client, "name", timeout=10)
    lock.keep("mine")
    lock.note = "of the user's own"
    lock.acquire()
    twin = copy.copy(lock)
    assert ("mine", "of the user's own", 0.05) == (twin.kept(), twin.note, twin.sleep)
    assert not hasattr(twin, "not_set")
    twin.release()
    assert not client.exists("name")


def test_locked_tells_of_anybodys_lock(lock_class: LockClass, client: redis.Redis) -> None:
    lock, other = lock_class(client, "name"), lock_class(client, "name")
    assert lock.locked() is False
    lock.acquire()
    assert (True, True) == (lock.locked(), other.locked())
    lock.release()
    assert (False, False) == (lock.locked(), other.locked())


def test_locked_is_true_for_a_key_set_by_hand(lock_class: LockClass, client: redis.Redis) -> None:
    client.set("name", "")
    assert lock_class(client, "name").locked() is True


def test_owned_tells_of_this_lock_only(lock_class: LockClass, client: redis.Redis) -> None:
    lock, other = lock_class(client, "name"), lock_class(client, "name")
    assert lock.owned() is False
    lock.acquire()
    assert (True, False) == (lock.owned(), other.owned())
    client.set("name", "stolen")
    assert lock.owned() is False
    client.delete("name")
    assert lock.owned() is False


@pytest.mark.parametrize(
    ("given", "stored"),
    [("token", b"token"), (b"token", b"token"), ("t\u00f6ken", b"t\xc3\xb6ken"), (b"\xff\0\r\n",) * 2],
)
def test_own_token_is_used(lock_class: LockClass, client: redis.Redis, given: Any, stored: bytes) -> None:
    lock = lock_class(client, "name", timeout=10)
    assert lock.acquire(token=given)
    assert stored == client.get("name") == lock.local.token
    assert lock.owned()
    assert lock.extend(10)
    lock.release()
    assert not client.exists("name")


def test_tokens_differ_from_acquire_to_acquire(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    tokens = set()
    for _ in range(20):
        lock.acquire()
        tokens.add(lock.local.token)
        lock.release()
    assert 20 == len(tokens)


@pytest.mark.usefixtures("raise_on_release_error")
def test_token_is_in_no_message_and_no_log(
    lock_class: LockClass, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    lock = lock_class(client, "name", timeout=10, raise_on_release_error=False)
    seen: list[str] = []
    with lock:
        token = lock.local.token.decode()
        seen += [repr(lock), str(lock)]
        client.delete("name")
        uses: list[Callable[[], object]] = [lambda: lock.extend(1), lock.reacquire]
        for fails in uses:
            with pytest.raises(LockNotOwnedError) as caught:
                fails()
            seen += [str(caught.value), repr(caught.value), repr(vars(caught.value))]
    seen += [record.getMessage() for record in caplog.records]
    assert any("no longer owned" in text for text in seen)
    assert not [text for text in seen if token in text]


def test_context_manager_holds_the_lock(lock_class: LockClass, client: redis.Redis) -> None:
    with lock_class(client, "name") as lock:
        assert type(lock) is type(lock_class(client, "other"))
        assert lock.local.token == client.get("name")
    assert not client.exists("name")


def test_context_manager_releases_when_the_body_raises(lock_class: LockClass, client: redis.Redis) -> None:
    with pytest.raises(KeyError), lock_class(client, "name"):
        raise KeyError
    assert not client.exists("name")


@pytest.mark.parametrize("settings", [{"blocking": False}, {"blocking_timeout": 0.05}])
def test_context_manager_that_cannot_acquire_raises_lock_error(
    lock_class: LockClass, client: redis.Redis, settings: dict[str, Any]
) -> None:
    client.set("name", "taken")
    lock = lock_class(client, "name", **settings)
    with pytest.raises(LockError) as caught, lock:
        pass
    _assert_error(caught.value, LockError, "Unable to acquire lock within the time specified", lock)
    assert b"taken" == client.get("name")


def test_context_manager_raises_when_no_longer_owned(lock_class: LockClass, client: redis.Redis) -> None:
    with pytest.raises(LockNotOwnedError), lock_class(client, "name"):
        client.set("name", "stolen")
    assert b"stolen" == client.get("name")


def test_context_manager_raises_when_already_released(lock_class: LockClass, client: redis.Redis) -> None:
    with pytest.raises(LockError, match="unlocked"), lock_class(client, "name") as lock:
        lock.release()


@pytest.mark.usefixtures("raise_on_release_error")
@pytest.mark.parametrize("releases", [False, True])
def test_raise_on_release_error_false_logs_a_warning(
    lock_class: LockClass, client: redis.Redis, caplog: pytest.LogCaptureFixture, releases: bool
) -> None:
    with lock_class(client, "name", raise_on_release_error=False) as lock:
        if releases:
            lock.release()
        else:
            client.set("name", "stolen")
    assert ["WARNING"] == [record.levelname for record in caplog.records]
    assert "no longer owned" in caplog.records[0].getMessage()


def _assert_error(error: LockError, kind: type[LockError], message: str, lock: Any) -> None:
    assert kind is type(error)
    assert isinstance(error, (ValueError, redis.RedisError))
    assert message == error.message
    assert isinstance(lock, Blocking) or error.lock_name == "name"
    assert message == str(error)


def test_unlocked_lock_raises_lock_error(lock_class_id: str, lock_class: LockClass, client: redis.Redis) -> None:
    is_old = lock_class_id == "redis-py" and REDIS_PY < (6, 0)
    unlocked = "an unlocked lock" if is_old else "a lock that's not owned or is already unlocked."
    lock = lock_class(client, "name", timeout=10)
    with pytest.raises(LockError) as caught:
        lock.release()
    _assert_error(caught.value, LockError, f"Cannot release {unlocked}", lock)
    with pytest.raises(LockError) as caught:
        lock.extend(1)
    _assert_error(caught.value, LockError, "Cannot extend an unlocked lock", lock)
    with pytest.raises(LockError) as caught:
        lock.reacquire()
    _assert_error(caught.value, LockError, "Cannot reacquire an unlocked lock", lock)


def test_released_lock_raises_lock_error_on_a_second_release(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    lock.acquire()
    lock.release()
    with pytest.raises(LockError) as caught:
        lock.release()
    assert LockError is type(caught.value)


@pytest.mark.parametrize(
    "lose",
    [
        lambda client: client.delete("name"),
        lambda client: client.set("name", "stolen"),
        lambda client: client.set("name", "stolen", ex=100),
    ],
    ids=["deleted", "taken", "taken with a ttl"],
)
def test_lost_lock_raises_not_owned(
    lock_class: LockClass, client: redis.Redis, lose: Callable[[redis.Redis], object]
) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    token = lock.local.token
    lose(client)
    left = client.get("name")
    with pytest.raises(LockNotOwnedError) as caught:
        lock.extend(1)
    _assert_error(caught.value, LockNotOwnedError, "Cannot extend a lock that's no longer owned", lock)
    with pytest.raises(LockNotOwnedError) as caught:
        lock.reacquire()
    _assert_error(caught.value, LockNotOwnedError, "Cannot reacquire a lock that's no longer owned", lock)
    assert token == lock.local.token
    with pytest.raises(LockNotOwnedError) as caught:
        lock.release()
    _assert_error(caught.value, LockNotOwnedError, "Cannot release a lock that's no longer owned", lock)
    assert lock.local.token is None
    assert left == client.get("name")


def test_release_after_expiry_raises_not_owned(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.pexpire("name", 1)
    other = lock_class(client, "name", timeout=10, sleep=0.001)
    assert other.acquire(blocking_timeout=5)
    with pytest.raises(LockNotOwnedError):
        lock.release()
    assert other.owned()


def test_lock_without_timeout_cannot_be_extended(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    lock.acquire()
    with pytest.raises(LockError) as caught:
        lock.extend(1)
    _assert_error(caught.value, LockError, "Cannot extend a lock with no timeout", lock)
    with pytest.raises(LockError) as caught:
        lock.reacquire()
    _assert_error(caught.value, LockError, "Cannot reacquire a lock with no timeout", lock)
    assert (True, -1) == (lock.owned(), client.ttl("name"))


@pytest.mark.parametrize("more_s", [10, 10.0, 10.5])
def test_extend_adds_to_the_ttl(lock_class: LockClass, client: redis.Redis, more_s: float) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    assert lock.extend(more_s) is True
    assert 16_000 < client.pttl("name") <= 10_000 + more_s * 1000
    assert lock.owned()


@pytest.mark.parametrize("new_s", [5, 20.5])
def test_extend_with_replace_ttl_sets_the_ttl(lock_class: LockClass, client: redis.Redis, new_s: float) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    assert lock.extend(new_s, replace_ttl=True) is True
    assert new_s * 1000 - 4000 < client.pttl("name") <= new_s * 1000
    assert lock.extend(new_s, True) is True


def test_extend_of_a_key_made_persistent_raises_not_owned(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.persist("name")
    with pytest.raises(LockNotOwnedError):
        lock.extend(10)
    assert -1 == client.ttl("name")


def test_reacquire_sets_the_ttl_back_to_the_timeout(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    client.pexpire("name", 5000)
    assert lock.reacquire() is True
    assert 5_000 < client.pttl("name") <= 10_000
    client.persist("name")
    lock.reacquire()
    assert 5_000 < client.pttl("name") <= 10_000


@IN_THREADS
def test_token_is_thread_local_by_default(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name")
    lock.acquire(token="mine")
    assert in_thread(lambda: getattr(lock.local, "token", None)) is None
    assert b"mine" == lock.local.token
    lock.release()


def test_thread_local_false_shares_the_token(world: World, lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10, thread_local=False)
    lock.acquire(token="mine")
    assert b"mine" == in_thread(lambda: lock.local.token)
    assert world.beside(lock.owned) is True
    assert world.beside(lambda: lock.extend(10))
    assert world.beside(lock.reacquire)
    world.beside(lock.release)
    assert lock.local.token is None
    assert not client.exists("name")


def test_callers_of_one_lock_wait_for_each_other(world: World, lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", sleep=0.001)
    lock.acquire()
    token = lock.local.token
    assert world.beside(lambda: lock.acquire(blocking=False)) is False
    assert token == lock.local.token == client.get("name")
    lock.release()

    def take_and_release() -> bytes:
        with lock:
            taken: bytes = lock.local.token
            return taken

    assert world.beside(take_and_release) != world.beside(take_and_release)


def test_locks_of_other_names_and_databases_are_independent(lock_class: LockClass, client: redis.Redis) -> None:
    with lock_class(client, "a", blocking=False), lock_class(client, "b", blocking=False):
        assert {b"a", b"b"} == set(client.keys())
    with lock_class(client, "a"), redis.Redis(port=client.connection_pool.connection_kwargs["port"], db=1) as other:
        assert lock_class(other, "a").acquire(blocking=False)
        other.flushdb()
