"""Which asyncio clients have a thread that renews beside their event loop. No server."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import redis.asyncio

from redislock_fast._transport.beside import beside_cluster, beside_pool
from tests.support.async_helpers import in_loop

STRICT: list[dict[str, Any]] = [{"ssl_min_version": ssl.TLSVersion.TLSv1_3}, {"ssl_ciphers": "ECDHE+AESGCM"}]


@pytest.mark.parametrize("settings", STRICT, ids=lambda settings: next(iter(settings)))
@in_loop
async def test_no_thread_connects_to_a_cluster_less_safely_than_its_client(settings: dict[str, Any]) -> None:
    cluster = redis.asyncio.RedisCluster(host="127.0.0.1", ssl=True, **settings)
    assert beside_cluster(cluster) is None
    assert beside_cluster(redis.asyncio.RedisCluster(host="127.0.0.1", ssl=True)) is not None


@pytest.mark.parametrize("settings", STRICT, ids=lambda settings: next(iter(settings)))
@in_loop
async def test_thread_connects_to_a_server_as_safely_as_its_client(settings: dict[str, Any]) -> None:
    pool = redis.asyncio.Redis(ssl=True, **settings).connection_pool
    assert beside_pool(pool) is not None
