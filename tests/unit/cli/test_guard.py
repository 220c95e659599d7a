"""When `redislock run` ends its command. The clock is simulated; there is no server and no process."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast import LossReason
from redislock_fast._cli import guard as guard_module
from redislock_fast._cli.guard import Guard

TTL_S = 10.0
TERM_S, KILL_S = 2.5, 1.0
"""How long before the end of a lease of this ttl the command is killed, and how long before that it is told to end."""

NEVER = math.inf


class World:
    """A lock, a command and the signals of this process, on one simulated clock.

    Args:
        ends: whether the command has ended.
        renewed_until: until when renewals succeed.
    """

    name = "name"

    def __init__(self, ends: Callable[[World], bool], renewed_until: float) -> None:
        self.now = 0.0
        self.sent: list[tuple[float, int]] = []
        self.events: list[tuple[float, Callable[[], object]]] = []
        self.lost = False
        self._ends = ends
        self._renewed_until = renewed_until

    def remaining(self) -> float:
        """The lock is renewed when a third of its lease has passed."""
        renewed_at = min(self.now, self._renewed_until) // (TTL_S / 3) * (TTL_S / 3)
        return 0.0 if self.lost else max(renewed_at + TTL_S - self.now, 0.0)

    def send(self, number: int) -> None:
        self.sent.append((round(self.now, 6), number))

    def poll(self) -> int | None:
        return 0 if self._ends(self) else None

    def has_left_others(self) -> bool:
        return False

    def wait(self, limit_s: float) -> list[int]:
        """Time passes until the next event, or to the limit."""
        assert limit_s > 0, "it does not sleep"
        due = [event for event in self.events if event[0] <= self.now + limit_s]
        self.now = max(self.now, due[0][0]) if due else self.now + limit_s
        if due:
            self.events.remove(due[0])
            due[0][1]()
        return []

    def wake(self) -> None:
        pass


def killed(world: World) -> bool:
    return signal.SIGKILL in (number for _, number in world.sent)


def told(world: World) -> bool:
    return signal.SIGTERM in (number for _, number in world.sent)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[World, Guard]]:
    """Makes a world and a guard in it."""

    def make(ends: Callable[[World], bool], renewed_until: float = NEVER) -> tuple[World, Guard]:
        world: Any = World(ends, renewed_until)
        monkeypatch.setattr(guard_module, "clock", lambda: world.now)
        return world, Guard("the lock", world, TTL_S, kills=True)

    return make


def test_command_is_left_alone_while_the_lock_is_renewed(begin: Callable[..., Any]) -> None:
    world, guard = begin(lambda world: world.now > 100)
    assert guard.run(world, world) == 0
    assert (world.sent, guard.has_ended_it) == ([], False)


def test_command_that_ignores_term_is_killed_before_its_lease_ends(begin: Callable[..., Any]) -> None:
    world, guard = begin(killed, renewed_until=1.0)
    guard.run(world, world)
    kill_at = TTL_S - KILL_S
    assert (world.sent, guard.has_ended_it) == (
        [(kill_at - TERM_S, signal.SIGTERM), (kill_at, signal.SIGKILL)],
        True,
    )


def test_command_that_is_told_to_end_may_end_by_itself(begin: Callable[..., Any]) -> None:
    world, guard = begin(told, renewed_until=1.0)
    guard.run(world, world)
    assert (world.sent, guard.has_ended_it) == ([(TTL_S - KILL_S - TERM_S, signal.SIGTERM)], True)


def test_command_is_told_at_once_and_killed_soon_after_a_loss(begin: Callable[..., Any]) -> None:
    world, guard = begin(killed)

    def lose() -> None:
        world.lost = True
        guard.note_loss(world, LossReason.TAKEN)

    world.events.append((0.5, lose))
    guard.run(world, world)
    assert world.sent == [(0.5, signal.SIGTERM), (1.5, signal.SIGKILL)]


def test_command_whose_lease_ended_while_the_machine_slept_is_killed_at_once(begin: Callable[..., Any]) -> None:
    world, guard = begin(killed, renewed_until=0.0)

    def sleep() -> None:
        world.now += 3600

    world.events.append((0.5, sleep))
    guard.run(world, world)
    assert world.sent == [(3600.5, signal.SIGTERM), (3600.5, signal.SIGKILL)]


def test_loss_that_the_release_finds_out_is_none_of_the_command(begin: Callable[..., Any]) -> None:
    world, guard = begin(lambda _: True)
    guard.run(world, world)
    guard.note_loss(world, LossReason.DELETED)
    assert (guard.loss, guard.has_ended_it) == (None, False)
