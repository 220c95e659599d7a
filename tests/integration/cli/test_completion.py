"""`redislock completion`: scripts that the shells understand."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.integration.cli.conftest import Command


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_one_of_the_shell(redislock: Command, shell: str) -> None:
    pytest.importorskip("shtab")
    outcome = redislock("completion", shell)
    assert (0, "") == (outcome.code, outcome.err)
    assert all(word in outcome.out for word in ("doctor", "token-id"))
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([program, "-n"], input=outcome.out, text=True, check=True)


def test_bash_completes_commands_and_options(redislock: Command) -> None:
    pytest.importorskip("shtab")
    program = shutil.which("bash")
    if program is None:
        pytest.skip("no bash here")
    asking = (
        "COMP_WORDS=({words}); COMP_CWORD={number}; "
        "$(complete -p redislock | sed 's/.*-F //; s/ .*//') 2>&1; echo \"${{COMPREPLY[@]}}\"\n"
    )
    script = redislock("completion", "bash").out + "".join(
        asking.format(words=words, number=number) for words, number in (("redislock sh", 1), ("redislock ls --bu", 2))
    )
    answer = subprocess.run([program], input=script, text=True, check=True, capture_output=True)
    assert ["show", "--budget"] == answer.stdout.split()


def test_missing_library_is_named(redislock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    outcome = redislock("completion", "bash")
    assert (125, "", 1) == (outcome.code, outcome.out, len(outcome.err.splitlines()))
    assert "redislock_fast[cli]" in outcome.err
    assert 2 == redislock("completion", "csh").code
