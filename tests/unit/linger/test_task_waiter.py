"""A task that waits for the local lock of a key that lingers. No server."""

from __future__ import annotations

import asyncio

from redislock_fast._linger.loop import _TaskWaiter


async def _some_turns_of_the_loop() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_task_that_is_woken_without_the_local_lock_waits_again() -> None:
    async def story() -> None:
        waiter = _TaskWaiter(asyncio.get_running_loop())
        first = asyncio.ensure_future(waiter.wait(None))
        await _some_turns_of_the_loop()
        assert first.done() is False
        waiter.wake()
        await first

        second = asyncio.ensure_future(waiter.wait(None))
        await _some_turns_of_the_loop()
        assert second.done() is False
        assert waiter.give() is True
        await second

    asyncio.run(story())


def test_a_task_that_got_the_local_lock_before_it_waits_does_not_wait() -> None:
    async def story() -> None:
        waiter = _TaskWaiter(asyncio.get_running_loop())
        assert waiter.give() is True
        await waiter.wait(None)
        await waiter.wait(None)

    asyncio.run(story())
