"""Locks in etcd: a key with a lease of its own, and the recipe of etcd's clients, on one member or on three.

Each thread has a connection of its own to the leader, over the JSON gateway of the server. The gateway needs no
library, and is a little slower than gRPC.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any

from bench.alternatives import places
from bench.alternatives.locks import Alternative, PollingLock, released
from bench.contestants import LEASE_S
from bench.contestants.commands import new_token
from redislock_fast.server import free_port

_PACKAGE = "etcd-server"
_TIMEOUT_S = 10.0
_SESSION_S = 3600  # longer than the run; a real session has a shorter lease, renewed in the background
_MADE = "CREATE"
_NEVER = "0"  # the create revision of a missing key


class EtcdError(Exception):
    """The server refused a request."""


class Gateway:
    """One connection to a member.

    Args:
        port: of its client URL.
    """

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
        self._connection.connect()
        # Headers and body leave in two writes.
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, **request: object) -> dict[str, Any]:
        """Make one request, and return the reply.

        Raises:
            EtcdError: when the request was refused.
        """
        self._connection.request("POST", path, json.dumps(request))
        reply = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(reply.read())
        if reply.status != 200:
            raise EtcdError(f"{path}: {answer}")
        return answer

    def grant(self, ttl_s: int) -> str:
        """Grant a lease, and return its id."""
        lease: str = self.post("/v3/lease/grant", TTL=ttl_s)["ID"]
        return lease

    def is_healthy(self) -> bool:
        """Whether the member can write."""
        self._connection.request("GET", "/health")
        return self._connection.getresponse().status == 200

    def version(self) -> str:
        """The version of the server."""
        version: str = self.post("/v3/maintenance/status")["version"]
        return version

    def is_leader(self) -> bool:
        """Whether the member is the leader."""
        status = self.post("/v3/maintenance/status")
        return bool(status["leader"] == status["header"]["member_id"])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class LeasedKey(PollingLock):
    """The nearest to `SET NX PX`: a lease, and a transaction that puts the key with the lease unless the key exists.

    Args:
        gateway: used by this thread alone.
        name: of the lock, which is its key.
    """

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway = gateway
        self._key = _encoded(name)
        self._lease = ""

    def attempt(self) -> bool:
        """Put the key with a lease of its own."""
        lease = self._gateway.grant(LEASE_S)
        put = {"key": self._key, "value": _encoded(new_token()), "lease": lease}
        is_free = {"key": self._key, "target": _MADE, "result": "EQUAL", "create_revision": _NEVER}
        answer = self._gateway.post("/v3/kv/txn", compare=[is_free], success=[{"request_put": put}])
        if answer.get("succeeded"):
            self._lease = lease
            return True
        self._gateway.post("/v3/lease/revoke", ID=lease)
        return False

    def release(self) -> None:
        """End the lease, and the key with it."""
        released(bool(self._lease))
        self._gateway.post("/v3/lease/revoke", ID=self._lease)
        self._lease = ""


class RecipeLock(PollingLock):
    """The mutex of etcd's clients (`clientv3/concurrency`): each session puts a key, and the oldest key is the holder.

    Args:
        gateway: used by this thread alone; its session gets one lease for all acquires.
        name: of the lock.
    """

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway = gateway
        self._lease = gateway.grant(_SESSION_S)
        prefix = f"{name}/"
        self._key = _encoded(f"{prefix}{int(self._lease):x}")
        below = {"key": _encoded(prefix), "range_end": _encoded(f"{name}0")}  # "0" comes after "/"
        oldest = {**below, "sort_target": _MADE, "sort_order": "ASCEND", "limit": "1"}
        put = {"key": self._key, "value": "", "lease": self._lease}
        self._enter = {
            "compare": [{"key": self._key, "target": _MADE, "result": "EQUAL", "create_revision": _NEVER}],
            "success": [{"request_put": put}, {"request_range": oldest}],
            "failure": [{"request_range": oldest}],
        }

    def attempt(self) -> bool:
        """Put the key of the session, and delete it when the key of another session is older."""
        answer = self._gateway.post("/v3/kv/txn", **self._enter)
        oldest = answer["responses"][-1]["response_range"]["kvs"][0]
        if oldest["key"] == self._key:
            return True
        self._delete()
        return False

    def release(self) -> None:
        """Delete the key of the session."""
        released(self._delete())

    def _delete(self) -> bool:
        answer = self._gateway.post("/v3/kv/deleterange", key=self._key)
        return bool(answer.get("deleted") == "1")


@contextmanager
def open_members(count: int) -> Iterator[list[Alternative]]:
    """Start a cluster with default settings, except for its addresses.

    Args:
        count: of members.

    Yields:
        The alternatives; the cluster ends with the context.

    Raises:
        AbsentError: when the server is not installed.
    """
    etcd = places.program("etcd", _PACKAGE)
    ports = {f"member-{index}": free_port() for index in range(count)}
    peers = {member: f"http://127.0.0.1:{free_port()}" for member in ports}
    with places.folder() as folder, ExitStack() as stack:
        daemons = []
        for member, port in ports.items():
            flags = {
                "name": member,
                "data-dir": folder / member,
                "listen-client-urls": f"http://127.0.0.1:{port}",
                "advertise-client-urls": f"http://127.0.0.1:{port}",
                "listen-peer-urls": peers[member],
                "initial-advertise-peer-urls": peers[member],
                "initial-cluster": ",".join(f"{name}={url}" for name, url in peers.items()),
                "logger": "zap",
                "log-level": "error",
            }
            command = [str(etcd), *(f"--{name}={value}" for name, value in flags.items())]
            daemons.append(stack.enter_context(places.Daemon(command, folder / f"{member}.log")))
        for daemon, port in zip(daemons, ports.values(), strict=True):
            daemon.wait_until(partial(_is_healthy, port))
        yield _alternatives(count, _leader(ports.values()), stack)


def _alternatives(count: int, port: int, stack: ExitStack) -> list[Alternative]:
    members, kept = ("1 member", "disk") if count == 1 else (f"{count} members", f"disks of most of {count}")

    with closing(Gateway(port)) as gateway:
        server = f"etcd {gateway.version()}"

    def alternative(name: str, lock_class: Callable[[Gateway, str], LeasedKey | RecipeLock]) -> Alternative:
        def make(lock_name: str) -> LeasedKey | RecipeLock:
            gateway = Gateway(port)
            stack.callback(gateway.close)
            return lock_class(gateway, lock_name)

        return Alternative(f"etcd, {members}, {name}", kept, server, lambda: make)

    return [alternative("lease for each", LeasedKey), alternative("recipe", RecipeLock)]


def _leader(ports: Iterable[int]) -> int:
    for port in ports:
        with closing(Gateway(port)) as gateway:
            if gateway.is_leader():
                return port
    raise EtcdError("no member leads")


def _is_healthy(port: int) -> bool:
    try:
        with closing(Gateway(port)) as gateway:
            return gateway.is_healthy()
    except (OSError, HTTPException):
        return False


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
