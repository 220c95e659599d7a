"""The text by which a connection tells whose it is. No server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redislock_fast._protocol.identity import introduction, read_introduction

IDENTIFIER = b"8ab35290dc5"


def test_text_says_whose_the_connection_is() -> None:
    text = introduction(IDENTIFIER, "web-1", 4711, "worker.py")
    assert b"redislock_fast(8ab35290dc5;web-1;4711;worker.py)" == text
    assert (IDENTIFIER, "web-1", 4711, "worker.py") == read_introduction(text)


@given(st.text(), st.integers(0, 2**32 - 1), st.text())
def test_server_accepts_the_text_of_any_names(host: str, pid: int, program: str) -> None:
    text = introduction(IDENTIFIER, host, pid, program)
    assert len(text) <= 105
    assert all(0x21 <= byte <= 0x7E for byte in text)
    read = read_introduction(text)
    assert read is not None
    assert (IDENTIFIER, pid) == (read[0], read[2])
    assert introduction(*read) == text


def test_characters_that_the_server_does_not_take_are_replaced() -> None:
    text = introduction(IDENTIFIER, "a b\n", 1, "x;(ü)" + "y" * 100)
    assert b"redislock_fast(8ab35290dc5;a_b_;1;x____" + b"y" * 25 + b")" == text


@pytest.mark.parametrize(
    "text",
    [
        b"", b"redis-py", b"redis-py(django;5.0)", b"redislock_fast", b"redislock_fast(8ab35290dc5;host;1)",
        b"redislock_fast(8ab35290dc;host;1;x)", b"redislock_fast(8ab35290dc5;host;pid;x)", b"\xff",
        b"redislock_fast(8ab35290dc5;host;1;x;y)", b"redislock_fast(8ab35290dc5;host;12345678901;x)",
    ],
    ids=repr,
)  # fmt: skip
def test_other_names_tell_nothing(text: bytes) -> None:
    assert read_introduction(text) is None
