"""Tokens, also where many threads draw them at once (`make test` runs it so). No server."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from redislock_fast._util.tokens import (
    CONTENDED_FLAG,
    LISTENS,
    PLAIN,
    TOKEN_BYTES,
    TokenSource,
    identifier_of,
    is_of_connection,
    is_ours,
    listens,
    new_token,
    stem_of,
    token_id_of,
)

ALPHABET = set(b"0123456789abcdef")


def test_tokens_are_never_drawn_twice() -> None:
    source = TokenSource()
    tokens = [draw() for _ in range(2000) for draw in (new_token, source.new_token)]
    assert len(tokens) == len(set(tokens))


@pytest.mark.parametrize("hears", [False, True])
def test_token_tells_its_connection_and_whether_its_holder_listens(hears: bool) -> None:
    source = TokenSource()
    token = source.new_token(LISTENS if hears else PLAIN)
    assert (TOKEN_BYTES, True) == (len(token), is_ours(token))
    assert (source.identifier, hears) == (identifier_of(token), listens(token))
    assert source.identifier == identifier_of(token + CONTENDED_FLAG)


def test_holder_with_a_token_of_another_library_does_not_listen() -> None:
    assert not any(listens(b"%s1%s" % (b"a" * 15, b"b" * length)) for length in (16, 20))


@pytest.mark.parametrize("of_connection", [False, True])
def test_identifier_tells_whether_it_is_of_a_connection(of_connection: bool) -> None:
    identifiers = [TokenSource(of_connection).identifier for _ in range(500)]
    assert 500 == len(set(identifiers))
    assert {(11, of_connection)} == {(len(one), is_of_connection(one)) for one in identifiers}
    assert all(set(one) <= ALPHABET for one in identifiers)


def test_connections_one_after_the_other_have_identifiers_with_one_stem() -> None:
    sources = [TokenSource()]
    for _ in range(4095):
        sources.append(sources[-1].successor())
    identifiers = [source.identifier for source in sources]
    assert 4096 == len(set(identifiers))
    assert 1 == len(set(map(stem_of, identifiers)))
    assert sources[0].identifier == sources[-1].successor().identifier


def test_token_without_a_connection_names_none() -> None:
    assert not is_of_connection(identifier_of(new_token()))


def test_tokens_of_one_source_differ_in_80_bits() -> None:
    source = TokenSource()
    columns = [len(set(column)) for column in zip(*(source.new_token() for _ in range(3000)), strict=True)]
    assert 80.0 == sum(math.log2(values) for values in columns)


def test_a_forked_child_has_another_identifier_and_other_tokens() -> None:
    source = TokenSource()
    source.new_token()
    identifier, stock = source.identifier, list(source._stock)
    source.forget()  # as after a fork
    assert identifier != source.identifier
    assert not {source.new_token() for _ in stock} & set(stock)


def test_id_names_a_token_and_has_nothing_of_it() -> None:
    assert "3c469e9d6c58" == token_id_of(b"token")


def test_child_that_a_signal_handler_forks_draws_nothing_that_its_parent_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    source, urandom = TokenSource(), os.urandom

    class Digits(bytes):
        """There is a fork as they are put into tokens."""

        def hex(self, *_: Any) -> Any:
            return self

        def encode(self) -> Digits:
            return self

        def __getitem__(self, at: Any) -> Any:
            if forks:
                forks.pop()()
            return super().__getitem__(at)

    forks = [source.forget]
    digits = iter([Digits(urandom(10_000).hex().encode())])
    monkeypatch.setattr(os, "urandom", lambda size: next(digits, None) or urandom(size))
    source.new_token()  # its caller gets an error: the call is the parent's
    assert identifier_of(source.new_token()) == source.identifier
