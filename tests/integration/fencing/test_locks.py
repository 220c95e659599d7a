"""`lock.fence`: however a lock is got, its number is higher than that of every earlier holding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import redis

from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.scenes import Scene
from tests.support.waiting import LATE, Contender


def fence_of(contender: Contender) -> int:
    fence = contender.lock.fence
    assert isinstance(fence, int)
    return fence


def test_each_holding_has_a_higher_number(scene: Scene) -> None:
    lock, other = scene.contenders(2, timeout=60, fencing=True)
    fences = []
    for holder in (lock, other, other, lock):
        assert holder.call("acquire")
        fences.append(fence_of(holder))
        holder.release()
        assert holder.lock.fence is None
    assert all(earlier < later for earlier, later in pairwise(fences))


def test_numbers_go_on_where_the_lock_is_handed_over(scene: Scene) -> None:
    crew = scene.contenders(4, **LATE, fencing=True)
    assert crew[0].call("acquire")
    answers = scene.queue_up(crew[1:])
    fences = [fence_of(crew[0])]
    for before, heir, answer in zip(crew, crew[1:], answers, strict=False):
        before.release()
        assert answer.result(PATIENCE_S) is True
        fences.append(fence_of(heir))
    assert all(earlier < later for earlier, later in pairwise(fences))
    crew[-1].release()
    assert scene.client.keys() == [b"{name}:rlf:fence"]


def test_unnumbered_holders_in_between_do_no_harm(scene: Scene) -> None:
    plain = scene.contender()
    first, second = scene.holder_and(1, **LATE, fencing=True)
    fence = fence_of(first)
    answer = scene.wait(plain)
    first.release()
    assert answer.result(PATIENCE_S) is True
    assert plain.lock.fence is None
    answer = scene.wait(second)
    plain.release()
    assert answer.result(PATIENCE_S) is True
    assert fence_of(second) > fence


@pytest.mark.parametrize("wait", ["push", "poll"])
def test_lock_that_is_taken_again_with_the_same_token_has_a_higher_number(scene: Scene, wait: Any) -> None:
    settings = {"timeout": 60, "sleep": 0.01 if wait == "poll" else 60, "fencing": True, "wait": wait}
    holder, heir = scene.contenders(2, **settings)
    fences = []
    for _ in range(2):
        assert holder.call("acquire", token="job")
        fences.append(fence_of(holder))
        holder.release()
    scene.client.set("name", "somebody's")
    answer = heir.acquire(token="job")
    if wait == "push":
        scene.until_queued(1)
    scene.client.delete("name")
    assert answer.result(PATIENCE_S) is True
    fences.append(fence_of(heir))
    assert all(earlier < later for earlier, later in pairwise(fences))


def test_acquire_with_the_token_of_the_holder_has_its_number(scene: Scene) -> None:
    first, second = scene.contenders(2, timeout=60, fencing=True)
    assert first.call("acquire", token="job")
    assert second.call("acquire", token="job")
    assert fence_of(second) == fence_of(first)


def test_handed_over_lock_that_cannot_be_numbered_is_given_up(scene: Scene) -> None:
    crew = scene.contenders(2, **LATE, fencing=True)
    assert crew[0].call("acquire")
    scene.client.set("{name}:rlf:fence", "no hash")
    (answer,) = scene.queue_up(crew[1:])
    crew[0].release()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        answer.result(PATIENCE_S)
    wait_until(lambda: not scene.client.exists("name"), "the lock is given up")
    assert crew[1].lock.local.token is None
