"""Selects the tests of a run: one kind of server and of event loop, and no slow tests, unless all are asked for.

A test is left out of the usual run if it is marked `slow`, stands in `tests/slow/`, or has one of `REPEATED` among its
parameters. `--all` runs everything; `--rest` runs what the usual run leaves out, so that both together are everything.
Tests that are named one by one (`file.py::test`) always run.

`conftest.py` imports the hooks. A test is slow if it waits for longer than a second.
"""

from __future__ import annotations

from pathlib import Path

import pytest

SLOW = f"{Path(__file__).parents[1]}/slow/"

REPEATED = frozenset({"redis", "redis-6.2", "mixed", "uvloop"})
"""The kinds of servers, sets of servers and event loops on which tests are repeated."""


def in_two_runs(seeds: range, usual: int) -> pytest.MarkDecorator:
    """Give a test its `seeds`: the first `usual` of them in the usual run, the others as a slow test."""
    others = pytest.param(seeds[usual:], marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [seeds[:usual], others], ids=["some", "the others"])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select the other tests."""
    group = parser.getgroup("redislock_fast")
    group.addoption("--all", action="store_true", help="run every test on every kind of server and of event loop")
    group.addoption("--rest", action="store_true", help="run what is left out without --all")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line("markers", "slow: waits for longer than a second; run with --all or --rest")


def is_usual(item: pytest.Item) -> bool:
    """Whether a test belongs to the usual run."""
    if item.get_closest_marker("slow") is not None or str(item.path).startswith(SLOW):
        return False
    callspec = getattr(item, "callspec", None)
    return callspec is None or not any(
        isinstance(value, str) and value in REPEATED for value in callspec.params.values()
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this run was not asked for."""
    if config.option.all or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if is_usual(item) is config.option.rest]
    config.hook.pytest_deselected(items=left_out)
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
