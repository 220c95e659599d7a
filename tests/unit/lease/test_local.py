"""Unit tests: `lock.local.token`, as other projects read and set it. No server."""

from __future__ import annotations

import pytest

from redislock_fast._lease.owner import Local, SharedOwner, owners_of
from redislock_fast._util.tokens import new_token

OURS = b"rlf:0123456789abcdef0123456789abcdef"


def encode(value: object) -> bytes:
    """As a client's encoder does."""
    return value if isinstance(value, bytes) else str(value).encode()


def local() -> Local:
    """That of a lock that nobody holds."""
    return Local(SharedOwner(), encode, lambda _owner, _lease: None)


@pytest.mark.parametrize("token", [None, OURS, b"own", b"own+", b"", OURS[:-1] + b"+"], ids=repr)
def test_token_that_is_set_is_kept(token: bytes | None) -> None:
    one = local()
    one.token = token
    assert (token, token) == (one.token, owners_of(one).token)


@pytest.mark.parametrize("text", ["\xe9", "own+", ""], ids=repr)
def test_text_that_is_set_counts_as_its_bytes(text: str) -> None:
    one = local()
    one.token = text
    assert (text.encode(), text.encode()) == (one.token, owners_of(one).token)


@pytest.mark.parametrize("value", [OURS + b"+", OURS.decode() + "+"], ids=["bytes", "str"])
def test_value_that_is_set_counts_as_its_token(value: bytes | str) -> None:
    one = local()
    one.token = value
    assert (OURS + b"+", OURS) == (one.token, owners_of(one).token)


def test_flag_of_an_earlier_token_is_not_shown() -> None:
    one = local()
    one.token = OURS + b"+"
    one.token = token = new_token()
    assert token == one.token


def test_token_is_not_shown_in_the_repr() -> None:
    one = local()
    one.token = OURS
    assert OURS.decode() not in repr(one)


def test_other_attributes_are_the_owners() -> None:
    one = local()
    one.fence = 3
    assert (3, 3) == (one.fence, owners_of(one).fence)
