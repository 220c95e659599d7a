"""The end of an event loop, beside other threads. Rules: no server."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator
from typing import Any

from redislock_fast._transport.loop.end import LoopEnd


class _Server:
    """A server transport with nothing under way.

    Attributes:
        stops: how often it was stopped.
    """

    lingering = None
    stops = 0

    @property
    def cleanup(self) -> _Server:
        return self

    def cleaning_up(self) -> None:
        """There is no task."""

    def stop(self) -> tuple[()]:
        """Returns no tasks."""
        self.stops += 1
        return ()


class _Changing(weakref.WeakSet[Any]):
    """Changes while it is gone through for the first time: the garbage collector runs in another thread."""

    has_changed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.has_changed:
            self.has_changed = True
            raise RuntimeError("Set changed size during iteration")
        return super().__iter__()


def test_loop_ends_though_another_thread_collects_a_transport_meanwhile() -> None:
    server = _Server()

    async def end() -> None:
        end = LoopEnd()
        end._servers = _Changing([server])
        await end.finish()

    asyncio.run(end())
    assert server.stops == 1
