"""Fencing with keys that linger: each holding has a number of its own, higher than all before it, in every process."""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, until_queued

LINGERS: dict[str, Any] = {"timeout": FAR_S, "sleep": FAR_S, "linger": FAR_S, "fencing": True}


def test_each_holding_in_memory_has_the_next_number(holders: Holders, valkey: Server, connect: Connect) -> None:
    first = holders.make(valkey.port, "name", **LINGERS)
    second = holders.on(first.lock.redis, "name", **LINGERS)
    counted = connect(valkey.port).info("commandstats").get("cmdstat_hincrby", {"calls": 0})["calls"]
    fences = []
    for lock in (first, second, first):
        assert lock.call("acquire") is True
        fences.append(lock.lock.fence)
        lock.release()
    assert fences == [1, 2, 3]
    assert connect(valkey.port).info("commandstats")["cmdstat_hincrby"]["calls"] == counted + 1


@pytest.mark.parametrize("waits", [True, False])
def test_another_process_gets_a_higher_number(holders: Holders, valkey: Server, connect: Connect, waits: bool) -> None:
    keeper, other = (holders.make(valkey.port, "name", **LINGERS) for _ in range(2))
    plain = holders.make(valkey.port, "name", timeout=FAR_S, fencing=True)
    assert keeper.call("acquire") is True
    if waits:
        answer = other.acquire()
        until_queued(connect(valkey.port), "name", 1)
        keeper.release()
        assert answer.result(PATIENCE_S) is True
    else:
        keeper.release()
        assert other.call("acquire") is True
    fences = [other.lock.fence]
    other.release()
    assert plain.call("acquire") is True
    fences.append(plain.lock.fence)
    plain.release()
    assert keeper.call("acquire") is True
    assert 1 < fences[0] < fences[1] < keeper.lock.fence


def test_a_key_goes_back_to_the_server_behind_its_last_number(
    holders: Holders, valkey: Server, connect: Connect
) -> None:
    lock = holders.make(valkey.port, "name", **LINGERS)
    fences, tokens = [], set()
    for _ in range(130):
        assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
        fences.append(lock.lock.fence)
        tokens.add(connect(valkey.port).get("name"))
        lock.release()
    assert fences == sorted(set(fences))
    assert len(tokens) >= 3  # more where the machine is slow, since a key is kept for a second at most
