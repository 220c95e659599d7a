"""Wrong command lines of `redislock run`: a line on stderr, exit code 125, and nothing is sent or changed."""

from __future__ import annotations

import signal

import pytest

from redislock_fast._cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: NAME"),
        (["--bogus", "name", "true"], "unrecognized arguments: --bogus"),
        (["-n", "-w", "1", "name", "true"], "argument -w: not allowed with argument -n"),
        (["-w", "soon", "name", "true"], "argument -w: invalid seconds value: 'soon'"),
        (["-w", "nan", "name", "true"], "argument -w: nan is no time"),
        (["-t", "0", "name", "true"], "argument -t: invalid ttl value: '0'"),
        (["--at-least", "-1", "name", "true"], "argument --at-least: -1 is no time"),
        (["n\udcff", "true"], "argument NAME: invalid name value: 'n\\udcff'"),
        (["-E", "256", "name", "true"], "argument -E: 256 is not between 0 and 255"),
        (["--on-lost", "redis://:canary@host", "name"], "redis://...@host"),
    ],
)
def test_wrong_options_exit_as_with_timeout(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    errors = capsys.readouterr().err
    assert (end.value.code, message in errors, "canary" in errors) == (125, True, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["name"], "a command is missing"),
        (["name", "--"], "a command is missing"),
        (["name", "-n", "--", "true"], "options stand before the name of the lock: -n"),
    ],
)
def test_wrong_order_exits_as_with_timeout(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["run", *words]) == 125
    assert message in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
