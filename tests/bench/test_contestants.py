"""Each contestant of the bench is a lock that excludes others, on a real server."""

from __future__ import annotations

import pytest
import redis

pytest.importorskip("bench", reason="the bench is no part of the package")

from bench.contestants import AbsentError, check, libraries


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # those of bare sockets stay until the process ends
@pytest.mark.parametrize("name", libraries.NAMES)
def test_contestant_excludes_others(valkey_client: redis.Redis, name: str) -> None:
    try:
        contestant = libraries.find(name)
    except AbsentError as error:
        pytest.skip(f"{name}: {error}")
    holder, rival = (contestant.make(valkey_client, "invoice:17") for _ in range(2))
    check(contestant.key_of("invoice:17"), holder, rival, valkey_client, contestant.linger_s)
