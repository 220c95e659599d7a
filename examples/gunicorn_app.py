"""gunicorn with prefork workers: the lock is made before the fork, and each worker has its own connection.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/gunicorn_app.py

In production: `gunicorn --preload --workers 4 examples.gunicorn_app:app`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import redis

from redislock_fast import Lock
from redislock_fast.server import free_port

client = redis.Redis.from_url(os.environ["REDIS_URL"])
ORDERS = Lock(client, "orders", timeout=10)
with ORDERS:  # also in the parent process: nothing of it reaches the workers
    client.set("orders:next", 1)


def app(environ: dict[str, object], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Give out the next number: read, count, write."""
    with ORDERS:
        number = int(client.get("orders:next") or 1)
        client.set("orders:next", number + 1)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"%d" % number]


def main() -> None:
    """Start gunicorn with two workers, and order 20 times at once."""
    port = free_port()
    options = ["--preload", "--workers", "2", "--bind", f"127.0.0.1:{port}", "--log-level", "warning"]
    command = [sys.executable, "-m", "gunicorn", *options, "gunicorn_app:app"]
    with subprocess.Popen(command, cwd=Path(__file__).parent) as gunicorn, ThreadPoolExecutor(8) as customers:
        try:
            numbers = list(customers.map(lambda _: order(port), range(20)))
        finally:
            gunicorn.terminate()
    print("each number once:", sorted(numbers) == list(range(1, 21)))


def order(port: int) -> int:
    """Ask for a number; wait for gunicorn to start."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as response:
                return int(response.read())
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main()
