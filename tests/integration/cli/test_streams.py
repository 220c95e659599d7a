"""The streams of `redislock`: what a closed one, or one that takes not all, does to its output and exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from redislock_fast import Lock, holders
from redislock_fast.server import Server
from tests.support.running import Runs
from tests.support.waiting import FAR_S

pytestmark = pytest.mark.slow


def redirected(how: str) -> tuple[str, ...]:
    """A command that runs another one with a shell's redirection."""
    return ("sh", "-c", f'exec "$@" {how}', "sh")


def test_exit_code_is_that_of_the_command_where_all_streams_are_closed(runs: Runs, valkey: Server) -> None:
    tells = "(echo >&1) 2>/dev/null || (read -r line <&0) 2>/dev/null || exit 7"  # where it has none of them, too
    run = runs(valkey.port, "name", "sh", "-c", tells, wrapper=redirected("<&- >&- 2>&-"))
    assert run.end() == (7, "", "")


def test_look_without_an_output_has_its_exit_code(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    looks = [("show", "name"), ("ls",), ("top", "-n", "1")]
    ends = [runs(valkey.port, *words, command=command, wrapper=redirected(">&-")) for command, *words in looks]
    assert [run.end()[::2] for run in ends] == [(1, ""), (0, "redislock: no locks\n"), (0, "")]


def test_nobody_is_asked_where_the_input_is_closed(runs: Runs, valkey: Server, valkey_client: redis.Redis) -> None:
    with Lock(valkey_client, "name", timeout=FAR_S) as lock:
        holder = holders(valkey_client, "name").holder
        assert holder is not None
        words = ("name", "--token-id", str(holder.token_id))
        code, _, errors = runs(valkey.port, *words, command="break", wrapper=redirected("<&-")).end()
        assert lock.owned()
    assert (code, errors) == (2, "redislock: there is no terminal to ask: --yes breaks the lock without asking\n")


def test_characters_that_the_encoding_of_the_output_lacks_are_escaped(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    with Lock(valkey_client, "h\xe9ld \u65e5", timeout=FAR_S):
        code, output, errors = runs(valkey.port, command="ls", environment=ascii_only).end()
    assert (code, errors, output.splitlines()[1].split("  ")[0]) == (0, "", r"h\xe9ld \u65e5")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", [(), ("--json",)], ids=["text", "JSON"])
def test_output_that_cannot_be_written_is_told_in_one_line(
    runs: Runs, valkey: Server, valkey_client: redis.Redis, words: tuple[str, ...]
) -> None:
    buffered = {"PYTHONUNBUFFERED": ""}
    with Lock(valkey_client, "name", timeout=FAR_S):
        run = runs(valkey.port, *words, command="ls", wrapper=redirected(">/dev/full"), environment=buffered)
        assert run.end() == (125, "", "redislock: [Errno 28] No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_message_that_cannot_be_written_leaves_the_exit_code_alone(
    runs: Runs, valkey: Server, valkey_client: redis.Redis
) -> None:
    full, buffered = redirected("2>/dev/full"), {"PYTHONUNBUFFERED": ""}
    with Lock(valkey_client, "name", timeout=FAR_S):
        refused = [("-n", "name", "true"), ("-n", "--skip-ok", "name", "true"), ("--bogus", "name", "true")]
        ends = [runs(valkey.port, *words, wrapper=full, environment=buffered).end() for words in refused]
    assert ends == [(75, "", ""), (0, "", ""), (125, "", "")]
