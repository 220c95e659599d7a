"""Helpers of the tests of semaphores: a semaphore's keys, its permits and their ends by the server's clock.

Nothing here asserts what a semaphore should do, and every wait is on a condition.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from redislock_fast._protocol import permits
from redislock_fast._protocol.keys import permit_keys
from redislock_fast._protocol.permits import AcquirePermit, ReleasePermit, Resize, acquire_permit
from redislock_fast._protocol.scripts import FOR_PERMITS, WAIT
from redislock_fast._util.tokens import PERMIT, TokenSource
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import until_queued

__all__ = [
    "LIMIT_KEY",
    "QUEUE",
    "WAITERS",
    "ends_of",
    "first_done",
    "held",
    "limits_logged_anew",
    "new_tokens",
    "now_ms",
    "queue_up",
    "run_acquire",
    "run_release",
    "run_resize",
    "run_wait",
    "take",
]

QUEUE, WAITERS, LIMIT_KEY = (key.decode() for key in permit_keys(b"name"))
"""The other keys of the semaphore "name"."""


def now_ms(admin: Any) -> float:
    """The server's time, in milliseconds."""
    seconds, microseconds = admin.time()
    return float(seconds * 1000 + microseconds / 1000)


def ends_of(admin: Any, name: str = "name") -> dict[bytes, float]:
    """The permits on the server: by token, its end in the server's milliseconds."""
    return dict(admin.zrange(name, 0, -1, withscores=True))


def held(admin: Any, name: str = "name") -> int:
    """How many permits have not ended, by the server's clock."""
    return sum(end + 1 > now_ms(admin) for end in ends_of(admin, name).values())


def queue_up(world: Any, semaphores: list[Any], admin: Any, **arguments: Any) -> list[Any]:
    """Let a caller of each wait for a permit, one after another. Returns the futures of their permits."""
    answers: list[Any] = []
    for semaphore in semaphores:
        length = admin.zcard(QUEUE) + 1
        answers.append(world.start(partial(semaphore.acquire, **arguments)))
        until_queued(admin, "name", length)
    return answers


def first_done(answers: list[Any]) -> int:
    """Which of them has an answer, once one has."""
    wait_until(lambda: any(answer.done() for answer in answers), "one has an answer")
    return [answer.done() for answer in answers].index(True)


def take(answer: Any) -> Any:
    """The permit that a future brings."""
    permit = answer.result(PATIENCE_S)
    if permit is None:
        raise AssertionError("no permit was granted")
    return permit


# The operations, one by one, as a client sends them


def new_tokens(count: int) -> list[bytes]:
    """So many tokens of permits. No process listens for them."""
    source = TokenSource()
    return [source.new_token(PERMIT) for _ in range(count)]


def _execute(client: Any, operation: Any) -> Any:
    """The server's reply to the operation's request."""
    operation.with_text = True
    return client.execute_command(*operation.request(None, 1.0))


def run_acquire(client: Any, token: bytes, limit: int = 2, ttl_ms: int = 60_000) -> Any:
    """Acquire a permit; the script's reply."""
    operation: AcquirePermit = acquire_permit(limit)(b"name", token, ttl_ms)
    return _execute(client, operation)


def run_release(client: Any, token: bytes) -> Any:
    """Release a permit; the script's reply."""
    return _execute(client, ReleasePermit(b"name", token, None))


def run_resize(client: Any, limit: int | None) -> Any:
    """Resize; the script's reply."""
    return _execute(client, Resize(b"name", limit))


def run_wait(
    client: Any, token: bytes, channel: str = "rlf:gone", limit: int = 2, ttl_ms: int = 60_000, look_for: bytes = b""
) -> Any:
    """Join the queue, as a waiter that listens on this channel; the script's reply."""
    words = (f"{ttl_ms}/{limit}", "publish", channel, 60_000, 600_000, look_for)
    return client.eval(FOR_PERMITS[WAIT.sha].text, 4, "name", QUEUE, WAITERS, LIMIT_KEY, token, *words)


def limits_logged_anew() -> None:
    """Have each operator's limit be logged again, as in a new process."""
    permits._differing.clear()
