"""The command line of the bench, where something that it needs is not there."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")

from redislock_fast.server import free_port
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


@pytest.mark.slow
def test_commands_do_not_need_matplotlib() -> None:
    imports = "import sys, bench.commands; print([name for name in sys.modules if 'matplotlib' in name])"
    run = subprocess.run([sys.executable, "-c", imports], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_without_a_command_the_short_selection_runs(bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import commands

    ran: list[str] = []

    def run(options: argparse.Namespace) -> int:
        ran.append(options.command)
        return len(ran) - 1

    monkeypatch.setattr(commands, "_run", run)
    assert bench() == 2  # the worst of them
    assert ran == ["throughput", "latency", "contention"]


@pytest.mark.parametrize(
    "command", ["throughput", "latency", "contention", "renewal", ("throughput", "--mode", "linger")]
)
def test_url_of_a_server_that_is_not_there_is_not_printed_since_it_may_have_a_password(
    command: Any, bench: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command] if isinstance(command, str) else command
    assert bench(*words, "--server", f"redis://:canary@127.0.0.1:{free_port()}") == 2
    assert "cannot run: the server at the URL: " in (said := capsys.readouterr().err)
    assert "canary" not in said


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    option: str, bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench("contention", option, tmp_path / "absent" / "file")
    assert end.value.code == 2
    assert f"no such folder: {tmp_path / 'absent'}" in capsys.readouterr().err
