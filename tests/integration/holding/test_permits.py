"""A permit that the server has not any more before its lease ends was deleted, whatever its semaphore has by then."""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast import LockLostError, LossReason
from tests.support.helpers import PATIENCE_S
from tests.support.holding import RENEWED, Losses
from tests.support.scenes import Scene
from tests.support.waiting import FAR_S, sent_by


@pytest.mark.parametrize("beside", [True, False], ids=["others hold", "alone"])
def test_a_release_of_a_permit_that_was_removed_says_deleted(valkey_scene: Scene, beside: bool) -> None:
    client = valkey_scene.connect(client_name="ours")
    semaphore = valkey_scene.callers.package.Semaphore(client, "name", 2, timeout=FAR_S)
    permit = valkey_scene.callers.begin(semaphore.acquire).result(PATIENCE_S)
    valkey_scene.client.delete("name")
    others: list[Any] = [valkey_scene.callers.begin(semaphore.acquire).result(PATIENCE_S)] if beside else []
    with sent_by(valkey_scene.client, "ours") as sent, pytest.raises(LockLostError) as caught:
        valkey_scene.callers.run(permit.release)
    assert (caught.value.reason, "GET" in sent.commands) == (LossReason.DELETED, False)
    for other in others:
        valkey_scene.callers.run(other.release)


def test_a_renewal_that_finds_a_permit_removed_says_deleted(valkey_scene: Scene) -> None:
    losses = Losses()
    client = valkey_scene.connect()
    lost = valkey_scene.callers.package.Semaphore(client, "name", 2, on_lost=losses, **RENEWED)
    kept = valkey_scene.callers.package.Semaphore(client, "name", 2, timeout=FAR_S)
    permit = valkey_scene.callers.begin(lost.acquire).result(PATIENCE_S)
    token: Any = valkey_scene.client.zrange("name", 0, -1)[0]
    other = valkey_scene.callers.begin(kept.acquire).result(PATIENCE_S)
    valkey_scene.client.zrem("name", token)
    assert losses.until() == [LossReason.DELETED]
    assert permit.lost
    valkey_scene.callers.run(other.release)
