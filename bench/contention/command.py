"""`python -m bench contention`: real processes that contend for locks.

Each row of the table is one contestant in one workload. Each round of a workload measures all contestants in turn.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import redis

import redislock_fast
from bench import contestants
from bench.contention import figures, page, tables
from bench.contention.goals import goals_of
from bench.contention.presets import NAMES, PRESETS, Plan, Race, plan_of
from bench.contention.records import Window
from bench.contention.window import WARM_UP_S, open_idle, open_window
from bench.contention.workload import DISTRIBUTIONS, HOT, Workload
from bench.contestants import BARE, OURS, REDIS_PY, AbsentError, CheckFailedError, Contestant, Options, libraries
from bench.measuring import arguments, report, servers
from bench.measuring.delay import delayed_url
from bench.measuring.tables import print_rows

HELP = "many processes, threads or tasks that want the same locks: gaps, waits, fairness, costs"

_RATIOS = ("acquisitions_per_s", "gap_p50_ms", "wait_p99_ms")
_IDLE_LEASE_S = 60  # longer than the measurement
_TIMELINE_HOLDS = 30  # roughly, for a hand-over in half a millisecond


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    arguments.add_server(parser)
    arguments.add_rtt(parser)
    parser.add_argument("--processes", type=arguments.counts, metavar="N,...", help="one row each (default: 2,8,32,64)")
    parser.add_argument("--threads", type=arguments.positive(int), metavar="N", help="of each process, itself 1 then")
    parser.add_argument(
        "--tasks",
        type=arguments.positive(int),
        nargs="?",
        const=1000,
        metavar="N",
        help="the same, in an event loop (default: 1,000)",
    )
    parser.add_argument("--keys", type=arguments.positive(int), default=16, help="for uniform and zipf (default: 16)")
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, default=HOT, help="default: hot, all want one key")
    for name, about in (("hold", "keeps the lock"), ("think", "thinks before it wants one again")):
        parser.add_argument(
            f"--{name}", type=arguments.not_negative, default=1.0, metavar="MS", help=f"a worker {about} (default: 1)"
        )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--preset",
        choices=PRESETS,
        help="; ".join(f"{name}: {plan.about}" for name, plan in PRESETS.items()) + " (instead of the options above)",
    )
    instead.add_argument(
        "--idle",
        type=arguments.positive(int),
        metavar="N",
        help="the cost of N threads of one process, or N tasks with --tasks, that wait for a lock that stays held",
    )
    parser.add_argument("--rounds", type=arguments.positive(int), help="default: 3, and 1 with --idle")
    parser.add_argument(
        "--seconds",
        type=arguments.positive(float),
        help=f"for each contestant and round, after {WARM_UP_S:g} s of warm-up (default: 3, and 10 with --idle)",
    )
    parser.add_argument(
        "--timeout", type=arguments.positive(int), default=contestants.LEASE_S, metavar="S", help="lease"
    )
    parser.add_argument(
        "--sleep",
        type=arguments.positive(float),
        default=contestants.SLEEP_S,
        metavar="S",
        help="between two attempts of a poller (default: %(default)s, as in the libraries)",
    )
    parser.add_argument("--only", type=arguments.some_of(NAMES), metavar="NAME,...", help=", ".join(NAMES))
    arguments.add_wide(parser)
    arguments.add_json(parser)
    parser.add_argument(
        "--html", type=arguments.new_file, metavar="FILE", help="a page with plots of all this (not with --idle)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and print the tables."""
    plan = plan_of(options)
    servers.allow_open_files()
    try:
        with (
            servers.open_server(options.server) as server,
            delayed_url(server.url, options.rtt) as url,
            redis.Redis.from_url(server.url) as witness,
        ):
            bench = _Bench(server, url, witness, plan, options)
            result = bench.idle() if options.idle else bench.contention()
    except CheckFailedError as error:
        report.say(f"CHECK FAILED: {error}")
        return 1
    except (AbsentError, FileNotFoundError, ValueError, redis.ConnectionError) as error:
        return servers.refuse(options.server, error)
    if options.json:
        report.save_json(options.json, result)
    if options.html and not options.idle:
        on_the_site = options.html.resolve().parent.name == "_extra"  # whose files are put beside its index
        options.html.write_text(page.page(result, "index.html" if on_the_site else None))
    return 1 if result.get("violations") else 0


class _Bench:
    """One run of the command."""

    def __init__(
        self, server: servers.RunningServer, url: str, witness: redis.Redis, plan: Plan, options: argparse.Namespace
    ) -> None:
        self._server = server
        self._url = url
        self._rtt_ms = options.rtt
        self._witness = witness
        self._plan = plan
        self._rounds = options.rounds or plan.rounds
        self._seconds = options.seconds or plan.seconds
        self._terms = Options(_IDLE_LEASE_S if options.idle else options.timeout, options.sleep)
        self._preset = options.preset
        self._command_line = _command_line(options.server)
        self._is_wide = options.wide
        self._absent: dict[str, str] = {}

    def contention(self) -> dict[str, Any]:
        """Measure contention, and print the tables."""
        rows = self._rows(open_window, self._contention_rows)
        print_rows(self._title(), tables.SPEED, rows, {} if self._is_wide else self._absent, self._is_wide)
        if self._is_wide:
            print_rows("costs and extremes", tables.COSTS, rows, self._absent)
        if self._preset == "goals":
            cells = [
                (
                    goal.about,
                    goal.verdict,
                    _shown(goal.figure),
                    f"{goal.sign} {_shown(goal.bound)}",
                    *map(_shown, goal.bare),
                )
                for goal in goals_of(rows)
            ]
            report.table("goals", ("figure", "", "is", "bound", *BARE), cells, words=2)
        violations = sum(row["violations"] for row in rows)
        print(f"two holders at a time: {violations or 'never'}")
        if violations:
            report.say(f"CHECK FAILED: two holders at a time, {violations} times")
        return {**self._facts(), "violations": violations, "results": rows}

    def idle(self) -> dict[str, Any]:
        """Measure waiters that wait all the time, and print the table."""
        rows = self._rows(open_idle, self._idle_rows)
        print_rows(f"{self._title()}; the lock stays held", tables.IDLE, rows, self._absent)
        return {**self._facts(), "results": rows}

    def _title(self) -> str:
        away = f", {self._rtt_ms:g} ms away" if self._rtt_ms else ""
        return (
            f"{self._server.name}{away}; {self._rounds} rounds of {self._seconds:g} s; "
            f"pollers poll each {self._terms.sleep_s:g} s; {OURS} is {redislock_fast.implementation}"
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "command": "contention",
            "command_line": self._command_line,
            "title": self._title(),
            "server": self._server.name,
            "rtt_ms": self._rtt_ms,
            **report.environment(),
            "redislock_fast.implementation": redislock_fast.implementation,
            "not_measured": self._absent,
            "rounds": self._rounds,
            "seconds": self._seconds,
            "lease_s": self._terms.lease_s,
            "sleep_s": self._terms.sleep_s,
        }

    def _rows(
        self,
        measure: Callable[..., Window],
        rows_of: Callable[[Workload, Mapping[str, Sequence[Window]]], list[dict[str, Any]]],
    ) -> list[dict[str, Any]]:
        """Measure the contestants of each workload in turn, and make the rows."""
        races = [(race.workload, self._field(race)) for race in self._plan.races]
        rows: list[dict[str, Any]] = []
        with report.progress(self._rounds * sum(len(field) for _, field in races)) as step:
            for workload, field in races:
                windows: dict[str, list[Window]] = {contestant.name: [] for contestant in field}
                for number in range(self._rounds):
                    for contestant in field:
                        step(f"{workload.label}, round {number + 1} of {self._rounds}")
                        try:
                            window = measure(self._url, self._witness, contestant, self._terms, workload, self._seconds)
                        except CheckFailedError as error:
                            raise CheckFailedError(f"{contestant.name}, {workload.label}: {error}") from error
                        windows[contestant.name].append(window)
                about = {"workload": workload.label, **asdict(workload)}
                for contestant, figures_ in zip(field, rows_of(workload, windows), strict=True):
                    names = {"contestant": contestant.name, "title": contestant.name, "version": contestant.version}
                    rows.append({**names, **about, **figures_})
        return rows

    def _field(self, race: Race) -> list[Contestant]:
        """The contestants of a race that are available."""
        field = []
        for name in race.names:
            try:
                contestant = libraries.find(name, self._terms)
                if race.workload.tasks and contestant.make_async is None:
                    raise AbsentError("no locks for asyncio")
            except AbsentError as reason:
                self._absent[name] = str(reason)
            else:
                field.append(contestant)
        return field

    @staticmethod
    def _contention_rows(workload: Workload, windows: Mapping[str, Sequence[Window]]) -> list[dict[str, Any]]:
        of_rounds = {name: [figures.figures(window) for window in found] for name, found in windows.items()}
        timeline_s = _TIMELINE_HOLDS * (workload.hold_ms + 0.5) / 1000
        return [
            {
                **figures.summary(own),
                **_ratios(own, of_rounds.get(REDIS_PY)),
                "of_rounds": own,
                "wait_cdf": figures.cdf(figures.all_waits_s(windows[name])),
                "timeline": figures.timeline(windows[name][-1], timeline_s),
                "timeline_ms": 1000 * timeline_s,
            }
            for name, own in of_rounds.items()
        ]

    @staticmethod
    def _idle_rows(workload: Workload, windows: Mapping[str, Sequence[Window]]) -> list[dict[str, Any]]:
        return [
            {**figures.summary([figures.idle_figures(window) for window in found]), "workload": workload.who}
            for found in windows.values()
        ]


def _command_line(server: str) -> str:
    """The command as it was called, without the URL of the server, which may have a password."""
    words = sys.argv[1:] if server in servers.CHOICES else [word.replace(server, "URL") for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "bench", *words])


def _shown(figure: float | None) -> str:
    return "-" if figure is None else tables.three_digits(figure)


def _ratios(own: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]] | None) -> dict[str, float | None]:
    """The medians of the ratios to the figures of redis-py in the same rounds."""
    ratios: dict[str, float | None] = {}
    for name in _RATIOS:
        pairs = [(a[name], b[name]) for a, b in zip(own, base or (), strict=base is not None)]
        known = [figure / other for figure, other in pairs if figure is not None and other]
        ratios[f"{name}_to_redis_py"] = statistics.median(known) if known else None
    return ratios
