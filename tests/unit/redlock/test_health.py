"""The pauses before a server of Redlocks that cannot be reached is tried again.

Rules: no server, and no time passes.
"""

from __future__ import annotations

import pytest

from redislock_fast._redlock.health import ServerHealth

TROUBLE = ConnectionError("refused")


def test_server_that_could_not_be_reached_is_left_alone_for_a_while() -> None:
    health = ServerHealth()
    assert not health.backs_off(100.0)
    health.failed(TROUBLE, 100.0)
    assert (health.backs_off(100.04), health.backs_off(100.06)) == (True, False)


@pytest.mark.parametrize(("failures", "pause_s"), [(1, 0.05), (2, 0.1), (3, 0.2), (5, 0.8), (6, 1.0), (5000, 1.0)])
def test_pause_doubles_up_to_a_second(failures: int, pause_s: float) -> None:
    health = ServerHealth()
    for _ in range(failures):
        health.failed(TROUBLE, 100.0)
    assert health.retry_at == pytest.approx(100.0 + pause_s)


def test_connection_ends_the_pause() -> None:
    health = ServerHealth()
    for _ in range(10):
        health.failed(TROUBLE, 100.0)
    health.connected()
    assert not health.backs_off(100.0)
    health.failed(TROUBLE, 100.0)
    assert health.retry_at == pytest.approx(100.05)


def test_server_that_made_a_round_wait_comes_last_until_that_is_forgotten() -> None:
    slow, soon = ServerHealth(), ServerHealth()
    slow.note_wait(0.001)
    soon.note_wait(0.0004)
    assert (2, 0) == (slow.slowness, soon.slowness)
    rounds = 0
    while slow.slowness:
        slow.note_wait(None)
        rounds += 1
    assert 100 < rounds < 1000
