"""Flask: a request takes the lock, and the thread that does the work afterwards holds it to its end.

    REDIS_URL=redis://127.0.0.1:6379/0 python examples/flask_app.py

The same way leads to a worker in another process: `handle.to_dict()` goes into the message.
"""

from __future__ import annotations

import os
import threading

import redis
from flask import Flask

from redislock_fast import Handle, Lock

app = Flask(__name__)
client = redis.Redis.from_url(os.environ["REDIS_URL"])
delivery = threading.Event()  # stands for what the report waits for
workers: list[threading.Thread] = []
reports: list[str] = []


@app.post("/reports/<customer>")
def request_report(customer: str) -> tuple[str, int]:
    """Start a report, unless one for this customer is being made."""
    lock = Lock(client, f"report:{customer}", timeout=30)
    if not lock.acquire(blocking=False):
        return "a report is being made", 409
    workers.append(threading.Thread(target=make_report, args=(customer, lock.detach())))
    workers[-1].start()
    return "started", 202


def make_report(customer: str, handle: Handle) -> None:
    """Make the report, with the lock of the request."""
    with Lock.attach(client, handle, auto_renew=True):
        delivery.wait()
        reports.append(customer)


def main() -> None:
    """Ask for a report twice, and once more when it is ready."""
    browser = app.test_client()
    print("first:", browser.post("/reports/acme").status_code)
    print("second:", browser.post("/reports/acme").status_code)
    delivery.set()
    workers[0].join()
    print("afterwards:", browser.post("/reports/acme").status_code)
    workers[1].join()
    print("reports:", reports)


if __name__ == "__main__":
    main()
