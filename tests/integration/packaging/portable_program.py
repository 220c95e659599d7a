"""A program for platforms without the compiled core: takes contended locks in threads and in tasks, on pure Python.

Its argument is the port of a server. Without one, it starts the server of fakeredis[lua], which is Python, too. CI runs
the program on Windows and PyPy, `test_packaging.py` where the names of POSIX are hidden.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio


def fake_server() -> int:
    """Start fakeredis' server, for as long as the program runs. Returns its port."""
    from fakeredis import TcpFakeServer

    server = TcpFakeServer(("127.0.0.1", 0), server_type="valkey")
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port: int = server.server_address[1]
    return port


def in_threads(client: redis.Redis) -> bool:
    """Have another thread wait for a lock that is held, and released when it waits. Returns whether it was acquired."""
    was_refused = threading.Event()
    results: list[bool] = []

    def other() -> None:
        lock = redislock_fast.Lock(client, "threads", timeout=60)
        assert not lock.acquire(blocking=False)
        was_refused.set()
        with lock:
            results.append(lock.owned())

    with redislock_fast.Lock(client, "threads", timeout=60, auto_renew=True):
        thread = threading.Thread(target=other, daemon=True)  # a failure here ends the program
        thread.start()
        was_refused.wait()
    thread.join()
    return results == [True]


async def in_tasks(port: int) -> bool:
    """The same with another task."""
    was_refused = asyncio.Event()
    async with redis.asyncio.Redis(port=port) as client:

        async def other() -> bool:
            lock = redislock_fast.asyncio.Lock(client, "tasks", timeout=60)
            assert not await lock.acquire(blocking=False)
            was_refused.set()
            async with lock:
                return await lock.owned()

        async with redislock_fast.asyncio.Lock(client, "tasks", timeout=60, auto_renew=True):
            task = asyncio.create_task(other())
            await was_refused.wait()
        return await task


def main() -> None:
    """Import each public name, take the locks, and say what was acquired."""
    for package in (redislock_fast, redislock_fast.asyncio):
        for name in package.__all__:
            getattr(package, name)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else fake_server()
    with redis.Redis(port=port) as client:
        acquired = [in_threads(client), asyncio.run(in_tasks(port))]
    print(redislock_fast.implementation, *acquired)
    assert [True, True] == acquired


if __name__ == "__main__":
    main()
