"""Tokens, also where many threads draw them at once (`make test` runs it so). No server."""

from __future__ import annotations

from redislock_fast._util.tokens import new_token


def test_tokens_are_never_drawn_twice() -> None:
    tokens = [new_token() for _ in range(2000)]
    assert len(tokens) == len(set(tokens))
