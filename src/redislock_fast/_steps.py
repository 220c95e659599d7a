"""What a procedure that takes several operations asks of who drives it, step by step.

A procedure is a generator of steps. Whoever drives it does what a step says, sends back what it gives and throws in
what it raises. So the logic is written once, for threads, event loops and simulations, and an error or a cancel arrives
where it must be dealt with.

Must not know: how any step is done.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from redislock_fast._protocol import Operation

if TYPE_CHECKING:
    from redislock_fast._many import Many
    from redislock_fast._queue import Wait
    from redislock_fast._room import Seat
    from redislock_fast._round import Round

__all__ = [
    "Ask",
    "AskAll",
    "Enter",
    "Execute",
    "ExecuteAll",
    "ExecuteBeside",
    "Listen",
    "Post",
    "Sleep",
    "Split",
    "Step",
    "Steps",
    "all_of",
]


class Execute(NamedTuple):
    """Drive the operation to its end, within so many seconds."""

    operation: Operation
    limit_s: float | None = None


class ExecuteAll(NamedTuple):
    """Drive operations, each on locks of another server, to their ends within so many seconds.

    No server's replies are waited for before all have been asked, and none that fails keeps the others from their ends:
    then the first error is thrown in.
    """

    operations: Sequence[Many]
    limit_s: float | None = None


class ExecuteBeside(NamedTuple):
    """Drive an operation that sets no key to its end on a connection of its own, within so many seconds.

    `slow_s` is for how long the server may hold its reply back: everything behind it would wait for as long.
    """

    operation: Operation
    limit_s: float | None
    slow_s: float


class Sleep(NamedTuple):
    """Do nothing for so long."""

    seconds: float


class Split(NamedTuple):
    """Send back the keys' indexes, those together that one server has."""

    keys: list[bytes]


class Enter(NamedTuple):
    """Send back a seat in the room of the lock's connection, or None where that takes no messages."""

    key: bytes
    token: bytes
    limit_s: float | None = None


class Post(NamedTuple):
    """Send the operation's first request on the seat's connection, its reply to be given to the seat.

    Send back whether that could be done: on a connection that is not the current one any more, it cannot.
    """

    seat: Seat
    operation: Wait


class Listen(NamedTuple):
    """Send back the next message for the seat, or None when none has come within so many seconds."""

    seat: Seat
    timeout_s: float


class Ask(NamedTuple):
    """Hold the round: ask all servers of a quorum, until the outcome is certain or the round's time is up."""

    round: Round


class AskAll(NamedTuple):
    """Hold these rounds at once, until the outcome of each is certain or the time of the shortest is up."""

    rounds: list[Round]


Step: TypeAlias = "Execute | ExecuteAll | ExecuteBeside | Sleep | Split | Enter | Post | Listen | Ask | AskAll"
Steps: TypeAlias = Generator[Step, Any, Any]


def all_of(operations: Sequence[Many], limit_s: float | None = None) -> Execute | ExecuteAll:
    """The step that drives operations, each on locks of another server, of which there is mostly one."""
    return Execute(operations[0], limit_s) if len(operations) == 1 else ExecuteAll(operations, limit_s)
