"""The names beside a lock are in its hash slot, whatever its name, and two locks never share them.

redis-py's own slot function is the reference, and a real cluster in `integration/cluster/test_waiting.py`.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from redislock_fast._protocol.keys import channel_beside, fence_key, guard_key, lock_of_queue, queue_keys

AWKWARD = [
    b"",
    b"{",
    b"}",
    b"{}",
    b"}{",
    b"{{}}",
    b"{}}",
    b"a{b}c",
    b"{a}{b}",
    b"a{}{b}c",
    b"{a",
    b"a}",
    b"a{b",
    b"a}b{c}",
    b"{\x00\xff}",
    b"\xff\x00\r\n",
    b"*" * 500,
    "schloß".encode(),
]

# Braces decide, so they are common.
NAMES = st.lists(
    st.one_of(st.sampled_from([b"{", b"}", b"{}", b":rlf:queue", b":rlf:fence"]), st.binary(max_size=5))
).map(b"".join)


def keys_beside(name: bytes) -> tuple[bytes, ...]:
    return (*queue_keys(name), fence_key(name), guard_key(name))


@pytest.mark.parametrize("name", AWKWARD, ids=repr)
def test_awkward_names_share_their_slot_with_what_stands_beside_them(name: bytes) -> None:
    assert {key_slot(key) for key in keys_beside(name)} == {key_slot(name)}
    assert key_slot(channel_beside(name, b"listener")) == key_slot(name)


@given(NAMES)
def test_every_name_shares_its_slot_with_what_stands_beside_it(name: bytes) -> None:
    assert {key_slot(key) for key in keys_beside(name)} == {key_slot(name)}
    assert key_slot(channel_beside(name, b"listener")) == key_slot(name)


def share_nothing(one: bytes, other: bytes) -> bool:
    return one == other or set(keys_beside(one)).isdisjoint(keys_beside(other))


@given(NAMES, NAMES)
def test_two_locks_share_no_key(one: bytes, other: bytes) -> None:
    assert share_nothing(one, other)


@given(NAMES)
def test_a_lock_and_its_tagged_namesake_share_nothing(name: bytes) -> None:
    begins = [key[: key.index(name) + len(name)] for key in keys_beside(name)]  # as "{name" and "{5}name"
    for begin in begins:
        for namesake in (begin, begin + b"}", b"{" + name + b"}"):
            assert share_nothing(name, namesake)


@given(NAMES)
def test_a_lock_is_none_of_its_own_keys(name: bytes) -> None:
    assert len({name, *keys_beside(name)}) == 5


@given(NAMES)
def test_lock_is_known_by_the_key_of_its_queue(name: bytes) -> None:
    queue, waiters = queue_keys(name)
    assert [lock_of_queue(key) for key in (queue, waiters, fence_key(name))] == [name, None, None]


@pytest.mark.parametrize("key", [b"jobs:queue", b":queue", b"{}:rlf:queue", b"a{b}c:rlf:queue"], ids=repr)
def test_other_queues_are_of_no_lock(key: bytes) -> None:
    assert lock_of_queue(key) is None


def test_there_is_a_channel_in_every_slot_and_one_only() -> None:
    names = [b"name-%d" % number for number in random.Random(1).sample(range(10**6), 100)]
    channels: dict[int, set[bytes]] = {}
    for name in names:
        channels.setdefault(key_slot(name), set()).add(channel_beside(name, b"listener"))
    assert {len(in_slot) for in_slot in channels.values()} == {1}
    assert len(set.union(*channels.values())) == len(channels)


@given(NAMES)
def test_two_listeners_have_two_channels(name: bytes) -> None:
    assert channel_beside(name, b"one") != channel_beside(name, b"other")
