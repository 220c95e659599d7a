"""Helpers of all tests: waiting on conditions, other threads, children and scripts, a fake clock.

Nothing here asserts what a lock should do. Every wait is on a condition, with a limit that only a failing test reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
import redis.asyncio.lock
import redis.lock
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

import redislock_fast
import redislock_fast.lock
from redislock_fast._protocol.capabilities import HELLO, PROBE, Capabilities
from redislock_fast._transport.loop import server as loop_server
from redislock_fast._transport.threads import driver
from redislock_fast._transport.threads import server as thread_server
from redislock_fast._util import times
from redislock_fast.server import Server

_REAL_CLOCK = times.clock
Result = TypeVar("Result")
LockClass = type[redis.lock.Lock]

ROOT = Path(__file__).parents[2]
REDIS_PY = tuple(map(int, redis.__version__.split(".")[:2]))

PATIENCE_S = 10.0
"""How long a condition may take before its test fails; a passing test never waits this long."""

COMMAND_NAME = () if REDIS_PY >= (5, 3) else ("_",)
"""What `ConnectionPool.get_connection` takes: an earlier redis-py wants the name of a command, which it ignores."""

TAKES_RAISE_ON_RELEASE_ERROR = "raise_on_release_error" in inspect.signature(redis.Redis.lock).parameters
"""Whether redis-py's locks have this parameter, and `client.lock()`: since 6.0."""

RETRIED: list[type[Exception]] = [redis.ConnectionError, redis.TimeoutError, OSError]
"""A client's `retry_on_error`: without it, redis-py before 6.0 repeats no command, whatever `retry` is."""

MODULES: dict[str, Any] = {"redis-py": redis.lock, "ours": redislock_fast.lock}
"""The module of each class."""

CLASSES: dict[str, LockClass] = {"redis-py": redis.lock.Lock, "ours": redislock_fast.Lock}

RELEASE_COMMANDS = ("DELIFEQ", "DELEX", "EVALSHA", "EVAL")
"""The commands by which a release may be sent."""

EXTEND_COMMANDS = ("SET", "EVALSHA", "EVAL")
"""The commands by which an extend or a reacquire may be sent."""


def replace_clock(monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Have the deadlines of acquires, and the times of their first requests, be read from this clock."""
    for module in (times, thread_server, loop_server):
        monkeypatch.setattr(module, "clock", clock)


class FakeTime:
    """In place of `mod_time` in redis-py's lock, or `time` in our driver: sleeping moves the clock and takes no time.

    Attributes:
        sleeps_s: every sleep asked for, in order.
        at_most: a further sleep than this many raises AssertionError: the caller would wait forever.
    """

    def __init__(self, at_most: int = 1000) -> None:
        self.sleeps_s: list[float] = []
        self.at_most = at_most
        self.now_s = 1000.0

    def replace_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have our locks for threads sleep by this, and their deadlines be read from its clock."""
        monkeypatch.setattr(driver, "time", self)
        replace_clock(monkeypatch, self.monotonic)

    @staticmethod
    def restore_clock(monkeypatch: pytest.MonkeyPatch) -> None:
        """Have deadlines be read from the real clock again."""
        replace_clock(monkeypatch, _REAL_CLOCK)

    def monotonic(self) -> float:
        """The fake clock."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        if len(self.sleeps_s) >= self.at_most:
            raise AssertionError("waits forever")
        self.sleeps_s.append(seconds)
        self.now_s += seconds


def _release_keeps_token() -> bool:
    """Whether the release of redis-py's Lock keeps the token where it fails."""

    class FailingLock(redis.lock.Lock):
        def register_scripts(self) -> None:
            """Register none: there is no client."""

        def do_release(self, expected_token: str) -> None:
            raise redis.ConnectionError

    lock: Any = FailingLock(None, "name")
    lock.local.token = b"token"
    with contextlib.suppress(redis.ConnectionError):
        lock.release()
    return lock.local.token is not None


def redis_py_passes(is_so: bool, *failures: type[BaseException]) -> pytest.MarkDecorator:
    """Marks a test of both classes that some releases of redis-py pass, and others fail.

    Args:
        is_so: whether the installed one passes it.
        failures: what the test raises otherwise.
    """
    marks = () if is_so else pytest.mark.xfail(strict=True, raises=failures)
    return pytest.mark.parametrize("lock_class_id", [pytest.param("redis-py", marks=marks), "ours"])


RELEASE_KEEPS_TOKEN = _release_keeps_token()
"""redis-py 8.1.0 does not; pull request 4258, merged after it, does."""

ASYNC_RELEASE_KEEPS_TOKEN = inspect.iscoroutinefunction(redis.asyncio.lock.Lock.release)
"""redis-py does since 7.2, by pull request 3900."""


def pause(seconds: float = 0.002) -> None:
    """Let others run: other threads, and other tasks where the caller is a greenlet of a task (see worlds)."""
    greenlet = sys.modules.get("greenlet")
    task = greenlet and greenlet.getcurrent().parent
    if task:
        task.switch(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def wait_until(condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Return once the condition is true.

    Raises:
        AssertionError: when it does not come true.
    """
    give_up = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"did not happen: {what}")
        pause()


def capabilities_of(server: Server) -> Capabilities:
    """The capabilities of a server."""
    with redis.Redis(port=server.port) as client:
        connection: Any = client.connection_pool.get_connection(*COMMAND_NAME)
        replies = []
        for request in (PROBE, HELLO):
            connection.send_command(*request)
            replies.append(connection.read_response())
    return Capabilities(*replies)


@contextlib.contextmanager
def full_disk(server: Server, admin: redis.Redis) -> Iterator[None]:
    """Have a server refuse all writes meanwhile, since it could not save its data."""
    (server.folder / "dump.rdb").mkdir(exist_ok=True)  # where the file would have to be
    admin.config_set("save", "3600 1000000")
    admin.bgsave()
    wait_until(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err", "the server could not save")
    try:
        yield
    finally:
        admin.config_set("save", "")


def settings_of(lock: Any) -> tuple[Any, ...]:
    """The arguments of the constructor, without the client."""
    return (
        lock.name,
        lock.timeout,
        lock.sleep,
        lock.blocking,
        lock.blocking_timeout,
        lock.thread_local,
        lock.raise_on_release_error,
    )


def start(work: Callable[[], Result]) -> Future[Result]:
    """Run in a thread of its own, which never keeps the interpreter alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def in_thread(work: Callable[[], Result]) -> Result:
    """Do the work in another thread; returns or raises what it does."""
    return start(work).result(PATIENCE_S)


def redislock_main() -> int:
    """Call the command `redislock` with the words in `sys.argv`. Returns its exit code, unless it exits itself."""
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="redislock")
    code: int = command.load()()
    return code


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a Python script in a new interpreter that imports what this one imports."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


RELEASES_LAST = """
import builtins
from redislock_fast import Lock

class Keeper:
    def __init__(self):
        self.lock = Lock(client, sys.argv[2], timeout=10)
        self.lock.acquire()

    def __del__(self, is_finalizing=sys.is_finalizing):
        assert is_finalizing()
        print("ends", flush=True)
        self.lock.release()

builtins.keeper = Keeper()
"""
"""A part of a script: an object of its `client` releases a lock when the interpreter ends, after all threads of Python.

The script has imported `sys`; the lock's name is its second argument.
"""


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Let no thread be started within the block, as at a limit of the system: none has room for its stack."""
    before = threading.stack_size(1 << 40)
    try:
        yield
    finally:
        threading.stack_size(before)


def signal_main(number: int = signal.SIGUSR1) -> None:
    """Send the main thread a signal."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


@contextlib.contextmanager
def on_signal(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Have SIGUSR1 handled so within the block."""
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def signals_handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Send the main thread SIGUSR1 repeatedly, each signal once the one before was handled."""
    handled = threading.Event()
    finished = threading.Event()

    def handle(number: int, frame: object) -> None:
        handler(number, frame)
        handled.set()

    def send() -> None:
        while not finished.is_set():
            handled.clear()
            signal_main()
            handled.wait(1)

    with on_signal(handle):
        sender = start(send)
        try:
            yield
        finally:
            finished.set()
            sender.result(PATIENCE_S)


def once() -> Retry:
    """A retry policy without retries."""
    return Retry(NoBackoff(), 0)


def few() -> Retry:
    """A retry policy that soon gives up."""
    return Retry(ConstantBackoff(0.01), 3)


def many() -> Retry:
    """A retry policy that outlasts the restart of a server."""
    return Retry(ConstantBackoff(0.05), 400)
