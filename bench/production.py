"""`python -m bench production`: locks as teams run them, beside plain ones on one server.

Each setting is one thing that production turns on: a time limit, renewal, reentry, metrics, a cluster, TLS. Each caller
has a lock of its own, and all share a client. All settings of a number of callers are measured in turn, round after
round; a figure is the median of the ratios within a round. redis-py's locks take part where a user would have them
instead: on one server, in the cluster, over TLS.

A second table has what depends on more than the callers' number: a crowd of threads, contention over TLS, and CPython
without the GIL beside the same version with it. Both interpreters need the package, and what the bench imports.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from bench.cluster import open_cluster
from bench.contention import figures
from bench.contention.goals import Goal, print_goals
from bench.contention.window import open_window
from bench.contention.workload import Workload
from bench.contestants import LEASE_S, OURS, REDIS_PY, AbsentError, libraries
from bench.guard.child import BENCH_TREE, open_child
from bench.guard.counted import METRICS
from bench.guard.workloads import OF_INTERPRETERS
from bench.measuring import arguments, report
from bench.measuring.delay import open_delay
from bench.measuring.rounds import Entrant, Sample, open_scene, race, summary
from bench.workloads.callers import Crew, of_threads
from redislock_fast.server import Server, find_binary, free_port

HELP = "locks with what production turns on, beside plain ones: limits, renewal, metrics, a cluster, TLS; crowds"

_PRIMARIES = 3
_PREFIX = "bench:production"
_REST = "rest"  # in the place of callers: the second table
_CALLERS = {"1 thread": 1, "16 threads": 16, "64 threads": 64, "1 task": 1, "100 tasks": 100}
_PLAIN = "plain"


@dataclass(frozen=True)
class Setting:
    """A row of the table."""

    name: str  # in the table
    beside: str = _PLAIN  # the setting to which its ratio is taken
    place: str = "server"  # where its locks are, a key of what `open_places` yields
    options: Mapping[str, Any] | None = field(default_factory=dict)  # of our locks; None: its locks are redis-py's
    metrics: str | None = None  # our module that is installed while its locks are made
    goals: tuple[float | None, ...] = (None,) * len(_CALLERS)  # the least ratios, by `_CALLERS`; None for none

    def locks(self, client: Any, count: int, for_asyncio: bool) -> list[Any]:
        """The locks of so many callers."""
        names = [f"{_PREFIX}:{index}" for index in range(count)]
        make = client.lock
        with ExitStack() as closing:
            if self.options is not None:
                lock_class: Any = redislock_fast.asyncio.Lock if for_asyncio else redislock_fast.Lock
                make = partial(lock_class, client, **self.options)
            if self.metrics is not None:
                module = importlib.import_module(f"redislock_fast.{self.metrics}")
                module.install(METRICS[self.metrics]())
                closing.callback(module.uninstall)
            return [make(name, timeout=LEASE_S) for name in names]


_CLUSTER, _TLS = f"cluster of {_PRIMARIES}", "TLS"
_TLS_CLUSTER = f"{_CLUSTER} over TLS"
_IN_CLUSTER, _OVER_TLS, _WITHOUT_TLS = f"{REDIS_PY} in it", f"{REDIS_PY} over TLS", "the same server without"

SETTINGS = (
    Setting(_PLAIN, REDIS_PY),
    Setting("blocking_timeout=5", options={"blocking_timeout": 5}, goals=(0.95, 0.95, None, None, 0.95)),
    Setting("auto_renew", options={"auto_renew": True}, goals=(0.9, 0.9, None, None, 0.9)),
    Setting("reentrant", options={"reentrant": True}, goals=(0.95, 0.95, None, None, 0.95)),
    Setting("fencing", options={"fencing": True}),
    Setting("on_lost", options={"on_lost": print}),
    Setting("OpenTelemetry", metrics="otel", goals=(0.9, 0.9, None, 0.85, 0.85)),
    Setting("Prometheus", metrics="prometheus", goals=(0.9, 0.9, None, 0.85, 0.85)),
    Setting(_CLUSTER, place="cluster", goals=(0.9, 0.8, None, 0.85, 0.75)),
    Setting(_CLUSTER, _IN_CLUSTER, "cluster"),
    Setting(_TLS, _WITHOUT_TLS, "tls", goals=(None, 0.6, None, None, 0.85)),
    Setting(_TLS, _OVER_TLS, "tls", goals=(2.2, 6.0, 7.0, None, None)),
    Setting(_TLS_CLUSTER, _CLUSTER, "tls cluster"),
)
_PEERS = (
    Setting(REDIS_PY, options=None),
    Setting(_IN_CLUSTER, place="cluster", options=None),
    Setting(_OVER_TLS, place="tls", options=None),
    Setting(_WITHOUT_TLS, place="beside tls"),
)

_OVER, _FREE, _WITH_GIL = f"{OURS} over TLS", "without the GIL", "with the GIL"
_CROWDS = (100, 1000)
_CONTENTION = Workload(8)
_GOALS = (
    Goal("1000 threads", "median", ">=", 0.75, OURS, base_workload="100 threads"),
    Goal("1000 threads", "longest_to_median", "<=", 20),
    Goal(_CONTENTION.label, "gap_p50_ms", "<=", 1.5, OURS, _OVER),
    Goal("linger, 2 threads", "median", ">=", 1.8, _FREE, _FREE, "linger, 1 thread"),
    Goal("linger, 1 thread", "median", ">=", 0.7, _WITH_GIL, _FREE),
    Goal("16 threads", "median", ">=", 1.3, _WITH_GIL, _FREE),
    Goal("100 threads", "median", ">=", 1.6, _WITH_GIL, _FREE),
    Goal("16 threads", "median", ">=", 5, _FREE, _FREE, "16 threads of redis-py"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_rounds(parser, 10, 0.2, of="setting")
    arguments.add_rtt(parser)
    about = f"{', '.join(_CALLERS)}; {_REST}: the second table, in rounds of five times as long"
    arguments.add_names(parser, "--callers", (*_CALLERS, _REST), about)
    there = BENCH_TREE / "build" / "free-threaded" / "venv" / "bin" / "python"
    about = "an interpreter without the GIL (default: that of `make test-free-threaded`, if it is there)"
    parser.add_argument("--free-threaded", default=str(there) if there.exists() else None, metavar="PYTHON", help=about)
    parser.add_argument("--with-gil", metavar="PYTHON", help="one of the same version with the GIL")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    callers = [name for name in options.callers if name != _REST]
    with open_places(options.rtt) as places:
        rates, absent = _measure(places, callers, options)
        rest = _measure_rest(places, options) if _REST in options.callers else []
    title = report.title("locks", options.rounds, options.seconds, options.rtt)
    if callers:
        rows = [_row(setting, rates, callers) for setting in SETTINGS]
        report.table(title, ["pairs/s : pairs/s", *callers], rows, words=1)
        print("After a figure, its goal: it is met (>=) or missed (<).")
    for name, reason in absent.items():
        print(f"{name}: {reason}")
    if rest:
        print_goals(title, _GOALS, rest)
    by_callers = {of: {name: found for (name, _), found in by.items()} for of, by in rates.items()}
    return {"pairs_per_s": by_callers, "rest": rest}


_Rates = dict[str, dict[tuple[str, str], list[float]]]
"""The pairs per second of each round, by callers, and by the name and place of a setting."""


def _measure(
    places: Mapping[str, Mapping[str, Any]], of: Sequence[str], options: argparse.Namespace
) -> tuple[_Rates, dict[str, str]]:
    rates: _Rates = {}
    absent: dict[str, str] = {}
    for callers in of:
        with ExitStack() as closing:
            entrants: dict[tuple[str, str], Entrant] = {}
            for setting in (*SETTINGS, *_PEERS):
                try:
                    crew = _crew(callers, setting, places, closing)
                except (AbsentError, ModuleNotFoundError) as reason:
                    absent[setting.name] = str(reason)
                else:
                    where = setting.name, setting.place
                    entrants[where] = Entrant(setting.name, callers, crew)
            race(list(entrants.values()), options.rounds, options.seconds)
            rates[callers] = {where: entrant.rates for where, entrant in entrants.items()}
    return rates, absent


def _crew(
    callers: str, setting: Setting, places: Mapping[str, Mapping[str, Any]], closing: ExitStack
) -> Callable[[float], Sample]:
    """Make the function that measures a setting with these callers."""
    if setting.place not in places:
        raise AbsentError("no redis-server, or no program openssl, here, or a cluster that is not near")
    count, in_tasks = _CALLERS[callers], "task" in callers
    if setting.name == _IN_CLUSTER and in_tasks and count > 1:
        raise AbsentError("with 100 tasks, redis-py's cluster client fails while it connects")
    module: Any = redis.asyncio if in_tasks else redis
    client_class = module.RedisCluster if setting.place.endswith("cluster") else module.Redis
    client = client_class(**places[setting.place], max_connections=2 * count)
    locks = setting.locks(client, count, in_tasks)
    return Crew(client, locks, closing, asyncio.new_event_loop if in_tasks else None).measure


def _row(setting: Setting, rates: _Rates, callers: Sequence[str]) -> list[str]:
    """The cells of a setting: its ratios, and the goals."""
    goals = dict(zip(_CALLERS, setting.goals, strict=True))
    base = next((peer for peer in (*SETTINGS, *_PEERS) if peer.name == setting.beside), setting)
    cells = [f"{setting.name} : {setting.beside}"]
    for of in callers:
        own, other = (rates[of].get((one.name, one.place)) for one in (setting, base))
        goal = goals[of]
        if own is None or other is None:
            cells.append("-")
            continue
        ratio = statistics.median(mine / its for mine, its in zip(own, other, strict=True))
        verdict = "" if goal is None else f" {'<' if ratio < goal else '>='} {goal:g}"
        cells.append(f"{ratio:.2f}{verdict}")
    return cells


def _measure_rest(places: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the second table: pairs per second, and gaps between holders."""
    seconds = 5 * options.seconds
    urls = {OURS: f"redis://127.0.0.1:{places['server']['port']}"}
    with open_scene(urls[OURS]) as scene:
        entrants = of_threads(libraries.find(OURS), scene, _CROWDS)
        for name, python in ((_FREE, options.free_threaded), (_WITH_GIL, options.with_gil)):
            if python is not None:
                settings = {"PYTHON_GIL": "0"} if name == _FREE else {}  # hiredis would turn it on
                child = scene.closing.enter_context(open_child(None, [scene.url], python, **settings))
                for workload in OF_INTERPRETERS:
                    entrants.append(Entrant(name, workload, partial(child.sample, workload)))
        race(entrants, options.rounds, seconds)
    rows = [summary(entrant, entrants) for entrant in entrants]
    if tls := places.get("tls"):
        urls = {OURS: f"redis://127.0.0.1:{places['beside tls']['port']}"}
        urls[_OVER] = f"rediss://127.0.0.1:{tls['port']}?ssl_ca_certs={tls['ssl_ca_certs']}"
    gaps: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    with redis.Redis.from_url(urls[OURS]) as witness:
        for _ in range(options.rounds):
            for name, url in urls.items():
                found = open_window(url, witness, libraries.find(OURS), LEASE_S, _CONTENTION, seconds)
                gaps[name].append(figures.figures(found))
    named = {"workload": _CONTENTION.label}
    return rows + [{"contestant": name, **named, **figures.summary(of)} for name, of in gaps.items()]


@contextmanager
def open_places(rtt_ms: float = 0.0) -> Iterator[Mapping[str, Mapping[str, Any]]]:
    """Start what can be here. Yields what a client of redis-py takes, by the name of a place."""
    with ExitStack() as closing:
        server = closing.enter_context(Server())
        nodes = closing.enter_context(open_cluster("valkey", _PRIMARIES))
        places: dict[str, Mapping[str, Any]] = {
            "server": {"host": "127.0.0.1", "port": server.port},
            "cluster": {"host": "127.0.0.1", "port": nodes[0].connection_pool.connection_kwargs["port"]},
        }
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        if find_binary("redis") is not None and _make_certificate(folder):  # the embedded server knows no TLS
            with_tls = closing.enter_context(Server("redis", _of_tls(folder)))
            admin = closing.enter_context(redis.Redis(port=with_tls.port))
            tls_nodes = closing.enter_context(open_cluster("redis", _PRIMARIES, partial(_of_tls, folder)))
            trusted = {"host": "127.0.0.1", "ssl": True, "ssl_ca_certs": str(folder / "cert.pem")}
            for place, client in (("tls", admin), ("tls cluster", tls_nodes[0])):
                places[place] = {**trusted, "port": int(client.config_get("tls-port")["tls-port"])}
            places["beside tls"] = {"host": "127.0.0.1", "port": with_tls.port}
        if rtt_ms:  # nodes of a cluster would send its client to their own ports
            near = {name: place for name, place in places.items() if "cluster" not in name}
            reached = closing.enter_context(open_delay([place["port"] for place in near.values()], rtt_ms))
            places = {name: {**place, "port": reached[place["port"]]} for name, place in near.items()}
        yield places


def _of_tls(folder: Path) -> dict[str, str]:
    """The settings of a server with TLS, on a port of its own beside the plain one."""
    files = {"tls-cert-file": "cert.pem", "tls-key-file": "key.pem", "tls-ca-cert-file": "cert.pem"}
    settings = {name: str(folder / file) for name, file in files.items()}
    return {**settings, "tls-port": str(free_port()), "tls-auth-clients": "no"}


def _make_certificate(folder: Path) -> bool:
    """Write a key and a certificate for the loopback address. Returns False without the program openssl."""
    if shutil.which("openssl") is None:
        return False
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    return True
