"""The program of test_interrupt_storm: prints how many interrupts there were.

Arguments: the server's port, for how many seconds, the seed of the main thread's choices, and for a connection with TLS
the file of its authority.
"""

from __future__ import annotations

import contextlib
import faulthandler
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import RedisError

from redislock_fast import Lock, Locker, Semaphore

TTL_S = 2.0
NAMES = [f"storm:{number}" for number in range(4)]
PATIENCE_S = 30
OPTIONS: list[dict[str, Any]] = [
    {},
    {"auto_renew": True},
    {"auto_renew": True, "thread_local": False},
    {"auto_renew": True, "linger": 0.02},
    {"linger": 0.02},
    {"reentrant": True},
    {"reentrant": True, "auto_renew": True, "linger": 0.02},
    {"blocking_timeout": 0.05},
    {"wait": "poll"},
    {"fencing": True},
]
PERMIT_OPTIONS: list[dict[str, Any]] = [{}, {"auto_renew": False}, {"blocking_timeout": 0.05}]


class Interrupt(BaseException):
    """What the signal handler raises."""


def _raise(_number: int, _frame: object) -> None:
    raise Interrupt


def _interrupted(work: Callable[[], None], after_s: float) -> bool:
    """Whether the timer has interrupted the work."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        try:
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.pthread_kill(threading.get_ident(), 0)  # looks for a signal that CPython has not handled so far
    except Interrupt:
        return True
    return False


def _use(lock: Lock, is_prolonged: bool) -> None:
    if lock.acquire():
        if is_prolonged:
            lock.extend(TTL_S, replace_ttl=True)
        lock.release()


def _use_batch(locker: Locker, names: list[str], settings: dict[str, Any]) -> None:
    locker.acquire_many(names, TTL_S, 0.05, **settings).release()


def _use_permit(semaphore: Semaphore) -> None:
    if semaphore.acquire():
        semaphore.release()


def _release_all(semaphore: Semaphore) -> None:
    """Release all permits of this thread."""
    with contextlib.suppress(RedisError):  # a LockError: there are no more
        while True:
            semaphore.release()


def _until_none_is_held(semaphore: Semaphore) -> None:
    ends_at = time.monotonic() + PATIENCE_S
    while semaphore.status().held:
        assert time.monotonic() < ends_at, "a permit has leaked"
        time.sleep(0.05)


def _storm(client: redis.Redis, semaphores: list[Semaphore], ends_at: float, chance: random.Random) -> int:
    """Use locks and semaphores until then, with an interrupt each. Returns how many came in time."""
    interrupts = 0
    while time.monotonic() < ends_at:
        after_s = 10 ** chance.uniform(-5, -2.5)
        if chance.random() < 0.2:
            semaphore = chance.choice(semaphores)
            with contextlib.suppress(RedisError):
                interrupts += _interrupted(lambda: _use_permit(semaphore), after_s)  # noqa: B023
            _release_all(semaphore)
            continue
        if chance.random() < 0.1:
            names = chance.sample(NAMES, 2)
            settings: dict[str, Any] = chance.choice([{}, {"auto_renew": True}])
            with contextlib.suppress(RedisError):
                interrupts += _interrupted(lambda: _use_batch(Locker(client), names, settings), after_s)  # noqa: B023
            continue
        lock = Lock(client, chance.choice(NAMES), timeout=TTL_S, sleep=0.05, **chance.choice(OPTIONS))
        is_prolonged = chance.random() < 0.3
        with contextlib.suppress(RedisError):  # it was lost, or an interrupt has broken the connection
            interrupts += _interrupted(lambda: _use(lock, is_prolonged), after_s)  # noqa: B023
        with contextlib.suppress(RedisError):
            lock.release()
    return interrupts


def _use_beside(client: redis.Redis, semaphores: list[Semaphore], is_over: threading.Event, number: int) -> None:
    chance = random.Random(number)
    while not is_over.is_set():
        with contextlib.suppress(RedisError):
            _use_permit(chance.choice(semaphores))
        lock = Lock(client, chance.choice(NAMES), timeout=TTL_S, sleep=0.05, **chance.choice(OPTIONS))
        with contextlib.suppress(RedisError):
            _use(lock, chance.random() < 0.3)
        time.sleep(0.001 * chance.random())


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"


def main() -> None:
    """Print the number of interrupts, if nothing hangs."""
    port, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore", ResourceWarning)  # of locks that an interrupt has left to be dropped
    faulthandler.dump_traceback_later(PATIENCE_S + seconds, exit=True)
    tls: dict[str, Any] = {"ssl": True, "ssl_ca_certs": sys.argv[4]} if len(sys.argv) > 4 else {}
    client = redis.Redis(host="127.0.0.1", port=port, socket_timeout=None, **tls)
    is_over = threading.Event()
    semaphores = [Semaphore(client, "storm:permits", 2, timeout=TTL_S, sleep=0.05, **each) for each in PERMIT_OPTIONS]
    others = [
        threading.Thread(target=_use_beside, args=(client, semaphores, is_over, number), daemon=True)
        for number in range(4)
    ]
    for other in others:
        other.start()
    signal.signal(signal.SIGALRM, _raise)
    interrupts = _storm(client, semaphores, time.monotonic() + seconds, random.Random(seed))
    is_over.set()
    _join(others)
    for settings in OPTIONS:
        lasts = [
            threading.Thread(target=_use, args=(Lock(client, name, timeout=TTL_S, **settings), False), daemon=True)
            for name in NAMES
        ]
        for last in lasts:
            last.start()
        _join(lasts)
    _until_none_is_held(semaphores[0])  # while this process lives, and renews what has leaked
    print(interrupts)


if __name__ == "__main__":
    main()
