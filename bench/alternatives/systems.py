"""Every system that the bench compares, by its name in `--only`.

A system is a context of its alternatives. It raises `AbsentError` when it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from bench.alternatives import disk, etcd, postgresql, valkey
from bench.alternatives.locks import Alternative

VALKEY = "valkey"
"""The system of the alternative with which all others are compared, its first one."""

SYSTEMS: Mapping[str, Callable[[], AbstractContextManager[list[Alternative]]]] = {
    VALKEY: valkey.open_single,
    "disk": disk.open_disk,
    "redlock": valkey.open_redlock,
    "postgresql": postgresql.open_server,
    "etcd": partial(etcd.open_members, 1),
    "etcd-cluster": partial(etcd.open_members, 3),
}
