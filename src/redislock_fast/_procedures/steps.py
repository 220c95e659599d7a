"""The steps that a procedure yields to its driver.

A procedure is a generator of steps. The driver does what a step says, sends the result back, and throws in what it
raises. So the logic is written once, for threads, event loops and simulations, and an error or a cancel is raised in
the procedure, at the step where it came.

The steps are plain classes, since named tuples would take ten times as long to import.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from redis.exceptions import LockError, RedisError

from redislock_fast._protocol.operation import Operation
from redislock_fast._util.errors import noted, shown

if TYPE_CHECKING:
    from redislock_fast._lease.key_lease import LocalWaiter
    from redislock_fast._procedures.waiters import Waiter
    from redislock_fast._protocol.pipeline import Pipeline

__all__ = [
    "ENTERED",
    "AwaitTurn",
    "CallHook",
    "Enter",
    "Execute",
    "ExecuteAll",
    "ExecuteDedicated",
    "Listen",
    "Sleep",
    "Split",
    "Step",
    "Steps",
    "all_of",
    "name_lock",
]

ENTERED: Final = "entered"
"""Given in place of a message where the waiter is registered and has not listened yet."""


class Execute:
    """Drive the operation to its end within `limit_s` seconds; None: without a limit."""

    __slots__ = ("limit_s", "operation")

    def __init__(self, operation: Operation, limit_s: float | None = None) -> None:
        self.operation = operation
        self.limit_s = limit_s


class ExecuteAll:
    """Drive operations, each on locks of another server, to their ends within `limit_s` seconds.

    All servers are asked before any reply is waited for. Where an operation fails, the others still run to their ends;
    then the first error is thrown in.
    """

    __slots__ = ("limit_s", "operations")

    def __init__(self, operations: Sequence[Pipeline], limit_s: float | None = None) -> None:
        self.operations = operations
        self.limit_s = limit_s


class ExecuteDedicated:
    """Drive an operation that sets no key to its end on a dedicated connection, within `limit_s` seconds.

    `slow_s` is how long the server may hold its reply back, in seconds: on a shared connection, all other replies would
    come so much later.
    """

    __slots__ = ("limit_s", "operation", "slow_s")

    def __init__(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        self.operation = operation
        self.limit_s = limit_s
        self.slow_s = slow_s


class Sleep:
    """Wait for so many seconds."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Split:
    """Send back the keys' indexes, grouped by server."""

    __slots__ = ("keys",)

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys


class Enter:
    """Send back a `Waiter`, registered on the lock's connection, or None where that connection takes no messages."""

    __slots__ = ("key", "limit_s", "token")

    def __init__(self, key: bytes, token: bytes, limit_s: float | None = None) -> None:
        self.key = key
        self.token = token
        self.limit_s = limit_s


class Listen:
    """Send back the next message for the waiter, or None when none has come within `timeout_s` seconds."""

    __slots__ = ("timeout_s", "waiter")

    def __init__(self, waiter: Waiter, timeout_s: float) -> None:
        self.waiter = waiter
        self.timeout_s = timeout_s


class AwaitTurn:
    """Wait for the local lock of a cached key, for `timeout_s` seconds at most; None: without a limit."""

    __slots__ = ("timeout_s", "waiter")

    def __init__(self, waiter: LocalWaiter, timeout_s: float | None) -> None:
        self.waiter: Any = waiter  # of the driver's own transport
        self.timeout_s = timeout_s


class CallHook:
    """Call a hook that a user has overridden, or a wing's function. Send back its result; in a task, await it first."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call


Step: TypeAlias = "Execute | ExecuteAll | ExecuteDedicated | Sleep | Split | Enter | Listen | AwaitTurn | CallHook"
Steps: TypeAlias = Generator[Step, Any, Any]


def name_lock(step: Step, error: BaseException) -> None:
    """Add the name of the step's lock to an error of the client's, as a note."""
    if isinstance(error, RedisError) and not isinstance(error, LockError):
        key = step.key if isinstance(step, Enter) else getattr(getattr(step, "operation", None), "key", None)
        if key is not None:
            noted(error, f"of the lock {shown(key)}")


def all_of(operations: Sequence[Pipeline], limit_s: float | None = None) -> Execute | ExecuteAll:
    """The step that drives operations, each on locks of another server. Mostly there is one."""
    return Execute(operations[0], limit_s) if len(operations) == 1 else ExecuteAll(operations, limit_s)
