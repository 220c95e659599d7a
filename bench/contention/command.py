"""`python -m bench contention`: real processes that contend for locks.

Each row of the table is one contestant in one workload. Each round of a workload measures all contestants in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import redis

from bench import contestants
from bench.contention import figures, goals
from bench.contention.figures import Window
from bench.contention.goals import GOALS, print_goals
from bench.contention.window import WARM_UP_S, measure_windows, open_idle, open_window
from bench.contention.workload import Workload
from bench.contestants import BARE_SOCKETS, LEASE_S, OURS, REDIS_PY, AbsentError, Contestant, libraries
from bench.measuring import arguments, columns, report, servers
from bench.measuring.delay import delayed_url

HELP = "many processes, threads or tasks that want the same locks: gaps, waits, fairness, costs"

_RATIOS = ("acquisitions_per_s", "gap_p50_ms", "wait_p99_ms")
_IDLE_LEASE_S = 60  # longer than the measurement
_TIMELINE_HOLDS = 30  # roughly, for a hand-over in half a millisecond

_USUAL = (REDIS_PY, OURS, contestants.OURS_POLLING, *contestants.PEERS, BARE_SOCKETS)
NAMES = (*_USUAL, contestants.OURS_LINGERING, contestants.HALF_LINGERING)
"""All contestants of this command; the last two only where `--only` names them."""

_PROCESSES = (2, 8, 32, 64)
_IDLE_S = 10.0


@dataclass(frozen=True)
class Plan:
    """The races to run, and the defaults of `--rounds` and `--seconds`."""

    about: str
    races: Sequence[tuple[Workload, Sequence[str]]]  # workloads, and the names of their contestants
    rounds: int = 3
    seconds: float = 3.0


_BOTH = (REDIS_PY, OURS)
PRESETS: Mapping[str, Plan] = {
    "goals": Plan(
        "the figures with a goal, each beside its bound",
        (
            *((workload, (*_BOTH, contestants.PYTHON_REDIS_LOCK, BARE_SOCKETS)) for workload in goals.PROCESSES),
            *((workload, (*_BOTH, BARE_SOCKETS)) for workload in (goals.THREADS, goals.TASKS)),
        ),
    ),
    "short": Plan("8 processes, redis-py and the package, in about 20 s", ((Workload(8), _BOTH),), seconds=2.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    number, seconds = arguments.positive(int), arguments.positive(float)
    add = parser.add_argument
    arguments.add_server(parser)
    arguments.add_rtt(parser)
    add("--processes", type=arguments.several(int), metavar="N,...", help="one row each (default: 2,8,32,64)")
    add("--threads", type=number, metavar="N", help="of each process, itself 1 then")
    about = "the same, in an event loop (default: 1,000)"
    add("--tasks", type=number, nargs="?", const=1000, metavar="N", help=about)
    for name, about in (("hold", "keeps the lock"), ("think", "thinks before it wants one again")):
        of_worker = f"a worker {about} (default: 1)"
        add(f"--{name}", type=arguments.not_negative, default=1.0, metavar="MS", help=of_worker)
    instead = parser.add_mutually_exclusive_group()
    about = "; ".join(f"{name}: {plan.about}" for name, plan in PRESETS.items())
    instead.add_argument("--preset", choices=PRESETS, help=f"{about} (instead of the options above)")
    about = "the cost of N threads of one process, or N tasks with --tasks, that wait for a lock that stays held"
    instead.add_argument("--idle", type=number, metavar="N", help=about)
    add("--rounds", type=number, help="default: 3, and 1 with --idle")
    about = f"for each contestant and round, after {WARM_UP_S:g} s of warm-up (default: 3, and 10 with --idle)"
    add("--seconds", type=seconds, help=about)
    arguments.add_names(parser, "--only", NAMES, default=_USUAL)
    arguments.add_wide(parser)
    about = "a page with plots of all this (not with --idle); needs matplotlib"
    add("--html", type=report.new_file, metavar="FILE", help=about)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the tables, and return the figures."""
    if options.html and not find_spec("matplotlib"):
        raise AbsentError("--html needs matplotlib, which is not installed")
    plan = plan_of(options)
    rounds, seconds = options.rounds or plan.rounds, options.seconds or plan.seconds
    lease_s = _IDLE_LEASE_S if options.idle else LEASE_S
    absent: dict[str, str] = {}
    races = [(of, libraries.find_all(names, absent, lease_s, of.tasks > 0)) for of, names in plan.races]
    with (
        servers.open_server(options.server) as server,
        delayed_url(server.url, options.rtt) as url,
        redis.Redis.from_url(server.url) as witness,
    ):
        measure = open_idle if options.idle else open_window
        found = measure_windows(measure, url, witness, lease_s, races, rounds, seconds)
        rows = [row for of in found for row in (_idle_rows if options.idle else _rows)(*of)]
    title = report.title(server.name, rounds, seconds, options.rtt)
    result = {"title": title, "not_measured": absent, "results": rows}
    if options.idle:
        report.print_rows(f"{title}; the lock stays held", columns.IDLE, rows, absent)
        return result
    result["violations"] = sum(row["violations"] for row in rows)
    _print(result, options)
    if options.html:
        from bench.contention import page  # noqa: PLC0415 - it needs matplotlib

        on_the_site = options.html.resolve().parent.name == "_extra"  # whose files are put beside its index
        facts = {**report.environment(options), **result}
        options.html.write_text(page.page(facts, "index.html" if on_the_site else None))
    return result


def _print(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    rows, absent = result["results"], result["not_measured"]
    report.print_rows(result["title"], columns.SPEED, rows, {} if options.wide else absent, options.wide)
    if options.wide:
        report.print_rows("costs and extremes", columns.COSTS, rows, absent)
    if options.preset == "goals":
        print_goals("goals", GOALS, rows)
    print(f"two holders at a time: {result['violations'] or 'never'}")


def _about(contestant: Contestant, workload: Workload) -> dict[str, Any]:
    names = {"contestant": contestant.name, "title": contestant.name, "version": contestant.version}
    return {**names, "workload": workload.label, "workers": workload.workers, **asdict(workload)}


def _rows(workload: Workload, windows: Mapping[Contestant, Sequence[Window]]) -> Iterator[dict[str, Any]]:
    of_rounds = {of: [figures.figures(window) for window in found] for of, found in windows.items()}
    redis_py = next((own for of, own in of_rounds.items() if of.name == REDIS_PY), None)
    timeline_s = _TIMELINE_HOLDS * (workload.hold_ms + 0.5) / 1000
    for contestant, own in of_rounds.items():
        yield {
            **_about(contestant, workload),
            **figures.summary(own),
            **_ratios(own, redis_py),
            "of_rounds": own,
            "wait_cdf": figures.cdf(sorted(wait_s for of in windows[contestant] for wait_s in figures.waits_s(of))),
            "timeline": figures.timeline(windows[contestant][-1], timeline_s),
            "timeline_ms": 1000 * timeline_s,
        }


def _idle_rows(workload: Workload, windows: Mapping[Contestant, Sequence[Window]]) -> Iterator[dict[str, Any]]:
    for contestant, found in windows.items():
        summed_up = figures.summary([figures.idle_figures(window) for window in found])
        yield {**_about(contestant, workload), **summed_up, "workload": workload.who}


def _ratios(own: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None) -> dict[str, float | None]:
    """The medians of the ratios to the figures of redis-py in the same rounds."""
    ratios: dict[str, float | None] = {}
    for name in _RATIOS:
        pairs = [(a[name], b[name]) for a, b in zip(own, base or (), strict=base is not None)]
        known = [figure / other for figure, other in pairs if figure is not None and other]
        ratios[f"{name}_to_redis_py"] = statistics.median(known) if known else None
    return ratios


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the options choose."""
    names = options.only
    if options.preset:
        plan = PRESETS[options.preset]
        races = [(workload, [name for name in of_race if name in names]) for workload, of_race in plan.races]
        return replace(plan, races=races)
    if options.idle:
        waiters = Workload(1, 1, options.idle) if options.tasks else Workload(1, options.idle)
        return Plan("idle", [(waiters, names)], rounds=1, seconds=_IDLE_S)
    processes = options.processes or ((1,) if options.threads or options.tasks else _PROCESSES)
    of_each = {"threads": options.threads or 1, "tasks": options.tasks or 0}
    times = {"hold_ms": options.hold, "think_ms": options.think}
    return Plan("as the options say", [(Workload(count, **of_each, **times), names) for count in processes])
