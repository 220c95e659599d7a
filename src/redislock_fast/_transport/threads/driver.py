"""The driver of procedures for threads, and the one server transport of each client."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from redislock_fast._pipe.base import Forked
from redislock_fast._procedures.steps import (
    AwaitTurn,
    CallHook,
    Enter,
    Execute,
    ExecuteAll,
    ExecuteDedicated,
    Listen,
    Sleep,
    Split,
    Steps,
    name_lock,
)
from redislock_fast._transport.base import Registry
from redislock_fast._transport.kinds import Kind, is_mock, kind_of, sends_by_itself
from redislock_fast._transport.observer import execute_observed
from redislock_fast._transport.threads.client import ThreadClientTransport
from redislock_fast._transport.threads.cluster import ThreadClusterTransport
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util import fork, patching
from redislock_fast._util.tracing import is_observed

if TYPE_CHECKING:
    from redislock_fast._procedures.call import CleanupEntries

__all__ = ["drive", "transport_of"]

_servers: Registry[ThreadServerTransport] = Registry()
_TRANSPORTS: dict[Kind, type[ThreadServerTransport]] = {
    "server": ThreadServerTransport,
    "cluster": ThreadClusterTransport,
    "client": ThreadClientTransport,
}
_kinds: dict[type, type[ThreadServerTransport]] = {}


def transport_of(client: Any) -> ThreadServerTransport:
    """The one transport of a client in this process.

    Args:
        client: redis-py's `Redis` or `RedisCluster`, of any kind.

    Raises:
        TypeError: for a pipeline or an asyncio client: neither can hold a lock by blocking calls.
    """
    kind = _kinds.get(type(client))
    if kind is None:
        kind = _TRANSPORTS[kind_of(client, for_asyncio=False)]
        if not is_mock(client):  # each mock has a class of its own
            _kinds[type(client)] = kind
    if kind is ThreadServerTransport and "execute_command" not in client.__dict__:
        transport = _servers.get(id(client.connection_pool))
        if transport is not None:
            return transport
    if kind is not ThreadClientTransport and sends_by_itself(client):
        kind = ThreadClientTransport
    owner = client.connection_pool if kind is ThreadServerTransport else client
    return _servers.get(id(owner)) or _servers.add(owner, kind)


def drive(  # noqa: PLR0912  # one branch for each kind of step
    transport: Any, steps: Steps, to_clean_up: CleanupEntries | None = None, client: Any = None
) -> Any:
    """Do what the steps say. Returns what they return.

    Args:
        transport: the `ThreadServerTransport` of the server or cluster that the steps are about, or what a wing has in
            its place.
        steps: the procedure.
        to_clean_up: the steps add to it what must be cleaned up.
        client: whose own tracer observes the operations; None: only tracers of all clients do.
    """
    if patching.in_force is not threading.local:
        patching.adapt()
    generation = fork.generation()
    step: Any = None
    try:
        step = next(steps)
        while True:
            answer: Any = None
            try:
                if fork.generation() != generation:  # by a signal handler, between two steps
                    raise Forked
                if type(step) is Listen:
                    answer = transport.hear(step.waiter.mailbox, step.timeout_s)
                elif type(step) is Execute:
                    if is_observed(client):
                        execute_observed(transport, step.operation, step.limit_s, client)
                    else:
                        transport.execute(step.operation, step.limit_s)
                elif type(step) is Enter:
                    answer = transport.enter(step.key, step.token, step.limit_s)
                elif type(step) is AwaitTurn:
                    step.waiter.wait(step.timeout_s)
                elif type(step) is ExecuteDedicated:
                    transport.execute_dedicated(step.operation, step.limit_s, step.slow_s)
                elif type(step) is Sleep:
                    time.sleep(step.seconds)
                elif type(step) is Split:
                    answer = transport.split(step.keys)
                elif type(step) is CallHook:
                    answer = step.call()
                elif type(step) is ExecuteAll:
                    transport.execute_all(step.operations, step.limit_s)
            except BaseException as error:
                name_lock(step, error)
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value
    except BaseException as error:
        step = answer = None  # the error keeps this frame, which must keep no connection
        steps.throw(error)  # an interrupt between two steps; where the steps have raised it, they have ended
    finally:
        if to_clean_up:
            transport.clean_up(to_clean_up)
