"""A job that runs once: one attempt that never waits, and a key that is kept for a while behind the job.

`redislock_fast/single.py` and `redislock_fast/asyncio/single.py` have the signatures.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from redis.exceptions import LockError, RedisError

from redislock_fast._lease.metrics import report
from redislock_fast._lease.owner import Owner
from redislock_fast._procedures.lock import LockBase
from redislock_fast._procedures.reporting import reporting
from redislock_fast._procedures.steps import Do, Steps
from redislock_fast._protocol.commands import Reacquire, Release
from redislock_fast._util.errors import shown
from redislock_fast._util.times import clock, positive_ms

if TYPE_CHECKING:
    from redislock_fast._lease.options import Options
    from redislock_fast._protocol.report import LockReport, Participant
    from redislock_fast._util.errors import LossReason

    RunToken: TypeAlias = "str | bytes | Callable[[], str | bytes]"

__all__ = ["OnceBase", "Skipped"]

_LOOK_S = 0.002
"""How long to wait between two looks at a renewal that is under way."""


class Skipped(LockError):
    """A job was not run: another caller runs it, or has run it not long ago.

    Attributes:
        holder: that caller, by its process, as `redislock_fast.holders` tells it; None where that is not known.
        ttl_s: for how many seconds its lock is held yet, unless it is prolonged or released; None where that is not
            known.
    """

    def __init__(
        self, message: str, lock_name: Any = None, holder: Participant | None = None, ttl_s: float | None = None
    ) -> None:
        super().__init__(message, lock_name=lock_name)
        self.args = (message,)  # as in `LockLostError`
        self.holder = holder
        self.ttl_s = ttl_s


@contextlib.contextmanager
def _naming(name: object) -> Iterator[None]:
    """Begin the text of an error for bad input with the name of the lock."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"once({shown(name)}): {error}") from None
    except ValueError as error:
        raise ValueError(f"once({shown(name)}): {error}") from None


class OnceBase(LockBase):
    """The lock of a job. `redislock_fast.once` describes the parameters."""

    def __init__(
        self,
        client: Any,
        name: str | bytes,
        timeout: float,
        at_least: float,
        on_skip: Callable[[Skipped], Any] | None,
        token: RunToken | None,
        on_lost: Callable[[Any, LossReason], object] | None,
    ) -> None:
        with _naming(name):
            if not isinstance(name, (str, bytes)):
                raise TypeError(f"the name is a str or bytes, not {type(name).__name__}")
            if not (on_skip is None or callable(on_skip)):
                raise TypeError(f"on_skip is not callable: {on_skip!r}")
            if not (token is None or isinstance(token, (str, bytes)) or callable(token)):
                raise TypeError(f"the token is a str, bytes or a function, not {type(token).__name__}")
            positive_ms(timeout, "timeout")
            self._at_least_s = 0.0 if at_least == 0 else positive_ms(at_least, "at_least") / 1000
            self._on_skip = on_skip
            self._token = token
            super().__init__(client, name, timeout, blocking=False, auto_renew=True, on_lost=on_lost)

    def _check_job(self, job: Any) -> None:
        """Check that the decorated function can be run by this lock.

        Raises:
            TypeError: it cannot.
        """
        with _naming(self.name):
            if isinstance(self._token, (str, bytes)):
                raise TypeError("each run needs a token of its own: give a decorator a function that returns it")
            if inspect.isgeneratorfunction(job) or inspect.isasyncgenfunction(job):
                raise TypeError(f"it cannot run a generator, whose body runs later: {job!r}")
            if inspect.iscoroutinefunction(job) is not self._is_for_tasks:
                kind = "a plain function, which redislock_fast.once runs"
                if not self._is_for_tasks:
                    kind = "a coroutine function, which redislock_fast.asyncio.once runs"
                raise TypeError(f"this is {kind}: {job!r}")

    def _token_of_run(self) -> str | bytes | None:
        """The token of the run that begins now; None: a new one."""
        return self._token() if callable(self._token) else self._token

    def _report_failure(self, options: Options, owner: Owner, asked_at: float, error: BaseException | None) -> None:
        """Report a run that is skipped as that, for metrics: nothing has failed."""
        if error is None:
            report(options.observers, "record_skip", self.name, clock() - asked_at)
        else:
            super()._report_failure(options, owner, asked_at, error)

    def _skipping(self) -> Steps:
        """Returns the `Skipped` of an attempt that has failed. Sends what `holders` sends."""
        report: LockReport | None = None
        with contextlib.suppress(RedisError):  # it may be forbidden
            report = yield from reporting(self._key)
        text = f"The lock {shown(self.name)} is another's: the job was not run"
        if report is None:
            return Skipped(text, self.name)
        return Skipped(text, self.name, report.holder, report.ttl_s)

    # ---- the end of a run ----

    def _begins_release(self, owner: Owner, token: object) -> bool:  # noqa: ARG002  # see there
        """A run ends by steps."""
        return False

    def _asking_release(self, owner: Owner, token: bytes, begun: Release | None) -> Steps:
        """Release the lock, or have it end `at_least` seconds after the run began. Returns whether it was held."""
        lease = owner.lease
        while lease is not None and lease.renewing:  # executed behind the request below, it would set another ttl
            yield Do("sleep", _LOOK_S)
        rest_s = 0.0 if lease is None else lease.begun + self._at_least_s - clock()
        if lease is None or rest_s <= 0:
            return (yield from super()._asking_release(owner, token, begun))
        keeping = Reacquire(self._key, token, positive_ms(rest_s, "at_least"), lease.contended)
        yield Do("execute", keeping)
        return keeping.result
