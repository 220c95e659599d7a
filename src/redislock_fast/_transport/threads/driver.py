"""The synchronous transport: a channel for every client, and a driver for procedures of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from redislock_fast._pipe.base import Forked
from redislock_fast._procedures.steps import (
    ENTERED,
    Enter,
    Execute,
    ExecuteAll,
    ExecuteBeside,
    Listen,
    Sleep,
    Split,
    Steps,
)
from redislock_fast._procedures.waiters import Seat
from redislock_fast._protocol.commands import Operation
from redislock_fast._protocol.pipeline import Many
from redislock_fast._transport.base import Registry, is_cluster
from redislock_fast._transport.threads.cluster import ClusterChannel
from redislock_fast._transport.threads.connect import Link
from redislock_fast._transport.threads.server import Begun, ThreadChannel
from redislock_fast._util import fork

if TYPE_CHECKING:
    from redislock_fast._procedures.waiting import Waiting

__all__ = ["Transport", "drive", "transport_of", "wait"]


class Transport(Protocol):
    """What the facade needs of a channel.

    Attributes:
        link: the connection, for `Pipe.ask`; None where there is none yet, or more than one.
        timeout_s: how long the pool's settings let a reply take, in seconds; below 0 for ever.
        inside: the identifiers of the threads that drive an operation.
    """

    link: Link | None
    timeout_s: float
    inside: set[int]

    def execute(self, operation: Operation, limit_s: float | None = None, begun: Begun | None = None) -> None:
        """Drive an operation to its end; see `ThreadChannel.execute`."""

    def execute_all(self, operations: Sequence[Many], limit_s: float | None = None) -> None:
        """Drive operations, each on locks of another server, to their ends; see `ClusterChannel.execute_all`."""

    def execute_beside(self, operation: Operation, limit_s: float | None, slow_s: float) -> None:
        """Drive an operation on a connection of its own; see `ThreadChannel.execute_beside`."""

    def undo(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""

    def split(self, keys: list[bytes]) -> Sequence[Sequence[int]]:
        """The keys' indexes, those together that one server has."""

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt to take this lock would probably fail; see `Room.is_contended`."""

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """This lock was released here, and a waiter has it now, or nobody waited."""

    def enter(self, key: bytes, token: bytes, limit_s: float | None) -> Seat | None:
        """A seat for a waiter; see `ThreadChannel.enter`."""

    def hear(self, mailbox: Any, timeout_s: float) -> object:
        """The next message in a seat's mailbox; see `ThreadChannel.hear`."""

    def encode(self, value: object) -> bytes:
        """A token as bytes, as the client's own encoder has it."""

    def key_of(self, name: object) -> bytes:
        """A lock's name as its key, as the client's own commands have it."""

    def keys_of(self, names: Sequence[Any]) -> tuple[list[bytes], bool]:
        """Many names as keys, and whether names that differ have certainly different keys."""


_channels: Registry[ThreadChannel | ClusterChannel] = Registry()
_kinds: dict[type, type[ThreadChannel | ClusterChannel]] = {}


def transport_of(client: Any) -> Transport:
    """The one transport of a client in this process.

    Args:
        client: redis-py's `Redis` or `RedisCluster`, of any kind.

    Raises:
        TypeError: for a pipeline or an asyncio client: neither can hold a lock by blocking calls.
    """
    kind = _kinds.get(type(client))
    if kind is None:
        kind = _kinds[type(client)] = ClusterChannel if is_cluster(client, for_asyncio=False) else ThreadChannel
    owner = client.connection_pool if kind is ThreadChannel else client
    return _channels.get(id(owner)) or _channels.add(owner, kind)


def drive(transport: Transport, steps: Steps) -> Any:
    """Do what the steps say. Returns what they return."""
    generation = fork.generation
    try:
        step = next(steps)
        while True:
            answer: Any = None
            try:
                if fork.generation != generation:  # by a signal handler, between two steps
                    raise Forked
                if type(step) is Listen:
                    answer = transport.hear(step.seat.mailbox, step.timeout_s)
                elif type(step) is Execute:
                    transport.execute(step.operation, step.limit_s)
                elif type(step) is Enter:
                    answer = transport.enter(step.key, step.token, step.limit_s)
                elif type(step) is ExecuteBeside:
                    transport.execute_beside(step.operation, step.limit_s, step.slow_s)
                elif type(step) is Sleep:
                    time.sleep(step.seconds)
                elif type(step) is Split:
                    answer = transport.split(step.keys)
                elif type(step) is ExecuteAll:
                    transport.execute_all(step.operations, step.limit_s)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value


def wait(transport: Transport, waiting: Waiting) -> Any:
    """Drive a waiting to its end, on a usual day without steps. Returns what its steps return."""
    seat = transport.enter(waiting.key, waiting.token, waiting.limit_s())
    heard: object = ENTERED
    try:
        if seat is not None:
            timeout_s = waiting.join(seat)
            if timeout_s is not None:
                heard = transport.hear(seat.mailbox, timeout_s)
                grant = waiting.granted(seat, heard)
                if grant is not None:
                    seat.room.leave(seat)
                    return grant
    except BaseException as error:
        heard = error
    try:
        return drive(transport, waiting.steps((seat, heard)))
    finally:
        del seat, heard  # an error would keep this frame, and this frame the error
