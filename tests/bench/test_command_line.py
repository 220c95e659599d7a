"""The command line of the bench, where something that it needs is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("command", ["throughput", "latency", "contention", "renewal"])
def test_url_of_a_server_that_is_not_there_is_not_printed_since_it_may_have_a_password(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="what the bench prints its tables with")
    from bench.commands import main

    monkeypatch.setattr(sys, "argv", ["bench", command, "--server", f"redis://:canary@127.0.0.1:{free_port()}"])
    assert main() == 2
    assert "cannot run on the URL: " in (said := capsys.readouterr().err)
    assert "canary" not in said


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich", reason="what the bench prints its tables with")
    from bench.commands import main

    monkeypatch.setattr(sys, "argv", ["bench", "contention", option, str(tmp_path / "absent" / "file")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"no such folder: {tmp_path / 'absent'}" in capsys.readouterr().err
