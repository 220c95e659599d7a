"""The rules of semaphores, checked by Spin in every state of a model, and faults of the model that it must find.

`semaphore.pml` says what is modelled, and how to run it by hand. `make model` runs all; other runs of the tests leave
out what takes longer than ten seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("semaphore.pml")

PROMPT = "-DPROMPT"
"""What is under way arrives before time passes: three processes, and waiters must get what is free."""

_LONG = pytest.mark.skipif("WHOLE_MODEL" not in os.environ, reason="`make model` runs it")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # alone, the longest takes 35 s of one core and 1.3 GB
    pytest.mark.skipif(shutil.which("spin") is None, reason="no spin here"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here"),
]


def checked(folder: Path, *definitions: str) -> tuple[str, bool]:
    """How many errors Spin finds, in its own words, and whether it has seen every state."""
    subprocess.run(["spin", *definitions, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True)
    options = ["-O2", "-DSAFETY", "-DNOREDUCE", "-DCOLLAPSE", "-DMEMLIM=8000"]
    subprocess.run(["gcc", "-w", *options, "-o", "pan", "pan.c"], cwd=folder, check=True)
    done = subprocess.run(["./pan", "-m6000000", "-w25"], cwd=folder, check=False, capture_output=True, text=True)
    found = re.search(r"errors: \d+", done.stdout)
    is_whole = "Search not completed" not in done.stdout and "too small" not in done.stdout
    return found[0] if found else done.stdout + done.stderr, is_whole


@pytest.mark.parametrize(
    "definitions", [pytest.param([PROMPT], marks=_LONG, id="prompt"), pytest.param([], id="any-time")]
)
def test_model_keeps_its_rules_in_every_state(definitions: list[str], tmp_path: Path) -> None:
    assert checked(tmp_path, *definitions) == ("errors: 0", True)


@pytest.mark.parametrize(
    ("fault", "form"),
    [
        pytest.param("CALLERS_TTL", [PROMPT], marks=_LONG),
        pytest.param("CLIENT_CLOCK", [PROMPT], marks=_LONG),
        pytest.param("COUNTER", [PROMPT], marks=_LONG),
        ("SHORTENED_KEY_TTL", [PROMPT]),
        ("NO_LISTENER", [PROMPT]),
        ("NO_HAND_OVER", [PROMPT]),
        ("OFF_BY_ONE", [PROMPT]),
        ("END_MOVES_BACK", []),
        ("ENTRY_STAYS", []),
        ("SHARED_SINCE", []),
    ],
)
def test_checker_finds_fault(fault: str, form: list[str], tmp_path: Path) -> None:
    assert checked(tmp_path, *form, f"-D{fault}")[0] == "errors: 1"
