"""The encoders: the compiled one, its pure-Python twin and hiredis write the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redislock_fast._pipe import resp_py
from redislock_fast._pipe.base import Args
from redislock_fast._pipe.impl import compiled, encode

ENCODERS = [pytest.param(resp_py.encode, id="python")]
if compiled is not None:
    ENCODERS.append(pytest.param(encode, id="compiled"))

words = st.one_of(st.binary(), st.text(), st.integers(-(1 << 63), (1 << 63) - 1))
requests = st.lists(words, min_size=1, max_size=12).map(tuple)


@pytest.mark.parametrize("encode", ENCODERS)
@given(args=requests)
def test_encoder_writes_what_hiredis_writes(encode: Callable[[Args], bytes], args: Args) -> None:
    assert hiredis.pack_command(args) == encode(args)  # type: ignore[arg-type]  # its stub knows one word only


@pytest.mark.skipif(compiled is None, reason="the compiled core is not in use")
@given(args=requests)
def test_twins_write_the_same_bytes(args: Args) -> None:
    assert resp_py.encode(args) == encode(args)


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((b"PING",), b"*1\r\n$4\r\nPING\r\n"),
        ((b"",), b"*1\r\n$0\r\n\r\n"),
        ((b"a\r\nb\x00",), b"*1\r\n$5\r\na\r\nb\x00\r\n"),
        (("é",), b"*1\r\n$2\r\n\xc3\xa9\r\n"),
        ((0,), b"*1\r\n$1\r\n0\r\n"),
        ((-1,), b"*1\r\n$2\r\n-1\r\n"),
        ((10, 99, 100), b"*3\r\n$2\r\n10\r\n$2\r\n99\r\n$3\r\n100\r\n"),
        ((-(1 << 63),), b"*1\r\n$20\r\n-9223372036854775808\r\n"),
        ((b"x",) * 10, b"*10\r\n" + b"$1\r\nx\r\n" * 10),
        ((), b"*0\r\n"),
    ],
)
def test_encoder_writes_these_bytes(encode: Callable[[Args], bytes], args: Args, expected: bytes) -> None:
    assert expected == encode(args)


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("word", [None, 1.5, True, bytearray(b"x"), [b"x"]])
def test_encoder_refuses_other_types(encode: Callable[[Args], bytes], word: object) -> None:
    with pytest.raises(TypeError, match=type(word).__name__):
        encode((b"SET", word))  # type: ignore[arg-type]


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1])
def test_encoder_refuses_an_int_beyond_64_bits(encode: Callable[[Args], bytes], number: int) -> None:
    with pytest.raises(OverflowError):
        encode((number,))


@pytest.mark.parametrize("encode", ENCODERS)
def test_encoder_refuses_a_lone_surrogate(encode: Callable[[Args], bytes]) -> None:
    with pytest.raises(UnicodeEncodeError):
        encode(("\ud800",))
