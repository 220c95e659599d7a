"""The page of `python -m bench contention --html`: all figures and plots of a saved result, in light and in dark.

It is one file, without scripts and without requests to the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from bench.contention import tables
from bench.contention.charts import Chart, Linear, Log, Names, Nines
from bench.contention.looks import BACKGROUND_DARK, BACKGROUND_LIGHT, looks_of
from bench.contestants import (
    BARE_HOLDINGS,
    BARE_SOCKETS,
    HALF_LINGERING,
    LINGER_S,
    OURS,
    OURS_LINGERING,
    OURS_POLLING,
    REDIS_PY,
)
from bench.measuring.tables import Column

Rows = Sequence[Mapping[str, Any]]

_LANES_PX = 320  # of a timeline, at most
_BAR_PX = 18.0
_LEAST_WAIT_MS = 0.01
_PLOTTED = (
    ("acquisitions_per_s", "acquires per second", "Throughput"),
    ("gap_p50_ms", "gap, ms", "Gap, median"),
    ("gap_p99_ms", "gap, ms", "Gap, 99th percentile"),
)
_ABOUT_WORKERS = (
    "Workers acquire a lock, hold it for the time named below, release it, think, and begin again. "
    "Each lock library had the same workers on the same server, in turn, in every round."
)
_ABOUT_PLOTTED = (
    "Throughput is the number of acquires of all workers in a second: more is better. The gap is the time from a "
    "release to the next acquire while a worker waits: less is better. Each figure is the median of the rounds."
)
_ABOUT_WAITS = (
    "The share of acquires that took no longer; a line further to the left is better. From 90 % to 99 % is as far as "
    "from 99 % to 99.9 %. An acquire that was not over at the end of a round counts as over then."
)
_ABOUT_FIGURES = (
    f"A ratio (: {REDIS_PY}) is to the figure of {REDIS_PY} in the same round. Gap: from a release to the next acquire "
    "while a worker waits. Wait: how long acquire takes. Jain: fairness, 1 where all workers have the lock equally "
    "often. Longest without: the longest time for which a worker did not get a lock. Server and client: CPU time. "
    "Left waiting: acquires that were not over at the end. Two holders: acquires of a lock that another worker held."
)
_MEANINGS = {
    OURS_POLLING: f"{OURS} that asks again and again instead of queueing",
    BARE_SOCKETS: f"no library, but the requests of {OURS} on plain sockets and nothing else",
    BARE_HOLDINGS: f"{BARE_SOCKETS} with a lease and a new token for each acquire",
    OURS_LINGERING: f"{OURS} whose keys stay with the process for {LINGER_S:g} s after a release",
    HALF_LINGERING: f"each other process with {OURS_LINGERING}, the others with {OURS}",
}

_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --dim: #60646c; --grid: #e4e6ea; }
@media (prefers-color-scheme: dark) { :root { --text: #e8eaed; --dim: #a0a6b0; --grid: #2e343c; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { color: var(--dim); margin: .3rem 0; max-width: 62rem; } a { color: var(--text); } code { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2rem; position: sticky; top: 0; background: var(--back);
  padding: .6rem 0; }
.legend svg { width: 2em; height: .8em; margin-right: .5em; }
.chart { font: 12px system-ui, sans-serif; } .chart svg { display: block; width: 100%; overflow: visible; }
.chart text { fill: var(--dim); } .chart .name { fill: var(--text); font-weight: 600; font-size: 13px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--grid); } .axis { stroke: var(--dim); }
.line { fill: none; stroke: var(--c); stroke-dasharray: var(--dashes); stroke-width: 2.2; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.dot { fill: var(--c); stroke: var(--back); stroke-width: 1.5; } .bar { fill: var(--c); }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin-top: .6rem; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { vertical-align: bottom; color: var(--dim); font-weight: 600; white-space: pre-line; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
"""


def page(result: Mapping[str, Any], back: str | None = None) -> str:
    """Make the page of a result.

    Args:
        result: what was measured.
        back: where a link at the top leads; None: there is no link.
    """
    rows: Rows = result["results"]
    machine = f"{result['cpu_count']} CPUs, {result['platform']}, Python {result['python']}"
    violations = result["violations"]
    sections = [
        f'<p><a href="{escape(back)}">&larr; redislock_fast</a></p>' if back else "",
        f"<h1>Locks under contention</h1><p>{escape(result['title'])}<br>{escape(machine)}<br>",
        f"Made by <code>{escape(result['command_line'])}</code></p>",
        f"<p>{_ABOUT_WORKERS}<br>Two holders at a time: {violations or 'never, by the records of all workers'}.</p>",
        _legend(rows),
        *_by_processes(rows),
        f"<h2>How long an acquire takes</h2><p>{_ABOUT_WAITS}</p>",
        _charts(map(_waits, _by_workload(rows).values())),
        _timelines(rows),
        f"<h2>All figures</h2><p>{_ABOUT_FIGURES}</p>",
        _table(tables.SPEED, rows),
        _table(tables.COSTS, rows),
    ]
    style = _STYLE + _colours(rows)
    head = f'<meta charset="utf-8">{_VIEWPORT}<title>Locks under contention</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _series(name: str) -> str:
    """The class of all that is drawn in the colour of a contestant."""
    return f"of-{re.sub('[^a-zA-Z0-9_-]', '_', name)}"


def _colours(rows: Rows) -> str:
    """The rules for the background and for all contestants, in light and in dark."""
    looks = {_series(name): look for name, look in looks_of(row["contestant"] for row in rows).items()}
    light = "".join(f".{of} {{ --c: {look.light}; --dashes: {look.dashes}; }}\n" for of, look in looks.items())
    dark = "".join(f".{of} {{ --c: {look.dark}; }}\n" for of, look in looks.items())
    return (
        f":root {{ --back: {BACKGROUND_LIGHT}; }}\n{light}"
        f"@media (prefers-color-scheme: dark) {{\n:root {{ --back: {BACKGROUND_DARK}; }}\n{dark}}}\n"
    )


def _contestants(rows: Rows) -> list[str]:
    return list(looks_of(row["contestant"] for row in rows))


def _legend(rows: Rows) -> str:
    names = _contestants(rows)
    line = '<svg><line class="line {}" x2="100%" y1="50%" y2="50%"/></svg>'
    entries = "".join(f"<span>{line.format(_series(name))}{escape(name)}</span>" for name in names)
    meanings = "; ".join(f"{name}: {_MEANINGS[name]}" for name in names if name in _MEANINGS)
    about = f"<p>{escape(meanings)}.</p>" if meanings else ""
    return f'<div class="legend">{entries}</div>{about}'


def _charts(charts: Iterable[Chart]) -> str:
    return f'<div class="charts">{"".join(chart.svg() for chart in charts)}</div>'


def _by_workload(rows: Rows) -> dict[str, Rows]:
    return {label: [row for row in rows if row["workload"] == label] for label in dict.fromkeys(map(_label, rows))}


def _label(row: Mapping[str, Any]) -> str:
    label: str = row["workload"]
    return label


def _by_processes(rows: Rows) -> list[str]:
    """Plot throughput and gap against the number of processes, for each kind of workload."""
    kinds: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        kind = tuple(row[name] for name in ("threads", "tasks", "keys", "distribution", "hold_ms", "think_ms"))
        kinds.setdefault(kind, []).append(row)
    sections = []
    for of_kind in kinds.values():
        first = of_kind[0]
        keys = "one key" if first["keys"] == 1 else f"{first['keys']:,} keys, {first['distribution']}"
        counts = list(dict.fromkeys(row["processes"] for row in of_kind))
        title = f"{_each(first)}{keys}, hold {first['hold_ms']:g} ms, think {first['think_ms']:g} ms"
        draw = partial(_lines, counts) if len(counts) > 1 else _bars
        charts = [draw(of_kind, *plotted) for plotted in _PLOTTED]
        sections += [f"<h2>{escape(title)}</h2><p>{_ABOUT_PLOTTED}</p>", _charts(charts)]
    return sections


def _each(row: Mapping[str, Any]) -> str:
    if row["tasks"]:
        return f"{row['tasks']:,} tasks in each process, "
    return f"{row['threads']} threads in each process, " if row["threads"] > 1 else ""


def _known(rows: Rows, figure: str) -> Rows:
    return [row for row in rows if row[figure] is not None]


def _lines(counts: Sequence[int], rows: Rows, figure: str, unit: str, title: str) -> Chart:
    """Plot one figure against the number of processes."""
    known = _known(rows, figure)
    values = [row[figure] for row in known]
    x = Names("processes", [f"{count:,}" for count in counts])
    y = Log.around(unit, values) if figure.endswith("_ms") else Linear(unit, 0, 1.15 * _most(values))
    chart = Chart(title, x, y)
    for name in _contestants(known):
        points = [(float(counts.index(row["processes"])), row[figure]) for row in known if row["contestant"] == name]
        chart.line(points, _series(name), name, dots=True)
    return chart


def _bars(rows: Rows, figure: str, unit: str, title: str) -> Chart:
    """Plot one figure of each contestant, for one number of processes."""
    known = {row["contestant"]: row[figure] for row in _known(rows, figure)}
    names = _contestants(rows)[::-1]  # from below
    x = Linear(unit, 0, 1.3 * _most(known.values()), most_ticks=3)
    chart = Chart(title, x, Names("", names))
    for name, value in known.items():
        chart.bar(value, names.index(name), _BAR_PX, _series(name), tables.three_digits(value))
    return chart


def _most(values: Iterable[float]) -> float:
    return max(values, default=0.0) or 1.0


def _waits(rows: Rows) -> Chart:
    values = [max(wait_ms, _LEAST_WAIT_MS) for row in rows for wait_ms, _ in row["wait_cdf"]]
    chart = Chart(f"{rows[0]['workload']} ms hold/think", Log.around("wait, ms", values), Nines("share of acquires"))
    for row in rows:
        chart.line(row["wait_cdf"], _series(row["contestant"]), row["contestant"])
    return chart


def _timelines(rows: Rows) -> str:
    """Plot the holders of the lock, for the workload with the number of workers that is nearest to 8."""
    rows = min(_by_workload(rows).values(), key=lambda of: abs(of[0]["processes"] * _crew(of[0]) - 8))
    workers = rows[0]["processes"] * _crew(rows[0])
    lane_px = min(24.0, _LANES_PX / workers)
    y = Linear("worker", -0.5, workers - 0.5, most_ticks=min(workers, 6))
    charts = []
    for row in rows:
        x = Linear("time, ms", 0, row["timeline_ms"])
        chart = Chart(row["contestant"], x, y, height=int(90 + lane_px * workers))
        for acquired_ms, released_ms, worker in row["timeline"]:
            words = f"worker {worker}: {released_ms - acquired_ms:.3f} ms"
            visible = max(0.0, acquired_ms), min(released_ms, row["timeline_ms"])
            chart.lane(*visible, worker, 0.8 * lane_px, _series(row["contestant"]), words)
        charts.append(chart)
    about = (
        "A bar is one turn of a worker with the lock, from just after acquire until just before release. Between "
        f"bars, nobody has it. {rows[0]['workload']} ms hold/think, in the middle of the last round."
    )
    return f"<h2>Holders of the first lock</h2><p>{escape(about)}</p>{_charts(charts)}"


def _crew(row: Mapping[str, Any]) -> int:
    crew: int = row["tasks"] or row["threads"]
    return crew


def _table(columns: Sequence[Column], rows: Rows) -> str:
    head = "".join(f"<th>{escape(column.heading)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(column.of(row))}</td>' for column in columns)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
