"""Celery: one task at a time for each customer; the others are tried again later.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/celery_app.py

In production: `celery -A examples.celery_app worker`. A task that is delivered again after a crash brings the same
token, its id, so it goes on at once instead of waiting for its own lock to expire.
"""

from __future__ import annotations

import os
import threading

import redis
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker

from redislock_fast import Lock

app = Celery("examples", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(task_acks_late=True, broker_connection_retry_on_startup=True)
client = redis.Redis.from_url(os.environ["REDIS_URL"])
retried = threading.Event()  # only for this demonstration: the first task lasts until the second was turned away


@app.task(bind=True, max_retries=None)
def sync(self: Task, customer: str) -> str:
    """Synchronise a customer's data, while no other task does."""
    lock = Lock(client, f"sync:{customer}", timeout=30, auto_renew=True)
    if not lock.acquire(blocking=False, token=self.request.id):
        retried.set()
        raise self.retry(countdown=0.1)
    try:
        retried.wait(30)
        return customer
    finally:
        lock.release()


def main() -> None:
    """Send two tasks for one customer to a worker with two threads."""
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False, loglevel="ERROR"):
        results = [sync.delay("acme"), sync.delay("acme")]
        print("synchronised:", [result.get(timeout=60) for result in results])
    print("the second had to wait:", retried.is_set())


if __name__ == "__main__":
    main()
