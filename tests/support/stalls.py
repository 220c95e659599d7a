"""Runs a failed test again, once, where the machine stalled during the test: leases end meanwhile.

A separate process notices that: it sleeps for 50 ms at a time, and does nothing else. So a test that holds the GIL,
forks or stops processes is not taken for a stall. There is one for each process that runs tests.

`conftest.py` imports the hooks. Thread safety: the watch belongs to the thread that runs pytest's hooks.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

TICK_S = 0.05
STALL_S = 0.5
"""A longer time is a stall: so late may a renewal come of the shortest lease that tests keep, 1.5 s."""

_TICKER = """
import os, select, sys, time
tick_s = float(sys.argv[1])
before = time.monotonic()
longest_s = 0.0
while True:
    is_asked = select.select([0], [], [], tick_s)[0]
    now = time.monotonic()
    longest_s = max(longest_s, now - before)
    before = now
    if is_asked:
        if not os.read(0, 1):
            break
        print(longest_s, flush=True)
        longest_s = 0.0
"""


class Watch:
    """Notices when the machine stalls.

    Attributes:
        pid: of the process that ticks.
    """

    def __init__(self) -> None:
        self._ticker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TICKER, str(TICK_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # an interrupt from the keyboard is not for it
        )
        self.pid = self._ticker.pid

    def longest_s(self) -> float:
        """The longest stall since the last call, in seconds."""
        assert self._ticker.stdin is not None
        assert self._ticker.stdout is not None
        self._ticker.stdin.write(b"?")
        return float(self._ticker.stdout.readline())

    def close(self) -> None:
        """End the process."""
        with self._ticker:
            assert self._ticker.stdin is not None
            self._ticker.stdin.close()


_WATCH = pytest.StashKey[Watch]()
_IS_AGAIN = pytest.StashKey[bool]()


def watch_of(config: pytest.Config) -> Watch:
    """The one watch of this process."""
    if _WATCH not in config.stash:
        config.stash[_WATCH] = watch = Watch()
        config.add_cleanup(watch.close)
    return config.stash[_WATCH]


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """As pytest does, but for the second run: a protocol of its own, so that a plugin's time limit begins anew."""
    is_again = item.stash.get(_IS_AGAIN, False)
    watch = watch_of(item.config)
    watch.longest_s()  # stalls before the test do not count
    if not is_again:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = [report for report in reports if report.failed]
    runs_again = bool(failed) and not is_again and watch.longest_s() > STALL_S
    for report in failed if runs_again else reports:
        if runs_again:
            report.outcome = "rerun"  # type: ignore[assignment]  # as plugins that rerun tests have it
        item.ihook.pytest_runtest_logreport(report=report)
    if runs_again:
        item.stash[_IS_AGAIN] = True
        item.ihook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    if not is_again:
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Show which tests were run again."""
    return ("rerun", "R", "RERUN") if report.outcome == "rerun" else None
