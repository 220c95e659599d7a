"""`python -m bench throughput --topology cluster`: batches of 1,000 names over one, three and six primaries.

On loopback, the client and all nodes share the CPUs of this machine, and more nodes add none. So each row names its
bottleneck. The rows with a delay of a millisecond show whether the requests to all nodes leave at once.

The clusters run side by side, each on loopback ports of its own, and are idle while another one is measured. A batch is
acquired and released as a whole, and its replies are counted. redis-py takes no part: it refuses scripts in the
pipeline of a cluster.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

import redislock_fast
from bench.contestants import LEASE_S, OURS, AbsentError, AnyBatch, CheckFailedError, libraries
from bench.measuring import report, rounds
from bench.measuring.costs import server_cpu_s
from bench.measuring.delay import open_delay
from bench.measuring.rounds import Entrant, Sample
from bench.measuring.servers import CHOICES, refuse
from redislock_fast.server import Server, free_port

PRIMARIES = (1, 3, 6)
"""The numbers of primaries; each is a row."""

NAMES = 1000

DELAYS_S = (0.0, 0.001)
"""The delay of each node in each direction, in seconds: none, and that of `delay.c`."""

_SLOTS = 16_384
_START_LIMIT_S = 30.0
_ROUNDS = 10
_SECONDS = 0.5


@contextmanager
def open_cluster(kind: str, primaries: int) -> Iterator[list[Any]]:
    """Start a cluster without replicas.

    Args:
        kind: of the servers, as in `redislock_fast.server.KINDS`.
        primaries: their number.

    Yields:
        A client of each node.
    """
    options = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}
    with ExitStack() as closing:
        nodes = [closing.enter_context(Server(kind, options, free_port())) for _ in range(primaries)]
        admins: list[Any] = [closing.enter_context(redis.Redis(port=node.port)) for node in nodes]
        for number, admin in enumerate(admins):
            bounds = [_SLOTS * number // primaries, _SLOTS * (number + 1) // primaries]
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            admin.execute_command("CLUSTER", "ADDSLOTS", *range(*bounds))
            for other in nodes[:number]:
                admin.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        give_up = time.monotonic() + _START_LIMIT_S
        while not all(_is_whole(admin, primaries) for admin in admins):
            if time.monotonic() > give_up:
                raise RuntimeError("the nodes do not become a cluster")
            time.sleep(0.01)
        yield admins


def _is_whole(admin: Any, primaries: int) -> bool:
    facts: bytes = admin.execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in facts and b"cluster_size:%d\r" % primaries in facts


@dataclass(frozen=True)
class _Bound:
    """The upper limit of pairs/s when all work overlaps, and the bottleneck that sets it."""

    pairs_per_s: float
    what: str


class _Crew:
    """A batch on one cluster, and a rival on another client.

    Args:
        admins: a client of each node.
        delay_s: of each node in each direction, in seconds.
        closing: ends the delay after the measurement.
    """

    def __init__(self, admins: list[Any], delay_s: float, closing: ExitStack) -> None:
        contestant = libraries.find(OURS)
        assert contestant.make_batch is not None
        ports = [admin.connection_pool.connection_kwargs["port"] for admin in admins]
        reached = {port: port for port in ports}
        if delay_s:
            reached = closing.enter_context(open_delay(ports, 2000 * delay_s))
        self._admins = admins
        self.delay_s = delay_s
        self._names = [f"bench:{index}" for index in range(NAMES)]
        clients: list[Any] = [
            redis.RedisCluster(
                host="127.0.0.1",
                port=reached[ports[0]],
                address_remap=lambda address: (address[0], reached.get(address[1], address[1])),
            )
            for _ in range(2)
        ]
        self._batch: AnyBatch = contestant.make_batch(clients[0])
        self._rival: AnyBatch = contestant.make_batch(clients[1])
        self.node_cpu_us: list[list[float]] = []
        """CPU time per pair of each node, in microseconds; a list for each measurement."""

    def measure(self, seconds: float) -> Sample:
        """Acquire and release the batch for some seconds."""
        latencies_s = array("d")
        batches = 0
        nodes_s = [server_cpu_s(admin) for admin in self._admins]
        client_s = time.process_time()
        began_all = now = time.perf_counter()
        while now < began_all + seconds:
            began = now
            if self._batch.acquire(self._names) != NAMES:
                raise CheckFailedError("not all of the free locks were acquired")
            acquired = time.perf_counter()
            if self._batch.release() != NAMES:
                raise CheckFailedError("not all of the held locks were released")
            now = time.perf_counter()
            latencies_s.extend((acquired - began, now - acquired))
            batches += 1
        pairs = batches * NAMES
        client_cpu_us = 1e6 * (time.process_time() - client_s) / pairs
        node_cpu_us = [
            1e6 * (server_cpu_s(admin) - before) / pairs for admin, before in zip(self._admins, nodes_s, strict=True)
        ]
        self.node_cpu_us.append(node_cpu_us)
        return Sample(pairs / (now - began_all), latencies_s, None, client_cpu_us, sum(node_cpu_us))

    def bound(self, client_cpu_us: float, node_cpu_us: list[float]) -> _Bound:
        """Find the bottleneck: the resource that a pair occupies for the longest time.

        Args:
            client_cpu_us: CPU time of the client per pair, all in one thread, in microseconds.
            node_cpu_us: CPU time of each node per pair, in microseconds.
        """
        cpus = os.cpu_count() or 1
        us = {
            "client": client_cpu_us,
            "a node": max(node_cpu_us),
            f"{cpus} CPUs": (client_cpu_us + sum(node_cpu_us)) / cpus,
            "network": 1e6 * 4 * self.delay_s / NAMES,  # two directions, for an acquire and a release
        }
        what = max(us, key=us.__getitem__)
        return _Bound(1e6 / us[what], what)

    def check(self) -> None:
        """Check at the nodes that the batch holds all its names, and none after the release.

        Raises:
            CheckFailedError: at the first violation.
        """

        def keys() -> int:
            return sum(admin.dbsize() for admin in self._admins)

        def expect(right: object, complaint: str) -> None:
            if not right:
                raise CheckFailedError(complaint)

        expect(keys() == 0, "keys were left behind")
        expect(self._batch.acquire(self._names) == NAMES, "not all of the free locks could be acquired")
        expect(keys() == NAMES, "acquired, but keys are missing")
        ttls_ms = [admin.pttl(admin.randomkey()) for admin in self._admins]
        expect(all(0 < ttl_ms <= LEASE_S * 1000 for ttl_ms in ttls_ms), f"held for {ttls_ms} ms")
        expect(self._rival.acquire(self._names) == 0, "two holders at a time")
        expect(self._batch.release() == NAMES, "not all of the held locks could be released")
        expect(keys() == 0, "released, but keys are still there")


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
    if options.server not in CHOICES:
        report.say(f"--topology cluster starts its own servers: --server is one of {', '.join(CHOICES)}")
        return 2
    count, seconds = options.rounds or _ROUNDS, options.seconds or _SECONDS
    try:
        with ExitStack() as closing:
            clusters = {n: closing.enter_context(open_cluster(CHOICES[options.server], n)) for n in PRIMARIES}
            crews = list(_crews(clusters, closing))
            entrants = [
                Entrant(OURS, OURS, f"{n} primaries, {1000 * crew.delay_s:g} ms", crew.measure, crew.check, n)
                for n, crew in zip(itertools.cycle(PRIMARIES), crews)
            ]
            rounds.race(entrants, count, seconds)
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (FileNotFoundError, RuntimeError, redis.RedisError) as error:
        return refuse(options.server, error)
    rows = [_row(entrant, entrants, crew) for entrant, crew in zip(entrants, crews, strict=True)]
    _print(rows, f"{options.server}; batches of {NAMES:,}; {count} rounds of {seconds} s")
    if options.json:
        facts = {"command": "throughput", "topology": "cluster", "server": options.server, **report.environment()}
        facts["redislock_fast.implementation"] = redislock_fast.implementation
        report.save_json(options.json, {**facts, "rounds": count, "seconds": seconds, "results": rows})
    return 0


def _crews(clusters: Mapping[int, list[Any]], closing: ExitStack) -> Iterator[_Crew]:
    """Make a crew for each delay and cluster; only those without a delay when `delay.c` cannot run."""
    try:
        for delay_s in DELAYS_S:
            for admins in clusters.values():
                yield _Crew(admins, delay_s, closing)
    except AbsentError as reason:
        report.say(f"no delayed nodes: {reason}")


def _row(entrant: Entrant, entrants: list[Entrant], crew: _Crew) -> dict[str, Any]:
    row = rounds.summary(entrant, entrants)
    of_one = entrants[entrants.index(entrant) // len(PRIMARIES) * len(PRIMARIES)]
    node_cpu_us = [statistics.median(of_node) for of_node in zip(*crew.node_cpu_us, strict=True)]
    bound = crew.bound(row["client_cpu_us"], node_cpu_us)
    return {
        **row,
        "delay_ms": 1000 * crew.delay_s,
        "ratios_to_one_primary": [rate / one for rate, one in zip(entrant.rates, of_one.rates, strict=True)],
        "node_cpu_us": node_cpu_us,
        "most_pairs_per_s": bound.pairs_per_s,
        "bound_by": bound.what,
    }


def _print(rows: list[dict[str, Any]], title: str) -> None:
    headings = ["each\naway", "primaries", "pairs/s", ":\n1 primary", "p50 ms\nan op"]
    headings += ["client\nus/pair", "servers\nus/pair", "of which each node", "at most\npairs/s", "for\nthe"]
    cells = [
        [
            f"{row['delay_ms']:g} ms",
            str(row["count"]),
            f"{row['median']:,.0f}",
            f"{statistics.median(row['ratios_to_one_primary']):.2f}",
            f"{row['latency_p50_ms']:.2f}",
            f"{row['client_cpu_us']:.2f}",
            f"{row['server_cpu_us']:.2f}",
            " ".join(f"{cpu_us:.2f}" for cpu_us in row["node_cpu_us"]),
            f"{row['most_pairs_per_s']:,.0f}",
            row["bound_by"],
        ]
        for row in rows
    ]
    report.table(title, headings, cells, words=0)
