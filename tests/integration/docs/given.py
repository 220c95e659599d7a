"""What the examples of the pages take for granted, and what is to be seen when they have run."""

from __future__ import annotations

__all__ = ["AFTER", "BEFORE", "NOT_RUN"]

BEFORE = {
    "docs/explanation/linger.md": """
import threading
from types import SimpleNamespace
from unittest.mock import Mock
book = Mock()
orders = [SimpleNamespace(customer=3), SimpleNamespace(customer=3)]
articles, index = [1, 2, 3], Mock()
""",
    "docs/explanation/redlock.md": "def stop_work(lock, reason): ...",
    "docs/how-to/election.md": """
from unittest.mock import Mock
tick = Mock(side_effect=lambda number: election.stop())
""",
    "docs/how-to/fencing.md": """
import sqlite3
from redis.exceptions import LockError
def render(): return "text"
key, value = "report:today", "text"
""",
    "docs/how-to/find-contention.md": """
from redislock_fast import Lock
def serve_for_a_while():
    for outer, inner in (("account:17", "ledger"), ("ledger", "account:17")):
        with Lock(client, outer, timeout=10), Lock(client, inner, timeout=10):
            pass
""",
    "docs/how-to/holding.md": """
import redis
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock
parts, names, lost = range(3), ["a", "b"], set()
work_on, book_once, queue, run_import = Mock(), Mock(return_value="paid"), Mock(), Mock()
work = AsyncMock()
order, job = 17, SimpleNamespace(id="job-1")
""",
    "docs/how-to/roll-out.md": "import redislock_fast; redislock_fast.patch()",
}
"""For each page the code that runs before its examples, with the names that the text around them speaks of."""

AFTER = {
    "docs/explanation/linger.md": "assert book.call_count == 2 and index.call_count == 3",
    "docs/how-to/election.md": "assert tick.call_count == 2",
    "docs/how-to/fencing.md": """
assert client.get("report:today") == b"text"
CLAIM = '''INSERT INTO fences (lock, fence) VALUES (:lock, :fence)
    ON CONFLICT (lock) DO UPDATE SET fence = excluded.fence WHERE fences.fence <= excluded.fence'''
connection = sqlite3.connect(":memory:")
connection.executescript('''CREATE TABLE fences (lock TEXT PRIMARY KEY, fence BIGINT NOT NULL);
    CREATE TABLE drafts (id TEXT); CREATE TABLE papers (id TEXT, body TEXT)''')
publish(connection, "report", 1, "r", "text")
assert connection.execute("SELECT * FROM papers").fetchall() == [("r", "text")]
connection.close()
""",
    "docs/how-to/find-contention.md": """
assert "could deadlock: account:17 -> ledger -> account:17" in str(report)
""",
    "docs/how-to/holding.md": """
assert work_on.call_count == 7 and work.await_count == 2
lock.release()
transfer_book, book = book, Mock(side_effect=book)
transfer()
assert book.call_count == 1
assert request_import(3) == ("started", 202) and request_import(3)[1] == 409
on_message(queue.send.call_args.args[0])
assert run_import.call_args.args == (3,)
assert charge(17) == ("paid", 200)
gone = redis.Redis(port=1, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0))
for guarded in (lock_if_possible, lock_here_at_least):
    with guarded(Lock(gone, "name", timeout=10)):
        pass
""",
    "docs/reference/metrics.md": """
import prometheus_client
with lock:
    pass
labels = {"name": "invoice", "kind": "lock", "result": "acquired"}
assert prometheus_client.REGISTRY.get_sample_value("redislock_acquire_duration_seconds_count", labels) == 1
redislock_fast.prometheus.uninstall()
redislock_fast.log_waits()
""",
}
"""For each page what is checked, or called and checked, after its examples."""

NOT_RUN: dict[str, list[str]] = {}
"""The reasons of the examples that are only parsed, page by page."""
