"""`python -m bench throughput --topology cluster`: batches of 1,000 names over one, three and six primaries.

On loopback, the client and all nodes share the CPUs of this machine, and more nodes add none. The rows with a delay of
a millisecond show whether the requests to all nodes leave at once.

The clusters run side by side, each on loopback ports of its own, and are idle while another one is measured. redis-py
takes no part: it refuses scripts in the pipeline of a cluster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import redis

from bench.contestants import OURS, AbsentError, libraries
from bench.measuring import report, rounds
from bench.measuring.delay import open_delay
from bench.measuring.report import Column
from bench.measuring.rounds import Entrant
from bench.measuring.servers import CHOICES
from bench.workloads.batches import Crew
from redislock_fast.server import Server, free_port

PRIMARIES = (1, 3, 6)
NAMES = 1000
DELAYS_S = (0.0, 0.001)
"""The delay of each node in each direction, in seconds: none, and that of `delay.c`. Each is a row per cluster."""

ABOUT = f"batches of {NAMES:,} names over {', '.join(map(str, PRIMARIES))} primaries"

_SLOTS = 16_384
_START_LIMIT_S = 30.0
_ROUNDS, _SECONDS = 10, 0.5

_COLUMNS = (
    Column("each\naway", str, ("workload",)),
    Column("primaries", str, ("count",)),
    Column("pairs/s", "{:,.0f}".format, ("median",)),
    Column(":\n1 primary", "{:.2f}".format, ("ratio_to_fewest",)),
    Column("p50 ms\nan op", "{:.2f}".format, ("latency_p50_ms",)),
    Column("client\nus/pair", "{:.2f}".format, ("client_cpu_us",)),
    Column("servers\nus/pair", "{:.2f}".format, ("server_cpu_us",)),
)


@contextmanager
def open_cluster(
    kind: str, primaries: int, of_tls: Callable[[], Mapping[str, str]] | None = None
) -> Iterator[list[Any]]:
    """Start a cluster without replicas, of servers of a kind of `redislock_fast.server`. Yields a client of each.

    `of_tls` makes the settings of a node with TLS, "tls-port" among them. Then the nodes tell clients of that port.
    """
    options = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}
    with ExitStack() as closing:
        nodes: list[Server] = []
        known_by: list[int] = []
        for _ in range(primaries):
            more = {**of_tls(), "tls-cluster": "yes"} if of_tls is not None else {}
            nodes.append(closing.enter_context(Server(kind, {**options, **more}, free_port())))
            known_by.append(int(more.get("tls-port", nodes[-1].port)))
        admins: list[Any] = [closing.enter_context(redis.Redis(port=node.port)) for node in nodes]
        for number, admin in enumerate(admins):
            bounds = [_SLOTS * number // primaries, _SLOTS * (number + 1) // primaries]
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            admin.execute_command("CLUSTER", "ADDSLOTS", *range(*bounds))
            for other in known_by[:number]:
                admin.execute_command("CLUSTER", "MEET", "127.0.0.1", other)
        give_up = time.monotonic() + _START_LIMIT_S
        while not all(_is_whole(admin, primaries) for admin in admins):
            if time.monotonic() > give_up:
                raise RuntimeError("the nodes do not become a cluster")
            time.sleep(0.01)
        yield admins


def _is_whole(admin: Any, primaries: int) -> bool:
    facts: bytes = admin.execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in facts and b"cluster_size:%d\r" % primaries in facts


def entrant(admins: list[Any], delay_s: float, closing: ExitStack) -> Entrant:
    """Make the row of a cluster, whose nodes have these clients and a delay in each direction."""
    ports = [admin.connection_pool.connection_kwargs["port"] for admin in admins]
    reached = closing.enter_context(open_delay(ports, 2000 * delay_s)) if delay_s else {}
    make = libraries.find(OURS).make_batch
    assert make is not None

    def client() -> Any:
        return redis.RedisCluster(
            host="127.0.0.1",
            port=reached.get(ports[0], ports[0]),
            address_remap=lambda address: (address[0], reached.get(address[1], address[1])),
        )

    names = [f"bench:{index}" for index in range(NAMES)]
    crew = Crew(make(client()), make(client()), names, lambda: sum(admin.dbsize() for admin in admins), client().pttl)
    return Entrant(OURS, f"{1000 * delay_s:g} ms", crew.measure, crew.check, len(admins), witnesses=admins)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    if options.server not in CHOICES:
        raise AbsentError(f"--topology cluster starts its own servers: --server is one of {', '.join(CHOICES)}")
    count, seconds = options.rounds or _ROUNDS, options.seconds or _SECONDS
    with ExitStack() as closing:
        clusters = {n: closing.enter_context(open_cluster(CHOICES[options.server], n)) for n in PRIMARIES}
        entrants: list[Entrant] = []
        try:
            for delay_s in DELAYS_S:
                entrants += [entrant(admins, delay_s, closing) for admins in clusters.values()]
        except AbsentError as reason:
            report.say(f"no delayed nodes: {reason}")
        rounds.race(entrants, count, seconds)
    # Within a delay, the fewest primaries are the base of the ratios.
    rows = [rounds.summary(each, [of for of in entrants if of.workload == each.workload]) for each in entrants]
    report.print_rows(f"{options.server}; batches of {NAMES:,}; {count} rounds of {seconds} s", _COLUMNS, rows, words=0)
    return {"server": options.server, "results": rows}
