"""A permit that the server has not any more before its lease ends was deleted, whatever its semaphore has by then."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from redislock_fast import LockLostError, LossReason
from redislock_fast.server import Server
from tests.support.helpers import PATIENCE_S
from tests.support.holding import RENEWED, Losses
from tests.support.waiting import FAR_S, Callers, sent_by


@pytest.mark.parametrize("beside", [True, False], ids=["others hold", "alone"])
def test_a_release_of_a_permit_that_was_removed_says_deleted(
    callers: Callers, valkey: Server, valkey_client: redis.Redis, beside: bool
) -> None:
    client = callers.client(valkey.port, client_name="ours")
    semaphore = callers.package.Semaphore(client, "name", 2, timeout=FAR_S)
    permit = callers.begin(semaphore.acquire).result(PATIENCE_S)
    valkey_client.delete("name")
    others: list[Any] = [callers.begin(semaphore.acquire).result(PATIENCE_S)] if beside else []
    with sent_by(valkey_client, "ours") as sent, pytest.raises(LockLostError) as caught:
        callers.run(permit.release)
    assert (caught.value.reason, "GET" in sent.commands) == (LossReason.DELETED, False)
    for other in others:
        callers.run(other.release)


def test_a_renewal_that_finds_a_permit_removed_says_deleted(
    callers: Callers, valkey: Server, valkey_client: redis.Redis
) -> None:
    losses = Losses()
    client = callers.client(valkey.port)
    lost = callers.package.Semaphore(client, "name", 2, on_lost=losses, **RENEWED)
    kept = callers.package.Semaphore(client, "name", 2, timeout=FAR_S)
    permit = callers.begin(lost.acquire).result(PATIENCE_S)
    token: Any = valkey_client.zrange("name", 0, -1)[0]
    other = callers.begin(kept.acquire).result(PATIENCE_S)
    valkey_client.zrem("name", token)
    assert losses.until() == [LossReason.DELETED]
    assert permit.lost
    callers.run(other.release)
