"""How often and after which pauses a request is sent again, by the retry policy of redis-py's pool. No server."""

from __future__ import annotations

from redis.backoff import ConstantBackoff, DecorrelatedJitterBackoff, ExponentialBackoff
from redis.retry import Retry

from redislock_fast._util.redis_py import RetryPolicy
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
