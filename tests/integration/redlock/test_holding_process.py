"""Holding a Redlock in a process that forks, or ends.

Rules: as in test_holding.
"""

from __future__ import annotations

import pytest

from redislock_fast.server import Server
from tests.support.helpers import run_script

Fleet = list[Server]
pytestmark = pytest.mark.parametrize("fleet", ["mixed"], indirect=True)


_HOLDERS = {
    "threads": """
import os, signal, sys, time
import redis
from redislock_fast import Redlock

clients = [redis.Redis(port=int(port)) for port in sys.argv[1:]]
lock = Redlock(clients, "name", timeout=4.5, auto_renew=True, on_lost=print)
lock.acquire()
time.sleep(1.8)
print(lock.valid)
""",
    "tasks": """
import asyncio, os, signal, sys
import redis.asyncio
from redislock_fast.asyncio import Redlock

clients = [redis.asyncio.Redis(port=int(port)) for port in sys.argv[1:]]
lock = Redlock(clients, "name", timeout=4.5, auto_renew=True, on_lost=print)

async def hold():
    await lock.acquire()
    await asyncio.sleep(1.8)
    print(lock.valid)

asyncio.run(hold())
""",
}
"""Hold a lock, by a process of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", _HOLDERS)
def test_interpreter_that_ends_while_it_holds_says_nothing(fleet: Fleet, kind: str) -> None:
    finished = run_script(_HOLDERS[kind], *(server.port for server in fleet))
    assert (finished.stdout, finished.stderr, finished.returncode) == ("True\n", "", 0)


_CHILD = """
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
print(lock.valid)
del lock
own = Redlock(clients, "own", timeout=1.5, auto_renew=True)
own.acquire()
give_up = time.monotonic() + 10
while any(client.exists("name") for client in clients) and time.monotonic() < give_up:
    time.sleep(0.01)
print(own.valid, any(client.exists("name") for client in clients))
own.release()
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_forked_child_renews_and_releases_nothing_of_its_parents(fleet: Fleet) -> None:
    """The parent is killed; the child, which renews a lock of its own, lets the parent's end."""
    finished = run_script(_HOLDERS["threads"] + _CHILD, *(server.port for server in fleet))
    assert finished.stdout == "True\nFalse\nTrue False\n"
