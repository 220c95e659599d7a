"""The driver of procedures for threads, and the one server transport of each client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from redislock_fast._pipe.base import Forked
from redislock_fast._protocol.steps import Steps, name_lock
from redislock_fast._transport.kinds import Transports
from redislock_fast._transport.observer import Observed
from redislock_fast._transport.threads.client import ThreadClientTransport
from redislock_fast._transport.threads.cluster import ThreadClusterTransport
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util import fork, patching
from redislock_fast._util.tracing import is_observed

if TYPE_CHECKING:
    from redislock_fast._protocol.steps import CleanupEntries

_servers: Transports[ThreadServerTransport] = Transports(
    False, {"server": ThreadServerTransport, "cluster": ThreadClusterTransport, "client": ThreadClientTransport}
)

transport_of = _servers.of


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_OWN: dict[str, Callable[..., Any]] = {"sleep": _sleep, "call": _call}


def drive(transport: Any, steps: Steps, to_clean_up: CleanupEntries | None = None, client: Any = None) -> Any:
    """Do what the steps say. Returns what they return.

    Args:
        transport: the `ThreadServerTransport` of the server or cluster that the steps are about, or the servers of a
            Redlock.
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
        server = Observed(transport, client) if is_observed(client) else transport
        while True:
            try:
                if fork.generation() != generation:  # by a signal handler, between two steps
                    raise Forked
                method = _OWN.get(step.method) or getattr(server, step.method)
                answer = method(*step.args)
            except BaseException as error:
                name_lock(step, error)
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value
    except BaseException as error:
        step = method = answer = None  # the error keeps this frame, which must keep no connection
        steps.throw(error)  # an interrupt between two steps; where the steps have raised it, they have ended
    finally:
        if to_clean_up:
            transport.clean_up(to_clean_up)
