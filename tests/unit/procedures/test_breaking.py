"""Which token a lock is broken by. No server."""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._procedures.breaking import breaking
from redislock_fast._protocol.commands import Release
from redislock_fast._util.tokens import token_id_of

OURS = b"rlf:11111111abc0" + b"a" * 20


@pytest.mark.parametrize(
    ("value", "token"),
    [(OURS, OURS), (OURS + b"+", OURS), (b"theirs", b"theirs"), (b"theirs+", b"theirs+")],
    ids=["ours", "ours, contended", "theirs", "theirs with a plus"],
)
def test_release_names_the_token_that_was_meant(value: bytes, token: bytes) -> None:
    steps: Any = breaking(b"name", token_id_of(token))
    next(steps).operation.holder = value
    release = steps.send(None).operation
    assert isinstance(release, Release)
    assert token == release.token
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value is release


@pytest.mark.parametrize("value", [None, OURS, OURS + b"+"], ids=["free", "another's", "another's, contended"])
def test_nothing_is_released_for_another_holder(value: bytes | None) -> None:
    steps: Any = breaking(b"name", token_id_of(b"gone"))
    next(steps).operation.holder = value
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value is None
