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
        (["--once-done", "0", "name", "true"], "argument --once-done: invalid ttl value: '0'"),
        (["-E", "256", "name", "true"], "argument -E: 256 is not between 0 and 255"),
        (["--on-lost", "redis://:canary@host", "name"], "redis://...@host"),
        (["--", "echo", "hi there"], "the name of the lock stands before the --, as in: run NAME -- echo 'hi there'"),
        (["-n", "--", "echo"], "NAME is missing"),
        (["--", "curl", "redis://:canary@host"], "run NAME -- curl redis://...@host"),
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
        (["--", "-name", "--"], "a command is missing"),
        (["name", "-n", "--", "true"], "options stand before the name of the lock: -n"),
        (["--once-done", "60", "--limit", "2", "name", "true"], "--once-done goes with neither"),
        (["--once-done", "60", "--at-least", "2", "name", "true"], "--once-done goes with neither"),
    ],
)
def test_wrong_order_exits_as_with_timeout(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["run", *words]) == 125
    assert message in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    "url",
    [
        "http://:canary@host",
        "redis://:canary@host:port",
        "redis://:canary@a..b:6379/0",
        "redis://:canary@host?protocol=7",
        "redis://:canary@host?encoding=none",
        "rediss://:canary@host?ssl_cert_reqs=perhaps",
        "redis+cluster://:canary@host:port",
        "redis+sentinel://:canary@host",
        "redis+sentinel://:canary@a..b/service",
    ],
)
def test_wrong_url_exits_as_with_timeout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    by_option = main(["run", "--url", url, "name", "--", "true"])
    monkeypatch.setenv("REDISLOCK_URL", url)
    by_environment = main(["run", "name", "--", "true"])
    by_other_command = main(["show", "name"])
    errors = capsys.readouterr().err
    assert (by_option, by_environment, by_other_command) == (125, 125, 2)
    assert (errors.count("redislock: the URL is wrong"), len(errors.splitlines()), "canary" in errors) == (3, 3, False)


def test_fault_of_its_own_exits_as_with_timeout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redislock_fast._cli.run.client_of", lambda _: 1 / 0)
    assert main(["run", "name", "--", "true"]) == 125
    assert "ZeroDivisionError" in capsys.readouterr().err
