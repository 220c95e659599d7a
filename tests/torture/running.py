"""Runs one history: a server, processes that use its locks, faults, and an observer; then heals all and waits.

Everything that is noted goes into files of one folder. No process outlives the history.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from redislock_fast.server import Server
from tests.support.clusters import Cluster
from tests.support.proxy import Proxy
from tests.support.stalls import TICK_S, Watch
from tests.torture.faults import PASSWORD, ClusterFaults, Faults, SentinelFaults
from tests.torture.history import SECOND, Log, now_ns
from tests.torture.sentinels import Watched
from tests.torture.workers import PATIENCE_S, Plan, client_of, run

__all__ = ["NAMES", "Setting", "run_history", "warm_up"]

NAMES = {
    "single": ("queue:0", "queue:0", "linger:0", "fenced:0", "mixed:0", "mixed:1", "permits:1", "permits:3"),
    "cluster": ("queue:0", "queue:1", "linger:0", "fenced:0", "mixed:0", "mixed:1", "permits:2"),
    "sentinel": ("queue:0", "linger:0", "fenced:0", "mixed:0", "permits:2"),
    "redlock": ("redlock:0", "redlock:1", "redlock:2"),
}
"""The locks that all processes use, by topology; one that comes twice is used twice as often.

Semaphores ("permits") have their limit as the number. A reader of strings sees nothing of them, nor does the observer.
"""

FADES_WITHIN_S = 12.0
"""So soon after the last release, nothing of a lock is left on the server."""

_KEPT = {"appendonly": "yes", "appendfsync": "no", "auto-aof-rewrite-percentage": "0"}
"""Each command is in a file before it is answered: a killed server has lost nothing when it comes back."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.torture.workers"])


def warm_up() -> None:
    """Return once processes can be started at once: they are forked from one that has imported all."""
    process = _PROCESSES.Process(target=os.getpid)
    process.start()
    process.join()


@dataclass(frozen=True)
class Setting:
    """Of one history.

    Attributes:
        folder: where it is noted.
        seed: of all choices.
        topology: "single"; "cluster" for three primaries and their replicas; "sentinel" for a primary
            that a sentinel names, and its replica; "redlock" for five servers.
        kind: of server.
        lasts_s: how long locks are used, in seconds.
        processes: how many use them, besides the one of redis-py's locks.
        resource_port: of the server with what fenced locks protect.
        is_calm: whether no faults are made: then the rules about waiting hold all the time.
    """

    folder: Path
    seed: int
    topology: str
    kind: str
    lasts_s: float
    processes: int
    resource_port: int
    is_calm: bool = False


class _Target:
    """A process that uses locks, and its successors."""

    def __init__(self, plan: Plan, links: list[Proxy]) -> None:
        self._plan = plan
        self.links = links
        self._generation = 0
        self.name = plan.name
        self._process = self._start()

    def _start(self) -> Any:
        process = _PROCESSES.Process(target=run, args=(replace(self._plan, name=self.name),), daemon=True)
        process.start()
        return process

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    def kill(self) -> None:
        """End it as a crash would, and put another one in its place."""
        self._process.kill()
        self._process.join()
        self._generation += 1
        self.name = f"{self._plan.name}.{self._generation}"
        self._process = self._start()

    def finish(self, log: Log) -> None:
        """Wait for its end, and note what is wrong with it."""
        self._process.join(2 * PATIENCE_S)
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGABRT)  # its fault handler prints where it hangs
            self._process.join()
            log.note("error", text=f"{self.name} does not end: see {self.name}.err")
        elif self._process.exitcode:
            log.note("error", text=f"{self.name} ended with status {self._process.exitcode}: see {self.name}.err")


class _Observer:
    """Notes, from a connection of its own, when keys are absent, and when the machine stalls."""

    PAUSE_S = 0.01
    UNKNOWN_S = 0.06
    """Between two looks that are further apart, a key may have been there."""

    LONG_S = 0.1
    STALL_S = 0.02

    def __init__(self, port: int, topology: str, names: tuple[str, ...], log: Log) -> None:
        self._names = () if topology == "redlock" else tuple({name for name in names if not name.startswith("permits")})
        self._client: Any = client_of(port, topology)
        self._read = self._client.mget_nonatomic if topology == "cluster" else self._client.mget
        self._log = log
        self._seen: dict[str, tuple[bytes | None, int]] = {}
        self._seen_at = 0
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=look, daemon=True) for look in (self._watch_keys, self._watch_machine)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End."""
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _watch_keys(self) -> None:
        while self._names and not self._ends.wait(self.PAUSE_S):
            before = now_ns()
            try:
                values: list[Any] = self._read(self._names)
            except RedisError:
                self._forget()
                continue
            if before - self._seen_at > self.UNKNOWN_S * SECOND:
                self._forget()
            self._seen_at = now_ns()
            for name, value in zip(self._names, values, strict=True):
                token = value and value.removesuffix(b"+")
                if name in self._seen and self._seen[name][0] != token:
                    self._note(name, before)
                self._seen.setdefault(name, (token, self._seen_at))
        self._forget()

    def _forget(self) -> None:
        for name in list(self._seen):
            self._note(name, self._seen_at)

    def _note(self, name: str, until: int) -> None:
        token, since = self._seen.pop(name)
        if until - since > self.LONG_S * SECOND:
            self._log.note("free" if token is None else "kept", since, name=name, until=until)

    def _watch_machine(self) -> None:
        watch = Watch()
        try:
            looked = now_ns()
            while not self._ends.wait(0.1):
                late_s = watch.longest_s() - TICK_S
                if late_s > self.STALL_S:
                    self._log.note("stall", looked - int(late_s * SECOND), until=now_ns())
                looked = now_ns()
        finally:
            watch.close()


def _note_left(admin: Any, log: Log) -> None:
    """Wait until nothing of a lock is left on the server, and note what is."""

    def left() -> dict[str, str]:
        channels = set(admin.pubsub_channels()) - {b"__sentinel__:hello"}
        texts = {f"channel {channel!r}": "left" for channel in channels}
        for key in admin.keys("*"):
            if key.endswith((b":queue", b":waiters")) and admin.ttl(key) > 0:
                if key.endswith(b":queue"):
                    waiters = admin.zrange(key, 0, -1, withscores=True)  # tokens, and when they joined
                    texts[f"{key!r}: {waiters}"] = "left queue"
            elif not key.endswith((b":fence", b":guard")):
                texts[repr(key)] = "left"
        own = str(admin.client_id())
        for row in admin.client_list():
            is_servers = row["flags"] in ("S", "M") or row["name"].startswith("sentinel-")
            if row["id"] != own and not is_servers:
                texts[f"connection {row}"] = "left"
        return texts

    give_up = time.monotonic() + FADES_WITHIN_S
    while "left" in (found := left()).values() and time.monotonic() < give_up:
        time.sleep(0.05)
    for text, rule in found.items():
        log.note("left", rule=rule, text=text)


def _links(
    servers: list[Server], topology: str, count: int, chance: random.Random, opened: ExitStack, log: Log
) -> list[dict[int, Proxy]]:
    """For every other process a proxy to one of the servers, by its port; where locks move, to each of the servers.

    All proxies of some processes delay for as long as they live.
    """
    links: list[dict[int, Proxy]] = []
    for number in range(count):
        links.append({})
        if number % 2:
            continue
        linked = servers if topology in ("cluster", "sentinel") else [servers[number % len(servers)]]
        delay_s = chance.choice((0, 0, 0, 0.0003, 0.003, 0.03, 0.2))
        for server in linked:
            links[-1][server.port] = link = opened.enter_context(Proxy(server.port))
            link.delay_s = delay_s
        if delay_s:
            now = now_ns()
            log.note("fault", now, kind="link delayed", until=now, delay_s=delay_s, processes=[f"p{number}"])
    return links


def _start_all(plan: Plan, links: list[dict[int, Proxy]]) -> list[_Target]:
    """Start the processes that use locks."""
    targets = []
    for number, linked in enumerate(links):
        reached = {port: link.port for port, link in linked.items()}
        targets.append(_Target(replace(plan, name=f"p{number}", reached=reached), list(linked.values())))
    if plan.topology == "single":
        targets.append(_Target(replace(plan, name="redis-py", is_redis_py=True, threads=1), []))
    return targets


def _open(setting: Setting, opened: ExitStack) -> tuple[tuple[int, ...], list[Server], Callable[..., Faults]]:
    """Start the servers. Returns the ports for clients, the servers, and what makes faults."""
    if setting.topology == "cluster":
        cluster = opened.enter_context(closing(Cluster(setting.kind, _KEPT)))
        return (cluster.port,), cluster.nodes, partial(ClusterFaults, cluster)
    if setting.topology == "sentinel":
        watched = opened.enter_context(closing(Watched(setting.kind, _KEPT, setting.folder)))
        return (watched.port,), watched.servers, partial(SentinelFaults, watched)
    count = 5 if setting.topology == "redlock" else 1
    options = _KEPT | {"requirepass": PASSWORD}
    servers = [opened.enter_context(Server(setting.kind, options)) for _ in range(count)]
    ports = tuple(server.port for server in servers)
    admins: list[Any] = [redis.Redis(port=port, password=PASSWORD, socket_timeout=20) for port in ports]
    return ports, servers, partial(Faults, servers, admins)


def run_history(setting: Setting) -> None:
    """Run one history, and note it in its folder."""
    chance = random.Random(f"{setting.seed} faults")
    setting.folder.mkdir(parents=True, exist_ok=True)
    names = NAMES[setting.topology]
    with ExitStack() as opened:
        ports, servers, faults_of = _open(setting, opened)
        log = Log(setting.folder, "main")
        opened.callback(log.close)
        settings: dict[str, Any] = {"topology": setting.topology, "server": setting.kind, "lasts_s": setting.lasts_s}
        log.note("settings", seed=setting.seed, **settings)
        links = _links(servers, setting.topology, setting.processes, chance, opened, log)
        ends_at = now_ns() + int(setting.lasts_s * SECOND)
        shared: dict[str, Any] = {"topology": setting.topology, "is_calm": setting.is_calm}
        plan = Plan(setting.folder, "", setting.seed, ports, {}, setting.resource_port, names, ends_at, **shared)
        targets = _start_all(plan, links)
        observer = _Observer(ports[0], setting.topology, names, log)
        faults = faults_of(targets, names, log, chance)
        while not setting.is_calm and now_ns() < ends_at:
            time.sleep(chance.uniform(0.2, min(2.0, 0.2 * setting.lasts_s)))
            faults.make_one()
        for target in targets:
            target.finish(log)
        observer.close()
        for number in faults.primaries():
            _note_left(faults.admins[number], log)
        for admin in faults.admins:
            admin.close()
