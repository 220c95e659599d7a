"""The driver of procedures for tasks, and the server transports: one for each event loop and server or cluster.

Thread safety: `AsyncTransport._servers` is used by atomic methods of dict alone, each entry by its own loop's
thread, and closed loops' entries by anybody.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError

from redislock_fast._pipe.loop_py import running_loop
from redislock_fast._protocol.steps import Steps, name_lock
from redislock_fast._transport.beside import Beside, beside_cluster, beside_pool
from redislock_fast._transport.kinds import Transports, changes_protocols
from redislock_fast._transport.loop.client import LoopClientTransport, transport_of_pool
from redislock_fast._transport.loop.cluster import LoopClusterTransport
from redislock_fast._transport.loop.server import LoopServerTransport
from redislock_fast._transport.observer import AsyncObserved
from redislock_fast._util import fork
from redislock_fast._util.tokens import PLAIN
from redislock_fast._util.tracing import is_observed

if TYPE_CHECKING:
    from redislock_fast._protocol.steps import CleanupEntries


class AsyncTransport:
    """All that this process sends from event loops to one server or cluster: a server transport for each loop.

    Args:
        owner: the connection pool whose server it is, or the client of the cluster. Only a weak reference is kept.
        kind: of its server transports.

    Attributes:
        encoding: makes bytes of names and tokens.
        sends_wait: whether `WAIT` can follow a request on its connection.
    """

    def __init__(self, owner: Any, kind: type[LoopServerTransport]) -> None:
        self.encoding = kind.encoding_of(owner)
        self.sends_wait = kind.sends_wait
        self._owner = weakref.ref(owner)
        self._kind = kind
        self._servers: dict[asyncio.AbstractEventLoop, LoopServerTransport] = {}
        fork.forget_in_child(self)

    def new_beside(self) -> Beside | None:
        """Make the same server or cluster for a thread; None where no thread can connect as the client does."""
        owner, make = self._owner(), _BESIDE.get(self._kind)
        return None if owner is None or make is None else make(owner)

    def of_running_loop(self) -> LoopServerTransport:
        """The running loop's server transport, which is made here if there is none."""
        fork.generation()  # has all forget in a child
        loop = running_loop()
        server = self._servers.get(loop)
        if server is None:
            for other in list(self._servers):
                if other.is_closed():
                    self._servers.pop(other, None)
            owner = self._owner()
            if owner is None:
                raise ConnectionError("the client is gone")
            make = self._kind if changes_protocols(loop) else _WITHOUT_TAKING_OVER[self._kind]
            server = self._servers[loop] = make(owner)
        return server

    def new_token(self, key: bytes | None = None, kind: bytes = PLAIN) -> bytes:
        """A new token; see `ServerTransport.new_token`."""
        return self.of_running_loop().new_token(key, kind)

    def is_contended(self, key: bytes, is_patient: bool) -> bool:
        """Whether an attempt to take this lock would probably fail; see `WaiterRegistry.is_contended`."""
        return self.of_running_loop().is_contended(key, is_patient)

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """Note that this lock was released here: a waiter has it now, or there was none."""
        self.of_running_loop().note_hand_over(key, handed_over)

    def server_of(self, key: bytes) -> LoopServerTransport:
        """The running loop's transport of the server that has this lock; see `ServerTransport.server_of`."""
        return self.of_running_loop().server_of(key)  # type: ignore[return-value]

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Delete locks that hold their tokens, without waiting."""
        self.of_running_loop().clean_up(entries)

    def clean_up_dropped(self, loop: asyncio.AbstractEventLoop, entries: list[tuple[bytes, bytes]]) -> None:
        """`clean_up` for a task of this loop that was dropped: the garbage collector runs this, in any thread."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self.clean_up, entries)

    def forget(self) -> None:
        """In a forked child: leave the parent's loops, connections and unfinished business to the parent."""
        for server in self._servers.values():
            server.abandon()
        # Never collected: that would have the parent's loops, whose selectors the child shares, close what they hold.
        _parents.append(self._servers)
        self._servers = {}


_parents: list[object] = []

_BESIDE: dict[type[LoopServerTransport], Callable[[Any], Beside | None]] = {
    LoopServerTransport: beside_pool,
    LoopClusterTransport: beside_cluster,
}


_WITHOUT_TAKING_OVER: dict[type[LoopServerTransport], Callable[[Any], LoopServerTransport]] = {
    LoopServerTransport: transport_of_pool,
    LoopClusterTransport: LoopClientTransport,
    LoopClientTransport: LoopClientTransport,
}
_transports: Transports[AsyncTransport] = Transports(
    True,
    {
        "server": partial(AsyncTransport, kind=LoopServerTransport),
        "cluster": partial(AsyncTransport, kind=LoopClusterTransport),
        "client": partial(AsyncTransport, kind=LoopClientTransport),
    },
)

transport_of = _transports.of


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


def _call(function: Callable[..., Awaitable[Any]], *args: Any) -> Awaitable[Any]:
    return function(*args)


_OWN: dict[str, Callable[..., Awaitable[Any]]] = {"sleep": _sleep, "call": _call}


async def drive(transport: Any, steps: Steps, to_clean_up: CleanupEntries | None = None, client: Any = None) -> Any:
    """Do what the steps say. Returns what they return.

    Args:
        transport: the `AsyncTransport` of the server or cluster that the steps are about, or the servers of a Redlock;
            or the running loop's own server transport, for a task that was dropped: then this may be any thread.
        steps: the procedure.
        to_clean_up: the steps add to it what must be cleaned up.
        client: whose own tracer observes the operations; None: only tracers of all clients do.
    """
    server = transport.of_running_loop()
    step, is_dropped = None, False
    try:
        step = next(steps)
        observed = AsyncObserved(server, client) if is_observed(client) else server
        while True:
            try:
                method = _OWN.get(step.method) or getattr(observed, step.method)
                answer = await method(*step.args)
            except BaseException as error:
                name_lock(step, error)
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value
    except BaseException as error:
        step = method = answer = None  # the error keeps this frame, which must keep no connection
        is_dropped = isinstance(error, GeneratorExit)
        steps.throw(error)  # an interrupt between two steps; where the steps have raised it, they have ended
    finally:
        if to_clean_up and is_dropped:  # this may be any thread
            server.clean_up_dropped(to_clean_up)
        elif to_clean_up:
            server.clean_up(to_clean_up)
