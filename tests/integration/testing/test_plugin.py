"""The pytest plugin, in runs of pytest as its users have them: each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import TypeAlias

import pytest

pytest_plugins = ["pytester"]

Run: TypeAlias = Callable[..., pytest.RunResult]

CONFTEST = """
import sys

def pytest_collection_finish():
    assert not [name for name in sys.modules if name.partition(".")[0] in ("redislock_fast", "redis")]
"""

TESTS = """
from pathlib import Path

import pytest

PORTS = Path(__file__).parent / "ports"

@pytest.mark.parametrize("number", [1, 2])
def test_database_is_empty(redislock_client, number):
    assert redislock_client.dbsize() == 0
    redislock_client.set("left", number)

def test_lock_is_lost(redislock_client):
    from redislock_fast import Lock, LockLostError
    from redislock_fast.testing import assert_no_locks_left, lose

    lost = []
    lock = Lock(redislock_client, "name", timeout=10, auto_renew=True, on_lost=lambda _, reason: lost.append(reason))
    with pytest.raises(LockLostError), lock:
        lose(lock, "taken by another")
    assert lost == ["taken by another"]
    assert_no_locks_left(redislock_client)

def test_server_is_the_workers_own(redislock_server):
    PORTS.mkdir(exist_ok=True)
    (PORTS / str(redislock_server.port)).touch()
"""

WITHOUT_SERVER = """
import pytest

@pytest.fixture(autouse=True, scope="session")
def no_server():
    from redislock_fast import server

    server.find_binary = lambda kind: None
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the tests with the plugin alone: others take seconds to import."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    return partial(pytester.runpytest_subprocess, "-W", "error", "-p", "pytest_redislock_fast")


def test_pytest_finds_the_plugin_by_itself() -> None:
    plugins = {found.name: found.value for found in entry_points(group="pytest11")}
    assert plugins["redislock_fast"] == "pytest_redislock_fast"


def test_package_is_not_imported_before_a_fixture_is_used(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeconftest(CONFTEST)
    run().assert_outcomes(passed=4)


@pytest.mark.slow
def test_each_worker_of_xdist_has_a_server(pytester: pytest.Pytester, run: Run) -> None:
    run("-p", "xdist", "-n", "2", "--dist", "each").assert_outcomes(passed=8)
    assert len(list((pytester.path / "ports").iterdir())) == 2


def test_tests_are_skipped_where_no_server_is_installed(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeconftest(WITHOUT_SERVER)
    result = run("-rs")
    result.assert_outcomes(skipped=4)
    result.stdout.fnmatch_lines(["*no server is installed: pip install redislock_fast?server?*"])
