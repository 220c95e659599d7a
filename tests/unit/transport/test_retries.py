"""When a request is sent again, and how long its reply may take.

Rules: no server, and no time passes but by `clock`.
"""

from __future__ import annotations

import gc
import weakref

import pytest
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError  # noqa: A004  # redis-py's
from redis.retry import Retry

from redislock_fast._pipe.base import ConnectionBroken
from redislock_fast._protocol.operation import NOAUTH, NotExecuted
from redislock_fast._transport import retries
from redislock_fast._transport.retries import Attempts
from redislock_fast._util.redis_py import RetryPolicy
from redislock_fast._util.times import GRACE_S

NOW = 100.0
BROKEN = ConnectionBroken(True, "broken")
LATER = NotExecuted("LOADING", "LOADING Redis is loading the dataset in memory")
UNAUTHENTICATED = NotExecuted(NOAUTH, "NOAUTH Authentication required.")


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "clock", lambda: NOW)


def attempts(limit_s: float | None = None, reply_s: float = -1.0, after: int = 2, pause_s: float = 0.5) -> Attempts:
    return Attempts(RetryPolicy(Retry(ConstantBackoff(pause_s), after)), limit_s, reply_s)


@pytest.mark.parametrize(
    ("limit_s", "reply_s", "timeout_s"),
    [
        (None, -1.0, -1.0),
        (None, 5.0, 5.0),
        (1e10, 5.0, 5.0),
        (2.0, -1.0, 2.0 + GRACE_S),
        (2.0, 5.0, 2.0 + GRACE_S),
        (2.0, 1.0, 1.0),
        (-GRACE_S / 2, 1.0, GRACE_S / 2),
        (-1.0, 1.0, 0.0),
    ],
)
def test_a_reply_is_waited_for_until_the_servers_or_the_callers_time_is_up(
    limit_s: float | None, reply_s: float, timeout_s: float
) -> None:
    assert attempts(limit_s, reply_s).timeout_s(NOW) == pytest.approx(timeout_s)


def test_the_callers_time_is_counted_from_the_beginning() -> None:
    limited, unlimited = attempts(2.0), attempts()
    assert (limited.left_s(), unlimited.left_s()) == (2.0, None)
    assert limited.bounded_s() == pytest.approx(2.0 + GRACE_S)
    assert limited.ends_at == pytest.approx(NOW + 2.0 + GRACE_S)
    assert unlimited.bounded_s() is unlimited.ends_at is None
    assert attempts(-1.0).bounded_s() == 0.0


def test_the_first_retry_leaves_at_once_and_the_policy_says_when_to_give_up() -> None:
    unlimited = attempts()
    assert [unlimited.pause_s(BROKEN) for _ in range(3)] == [0.0, 0.5, None]


def test_no_pause_lasts_longer_than_the_callers_time() -> None:
    limited = attempts(0.3, after=-1)
    assert [limited.pause_s(BROKEN) for _ in range(2)] == [0.0, None]


def test_a_server_that_answers_later_is_asked_until_the_callers_time_ends() -> None:
    assert [attempts(60.0).pause_s(LATER), *map(attempts(60.0).pause_s, [LATER] * 5)] == [0.0, 0.0, *[0.5] * 4]
    assert [*map(attempts().pause_s, [LATER] * 3)] == [0.0, 0.5, None]


def test_a_connection_on_which_nothing_is_executed_is_replaced_once() -> None:
    assert [*map(attempts(60.0, after=5).pause_s, [UNAUTHENTICATED] * 2)] == [0.0, None]


def test_the_error_of_the_last_attempt_is_raised_alone_and_nothing_keeps_it() -> None:
    last = attempts()
    for _ in range(2):
        last.note_failure(BROKEN, ConnectionError("not the last"))
        assert last.next_pause_s() >= 0.0
    error = ConnectionError("broken")
    last.note_failure(BROKEN, error)
    gc.disable()
    try:
        with pytest.raises(ConnectionError, match=r"^broken$") as raised:
            last.next_pause_s()
        assert raised.value is error
        assert error.__context__ is None
        is_there = weakref.ref(error)
        del error, raised
        assert is_there() is None
    finally:
        gc.enable()
