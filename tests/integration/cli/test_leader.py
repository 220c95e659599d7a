"""`redislock leader`: it shows who leads, and nobody where nobody does."""

from __future__ import annotations

import os
import re

import pytest

from redislock_fast import Election
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.cli.conftest import Command


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
