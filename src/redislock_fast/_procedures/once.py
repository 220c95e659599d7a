"""A job that runs once: one attempt that never waits, and a key that is kept for a while after the job.

Or the others wait until it is done, and find a mark of that. The mark is noted while the lock is held, and looked for
while it is held. So whoever acquires after a run finds what that has noted before its release, or it has failed.

`redislock_fast/single.py` and `redislock_fast/asyncio/single.py` have the signatures.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from redis.exceptions import LockError, RedisError

from redislock_fast._procedures.acquire import drop_acquired, give_back
from redislock_fast._procedures.lock import LockBase
from redislock_fast._protocol.done import Done
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._queue.reporting import read_report
from redislock_fast._util.coroutines import is_coroutine_function
from redislock_fast._util.errors import shown
from redislock_fast._util.times import positive_ms

if TYPE_CHECKING:
    from redislock_fast._protocol.report import LockReport, Participant

    RunToken: TypeAlias = "str | bytes | Callable[[], str | bytes]"


class Skipped(LockError):
    """A job was not run: another caller runs it, or has run it not long ago.

    Attributes:
        holder: that caller, by its process, as `redislock_fast.holders` tells it; None where that is not known, and
            where the job is done and others waited for it.
        ttl_s: for how many more seconds its lock is held, unless it is prolonged or released; None where `holder` is.
    """

    def __init__(
        self, message: str, lock_name: Any = None, holder: Participant | None = None, ttl_s: float | None = None
    ) -> None:
        super().__init__(message, lock_name=lock_name)
        self.args = (message,)  # as in `LockLostError`
        self.holder = holder
        self.ttl_s = ttl_s


@contextlib.contextmanager
def naming(name: object) -> Iterator[None]:
    """Begin the text of an error for bad input with the name of the lock."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"once({shown(name)}): {error}") from None
    except ValueError as error:
        raise ValueError(f"once({shown(name)}): {error}") from None


def check_settings(name: Any, timeout: Any, at_least: Any, on_skip: Any, token: Any) -> float:
    """Check the parameters of a job's lock that are not those of a lock. Returns `at_least` in seconds.

    Raises:
        TypeError: for a wrong type.
        ValueError: for a `timeout` that is not above 0, or a negative `at_least`.
    """
    if not isinstance(name, (str, bytes)):
        raise TypeError(f"the name is a str or bytes, not {type(name).__name__}")
    if not (on_skip is None or callable(on_skip)):
        raise TypeError(f"on_skip is not callable: {on_skip!r}")
    if not (token is None or isinstance(token, (str, bytes)) or callable(token)):
        raise TypeError(f"the token is a str, bytes or a function, not {type(token).__name__}")
    positive_ms(timeout, "timeout")
    return 0.0 if at_least == 0 else positive_ms(at_least, "at_least") / 1000


def check_others(others: Any, done_for: Any, at_least_s: float) -> int | None:
    """Check what the others do. Returns for how many milliseconds a job counts as done; None: they do not wait.

    Raises:
        TypeError: for a `done_for` that is no number.
        ValueError: for an unknown `others`, a `done_for` that is not above 0, or parameters that do not go together.
    """
    if others not in ("skip", "wait"):
        raise ValueError(f"others is 'skip' or 'wait', not {others!r}")
    if (others == "wait") is (done_for is None):
        raise ValueError("others='wait' and done_for need each other: for how many seconds the job counts as done")
    if done_for is None:
        return None
    if at_least_s:
        raise ValueError("at_least is for others='skip': those that wait are let in when the job has ended")
    return positive_ms(done_for, "done_for")


def check_job(lock: LockBase, job: Any, token: Any) -> None:
    """Check that the decorated function can be run by a job's lock.

    Raises:
        TypeError: it cannot.
    """
    with naming(lock.name):
        if isinstance(token, (str, bytes)):
            raise TypeError("each run needs a token of its own: give a decorator a function that returns it")
        if inspect.isgeneratorfunction(job) or inspect.isasyncgenfunction(job):
            raise TypeError(f"it cannot run a generator, whose body runs later: {job!r}")
        if is_coroutine_function(job) is not lock._is_for_tasks:
            kind = "a plain function, which redislock_fast.once runs"
            if not lock._is_for_tasks:
                kind = "a coroutine function, which redislock_fast.asyncio.once runs"
            raise TypeError(f"this is {kind}: {job!r}")


def drop_run(lock: LockBase, before: bytes | None) -> None:
    """Let go of a job's lock that the caller still holds: it is released in the background.

    Where `at_least` is set, it ends with its ttl.

    Args:
        lock: the job's.
        before: the token that the caller had before, which it keeps.
    """
    owner = lock._mine()
    token = owner.token
    if token is None or token == before:  # as mostly
        return
    if lock._at_least_s:
        drop_acquired(owner, token)
    else:
        give_back(lock, owner, token)


def token_of_run(token: RunToken | None) -> str | bytes | None:
    """The token of the run that begins now; None: a new one."""
    return token() if callable(token) else token


def describe_skip(lock: LockBase) -> Steps:
    """Returns the `Skipped` of an attempt that has failed. Sends what `holders` sends."""
    report: LockReport | None = None
    with contextlib.suppress(RedisError):  # it may be forbidden
        report = yield from read_report(lock._key)
    text = f"The lock {shown(lock.name)} is another's: the job was not run"
    if report is None:
        return Skipped(text, lock.name)
    return Skipped(text, lock.name, report.holder, report.ttl_s)


def describe_done(lock: LockBase) -> Skipped:
    """The `Skipped` of a job that is done."""
    return Skipped(f"The job of the lock {shown(lock.name)} is done: it was not run again", lock.name)


def read_done(key: bytes) -> Steps:
    """Returns whether the job of the lock with this key counts as done. Sends `EVALSHA`."""
    look = Done(key)
    yield Do("execute", look)
    return look.result


def mark_done(lock: LockBase, done_for_ms: int) -> Steps:
    """Note that the job is done, while the caller still holds the lock. Sends `EVALSHA`.

    Nothing is noted where the lock was lost, which the release finds out.
    """
    token = lock._held().token
    if token is not None:
        yield Do("execute", Done(lock._key, token, done_for_ms))
