"""The package below its public classes, for tests of faults: a client's transport, its cleanup, its operations.

Tests of behaviour reach it by this module alone. A `client` is redis-py's; an asyncio one is used in its loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from redislock_fast._batch.acquisition import AcquirePipeline
from redislock_fast._lease.owner import SharedOwner
from redislock_fast._pipe import impl, threads_py
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.fenced import AcquireFenced, AcquireOwnFenced, Fence
from redislock_fast._protocol.queue import JoinQueue
from redislock_fast._protocol.scripts import ACQUIRE_FENCED, PASS_ON, WAIT
from redislock_fast._protocol.steps import Do
from redislock_fast._queue.waiters import WaiterRegistry
from redislock_fast._queue.waiting import Waiting
from redislock_fast._renewal import threads as thread_renewer
from redislock_fast._transport import base
from redislock_fast._transport.base import ServerTransport
from redislock_fast._transport.loop import driver as loop_driver
from redislock_fast._transport.loop.cleanup import LoopCleanup
from redislock_fast._transport.loop.server import Mailbox
from redislock_fast._transport.threads import cleanup as thread_cleanup
from redislock_fast._transport.threads import cluster as thread_cluster
from redislock_fast._transport.threads import connect as thread_connect
from redislock_fast._transport.threads import driver as thread_driver
from redislock_fast._transport.threads.cleanup import ThreadCleanup
from redislock_fast._util import times

CleanupEntries = list[tuple[bytes, bytes]]
"""Names of locks and their tokens."""


def _is_for_threads(client: Any) -> bool:
    return isinstance(client, redis.Redis | redis.RedisCluster)


def _of_running_loop(client: Any) -> Any:
    if _is_for_threads(client):
        return thread_driver.transport_of(client)
    return loop_driver.transport_of(client).of_running_loop()


class _TakenInTurn(SharedOwner):
    """The owner of a lock object that several threads or tasks use, but only one after the other."""

    is_shared = False


def let_first_requests_settle(lock: Any) -> None:
    """Have the first request settle uncontended acquires of a lock object, whichever thread calls in turn."""
    lock.local = _TakenInTurn()
    lock._is_direct = lock._options is None or lock._options.need_reply_alone


def let_owners_outlive_their_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have locks expect that owners end later than they do, as on CPython 3.14 without the GIL."""
    monkeypatch.setattr("redislock_fast._lease.holding.LOCALS_WAIT", True)


def local_waiters(holder: Any) -> int:
    """How many locks of this process wait for the key of this one, which lingers, without asking the server."""
    return len(holder._cached.waiters)


def clean_up(client: Any, entries: CleanupEntries) -> None:
    """Delete these locks in the background, where they still have these tokens."""
    (thread_driver if _is_for_threads(client) else loop_driver).transport_of(client).clean_up(entries)


def is_idle(client: Any) -> bool:
    """Whether nothing is left to be cleaned up."""
    return bool(_of_running_loop(client).cleanup.idle)


def connection_of(client: Any) -> Any:
    """The shared connection, None where there is none."""
    return _of_running_loop(client).connection


def node_of(client: Any, name: str) -> Any:
    """A cluster client's transport to the node that has the lock."""
    return _of_running_loop(client)._node_of(name.encode())


def reference_to_transport(client: redis.Redis) -> weakref.ref[Any]:
    """A reference that does not keep the client's transport alive."""
    return weakref.ref(thread_driver.transport_of(client))


def transports() -> int:
    """How many transports there are for threads."""
    return len(thread_driver._servers._transports)


def can_connect(client: redis.Redis) -> bool:
    """Whether no thread is connecting. From then on, no other thread can."""
    return thread_driver.transport_of(client)._connecting.acquire(blocking=False)


def cleanups_left(client: redis.Redis) -> int:
    """How many locks are still to be cleaned up."""
    return len(thread_driver.transport_of(client).cleanup.pending)


def clean_up_now(client: redis.Redis) -> bool:
    """Clean up in this thread what is left; False where nothing could be sent."""
    return thread_driver.transport_of(client).cleanup.clean_up_some()


def clean_up_at_exit(client: redis.Redis, entries: CleanupEntries) -> None:
    """Leave it to the end of the program to clean up these locks, on a new connection."""
    transport = thread_driver.transport_of(client)
    transport.close()
    transport.clean_up(entries)


def threads_inside(client: redis.Redis) -> set[int]:
    """The threads that are inside a call. An interrupt in the very line that leaves it does not remove the thread."""
    return thread_driver.transport_of(client).inside


# ---- faults and circumstances ----


def drive_by(pipe: str, monkeypatch: pytest.MonkeyPatch) -> type | None:
    """Drive new connections by the "compiled" pipe of threads or by its "python" twin; None where it is not built."""
    core: Any = threads_py if pipe == "python" else impl.compiled
    monkeypatch.setattr(thread_connect, "compiled", None if core is threads_py else core)
    return None if core is None else core.Pipe


def noted_cleanups(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tokens that are given to be cleaned up from now on."""
    tokens: list[bytes] = []
    start = ServerTransport.clean_up

    def noting(transport: Any, entries: Any) -> None:
        tokens.extend(token for _, token in entries)
        start(transport, entries)

    monkeypatch.setattr(ServerTransport, "clean_up", noting)
    return tokens


def stop_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean up nothing in the background."""
    for cleanup in (ThreadCleanup, LoopCleanup):
        monkeypatch.setattr(cleanup, "start", lambda _: True)


def at_end_of_cleanup(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do this in the thread that has cleaned up, before it ends."""
    run = thread_cleanup._clean_up_in_background

    def end_later(transport: weakref.ref[Any]) -> None:
        run(transport)
        work()

    monkeypatch.setattr(thread_cleanup, "_clean_up_in_background", end_later)


def end_idle_renewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """End each renewer as soon as it has nothing to renew."""
    monkeypatch.setattr(thread_renewer, "_LINGER_S", 0.0)


def trust_nodes_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask whether a cluster has changed only after so long."""
    monkeypatch.setattr(thread_cluster, "_STALE_AFTER_S", seconds)


def queue_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each acquire join the queue at once, as where others of the process wait already."""
    monkeypatch.setattr(WaiterRegistry, "is_contended", lambda *_: True)


def give_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an acquire whose time is up not wait for the reply to a request under way."""
    for module in (base, times):
        monkeypatch.setattr(module, "GRACE_S", 0.0)


def wait_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each waiter go on by the steps of its procedure, as where the first message is not the grant."""
    monkeypatch.setattr(Waiting, "granted", lambda *_: None)


def noted_messages(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[object]]:
    """The messages for each waiter of a loop that begins to wait from now on."""
    messages: dict[Any, list[object]] = {}
    put, wait = Mailbox.put, Mailbox.wait

    def noting(mailbox: Mailbox, message: object) -> None:
        messages[mailbox].append(message)
        put(mailbox, message)

    def beginning(mailbox: Mailbox, waiter: Any, timeout_s: float) -> Any:
        messages.setdefault(mailbox, [])
        return wait(mailbox, waiter, timeout_s)

    monkeypatch.setattr(Mailbox, "put", noting)
    monkeypatch.setattr(Mailbox, "wait", beginning)
    return messages


def steps_until(condition: Callable[[], bool]) -> Iterator[Any]:
    """Steps for a driver, which end once the condition is true."""
    while not condition():
        yield Do("sleep", 0.001)


# ---- operations and scripts ----


def run_wait_script(client: redis.Redis, token: bytes) -> Any:
    """Join the queue of the lock "name" and make its health check; what the script answers."""
    operation = JoinQueue(b"name", token, 1000, b"publish", b"channel", 5000, 60_000, token)
    return client.eval(WAIT.text, *operation.request(Capabilities(), 0.0)[2:])  # type: ignore[arg-type]


def run_pass_on_script(client: redis.Redis, token: bytes) -> Any:
    """Release the lock "name" where others wait; what the script answers."""
    return client.eval(PASS_ON.text, 3, "name", "{name}:rlf:queue", "{name}:rlf:waiters", token)  # type: ignore[arg-type]


def acquire_round(client: redis.Redis, names: list[bytes], token: bytes) -> None:
    """Acquire these locks with this token, as one round of a batch does."""
    thread_driver.transport_of(client).execute(AcquirePipeline(names, token, None))


def load_fencing_script(client: redis.Redis) -> None:
    """Have the server know the script that acquires with a fencing number."""
    client.script_load(ACQUIRE_FENCED.text)


def acquire_fenced(client: redis.Redis, token: bytes, ttl_ms: int | None = 10_000, is_own: bool = False) -> Any:
    """Try once to acquire the lock "name" with a fencing number; the operation, with `result`, `fence` and `holder`.

    Args:
        client: sends it.
        token: of the attempt.
        ttl_ms: of the lock; None for one that does not expire.
        is_own: the caller brought the token, so that the lock may have it already.
    """
    operation = (AcquireOwnFenced if is_own else AcquireFenced)(b"name", token, ttl_ms)
    thread_driver.transport_of(client).execute(operation)
    return operation


def fence_of_holder(client: redis.Redis, token: bytes) -> tuple[bool, int]:
    """Whether the lock "name" has this token, and its fencing number, which it gets where it has none yet."""
    operation = Fence(b"name", token)
    thread_driver.transport_of(client).execute(operation)
    return bool(operation.result), operation.fence
