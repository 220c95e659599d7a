"""Which errors an election takes for an outage of its server, after which it goes on."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import AuthenticationError, ResponseError

from redislock_fast._election.record import Outage
from redislock_fast._util.redis_py import redis_error

AWAY = (
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down",
    "BUSY Redis is busy running a script.",
    "CLUSTERDOWN Hash slot not served",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "NOREPLICAS Not enough good replicas to write.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk.",
    "ERR Error running script (call to f_0): @user_script:3: -READONLY You can't write against a read only replica.",
)


@pytest.mark.parametrize("text", AWAY, ids=lambda text: str(text).split()[0])
def test_server_that_is_away_is_waited_for_and_that_is_logged_once(text: str, caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("beat")
    for _ in range(2):
        with outage.survived():
            raise redis_error(text)
    assert outage.is_met
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(redis_error(text)) in record.message


@pytest.mark.parametrize("text", ["NOPERM this user has no permissions", "ERR unknown command", "ERR -is no code"])
def test_other_errors_are_raised(text: str) -> None:
    outage = Outage("beat")
    with pytest.raises(ResponseError), outage.survived():
        raise redis_error(text)
    assert not outage.is_met


@pytest.mark.parametrize("text", ["WRONGPASS invalid username-password pair", "NOAUTH Authentication required."])
def test_refused_credentials_are_no_outage(text: str) -> None:
    outage = Outage("beat")
    with pytest.raises(AuthenticationError), outage.survived():
        raise redis_error(text)
    assert not outage.is_met
