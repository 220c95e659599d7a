"""Pools whose methods are extended: for new credentials, and for their end. No server."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from redis import ConnectionPool

from redislock_fast._transport import pool_events


def test_pool_that_knows_no_authentication_anew_is_left_as_it_is() -> None:
    class Old:
        pass

    class ServerTransport:
        def authenticate(self, request: object) -> None:
            raise AssertionError(request)

    pool = Old()
    pool_events.notice_credentials(pool, ServerTransport())
    assert vars(pool) == {}


class _Disconnecting:
    """Disconnects its pool when both are collected, as clients of redis-py 5.0 do."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        pool.client = self

    def __del__(self) -> None:
        self.pool.disconnect()


class _Closing:
    def note_closing(self) -> None:
        """Do nothing."""


def test_pool_that_is_disconnected_while_it_is_collected_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", errors.append)
    pool: Any = ConnectionPool()
    server = _Closing()
    pool_events.notice_closing(pool, server)
    _Disconnecting(pool)
    del pool
    gc.collect()
    assert errors == []
