"""The pauses by the retry policies of redis-py's pools, and the classes of errors by their texts. No server."""

from __future__ import annotations

import pytest
from redis.backoff import ConstantBackoff, DecorrelatedJitterBackoff, ExponentialBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from redislock_fast._util.redis_py import RetryPolicy, redis_error
from tests.support.helpers import once


def test_retry_policy_of_a_pool_without_one_tries_once_more() -> None:
    policy = RetryPolicy(None)
    assert policy.retries == 1
    assert [policy.delay_s(failures) for failures in (1, 2, 3)] == [0.0, 0.0, 0.0]


def test_retry_policy_keeps_to_the_pools() -> None:
    policy = RetryPolicy(Retry(ConstantBackoff(0.5), 3))
    assert policy.retries == 3
    assert [policy.delay_s(failures) for failures in (1, 2, 3)] == [0.0, 0.5, 0.5]
    assert RetryPolicy(once()).retries == 1
    assert RetryPolicy(Retry(ConstantBackoff(0.5), -1)).retries == -1
    growing = RetryPolicy(Retry(ExponentialBackoff(cap=10, base=1), 9))
    assert [growing.delay_s(failures) for failures in range(1, 7)] == [0.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_retry_policy_goes_on_for_as_long_as_the_pool_wants() -> None:
    policy = RetryPolicy(Retry(ExponentialBackoff(cap=10, base=0.5), -1))
    assert policy.delay_s(1_000_000) == 10.0


def test_retry_policy_leaves_the_pools_backoff_alone() -> None:
    backoff = DecorrelatedJitterBackoff(cap=10, base=1)
    before = dict(vars(backoff))
    RetryPolicy(Retry(backoff, 3)).delay_s(3)
    assert vars(backoff) == before


@pytest.mark.parametrize(
    ("wrapped", "kind"),
    [
        ("-OOM command not allowed when used memory > 'maxmemory'.", OutOfMemoryError),
        ("-READONLY You can't write against a read only replica.", ReadOnlyError),
        ("-NOREPLICAS Not enough good replicas to write.", ResponseError),
        ("attempt to index local 'x' (a nil value) -1", ResponseError),
    ],
)
def test_error_in_a_script_is_of_the_class_of_the_commands_error(wrapped: str, kind: type[Exception]) -> None:
    text = f"Error running script (call to f_0a): @user_script:16: @user_script: 16: {wrapped}"
    error = redis_error(f"ERR {text}")
    assert type(error) is kind
    assert str(error) == text
