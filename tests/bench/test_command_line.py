"""The command line of the bench, where something that it needs is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")

from tests.support.helpers import ROOT

WITHOUT_RICH = """
import runpy, sys

class NoRich:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name=name)

sys.meta_path.insert(0, NoRich())
runpy.run_module("bench", run_name="__main__")
"""


@pytest.mark.slow
def test_without_rich_the_bench_says_in_one_line_what_to_install() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_RICH], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "python -m bench needs rich, which is not installed; in the checkout, "
        "`python -m pip install -e . --group bench` installs it (pip 25.1 or newer)\n"
    )
