"""Planted faults: for each promise of the library, a change that breaks it, and a test that finds the change.

`python -m tests.planted` shows that the tests find every fault. `tests/unit/test_planted.py` checks that each fault
still applies, so a change of the code that a fault names must change the fault, too.
"""

from __future__ import annotations

from tests.planted import (
    batches,
    command_line,
    commands,
    core,
    elections,
    forks,
    holding,
    jobs,
    lingering,
    loops,
    patching,
    permits_simulated,
    pipes,
    redlocks,
    scripts,
    semaphores,
    transports,
    waiting,
)
from tests.planted.fault import Fault

__all__ = ["FAULTS"]

FAULTS: tuple[Fault, ...] = (
    *commands.FAULTS,
    *scripts.FAULTS,
    *semaphores.FAULTS,
    *waiting.FAULTS,
    *permits_simulated.FAULTS,
    *holding.FAULTS,
    *lingering.FAULTS,
    *batches.FAULTS,
    *redlocks.FAULTS,
    *elections.FAULTS,
    *jobs.FAULTS,
    *transports.FAULTS,
    *loops.FAULTS,
    *patching.FAULTS,
    *pipes.FAULTS,
    *core.FAULTS,
    *forks.FAULTS,
    *command_line.FAULTS,
)
