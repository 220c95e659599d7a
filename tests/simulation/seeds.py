"""Runs the stories of a simulation, each from its seed: by the thousand in tests, or by a command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Protocol

from tests.simulation.world import World


class Violation(AssertionError):
    """An invariant does not hold."""


class Story(Protocol):
    """One seed's story."""

    kind: str
    world: World

    def run(self) -> None:
        """Play it.

        Raises:
            Violation: an invariant does not hold.
        """


def violation_of(make: Callable[..., Story], seed: int, **options: Any) -> str | None:
    """The violation in a seed's story, with the story; None for none."""
    try:
        make(seed, **options).run()
    except Violation as violation:
        return str(violation)
    return None


def violations(make: Callable[..., Story], seeds: range, **options: Any) -> Iterator[str]:
    """The violations in the stories of these seeds, each with its seed."""
    for seed in seeds:
        violation = violation_of(make, seed, **options)
        if violation is not None:
            yield f"seed {seed}: {violation}"


def story_of(make: Callable[..., Story], seed: int) -> list[str]:
    """All that happens in a seed's story."""
    story = make(seed, tells=True)
    story.run()
    return story.world.story


def violations_in(make: Callable[..., Story], late_us: int, seeds: range) -> list[tuple[int, str]]:
    """The seeds with a violation, each with its violation."""
    found = [(seed, violation_of(make, seed, late_us=late_us)) for seed in seeds]
    return [(seed, violation.splitlines()[0]) for seed, violation in found if violation]


def main(make: Callable[..., Story], description: str | None) -> int:
    """Play many seeds, or tell the story of one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many to play")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--late-us", type=int, default=0, help="how long servers read what lost connections sent")
    parser.add_argument("-v", action="store_true", help="tell the story of --seed even if nothing breaks")
    options = parser.parse_args()
    if options.seed is not None:
        story = make(options.seed, tells=True, late_us=options.late_us)
        try:
            story.run()
        except Violation as violation:
            print(violation)
            return 1
        print("\n".join(story.world.story if options.v else []), f"\nnothing broke ({story.kind})")
        return 0
    started = time.monotonic()
    chunks = [
        range(first, min(first + 500, options.first + options.seeds))
        for first in range(options.first, options.first + options.seeds, 500)
    ]
    played, failed = 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for chunk, found in zip(chunks, pool.map(partial(violations_in, make, options.late_us), chunks), strict=True):
            played += len(chunk)
            failed += len(found)
            for seed, what in found:
                print(f"\rseed {seed}: {what}")
            rate = played / (time.monotonic() - started)
            print(f"\r{played} seeds, {failed} failed, {rate:.0f}/s", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return 1 if failed else 0
