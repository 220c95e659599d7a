"""Plays what several threads do, one line of the library at a time, in each order that counts.

Each actor is a thread. One of them runs at a time; before each line of the traced files it may be another's turn. So
a schedule is a list of places at which another actor goes on, and the same schedule is always the same story.

Rules: nothing here asserts what a lock should do. No actor may wait for another one.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import redislock_fast

_PACKAGE = Path(redislock_fast.__file__).parent

Switches = tuple[tuple[int, int], ...]
"""A schedule: before the line with this number, this actor goes on."""

_Choose = Callable[[int, list[int]], int | None]


class Scene(Protocol):
    """A story for several threads.

    Attributes:
        actors: what each of them does.
    """

    actors: list[Callable[[], object]]

    def check(self) -> None:
        """Assert what must be so in the end."""


class _Stage:
    """Runs the actors of one scene.

    Args:
        actors: the functions.
        files: the traced ones.
        first: which actor begins.
        choose: called with the number of the next line and the actors that have not ended; returns which goes on, or
            None: the one that runs.
        by_opcode: whether to look before each instruction, not before each line.
    """

    def __init__(
        self, actors: list[Callable[[], object]], files: frozenset[str], first: int, choose: _Choose, by_opcode: bool
    ) -> None:
        self._actors = actors
        self._files = files
        self._choose = choose
        self._by_opcode = by_opcode
        self._running = first
        self._live = list(range(len(actors)))
        self._turns = [threading.Lock() for _ in actors]
        self._ended = threading.Lock()
        self.lines = 0
        self.errors: list[BaseException] = []

    def play(self) -> None:
        """Run all to their ends.

        Raises:
            BaseException: the first error of an actor.
        """
        for turn in (*self._turns, self._ended):
            turn.acquire()
        threads = [threading.Thread(target=self._act, args=(number,)) for number in self._live]
        for thread in threads:
            thread.start()
        self._turns[self._running].release()
        self._ended.acquire()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _act(self, number: int) -> None:
        self._turns[number].acquire()
        try:
            sys.settrace(self._on_call)
            self._actors[number]()
        except BaseException as error:
            self.errors.append(error)
        finally:
            sys.settrace(None)
            self._live.remove(number)
            if self._live:
                self._running = self._live[0]
                self._turns[self._running].release()
            else:
                self._ended.release()

    def _on_call(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = self._by_opcode
        return self._on_line

    def _on_line(self, frame: Any, event: str, argument: object) -> Any:
        if event == ("opcode" if self._by_opcode else "line"):
            self.lines += 1
            me = self._running
            chosen = self._choose(self.lines, self._live)
            if chosen is not None and chosen != me:
                self._running = chosen
                self._turns[chosen].release()
                self._turns[me].acquire()
        return self._on_line


def _files(names: tuple[str, ...]) -> frozenset[str]:
    paths = [_PACKAGE / name for name in names]
    assert [path for path in paths if not path.is_file()] == []
    return frozenset(map(str, paths))


def play_all(make: Callable[[], Scene], switches: int, *names: str, one_in: int = 1) -> int:
    """Play a scene in each order with at most so many switches between two lines of these files.

    Args:
        make: makes the scene.
        switches: the most switches.
        names: the files.
        one_in: of the orders with the most switches, one in so many is played.

    Returns how many orders were played.
    """
    rng = random.Random(1)
    files, played = _files(names), 0
    left: list[tuple[int, Switches]] = [(first, ()) for first in range(len(make().actors))]
    while left:
        first, schedule = left.pop()
        live_at: dict[int, list[int]] = {}

        def choose(line: int, live: list[int], schedule: Switches = schedule, seen: Any = live_at) -> int | None:
            seen[line] = list(live)
            return next((actor for at, actor in schedule if at == line and actor in live), None)

        _play(make(), files, first, choose, False, f"first {first}, then {schedule}")
        played += 1
        if len(schedule) < switches:
            last = schedule[-1][0] if schedule else 0
            for line, live in live_at.items():
                chosen = [actor for actor in live if line > last]
                if len(schedule) + 1 == switches:
                    chosen = [actor for actor in chosen if rng.randrange(one_in) == 0]
                left += [(first, (*schedule, (line, actor))) for actor in chosen]
    return played


def play_some(make: Callable[[], Scene], seeds: range, *names: str) -> None:
    """Play a scene in random orders of the instructions in these files."""
    files = _files(names)
    for seed in seeds:
        rng = random.Random(seed)
        scene = make()
        rate = rng.choice((0.02, 0.1, 0.5))

        def choose(_: int, live: list[int], rng: random.Random = rng, rate: float = rate) -> int | None:
            return rng.choice(live) if rng.random() < rate else None

        _play(scene, files, rng.randrange(len(scene.actors)), choose, True, f"seed {seed}")


def _play(scene: Scene, files: frozenset[str], first: int, choose: _Choose, by_opcode: bool, how: str) -> None:
    try:
        _Stage(scene.actors, files, first, choose, by_opcode).play()
        scene.check()
    except Exception as error:
        raise AssertionError(f"{how}: {error!r}") from error
