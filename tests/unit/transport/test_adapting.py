"""What goes on after gevent or eventlet has patched `threading`. No server, and no patch.

How real programs go on is tested in `integration/lock/test_patched_later.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import redis

from redislock_fast import Lock


def test_connection_from_before_a_patch_is_closed() -> None:
    closed: list[bool] = []
    connection: Any = SimpleNamespace(close=lambda: closed.append(True), ending=None)
    transport = Lock(redis.Redis(), "name")._transport
    transport.connection = connection
    transport.adapt()
    assert (transport.connection, closed) == (None, [True])


def test_greenlet_that_another_one_overtakes_keeps_the_owners() -> None:
    lock = Lock(redis.Redis(), "name")
    owners = lock._owners
    lock._adapt_to_patch()
    assert lock._owners is owners
