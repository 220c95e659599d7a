"""Interrupts by a timer while a process uses a key that lingers and another process wants it, again and again.

The program is one process whose main thread is interrupted wherever it is, also where a line ends in the middle of a
call. The other process takes turns with it: it gets the lock whatever the interrupt has struck.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import LockError, RedisError

import redislock_fast
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import FAR_S

SECONDS = 8.0
LONGEST_S = 0.0015
"""The longest time from the begin of a pair of calls to its interrupt: mostly longer than the pair takes."""


class TimeIsUp(Exception):
    """An interrupt as Celery's `SoftTimeLimitExceeded` is one."""


KINDS: dict[str, type[BaseException]] = {"KeyboardInterrupt": KeyboardInterrupt, "TimeIsUp": TimeIsUp}


class Program:
    """Uses the key, and is interrupted.

    Args:
        port: the server's.
        kind: of the interrupts.
        seed: of the times at which they come.
    """

    def __init__(self, port: int, kind: type[BaseException], seed: str) -> None:
        self._client = redis.Redis(port=port)
        self._kind = kind
        self._chance = random.Random(seed)
        self._may_raise = False
        self.interrupts = 0
        signal.signal(signal.SIGALRM, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self._may_raise:
            self._may_raise = False
            self.interrupts += 1
            raise self._kind

    def _use(self, lock: redislock_fast.Lock) -> None:
        try:
            self._may_raise = True
            signal.setitimer(signal.ITIMER_REAL, LONGEST_S * self._chance.random() + 1e-6)
            lock.acquire()
            lock.release()
        finally:
            self._may_raise = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def run(self, settings: dict[str, Any]) -> None:
        """Work until the time is over; then wait until nothing listens any more."""
        ends_at = time.monotonic() + SECONDS
        while time.monotonic() < ends_at:
            lock = redislock_fast.Lock(self._client, "name", timeout=FAR_S, linger=FAR_S, **settings)
            with contextlib.suppress(self._kind, RedisError, KeyError):  # Python's own, of a thread's interrupted start
                self._use(lock)
            with contextlib.suppress(LockError):
                lock.release()
        listeners = [one for one in threading.enumerate() if one.name == "redislock_fast-linger"]
        assert len(listeners) <= 2  # one that is one too many may be about to end
        wait_until(lambda: sum(one.is_alive() for one in listeners) <= 1, "one thread listens")
        print(self.interrupts)


@pytest.mark.timeout(SECONDS + 4 * PATIENCE_S)
@pytest.mark.parametrize("settings", ["{}", "{'auto_renew': True}"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_process_gets_a_key_whose_holder_is_interrupted(
    kind: str, settings: str, valkey: Server, connect: Connect
) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.slow.test_linger_interrupts", str(valkey.port), kind]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    lock = redislock_fast.Lock(connect(valkey.port), "name", timeout=FAR_S, sleep=FAR_S)
    turns = 0
    with subprocess.Popen([*command, settings], cwd=Path(__file__).parents[2], **pipes) as program:
        try:
            while program.poll() is None:
                assert lock.acquire(blocking_timeout=PATIENCE_S / 2), f"not granted after {turns} turns"
                lock.release()
                turns += 1
                time.sleep(0.001)
            printed, errors = program.communicate(timeout=PATIENCE_S)
        finally:
            program.kill()
    assert (program.returncode, "was lost" in errors) == (0, False), errors
    assert int(printed) > 100
    assert turns > 100


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    Program(int(sys.argv[1]), KINDS[sys.argv[2]], sys.argv[2]).run(eval(sys.argv[3]))
