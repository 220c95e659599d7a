"""Every system that the bench compares, by the name that `--only` has for it.

Rules: what one gives, it gives as long as its context is open; what is not installed raises `AbsentError` on opening.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from bench.alternatives import disk, etcd, postgresql, valkey
from bench.alternatives.locks import Alternative

VALKEY = "valkey"
"""The system whose first alternative all are compared with."""

SYSTEMS: Mapping[str, Callable[[], AbstractContextManager[list[Alternative]]]] = {
    VALKEY: valkey.open_single,
    "disk": disk.open_disk,
    "redlock": valkey.open_redlock,
    "postgresql": postgresql.open_server,
    "etcd": partial(etcd.open_members, 1),
    "etcd-cluster": partial(etcd.open_members, 3),
}
