"""`redislock lead`: wrong command lines, and when a command is run again. No server."""

from __future__ import annotations

import signal

import pytest

from redislock_fast._cli.lead import _begins_anew, _next_pause_s
from redislock_fast._cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: NAME"),
        (["--restart", "sometimes", "name", "true"], "argument --restart: invalid choice: 'sometimes'"),
        (["--value", "x" * 1025, "name", "true"], "argument --value: invalid value value"),
        (["-t", "0", "name", "true"], "argument -t: invalid ttl value: '0'"),
        (["--", "echo"], "as in: lead NAME -- echo"),
    ],
)
def test_wrong_options_exit_as_with_timeout(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["lead", *words])
    assert (end.value.code, message in capsys.readouterr().err) == (125, True)


def test_command_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lead", "beat"]) == 125
    assert "a command is missing: redislock lead [OPTIONS] NAME -- COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "passed_on", "expected"),
    [
        (0, set(), {"always"}),
        (7, set(), {"always", "on-failure"}),
        (7, {signal.SIGHUP}, {"always", "on-failure"}),
        (128 + signal.SIGSEGV, set(), {"always", "on-failure"}),
        (128 + signal.SIGHUP, {signal.SIGHUP}, set()),
        (7, {signal.SIGTERM}, set()),
        (0, {signal.SIGINT}, set()),
    ],
)
def test_when_a_command_is_run_again(code: int, passed_on: set[int], expected: set[str]) -> None:
    assert {how for how in ("always", "on-failure", "never") if _begins_anew(code, how, passed_on)} == expected


def test_pauses_double_until_the_command_has_run_for_long() -> None:
    pauses = [0.0]
    for ran_s in [0.1] * 8 + [61, 0.1]:
        pauses.append(_next_pause_s(pauses[-1], ran_s))
    assert pauses[1:] == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]
