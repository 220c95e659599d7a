"""The requests that acquire many locks of one server at once, and what their replies mean."""

from __future__ import annotations

from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.pipeline import InBulk

__all__ = ["AcquirePipeline"]


class AcquirePipeline(InBulk):
    """Take the locks that are free, all under one token.

    `results` says which are ours. `sent_at` is the time of the first request: all leases count from there.
    """

    def __init__(self, keys: list[bytes], token: bytes, ttl_ms: int | None) -> None:
        super().__init__(keys, token)
        self._ttl_ms = ttl_ms

    @property
    def sent_at(self) -> float:
        """The time of the first request."""
        return self._template.sent_at if isinstance(self._template, Acquire) else 0.0

    def _new_machine(self, key: bytes) -> Acquire:
        return Acquire(key, self._token, self._ttl_ms)

    def takes(self) -> list[tuple[bytes, bytes]]:
        return [(key, self._token) for key in self._keys]

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:
        # The locks that are ours, if the caller gets an error, and those that an attempt of unknown outcome may make
        # ours.
        return [
            (key, self._token)
            for key, ours in zip(self._keys, self.results, strict=True)
            if (failed if ours else self.unsettled)
        ]
