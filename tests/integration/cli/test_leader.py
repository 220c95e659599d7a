"""`redislock leader`: it shows who leads, and nobody where nobody does; with `--watch`, each new leader."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from redislock_fast import Election
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.cli.conftest import Command
from tests.support.helpers import PATIENCE_S
from tests.support.running import Runs


def test_leader_is_shown_while_it_leads(
    redislock: Command, valkey: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDISLOCK_URL", valkey.url)
    with Election(connect(valkey.port), "beat", value="a\nb").term() as term:
        shown, told = redislock("leader", "beat"), redislock("leader", "beat", "--json")
    (leader,) = told.objects
    assert [leader[field] for field in ("name", "term", "value")] == ["beat", term.number, "a\nb"]
    assert leader["process"]["pid"] == os.getpid()
    assert 0 <= leader["since_s"] < 60
    expected = rf"""election  beat
leader    [^ ]+:{os.getpid()}, .*
value     a\\nb
term      {term.number}
since     .* s
"""
    assert re.fullmatch(expected, shown.out)
    assert (shown.code, shown.err, told.code) == (0, "", 0)
    shown, told = redislock("leader", "beat"), redislock("leader", "beat", "--json")
    assert (shown.code, shown.out, told.code) == (1, "election  beat\nleader    none\n", 1)
    assert told.objects == [{"name": "beat", "term": None, "value": None, "process": None, "since_s": None}]


@pytest.mark.slow
def test_each_new_leader_is_watched(runs: Runs, valkey: Server, connect: Connect) -> None:
    objects = runs(valkey.port, "beat", "--watch", "--json", command="leader")
    lines = runs(valkey.port, "beat", "--watch", command="leader")
    for term in (1, 2):
        with Election(connect(valkey.port), "beat", value="a\nb").term():
            shown, line = json.loads(objects.line()), lines.line()
        assert [shown[field] for field in ("name", "term", "value")] == ["beat", term, "a\nb"]
        assert shown["process"]["pid"] == os.getpid()
        assert re.fullmatch(rf"term {term}  [^ ]+:{os.getpid()}, .*  value a\\nb\n", line)
    objects.send(signal.SIGINT)
    assert objects.end() == (0, "", "")
    assert lines.process.stdout is not None
    lines.process.stdout.close()
    with Election(connect(valkey.port), "beat").term():
        assert (lines.process.wait(PATIENCE_S), lines.trouble()) == (0, "")  # it ends with its reader
