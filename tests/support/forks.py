"""Forked children, with and without the hook by which Python tells the package of a fork: uWSGI does not call it."""

from __future__ import annotations

import gc
import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Protocol

import pytest

from redislock_fast._util import fork
from tests.support.helpers import PATIENCE_S

__all__ = ["FORKS", "InFork", "fork_unannounced", "in_fork", "run_in_fork"]


class InFork(Protocol):
    """Does the work in a forked child. Returns its result, or its traceback."""

    def __call__(self, work: Callable[[], str]) -> str: ...


def fork_unannounced() -> int:
    """`os.fork` without the hook of the package, as where C code forks.

    Python's own hooks are called: without them, a child hangs if another thread of the parent waits for the GIL at that
    moment. `test_forks` forks really so, where no thread does.
    """
    before, generation = fork.generation(), fork.generation
    fork.generation = lambda: before
    try:
        return os.fork()
    finally:
        fork.generation = generation


def run_in_fork(work: Callable[[], str], fork_: Callable[[], int] = os.fork) -> str:
    """Do the work in a forked child. Returns its result, or its traceback."""
    gc.collect()  # or what earlier tests have left forgets, too: their fakes cannot
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Newer interpreters warn of forking with several threads, which is under test here.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = fork_()
    if pid == 0:
        try:
            answer = work()
        except BaseException:
            answer = traceback.format_exc()
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answers, _, _ = select.select([pipe], [], [], PATIENCE_S)
        if not answers:
            os.kill(pid, signal.SIGABRT)  # pytest's fault handler prints where it hangs
        answer = pipe.read().decode() if answers else "the child hangs"
    os.waitpid(pid, 0)
    return answer


FORKS = pytest.mark.parametrize("fork", [os.fork, fork_unannounced], ids=["announced", "unannounced"])
"""Runs a test with `fork`, which forks in both ways in turn."""


@pytest.fixture(params=[os.fork, fork_unannounced], ids=["announced", "unannounced"])
def in_fork(request: pytest.FixtureRequest) -> InFork:
    """The test forks in both ways, in turn."""
    return lambda work: run_in_fork(work, request.param)
