"""`profile()`: which locks of this process are waited for and held, by which code, and which orders could deadlock."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from redislock_fast._lease.metrics import install, uninstall
from redislock_fast._observe.profiling.recorder import Recorder
from redislock_fast._observe.profiling.table import table_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Profile", "profile", "profile_process"]


class Profile:
    """A profile of this process: a context manager, and the report, which may be read during and after the block.

    It gets the reports of all locks that are made in the block, for threads and for tasks, `Redlock` included. It sends
    nothing. Profiles may be nested or overlap; each counts for itself. A forked child begins anew.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._has_begun = False

    def __enter__(self) -> Self:
        """Begin.

        Raises:
            RuntimeError: it has begun already.
        """
        if self._has_begun:
            raise RuntimeError("This profile has begun already: call profile() for another one")
        self._has_begun = True
        self._recorder.forget()
        install(self._recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End. What is held now does not count as held."""
        uninstall(self._recorder)
        self._recorder.end()

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it. Times are in seconds.

        Returns:
            `pid`; `seconds`, for how long it has lasted; `locks`; `deadlocks`.

            Each lock, by time waited: `name`; `acquisitions`, `failures` and `losses`, counts; `waited_s`,
            `waited_p99_s`, `waited_max_s` (from the call of acquire to its end, the round trip included; the 99th
            percentile is at most 19 % too high); `held_s`, `held_max_s` (of holdings that were released); `sites`.

            Each site, by time blocked: `site` ("file:line function"), `acquisitions`, `held_s`, and `blocked_s`, for
            how long callers in this process have waited while it held the lock.

            Each deadlock that could be is a list of orders: `held`, `held_site`, `acquired`, `acquired_site` and
            `count`. What one order acquires is held in the next one, and so on around.
        """
        return self._recorder.as_dict()

    def to_json(self) -> str:
        """`as_dict()` as JSON, indented."""
        return json.dumps(self.as_dict(), indent=2)

    def table(self, top: int = 10) -> str:
        """The report as plain text.

        Args:
            top: how many locks, call sites and possible deadlocks to show at most.
        """
        return table_of(self.as_dict(), top)

    def __str__(self) -> str:
        """As `table()`."""
        return self.table()


def profile() -> Profile:
    """Profile the locks that are made in a `with` block.

        with redislock_fast.profile() as report:
            ...
        print(report)

    Locks that were made before are not profiled; `REDISLOCK_PROFILE=1` profiles all of a process.

    Returns:
        The context manager, which is the report, too.
    """
    return Profile()


def profile_process(wanted: str) -> None:
    """Profile this process until it ends, as the environment variable REDISLOCK_PROFILE says.

    Args:
        wanted: "1" writes the table to stderr; a path that ends with ".json" gets the report, with "{pid}" in it
            replaced by the process id.

    Raises:
        ImportError: it is something else.
    """
    if wanted != "1" and not wanted.endswith(".json"):
        raise ImportError(f"REDISLOCK_PROFILE is {wanted!r}: it may be '1', '0' or a path that ends with '.json'")
    atexit.register(_write, profile().__enter__(), wanted)


def _write(report: Profile, wanted: str) -> None:
    report.__exit__(None, None, None)
    if wanted == "1":
        print(report, file=sys.stderr)
    else:
        Path(wanted.replace("{pid}", str(os.getpid()))).write_text(report.to_json() + "\n", encoding="utf-8")
