"""Semaphores under gevent and eventlet: patched before the import, after the semaphore was made, or after its use.

Rules: gevent and eventlet are real. Each test runs in an interpreter of its own. What eventlet writes to stderr does
not count.
"""

from __future__ import annotations

import pytest

from redislock_fast.server import Server
from tests.integration.lock.test_patched_later import FORK, PATCHES
from tests.support.helpers import run_script

pytestmark = pytest.mark.slow

MAKE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import redis
from redis.exceptions import LockError
from redislock_fast import Semaphore

port = int(sys.argv[1])
client = redis.Redis(port=port, socket_timeout=30)
SETTINGS = {"renewed": {}, "fixed": {"auto_renew": False}, "ends": {"timeout": 3}}
semaphores = {name: Semaphore(client, name, 2, **settings) for name, settings in SETTINGS.items()}

def use():
    for semaphore in semaphores.values():
        with semaphore:
            pass
        semaphore.acquire()
        semaphore.release()
"""

# Each greenlet has permits of its own, and while one waits the others go on.
CONTEND = """
def contend(name, semaphore):
    inside, most, rounds, strangers = 0, 0, 0, 0
    def one():
        nonlocal inside, most, rounds, strangers
        try:
            semaphore.release()
        except LockError:
            strangers += 1
        for number in range(4):
            permit = semaphore.acquire()
            inside += 1
            most = max(most, inside)
            sleep(0.002)
            assert permit.valid
            inside -= 1
            rounds += 1
            if number % 2:
                semaphore.release()
            else:
                with permit:
                    pass
    run(*[one] * 6)
    return most, rounds, strangers, semaphore.status().held

for name, semaphore in semaphores.items():
    print(name, *contend(name, semaphore))

def wait_beside_others(semaphore):
    other = Semaphore(redis.Redis(port=port, socket_timeout=30), semaphore.name, 2)
    permits, order = [other.acquire(), other.acquire()], []
    def wait():
        with semaphore:
            order.append("acquired")
    def go_on():
        for _ in range(20):
            sleep(0.005)
        order.append("others went on")
        for permit in permits:
            permit.release()
    run(wait, go_on)
    return order

print(*wait_beside_others(semaphores["renewed"]))

def hold():
    semaphore = semaphores["ends"]
    with semaphore as permit:
        left_s = semaphore.status().next_end_s
        for _ in range(2000):
            sleep(0.005)
            before_s, left_s = left_s, semaphore.status().next_end_s
            if left_s > before_s:
                break
        print("renewed", left_s > before_s, permit.valid)

run(hold)

def leave():
    semaphores["renewed"].acquire()

run(leave)
for _ in range(2000):
    try:
        semaphores["renewed"].release()  # eventlet keeps what a greenlet had until another one looks
    except LockError:
        pass
    if not semaphores["renewed"].status().held:
        break
    sleep(0.005)
print("left", semaphores["renewed"].status().held)
"""

CONTENDED = [
    *[f"{name} 2 24 6 0" for name in ("renewed", "fixed", "ends")],
    "others went on acquired",
    "renewed True True",
    "left 0",
]


@pytest.mark.parametrize("library", PATCHES)
@pytest.mark.parametrize("before", ["patched", "made", "used, forked"])
def test_each_greenlet_has_permits_of_its_own(valkey: Server, library: str, before: str) -> None:
    patch = PATCHES[library]
    parts = {"patched": patch + MAKE, "made": MAKE + patch, "used, forked": MAKE + "use()" + FORK + patch}
    finished = run_script(parts[before] + CONTEND, valkey.port)
    assert (finished.stdout.splitlines(), finished.returncode) == (CONTENDED, 0)
    assert library == "eventlet" or finished.stderr == ""


HELD = """
use()
for semaphore in semaphores.values():
    semaphore.acquire()
    semaphore.__enter__()
"""

GIVE_BACK = """
def look():
    for name, semaphore in semaphores.items():
        assert semaphore.acquire(blocking=False) is None
        try:
            semaphore.release()
        except LockError:
            print(name, "is another's")

run(look)
for name, semaphore in semaphores.items():
    semaphore.__exit__(None, None, None)
    semaphore.release()
    print(name, semaphore.status().held)
"""


@pytest.mark.parametrize("library", PATCHES)
def test_permits_that_are_held_across_the_patch_stay_their_holders(valkey: Server, library: str) -> None:
    finished = run_script(MAKE + HELD + PATCHES[library] + GIVE_BACK, valkey.port)
    names = ("renewed", "fixed", "ends")
    given_back = [*[f"{name} is another's" for name in names], *[f"{name} 0" for name in names]]
    assert (finished.stdout.splitlines(), finished.returncode) == (given_back, 0)
    assert library == "eventlet" or finished.stderr == ""
