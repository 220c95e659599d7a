"""The operations that pytest-benchmark tracks: `pytest bench --benchmark-only`.

`--benchmark-save=NAME` saves a run, `--benchmark-compare` compares a later one with it. The figure of redis-py stands
beside that of the package for every operation that both have. Results are checked outside the timed part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import hiredis
import pytest
import redis
import redis.lock
from redis._parsers import Encoder
from redis.connection import PythonRespSerializer

from bench.workloads.import_cost import import_s
from redislock_fast import Lock

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

Encode: TypeAlias = Callable[[tuple[bytes, ...]], "bytes | list[bytes]"]

LEASE_S = 10
ACQUIRE = (b"SET", b"bench:lock", b"0123456789abcdef0123456789abcdef0123", b"NX", b"PX", b"10000")

both_locks = pytest.mark.parametrize("lock_class", [redis.lock.Lock, Lock], ids=["redis-py", "redislock_fast"])


class ChildClock:
    """A clock for pytest-benchmark: the sum of the seconds that child processes have measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """The time on this clock."""
        return self.seconds


child_clock = ChildClock()


def _redis_py_encode() -> Encode:
    encoder: Any = Encoder
    serializer: Any = PythonRespSerializer
    pack = serializer(6000, encoder("utf-8", "strict", False).encode).pack
    return lambda arguments: pack(*arguments)


def _our_encode(module: str) -> Encode:
    encode: Encode = pytest.importorskip(f"redislock_fast._pipe.{module}").encode
    return encode


@pytest.mark.benchmark(group="acquire+release")
@both_locks
def test_acquire_and_release(
    benchmark: BenchmarkFixture, client: redis.Redis, lock_class: type[redis.lock.Lock]
) -> None:
    """One acquire and one release of a free lock."""
    lock = client.lock("bench:pair", timeout=LEASE_S, lock_class=lock_class)

    def pair() -> bool:
        acquired: bool = lock.acquire()
        lock.release()
        return acquired

    assert benchmark(pair) is True
    assert client.exists("bench:pair") == 0


@pytest.mark.benchmark(group="acquire fails")
@both_locks
def test_acquire_of_a_held_lock(
    benchmark: BenchmarkFixture, client: redis.Redis, lock_class: type[redis.lock.Lock]
) -> None:
    """One attempt to acquire a held lock."""
    contender = client.lock("bench:held", timeout=LEASE_S, blocking=False, lock_class=lock_class)
    with client.lock("bench:held"):
        assert benchmark(contender.acquire) is False


@pytest.mark.benchmark(group="extend")
@both_locks
def test_extend(benchmark: BenchmarkFixture, client: redis.Redis, lock_class: type[redis.lock.Lock]) -> None:
    """Renewal of the lease of a held lock to its full time."""
    with client.lock("bench:extend", timeout=LEASE_S, lock_class=lock_class) as lock:
        assert benchmark(lock.extend, LEASE_S, replace_ttl=True) is True


@pytest.mark.benchmark(group="encode")
@pytest.mark.parametrize(
    "encoder",
    [
        pytest.param(_redis_py_encode, id="redis-py"),
        pytest.param(lambda: hiredis.pack_command, id="hiredis"),
        pytest.param(lambda: _our_encode("resp_py"), id="redislock_fast-python"),
        pytest.param(lambda: _our_encode("resp"), id="redislock_fast-compiled"),
    ],
)
def test_encode(benchmark: BenchmarkFixture, encoder: Callable[[], Encode]) -> None:
    """Packing of the acquire request."""
    encoded = benchmark(encoder(), ACQUIRE)
    expected = hiredis.pack_command(ACQUIRE)  # type: ignore[arg-type] # its stub: a tuple of one
    assert expected == (encoded if isinstance(encoded, bytes) else b"".join(encoded))


@pytest.mark.benchmark(group="parse")
@pytest.mark.parametrize(
    ("wire", "reply"),
    [
        pytest.param(b"$-1\r\n", None, id="nil"),
        pytest.param(b"+OK\r\n", b"OK", id="ok"),
        pytest.param(b":1\r\n", 1, id="one"),
        pytest.param(b"$36\r\n" + ACQUIRE[2] + b"\r\n", ACQUIRE[2], id="token"),
    ],
)
def test_parse(benchmark: BenchmarkFixture, wire: bytes, reply: object) -> None:
    """Parsing of each reply that a lock gets, which hiredis does for both libraries."""
    reader = hiredis.Reader()

    def parse() -> object:
        reader.feed(wire)
        return reader.gets()

    assert reply == benchmark(parse)


@pytest.mark.benchmark(group="import", timer=child_clock)
@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(("redis",), id="redis"),
        pytest.param(("redislock_fast", "redis"), id="redislock_fast-over-redis"),
    ],
)
def test_import(benchmark: BenchmarkFixture, modules: tuple[str, ...]) -> None:
    """Imports in a new interpreter: of redis, and of the package after redis."""

    def import_in_a_child() -> None:
        child_clock.seconds += import_s(*modules)

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        import_in_a_child, rounds=15, warmup_rounds=1
    )
    assert child_clock.seconds > 0
