"""Unit tests: what a lock makes of the class of its client. No server."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import redis.asyncio

from redislock_fast._transport.base import is_cluster

CLIENTS = pytest.mark.parametrize("client_class", [redis.Redis, redis.asyncio.Redis])


@CLIENTS
def test_client_with_commands_of_its_own_is_logged(client_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Prefixed(client_class):  # type: ignore[misc]
        def execute_command(self, *args: Any, **options: Any) -> Any:
            return super().execute_command(args[0], "prefix:" + args[1], *args[2:], **options)

    class Derived(Prefixed):
        pass

    assert not is_cluster(Derived(), client_class is redis.asyncio.Redis)
    assert [
        (record.levelname, "Prefixed overrides execute_command" in record.message) for record in caplog.records
    ] == [("WARNING", True)]


@CLIENTS
def test_client_with_redis_pys_commands_is_not_logged(
    client_class: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(client_class):  # type: ignore[misc]
        pass

    monkeypatch.setattr(client_class, "execute_command", lambda *_: None)  # as a tracer does
    assert not is_cluster(Plain(), client_class is redis.asyncio.Redis)
    assert caplog.messages == []
