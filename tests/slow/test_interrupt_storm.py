"""Interrupts at random places while the main thread acquires and releases on all options, beside other threads.

The handler of a timer raises. Afterwards nothing hangs, no key is left, and each lock can be acquired.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import redis

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import run_script, wait_until

SECONDS = 8.0
FEWEST_INTERRUPTS = 200

pytestmark = pytest.mark.slow

_PROGRAM = Path(__file__).with_name("interrupt_storm.py")


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore")
def test_interrupts_at_random_places_leave_nothing(valkey: Server, connect: Connect) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    done = run_script(_PROGRAM.read_text(), valkey.port, SECONDS, seed)
    assert done.returncode == 0, f"seed {seed}: {done.stdout} {done.stderr}"
    interrupts = int(done.stdout)
    assert interrupts >= FEWEST_INTERRUPTS, f"seed {seed}"
    client: redis.Redis = connect(valkey.port)
    wait_until(lambda: not list(client.scan_iter("storm:*", _type="string")), f"seed {seed}: no key is left")
