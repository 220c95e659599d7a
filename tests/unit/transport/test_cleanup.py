"""The cleanup that comes before an operation sets the same key and token again.

Rules: no server, and nothing is cleaned up in the background.
"""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._protocol.commands import Acquire, Release
from redislock_fast._protocol.operation import Exchange
from redislock_fast._protocol.own_token import AcquireOwn
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._transport.cleanup import Cleanup

KEYS = [b"name", b"other"]
TOKEN = b"a caller's own"


class Waiting(Cleanup[Any]):
    """A cleanup that has not begun."""

    def start(self) -> bool:
        return True


class Server:
    """A transport, which is its own client."""

    def owner(self) -> Server:
        return self

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Clean up nothing."""


@pytest.mark.parametrize(
    ("operation", "keys"),
    [
        (AcquireOwn(b"name", TOKEN, 1000), [b"name"]),
        (AcquireOwn(b"name", b"another token", 1000), []),
        (AcquireOwn(b"third", TOKEN, 1000), []),
        (Pipeline([Acquire(key, TOKEN, 1000) for key in [b"third", *KEYS]]), KEYS),
        (Release(b"name", TOKEN, None), []),
    ],
    ids=["acquire", "with another token", "of another lock", "batch", "release"],
)
def test_key_that_is_set_again_with_its_token_is_cleaned_up_first(operation: Exchange, keys: list[bytes]) -> None:
    server = Server()
    cleanup = Waiting(server)
    cleanup.delete([(key, TOKEN) for key in KEYS])
    assert cleanup._returning(operation) == [(key, TOKEN) for key in keys]
    assert not cleanup.idle


class _Removing(bytes):
    """A key. Whoever looks whether it is among others has another thread remove what was cleaned up meanwhile."""

    cleanup: Waiting

    def __hash__(self) -> int:
        del self.cleanup.pending[:1]
        return super().__hash__()


def test_entry_is_found_while_another_thread_removes_those_before_it() -> None:
    server = Server()
    cleanup = Waiting(server)
    key = _Removing(b"cleaned up")
    key.cleanup = cleanup
    cleanup.delete([(key, TOKEN), (b"name", TOKEN)])
    assert cleanup._returning(AcquireOwn(b"name", TOKEN, 1000)) == [(b"name", TOKEN)]
    assert cleanup.pending == [(b"name", TOKEN)]
