"""The orders in which locks are acquired, and the cycles among them."""

from __future__ import annotations

import random

import pytest

from redislock_fast._observe.profiling import orders
from redislock_fast._observe.profiling.orders import Orders, cycles_of


def pairs(text: str) -> list[tuple[str, str]]:
    """Orders from "ab bc": b was acquired while a was held, and c while b was."""
    return [(pair[0], pair[1]) for pair in text.split()]


@pytest.mark.parametrize(
    ("text", "cycles"),
    [
        ("", []),
        ("ab bc ac", []),
        ("ab ba", ["ab ba"]),
        ("ab bc ca", ["ab bc ca"]),
        ("ab bc ca ac", ["ac ca", "ab bc ca"]),
        ("ab ba bc cd dc", ["ab ba", "cd dc"]),
        ("xa ab bc ca cy", ["ab bc ca"]),
    ],
)
def test_each_order_in_a_cycle_is_in_one_of_the_shortest(text: str, cycles: list[str]) -> None:
    found = [" ".join(map("".join, cycle)) for cycle in cycles_of(pairs(text))]
    assert sorted(map(turned, found)) == sorted(map(turned, cycles))


def turned(cycle: str) -> list[str]:
    """A cycle, begun at its least order."""
    parts = cycle.split()
    first = parts.index(min(parts))
    return parts[first:] + parts[:first]


def test_an_order_is_in_a_cycle_if_there_is_a_way_back() -> None:
    chosen = random.Random(23)
    for _ in range(200):
        names = "abcdefgh"
        some = {(a, b) for a, b in zip(chosen.choices(names, k=14), chosen.choices(names, k=14), strict=True) if a != b}
        found = cycles_of(some)
        for cycle in found:
            assert set(cycle) <= some
            assert [name for _, name in cycle] == [held for held, _ in cycle[1:] + cycle[:1]]
        expected = {(held, name) for held, name in some if held in reached(some, name)}
        assert {order for cycle in found for order in cycle} == expected


def reached(some: set[tuple[str, str]], start: str) -> set[str]:
    """The names to which orders lead from this one."""
    names = {start}
    while more := {name for held, name in some if held in names} - names:
        names |= more
    return names


def test_a_long_chain_of_orders_is_no_deep_recursion() -> None:
    chain = [(str(number), str(number + 1)) for number in range(5_000)]
    assert cycles_of(chain) == []
    assert cycles_of([*chain, ("5000", "0")]) == [[*chain, ("5000", "0")]]


def test_the_orders_that_were_seen_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MOST_ORDERS", 2)
    seen = Orders()
    for held, name in pairs("ab bc ab cd"):
        seen.note(held, f"{held}'s site", name, f"{name}'s site")
    assert {pair: order.as_dict() for pair, order in seen.copy().items()} == {
        ("a", "b"): {"held_site": "a's site", "acquired_site": "b's site", "count": 2},
        ("c", "d"): {"held_site": "c's site", "acquired_site": "d's site", "count": 1},
    }


def test_no_more_than_100_cycles_are_told() -> None:
    assert len(cycles_of([pair for i in range(200) for pair in ((f"a{i}", f"b{i}"), (f"b{i}", f"a{i}"))])) == 100
