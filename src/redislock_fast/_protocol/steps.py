"""The steps that a procedure yields to its driver.

A procedure is a generator of steps. The driver does what a step says, sends the result back, and throws in what it
raises. So the logic is written once, for threads, event loops and simulations, and an error or a cancel is raised in
the procedure, at the step where it came.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from redis.exceptions import LockError, RedisError

from redislock_fast._util.errors import noted, shown
from redislock_fast._util.tokens import is_permit

if TYPE_CHECKING:
    from redislock_fast._protocol.pipeline import Pipeline

ENTERED: Final = "entered"
"""Given in place of a message where the waiter is registered, and no message has been waited for."""


class Do:
    """Call a method of the server transport, and send back what it returns; in a task, the awaited result.

    Two methods are the driver's own: `sleep(seconds)`, and `call(function, *args)` for a user's hook and for whatever
    else has to be called, in a task awaited. The others are described in `_transport/threads/server.py`: `execute`,
    `execute_all`, `execute_dedicated`, `enter`, `next_message`, `split`; a Redlock's servers have `ask`.

    Args:
        method: its name.
        args: for it.
    """

    __slots__ = ("args", "method")

    def __init__(self, method: str, *args: Any) -> None:
        self.method = method
        self.args = args


Steps: TypeAlias = Generator[Do, Any, Any]

CleanupEntries: TypeAlias = "list[tuple[bytes, bytes]]"
"""Keys and tokens that must be cleaned up when an acquire fails: the steps fill it, and the driver cleans up."""


def name_lock(step: Do, error: BaseException) -> None:
    """Add the name of the step's lock to an error of the client's, as a note."""
    if isinstance(error, RedisError) and not isinstance(error, LockError) and step.args:
        subject = step.args[0]
        key = subject if step.method == "enter" else getattr(subject, "key", None)
        token = step.args[1] if step.method == "enter" else getattr(subject, "token", b"")
        if key is not None:
            what = "semaphore" if is_permit(token) or getattr(subject, "of_semaphore", False) else "lock"
            noted(error, f"of the {what} {shown(key)}")


def all_of(operations: Sequence[Pipeline], limit_s: float | None = None) -> Do:
    """The step that drives operations, each on locks of another server. Mostly there is one."""
    if len(operations) == 1:
        return Do("execute", operations[0], limit_s)
    return Do("execute_all", operations, limit_s)
