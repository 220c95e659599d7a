"""What attempts of unknown outcome leave behind, and when it is undone.

Rules: on ours alone, by threads and by tasks. Faults are real: the proxy loses requests and replies. Where an order is
pinned, nothing is undone in the background. Must not know: requests of single operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from redislock_fast._loop_channel import LoopChannel
from redislock_fast._thread_channel import ThreadChannel
from redislock_fast.server import Server
from tests.async_helpers import async_few
from tests.helpers import few
from tests.proxy import Proxy
from tests.waiting_helpers import Callers, Contender, Threads

StartServer = Callable[..., Server]

# A caller's own token comes back


@pytest.fixture
def nothing_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server cannot be asked to undo anything just now."""
    for channel in (ThreadChannel, LoopChannel):
        monkeypatch.setattr(channel, "_start_undoing", lambda _: None)


def contender_of(callers: Callers, proxy: Proxy, **settings: Any) -> Contender:
    retry = few() if isinstance(callers, Threads) else async_few()
    return callers.contender(callers.client(proxy.port, retry=retry), **settings)


def acquire_in_vain(proxy: Proxy, contender: Contender) -> None:
    """Acquire with a token whose SET is executed, its reply lost, and then the server is away for a while."""
    contender.call("locked")
    proxy.refuse()
    proxy.drop_reply("SET")
    with pytest.raises(redis.ConnectionError):
        contender.call("acquire", token="mine", blocking=False)
    proxy.accept()


@pytest.mark.usefixtures("nothing_in_the_background")
def test_own_token_that_comes_back_takes_the_lock_anew(callers: Callers, proxy: Proxy, client: redis.Redis) -> None:
    contender = contender_of(callers, proxy, timeout=60)
    acquire_in_vain(proxy, contender)
    assert client.get("name") == b"mine"
    client.pexpire("name", 5_000)
    assert contender.call("acquire", token="mine", blocking=False) is True
    assert client.pttl("name") > 50_000
    contender.release()
    assert client.keys() == []


@pytest.mark.usefixtures("nothing_in_the_background")
def test_own_token_that_comes_back_in_vain_leaves_nothing(callers: Callers, spare_server: StartServer) -> None:
    server = spare_server()
    with Proxy(server.port) as proxy, redis.Redis(port=server.port) as client:
        contender = contender_of(callers, proxy)
        acquire_in_vain(proxy, contender)
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.OutOfMemoryError):
            contender.call("acquire", token="mine", blocking=False)
        assert client.keys() == []
