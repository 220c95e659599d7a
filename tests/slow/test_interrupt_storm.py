"""Interrupts at random places while the main thread acquires and releases on all options, beside other threads.

The handler of a timer raises. Afterwards nothing hangs, no key is left, and each lock can be acquired.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import Connect
from tests.support.helpers import run_script, wait_until

SECONDS = 8.0
FEWEST_INTERRUPTS = 200

pytestmark = pytest.mark.slow

_PROGRAM = Path(__file__).with_name("interrupt_storm.py")


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "TLS"])
def test_interrupts_at_random_places_leave_nothing(
    connect: Connect, request: pytest.FixtureRequest, over_tls: bool
) -> None:
    server: Any = request.getfixturevalue("tls_server" if over_tls else "valkey")
    ca_paths = [server.ca_path] if over_tls else []
    seed = random.SystemRandom().randrange(1 << 32)
    done = run_script(_PROGRAM.read_text(), server.port, SECONDS, seed, *ca_paths)
    assert done.returncode == 0, f"seed {seed}: {done.stdout} {done.stderr}"
    interrupts = int(done.stdout)
    assert interrupts >= FEWEST_INTERRUPTS, f"seed {seed}"
    tls: dict[str, Any] = {"host": "127.0.0.1", "ssl": True, "ssl_ca_certs": server.ca_path} if over_tls else {}
    client: redis.Redis = connect(server.port, **tls)
    wait_until(lambda: not list(client.scan_iter("storm:*", _type="string")), f"seed {seed}: no key is left")
