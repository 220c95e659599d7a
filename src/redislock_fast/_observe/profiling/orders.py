"""Which locks were acquired while which others were held, and the cycles among them, which could deadlock.

If one caller acquires A and then B, and another one B and then A, each can come to wait for the other. The orders tell
that though it has never happened.

Thread safety: none of its own; the recorder's mutex guards all of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

MOST_ORDERS = 10_000
MOST_CYCLES = 100

Pair: TypeAlias = "tuple[str, str]"
_Graph: TypeAlias = "Mapping[str, Iterable[str]]"


class Order:
    """That a lock was acquired while another one was held.

    Attributes:
        held_site: where the lock was acquired that was held, the first time.
        site: where the other one was acquired then.
        count: how often the order was seen.
    """

    __slots__ = ("count", "held_site", "site")

    def __init__(self, held_site: str, site: str) -> None:
        self.held_site = held_site
        self.site = site
        self.count = 0

    def as_dict(self) -> dict[str, Any]:
        """The attributes."""
        return {"held_site": self.held_site, "acquired_site": self.site, "count": self.count}


class Orders:
    """The 10,000 orders that were seen last, by the names of the held and the acquired lock."""

    def __init__(self) -> None:
        self._orders: dict[Pair, Order] = {}

    def note(self, held: str, held_site: str, name: str, site: str) -> None:
        """Count that `name` was acquired while `held` was held."""
        order = self._orders.pop((held, name), None) or Order(held_site, site)
        order.count += 1
        self._orders[held, name] = order  # the last one
        if len(self._orders) > MOST_ORDERS:
            del self._orders[next(iter(self._orders))]

    def copy(self) -> dict[Pair, Order]:
        """The orders as they are now."""
        return dict(self._orders)


def cycles_of(orders: Iterable[Pair]) -> list[list[Pair]]:
    """The orders that could deadlock: cycles, the shortest through each order that is in none yet; 100 at most.

    Returns:
        Each cycle as its orders: the name that is acquired by one is held by the next, and so on around.
    """
    onward: dict[str, list[str]] = defaultdict(list)
    for held, name in orders:
        onward[held].append(name)
    component = _components(onward)
    inside = {held: [name for name in names if component[name] == component[held]] for held, names in onward.items()}
    cycles: list[list[Pair]] = []
    covered: set[Pair] = set()
    for held, names in inside.items():
        for name in names:
            if (held, name) not in covered and len(cycles) < MOST_CYCLES:
                path = [held, *_shortest_path(inside, name, held)]
                cycles.append(list(pairwise(path)))
                covered.update(cycles[-1])
    return cycles


def _components(onward: _Graph) -> dict[str, str]:
    """The strongly connected component of each name, as one name of it, by Kosaraju's algorithm."""
    backward: dict[str, list[str]] = defaultdict(list)
    for at, names in onward.items():
        for name in names:
            backward[name].append(at)
    component: dict[str, str] = {}
    for root in reversed(_finished(onward)):
        found = [root]
        while found:
            name = found.pop()
            if name not in component:
                component[name] = root
                found += backward[name]
    return component


def _finished(onward: _Graph) -> list[str]:
    """All names, each one after those that a search in depth reaches from it first."""
    finished: list[str] = []
    seen: set[str] = set()
    for start in onward:
        path = [] if start in seen else [(start, iter(onward[start]))]
        seen.add(start)
        while path:
            at, names = path[-1]
            name = next((name for name in names if name not in seen), None)
            if name is None:
                finished.append(at)
                path.pop()
            else:
                seen.add(name)
                path.append((name, iter(onward.get(name, ()))))
    return finished


def _shortest_path(graph: _Graph, start: str, goal: str) -> list[str]:
    """The names from `start` to `goal`, both included. There is a path."""
    came_from: dict[str, str] = {}
    names = deque([start])
    while goal not in came_from and goal != start:
        at = names.popleft()
        for name in graph.get(at, ()):
            if name not in came_from and name != start:
                came_from[name] = at
                names.append(name)
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]
