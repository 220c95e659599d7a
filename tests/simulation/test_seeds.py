"""A reported seed can be replayed: its story depends on nothing but the seed. No server."""

from __future__ import annotations

import pytest

from tests.support.helpers import run_script

PLAY = """
import hashlib, itertools, sys, time
passed_s = itertools.count(0.0, float(sys.argv[2]))
time.clock_gettime = lambda _: next(passed_s)
from importlib import import_module
from tests.simulation.seeds import story_of
simulation = import_module(sys.argv[1]).Simulation
print([hashlib.md5(repr(story_of(simulation, seed)).encode()).hexdigest() for seed in range(200)])
"""
"""Plays 200 stories, where the machine's clock goes on by so many seconds each time that it is read."""


@pytest.mark.slow
@pytest.mark.parametrize("simulation", ["holding", "waiting"])
def test_a_seed_is_the_same_story_in_each_process_and_on_each_machine(simulation: str) -> None:
    stories = [run_script(PLAY, f"tests.simulation.{simulation}", passes_s) for passes_s in (0.0, 3600.0)]
    assert [played.returncode for played in stories] == [0, 0]
    assert stories[0].stdout == stories[1].stdout
