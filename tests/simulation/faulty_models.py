"""Servers with a fault that the simulations of held locks and of elections find, each by its own invariant."""

from __future__ import annotations

from typing import Any

from redislock_fast._pipe.base import Reply
from tests.simulation.model import Model

__all__ = ["GivesTheSameNumberAgain", "SetsHalfTheTtl"]


class GivesTheSameNumberAgain(Model):
    """The counter does not count."""

    def _acquire_fenced(
        self, value: bytes | None, lock: Any, fence: Any, token: Any, ttl_ms: Any, count: Any = 1
    ) -> Reply:
        reply = super()._acquire_fenced(value, lock, fence, token, ttl_ms)
        if isinstance(reply, list) and reply[0]:
            reply[2] = 1
        return reply


class SetsHalfTheTtl(Model):
    """A renewal sets less than it asks for."""

    def _pexpire(self, key: bytes, entry: Any, ttl_ms: object) -> None:
        assert isinstance(ttl_ms, int)
        super()._pexpire(key, entry, ttl_ms // 2)
