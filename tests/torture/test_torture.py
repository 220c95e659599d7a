"""Short runs of the torture and of the soak. In the tests, the machine has other work, so times are not judged."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.helpers import PATIENCE_S

pytestmark = pytest.mark.slow


def _run(module: str, *arguments: str) -> tuple[int, str]:
    """Run a module. Returns its status and what it printed."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10 * PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("topology", ["single", "cluster", "sentinel", "redlock"])
def test_no_safety_rule_is_broken(topology: str) -> None:
    status, shown = _run("tests.torture", "--topology", topology, "--minutes", "0.1", "--seconds", "5", "--busy")
    assert status == 0, shown


def test_memory_stays_the_same() -> None:
    status, shown = _run("tests.torture.soak", "--pairs", "500000")
    assert status == 0, shown
