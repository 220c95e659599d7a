"""The command line, in this process: as `redislock`, without the start of an interpreter."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from tests.support.helpers import redislock_main

CANARY = "S3CR3T-canary"
"""A password that may stand in no output."""

_TOKEN = re.compile("rlf:[0-9a-f]{12}|[0-9a-f]{20}")


@dataclass(frozen=True)
class Outcome:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Its lines, as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


class Command(Protocol):
    """The type of the `redislock` fixture."""

    def __call__(self, *words: object) -> Outcome:
        """Run the command line with these words. No token and no password may be in what it prints."""


@pytest.fixture
def redislock(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs command lines, by default without a terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["redislock", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            sys.exit(redislock_main())
        out, err = capfd.readouterr()
        assert CANARY not in out + err
        assert not _TOKEN.search(out + err)
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, out, err)

    return run
