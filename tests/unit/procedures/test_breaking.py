"""Which token a lock is broken by. No server."""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._procedures.breaking import break_lock
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Release
from redislock_fast._util.tokens import token_id_of

OURS = b"rlf:11111111abc0" + b"a" * 20
LISTENS = b"rlf:11111111abc1" + b"a" * 20


@pytest.mark.parametrize(
    ("value", "token"),
    [(OURS, OURS), (OURS + b"+", OURS), (b"theirs", b"theirs"), (b"theirs+", b"theirs+")],
    ids=["ours", "ours, contended", "theirs", "theirs with a plus"],
)
def test_release_names_the_token_that_was_meant(value: bytes, token: bytes) -> None:
    steps: Any = break_lock(b"name", token_id_of(token))
    next(steps).args[0].holder = value
    release = steps.send(None).args[0]
    assert isinstance(release, Release)
    assert token == release.token
    release.result = True
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value == (False, 0.0)


def test_holder_that_listens_is_told_before_its_lock_is_released() -> None:
    steps: Any = break_lock(b"name", token_id_of(LISTENS))
    next(steps).args[0].holder = LISTENS + b"+"
    asking = steps.send(None).args[0]
    assert asking.request(Capabilities(), 0.0) == (b"PUBLISH", LISTENS[:15], b"give up " + LISTENS + b"name")
    assert asking.feed(1, Capabilities())
    steps.send(None).args[0].holder = LISTENS
    assert steps.send(None).method == "sleep"
    with pytest.raises(StopIteration) as end:
        steps.send(steps.send(None).args[0])
    assert end.value.value == (False, 0.0)


@pytest.mark.parametrize("value", [None, OURS, OURS + b"+"], ids=["free", "another's", "another's, contended"])
def test_nothing_is_released_for_another_holder(value: bytes | None) -> None:
    steps: Any = break_lock(b"name", token_id_of(b"gone"))
    next(steps).args[0].holder = value
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value is None
