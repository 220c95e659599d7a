"""Names, tokens, times and options that a lock takes, for threads and for asyncio, and the refusal of all others.

Rules: what redis-py's Lock takes, ours takes, with the same bytes on the server; where redis-py goes wrong or its
result is an accident, ours has a documented error and the test runs on ours alone. Nothing is sent for what is refused.
"""

from __future__ import annotations

import decimal
import fractions
import inspect
import re
from typing import Any

import pytest
import redis
from redis.exceptions import DataError, LockError

import redislock_fast
from redislock_fast import Handle
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import REDIS_PY, FakeTime, LockClass
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")

MEBIBYTE = 1 << 20
ENCODES_BYTEARRAY = REDIS_PY >= (8, 0)
TEXTS: list[tuple[Any, bytes]] = [
    ("", b""),
    ("a b", b"a b"),
    ("a\r\nb", b"a\r\nb"),
    ("\r\n", b"\r\n"),
    ("$3\r\nabc\r\n", b"$3\r\nabc\r\n"),
    ("a\0b", b"a\0b"),
    ("\u00fc\u20ac\U0001f512", b"\xc3\xbc\xe2\x82\xac\xf0\x9f\x94\x92"),
    ("{tag}:name", b"{tag}:name"),
    ("x" * MEBIBYTE, b"x" * MEBIBYTE),
    (b"bytes", b"bytes"),
    (bytes(range(256)), bytes(range(256))),
    (b"\xff" * MEBIBYTE, b"\xff" * MEBIBYTE),
    *([(bytearray(b"array\0"), b"array\0")] if ENCODES_BYTEARRAY else []),
    (memoryview(b"view\r\n"), b"view\r\n"),
    (12, b"12"),
    (-1, b"-1"),
    (1.5, b"1.5"),
]
TEXT_IDS = [f"{type(given).__name__}-{wire[:8].hex()}-{len(wire)}" for given, wire in TEXTS]
NO_TEXTS: list[Any] = [None, True, False, [], ["a"], {}, object, ("a", "b"), decimal.Decimal(1)]


@pytest.mark.parametrize(("name", "key"), TEXTS, ids=TEXT_IDS)
def test_name_is_the_key(lock_class: LockClass, client: redis.Redis, name: Any, key: bytes) -> None:
    lock = lock_class(client, name, timeout=10)
    assert lock.acquire(blocking=False)
    assert [key] == client.keys()
    assert lock_class(client, name).acquire(blocking=False) is False
    assert lock.owned()
    assert lock.extend(10)
    assert lock.extend(10, replace_ttl=True)
    assert lock.reacquire()
    lock.release()
    assert [] == client.keys()


@pytest.mark.parametrize(("token", "value"), TEXTS, ids=TEXT_IDS)
def test_token_is_the_value(lock_class: LockClass, client: redis.Redis, token: Any, value: bytes) -> None:
    lock = lock_class(client, "name", timeout=10)
    assert lock.acquire(blocking=False, token=token)
    assert value == client.get("name") == bytes(lock.local.token)
    assert lock.extend(10)
    assert lock.extend(10, replace_ttl=True)
    assert lock.reacquire()
    lock.release()
    assert [] == client.keys()


@pytest.mark.parametrize("token", [token for token, _ in TEXTS], ids=TEXT_IDS)
def test_token_of_any_type_is_owned(our_lock: Any, client: redis.Redis, token: Any) -> None:
    lock = our_lock(client, "name", timeout=10)
    lock.acquire(token=token)
    assert lock.owned() is True


@pytest.mark.parametrize("name", NO_TEXTS, ids=repr)
def test_name_that_is_no_text_is_refused(lock_class: LockClass, valkey_client: redis.Redis, name: Any) -> None:
    with pytest.raises(DataError):
        lock_class(valkey_client, name).acquire(blocking=False)
    assert [] == valkey_client.keys()


@pytest.mark.parametrize("token", NO_TEXTS[1:], ids=repr)
def test_token_that_is_no_text_is_refused(lock_class: LockClass, valkey_client: redis.Redis, token: Any) -> None:
    with pytest.raises(DataError):
        lock_class(valkey_client, "name").acquire(blocking=False, token=token)
    assert [] == valkey_client.keys()


@pytest.mark.parametrize(
    "options", [{"encoding": "latin-1"}, {"encoding": "ascii", "encoding_errors": "replace"}], ids=str
)
@pytest.mark.parametrize("decodes", [False, True])
def test_name_is_the_key_that_the_client_itself_would_use(
    world: World, lock_class: LockClass, valkey: Server, connect: Connect, options: dict[str, Any], decodes: bool
) -> None:
    # Which bytes those are depends on redis-py's packer: hiredis's takes UTF-8, whatever the client's encoding is.
    client = connect(valkey.port, decode_responses=decodes, **options)
    lock = lock_class(client, "\u00fc", timeout=10)
    lock.acquire(token="token")
    assert ("token" if decodes else b"token") == waited(world.client(client).get("\u00fc"))
    assert lock.owned()
    lock.release()


def test_token_is_encoded_as_the_client_does(lock_class: LockClass, valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port, encoding="latin-1", decode_responses=True)
    lock = lock_class(client, "name", timeout=10)
    lock.acquire(token="\u00e9")
    assert (b"\xe9", True) == (lock.local.token, lock.owned())
    assert "\u00e9" == client.get("name")
    lock.release()


def test_token_that_the_clients_encoding_has_not_is_refused(
    lock_class: LockClass, valkey: Server, connect: Connect
) -> None:
    client = connect(valkey.port, encoding="ascii")
    with pytest.raises(UnicodeEncodeError):
        lock_class(client, "name").acquire(blocking=False, token="\u00fc")
    assert [] == client.keys()


@pytest.mark.parametrize("timeout_s", [1, 1.0, decimal.Decimal("1.0"), fractions.Fraction(1)], ids=repr)
def test_timeout_may_be_any_real_number(lock_class: LockClass, valkey_client: redis.Redis, timeout_s: Any) -> None:
    lock = lock_class(valkey_client, "name", timeout=timeout_s)
    assert lock.acquire(blocking=False)
    assert 0 < valkey_client.pttl("name") <= 1000
    assert lock.extend(timeout_s)
    assert lock.extend(timeout_s, replace_ttl=True)
    assert lock.reacquire()


@pytest.mark.parametrize("timeout_s", [0, 0.0, None])
def test_timeout_of_zero_or_none_is_no_expiry(
    lock_class: LockClass, valkey_client: redis.Redis, timeout_s: Any
) -> None:
    lock = lock_class(valkey_client, "name", timeout=timeout_s)
    assert lock.acquire(blocking=False)
    assert -1 == valkey_client.ttl("name")
    lock.release()


def test_extend_by_zero_changes_nothing(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    lock.acquire()
    assert lock.extend(0) is True
    assert 7_000 < client.pttl("name") <= 10_000


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("additional_s", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_extend_by_what_is_not_finite_is_refused(
    our_lock: Any, valkey_client: redis.Redis, additional_s: float, replaces: bool
) -> None:
    lock = our_lock(valkey_client, "name", timeout=10)
    lock.acquire()
    with pytest.raises(ValueError, match="additional_time") as caught:
        lock.extend(additional_s, replace_ttl=replaces)
    assert not isinstance(caught.value, LockError)
    assert lock.owned()
    assert 7_000 < valkey_client.pttl("name") <= 10_000


@pytest.mark.parametrize("additional", ["1", b"1", None, []], ids=repr)
def test_extend_by_what_is_no_number_is_refused(our_lock: Any, valkey_client: redis.Redis, additional: Any) -> None:
    lock = our_lock(valkey_client, "name", timeout=10)
    lock.acquire()
    with pytest.raises(TypeError, match="additional_time"):
        lock.extend(additional)
    assert lock.owned()


@pytest.fixture
def taken(valkey_client: redis.Redis) -> redis.Redis:
    """A client of a server on which the lock "name" is taken."""
    valkey_client.set("name", "taken")
    return valkey_client


@pytest.mark.parametrize("sleep_s", [-1, -0.001, float("nan")])
def test_sleep_that_cannot_be_is_refused(world: World, our_lock: Any, taken: redis.Redis, sleep_s: float) -> None:
    if world.in_threads:
        with pytest.raises(ValueError, match="sleep"):
            our_lock(taken, "name").acquire(sleep=sleep_s, blocking_timeout=1)
    with pytest.raises(ValueError, match="sleep"):
        our_lock(taken, "name", sleep=sleep_s).acquire(blocking_timeout=1)


def test_blocking_timeout_that_is_no_number_is_refused(our_lock: Any, taken: redis.Redis) -> None:
    with pytest.raises(ValueError, match="blocking_timeout"):
        our_lock(taken, "name").acquire(blocking_timeout=float("nan"))
    with pytest.raises(ValueError, match="blocking_timeout"):
        our_lock(taken, "name", blocking_timeout=float("nan")).acquire()
    with pytest.raises(TypeError, match="blocking_timeout"):
        our_lock(taken, "name").acquire(blocking_timeout="1")


@pytest.mark.parametrize("sleep", ["1", b"1", []], ids=repr)
def test_sleep_of_a_wrong_type_is_refused(world: World, our_lock: Any, taken: redis.Redis, sleep: Any) -> None:
    if world.in_threads:
        with pytest.raises(TypeError):
            our_lock(taken, "name").acquire(sleep=sleep, blocking_timeout=1)
    with pytest.raises(TypeError):
        our_lock(taken, "name", sleep=sleep).acquire(blocking_timeout=1)


@pytest.mark.usefixtures("polling")
@pytest.mark.parametrize("limit_s", [float("inf"), 1e12])
def test_infinite_blocking_timeout_is_no_limit(
    lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime, limit_s: float
) -> None:
    fake_time.at_most = 20
    with pytest.raises(AssertionError, match="waits forever"):
        lock_class(taken, "name").acquire(blocking_timeout=limit_s)
    assert [0.1] * 20 == fake_time.sleeps_s


@pytest.mark.usefixtures("polling")
def test_sleep_of_zero_polls_without_a_pause(lock_class: LockClass, taken: redis.Redis, fake_time: FakeTime) -> None:
    fake_time.at_most = 20
    with pytest.raises(AssertionError, match="waits forever"):
        lock_class(taken, "name", sleep=0).acquire()
    assert [0] * 20 == fake_time.sleeps_s


@IN_THREADS
def test_closed_client_connects_again(lock_class: LockClass, client: redis.Redis) -> None:
    lock = lock_class(client, "name", timeout=10)
    client.close()
    assert lock.acquire(blocking=False)
    client.close()
    assert lock.owned()
    client.close()
    lock.release()
    assert not client.exists("name")


@pytest.mark.parametrize("client", [None, "redis://localhost", object], ids=repr)
def test_client_that_is_none_is_refused(world: World, client: Any) -> None:
    with pytest.raises(TypeError):
        world.ours.Lock(client, "name")


NAN = float("nan")
BAD_TERMS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"auto_renew": True}, ValueError, "auto_renew needs a timeout"),
    ({"auto_renew": True, "timeout": 0}, ValueError, "auto_renew needs a timeout"),
    ({"max_hold": 10, "timeout": 10}, ValueError, "auto_renew"),
    ({"max_hold": 9, "timeout": 10, "auto_renew": True}, ValueError, "max_hold is shorter"),
    *(
        ({"max_hold": seconds, "timeout": 10, "auto_renew": True}, error, "max_hold")
        for seconds, error in [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("10", TypeError)]
    ),
    ({"auto_renew": "Loop", "timeout": 10}, ValueError, "auto_renew must be True, False or 'loop', not 'Loop'"),
    ({"max_stall": 10, "timeout": 10}, ValueError, "max_stall .* needs auto_renew=True"),
    ({"max_stall": 10, "timeout": 10, "auto_renew": "loop"}, ValueError, "max_stall .* needs auto_renew=True"),
    *(
        ({"max_stall": seconds, "timeout": 10, "auto_renew": True}, error, "max_stall")
        for seconds, error in [(0, ValueError), (-1, ValueError), (NAN, ValueError), ("10", TypeError), (9, ValueError)]
    ),
    ({"on_lost": "print"}, TypeError, "on_lost"),
    ({"reentrant": True, "thread_local": False}, ValueError, "thread_local"),
    ({"wait_replicas": -1, "wait_timeout": 1, "timeout": 10}, ValueError, "wait_replicas"),
    ({"wait_replicas": 1.0, "wait_timeout": 1, "timeout": 10}, TypeError, "float"),
    ({"wait_replicas": 1, "timeout": 10}, ValueError, "go together"),
    ({"wait_timeout": 1, "timeout": 10}, ValueError, "go together"),
    ({"wait_replicas": 1, "wait_timeout": 1}, ValueError, "wait_replicas needs a timeout"),
    *(
        ({"wait_replicas": 1, "wait_timeout": seconds, "timeout": 10}, error, "wait_timeout")
        for seconds, error in [("1", TypeError), *((bad, ValueError) for bad in (0, -1, NAN, float("inf"), 10))]
    ),
    ({"breaker": object}, TypeError, "calling"),
    ({"auto_renewal": True}, TypeError, "auto_renewal"),
]
BAD_TERM_IDS = [",".join(f"{name}={value!r}"[:30] for name, value in options.items()) for options, _, _ in BAD_TERMS]

NO_HANDLES: list[Any] = [None, "name", b"token", {"name": "name"}, object]


@pytest.fixture
def unused(connect: Connect) -> redis.Redis:
    """A client without a server: whatever is sent fails."""
    return connect(1)


@pytest.mark.parametrize(("options", "error", "match"), BAD_TERMS, ids=BAD_TERM_IDS)
def test_terms_that_cannot_be_are_refused(
    world: World, unused: redis.Redis, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        world.ours.Lock(world.client(unused), "name", **options)
    with pytest.raises(error, match=match):
        world.ours.Locker(world.client(unused)).lock("name", **options)


@IN_THREADS
@pytest.mark.parametrize("options", [{"auto_renew": "loop"}, {"auto_renew": True, "max_stall": 10}], ids=str)
def test_lock_without_a_loop_is_renewed_by_none(unused: redis.Redis, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="asyncio locks"):
        redislock_fast.Lock(unused, "name", timeout=10, **options)
    with pytest.raises(ValueError, match="asyncio locks"):
        redislock_fast.Locker(unused).lock("name", timeout=10, **options)


@IN_THREADS
def test_lock_without_tasks_cancels_none(unused: redis.Redis) -> None:
    with pytest.raises(ValueError, match="cancel_on_lost"):
        redislock_fast.Lock(unused, "name", timeout=10, cancel_on_lost=True)


@pytest.mark.parametrize("timeout_s", [None, 0, 21])
def test_timeout_that_does_not_go_with_the_terms_is_not_assigned(
    our_lock: Any, unused: redis.Redis, timeout_s: float | None
) -> None:
    lock = our_lock(unused, "name", timeout=10, auto_renew=True, max_hold=20)
    with pytest.raises(ValueError, match="timeout"):
        lock.timeout = timeout_s
    assert lock.timeout == 10


@pytest.mark.parametrize("additional_s", [-1, float("nan"), float("inf")])
def test_extend_on_terms_by_what_cannot_be_is_refused(
    our_lock: Any, valkey_client: redis.Redis, additional_s: float
) -> None:
    with our_lock(valkey_client, "name", timeout=10, auto_renew=True) as lock:
        with pytest.raises(ValueError, match="additional_time"):
            lock.extend(additional_s)
        assert (lock.valid, lock.owned()) == (True, True)


@pytest.mark.parametrize("handle", NO_HANDLES, ids=repr)
def test_handle_that_is_none_is_not_attached(world: World, unused: redis.Redis, handle: Any) -> None:
    with pytest.raises(TypeError, match="attach"):
        world.ours.Lock.attach(world.client(unused), handle)


def test_handle_is_attached_on_its_own_settings(world: World, unused: redis.Redis) -> None:
    handle = redislock_fast.Handle("name", b"token", 10.0, None)
    with pytest.raises(TypeError, match="timeout"):
        world.ours.Lock.attach(world.client(unused), handle, timeout=20)
    with pytest.raises(ValueError, match="max_hold"):
        world.ours.Lock.attach(world.client(unused), handle, auto_renew=True, max_hold=1)
    with pytest.raises(TypeError, match="pipeline"):
        world.ours.Lock.attach(world.client(unused).pipeline(), handle)


# Arguments that cannot be meant are refused when a lock is made


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"timout": 3}, r"^Lock\(\) got an unexpected keyword argument 'timout': did you mean 'timeout'\?$"),
        ({"auto_renw": True}, r"^Lock\(\) .*: did you mean 'auto_renew'\?$"),
        ({"colour": 3}, r"^Lock\(\) got an unexpected keyword argument 'colour'$"),
        ({"adaptive": 3}, "unexpected keyword argument 'adaptive'"),
        ({"metrics": 3}, r"metrics needs record_acquisition\(\), which int"),
        ({"sleep": "a"}, "sleep is a number of seconds"),
        ({"blocking": "no"}, "blocking is a bool"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(world: World, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        world.lock(world.connect(1), **settings)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"timout": 3}, r"^Redlock\(\) got an unexpected keyword argument 'timout': did you mean 'timeout'\?$"),
        ({"fencing": True}, r"^Redlock\(\) got an unexpected keyword argument 'fencing'"),
        ({"sleep": "a"}, "sleep is a number of seconds, not str"),
        ({"blocking": "no"}, "blocking is a bool, not 'no'"),
        ({"metrics": 3}, r"metrics needs record_acquisition\(\), which int"),
    ],
    ids=str,
)
def test_redlock_refuses_what_cannot_be_meant(world: World, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=error):
        world.ours.Redlock([world.connect(port) for port in (1, 2, 3)], "name", **{"timeout": 10, **settings})


def test_acquire_refuses_text_for_blocking(world: World) -> None:
    locks = [
        world.lock(world.connect(1), timeout=10),
        world.redlock([world.connect(port) for port in (1, 2, 3)], timeout=10),
    ]
    for lock in locks:
        with pytest.raises(TypeError, match="blocking is a bool, not 'no'"):
            lock.acquire(blocking="no")


@pytest.mark.parametrize("name", ["Lock", "Redlock"])
def test_signatures_spell_out_every_option(world: World, name: str) -> None:
    parameters = inspect.signature(getattr(world.ours, name)).parameters
    assert {"timeout", "auto_renew", "on_lost", "reentrant", "breaker", "metrics"} <= set(parameters)
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}


@pytest.mark.parametrize("given", ["name", "timeout"])
def test_attach_takes_name_and_timeout_from_the_handle(world: World, given: str) -> None:
    handle = Handle("name", b"token", 10.0, None)
    with pytest.raises(TypeError, match=f"Lock.attach\\(\\) takes no '{given}'"):
        world.ours.Lock.attach(world.connect(1), handle, **{given: 3})


def test_one_client_is_no_list_of_servers(world: World) -> None:
    with pytest.raises(TypeError, match="servers is a list of clients, one for each server, not Redis"):
        world.ours.Redlock(world.connect(1), "name", timeout=10)


def test_repr_of_a_lock_tells_its_state_and_no_token(world: World, valkey: Server) -> None:
    client = world.connect(valkey.port)
    lock = world.ours.Lock(client, "name", timeout=60)
    assert "<Lock 'name': not held>" == repr(lock)
    waited(lock.acquire())
    assert re.fullmatch(r"<Lock 'name': held, 5\d\.\d{3} s left>", repr(lock))
    waited(lock.release())
    assert "<Lock 'name': not held>" == repr(lock)


def test_repr_of_a_lock_that_does_not_expire(world: World, valkey: Server) -> None:
    lock = world.ours.Lock(world.connect(valkey.port), b"name")
    waited(lock.acquire())
    assert "<Lock b'name': held>" == repr(lock)
    waited(lock.release())


def test_repr_of_a_redlock_tells_its_name(world: World) -> None:
    redlock = world.ours.Redlock([world.connect(port) for port in (1, 2, 3)], "name", timeout=10)
    assert "<Redlock 'name': not held>" == repr(redlock)


def test_repr_of_a_batch_tells_what_is_held(world: World, valkey: Server, valkey_client: redis.Redis) -> None:
    valkey_client.set("b", "other")
    locker = world.ours.Locker(world.connect(valkey.port))
    batch = waited(locker.acquire_many(["a", "b", "c"], 60))
    assert re.fullmatch(r"<Batch 'a' and 2 more: 2 of 3 held, (59|60)\.\d{3} s left>", repr(batch))
    waited(batch.release())
    assert "<Batch 'a' and 2 more: 0 of 3 held>" == repr(batch)
