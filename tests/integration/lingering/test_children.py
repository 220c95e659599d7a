"""Children of `multiprocessing` and of pools, which end without Python's exit handlers: what lingers is given back."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import redis

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S
from tests.support.waiting import FAR_S

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking beside threads


_kept: list[redislock_fast.Lock] = []


def _linger(port: int, names: list[str]) -> bool:
    """In a child, which keeps its client: let the keys of these locks linger. Returns whether they do."""
    client = redis.Redis(host="127.0.0.1", port=port)
    locks = [redislock_fast.Lock(client, name, timeout=FAR_S, linger=FAR_S) for name in names]
    _kept.extend(locks)
    for lock in locks:
        with lock:
            pass
    return all(lock.lingers for lock in locks) and client.exists(*names) == len(names)


def _linger_then_fail(port: int, names: list[str]) -> None:
    assert _linger(port, names)
    raise SystemExit(3)


def _by_process(library: str, method: str, work: Callable[..., Any]) -> None:
    process = importlib.import_module(library).get_context(method).Process(target=work)
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == (3 if work.func is _linger_then_fail else 0)  # type: ignore[attr-defined]


def _by_executor(work: Callable[[], bool]) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        assert executor.submit(work).result(PATIENCE_S)


def _by_pool(work: Callable[[], bool]) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(work).get(PATIENCE_S)
        pool.close()
        pool.join()


WAYS: dict[str, Callable[..., None]] = {
    "fork": partial(_by_process, "multiprocessing", "fork"),
    "forkserver": partial(_by_process, "multiprocessing", "forkserver"),
    "spawn": partial(_by_process, "multiprocessing", "spawn"),
    "ProcessPoolExecutor": _by_executor,
    "Pool": _by_pool,
    "billiard": partial(_by_process, "billiard", "fork"),
}


SLOW_WAYS = {"forkserver", "spawn"}


@pytest.mark.parametrize("uses", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW_WAYS)) for way in WAYS])
def test_what_lingers_in_a_child_is_given_back_at_its_end(
    valkey: Server, connect: Connect, way: str, uses: bool
) -> None:
    if way == "billiard":
        pytest.importorskip("billiard")
    admin = connect(valkey.port, host="127.0.0.1")
    parents = redislock_fast.Lock(admin, "parents", timeout=FAR_S, linger=FAR_S)
    if uses:
        with parents:
            pass
    WAYS[way](partial(_linger, valkey.port, ["a", "b"]))
    assert admin.exists("a", "b", "parents") == uses
    assert parents.acquire(blocking=False)
    parents.release()


@pytest.mark.parametrize("way", ["fork", "billiard"])
def test_what_lingers_in_a_child_that_fails_is_given_back(valkey: Server, connect: Connect, way: str) -> None:
    if way == "billiard":
        pytest.importorskip("billiard")
    WAYS[way](partial(_linger_then_fail, valkey.port, ["a"]))
    assert not connect(valkey.port).exists("a")
