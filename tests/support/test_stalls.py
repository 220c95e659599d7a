"""Tests of the second run after a stall: when, how often, with which plugins.

pytest runs in a process of its own, on a file that is written for it. A stall is made by stopping the watching process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

LIMIT_S = 60

CONFTEST = "from tests.support.stalls import pytest_report_teststatus, pytest_runtest_protocol\n"

BEGIN = """
import ctypes, os, signal, time
from pathlib import Path
import pytest
from tests.support.stalls import STALL_S, watch_of

RUNS = Path(__file__).parent / "runs"

def run(config, stands_still=True):
    '''Note a run, while which the machine stands still. Returns how many there were.'''
    with RUNS.open("a") as runs:
        runs.write(".")
    if stands_still:
        watcher = watch_of(config).pid
        os.kill(watcher, signal.SIGSTOP)
        time.sleep(1.2 * STALL_S)
        os.kill(watcher, signal.SIGCONT)
    return len(RUNS.read_text())
"""


class Outcome:
    """The outcome of a pytest of its own.

    Attributes:
        runs: how often the test has run.
        summary: the last line.
        output: all of it.
    """

    def __init__(self, folder: Path, test: str, *options: str) -> None:
        folder.joinpath("conftest.py").write_text(CONFTEST)
        folder.joinpath("test_it.py").write_text(BEGIN + test)
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", *options, "test_it.py"],
            cwd=folder,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        self.output = done.stdout + done.stderr
        self.runs = len(folder.joinpath("runs").read_text())
        self.summary = done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("-p", "xdist", "-n", "1"), ("-p", "pytest_run_parallel.plugin", "--parallel-threads=2")],
    ids=["alone", "xdist", "run-parallel"],
)
def test_failure_during_a_stall_is_no_failure_where_the_second_run_passes(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    test = """
@pytest.fixture
def count(request):
    return run(request.config)

def test(count):
    assert count == 2
"""
    outcome = Outcome(tmp_path, test, *options)
    assert (2, True) == (outcome.runs, "1 passed, 1 rerun" in outcome.summary), outcome.output


@pytest.mark.slow
def test_failure_during_a_stall_is_one_where_the_second_run_fails(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "def test(request):\n    assert run(request.config) == 3\n")
    assert (2, True) == (outcome.runs, "1 failed, 1 rerun" in outcome.summary), outcome.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "run(request.config, stands_still=False)",
        "run(request.config, stands_still=False); ctypes.PyDLL(None).usleep(1_500_000)",
    ],
    ids=["nothing", "the GIL is held"],
)
def test_failure_without_a_stall_is_one_at_once(tmp_path: Path, body: str) -> None:
    outcome = Outcome(tmp_path, f"def test(request):\n    {body}\n    assert False\n")
    assert (1, True) == (outcome.runs, "1 failed in" in outcome.summary), outcome.output


@pytest.mark.slow
def test_stall_before_the_test_does_not_count(tmp_path: Path) -> None:
    test = """
def test_before(request):
    run(request.config)

def test_it(request):
    run(request.config, stands_still=False)
    assert False
"""
    outcome = Outcome(tmp_path, test)
    assert (2, True) == (outcome.runs, "1 failed, 1 passed in" in outcome.summary), outcome.output


def test_test_that_passes_is_run_once_whatever_the_machine_does(tmp_path: Path) -> None:
    outcome = Outcome(tmp_path, "def test(request):\n    run(request.config)\n")
    assert (1, True) == (outcome.runs, "1 passed in" in outcome.summary), outcome.output


@pytest.mark.slow
def test_fixture_that_fails_during_a_stall_is_made_again(tmp_path: Path) -> None:
    test = """
@pytest.fixture(scope="module")
def made(request):
    assert run(request.config) == 2
    yield

def test(made):
    pass
"""
    outcome = Outcome(tmp_path, test)
    assert (2, True) == (outcome.runs, "1 passed, 1 rerun" in outcome.summary), outcome.output


@pytest.mark.slow
def test_time_limit_begins_anew_for_the_second_run(tmp_path: Path) -> None:
    test = """
def test(request):
    run(request.config)
    time.sleep(30)
"""
    outcome = Outcome(tmp_path, test, "-p", "pytest_timeout", "--timeout=3")
    assert (2, 2) == (outcome.runs, outcome.output.count("Failed: Timeout")), outcome.output


def test_watch_ends_with_its_process(tmp_path: Path) -> None:
    test = """
def test(request):
    run(request.config, stands_still=False)
    Path(__file__).with_name("pid").write_text(str(watch_of(request.config).pid))
"""
    outcome = Outcome(tmp_path, test)
    assert "1 passed in" in outcome.summary, outcome.output
    with pytest.raises(ProcessLookupError):
        os.kill(int(tmp_path.joinpath("pid").read_text()), 0)
