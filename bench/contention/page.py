"""The page of `python -m bench contention --html`: all figures and plots of a saved result, in light and in dark.

It is one file, without scripts and without requests to the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from bench.contention import tables
from bench.contention.charts import Chart, Linear, Log, Names, Nines
from bench.contention.presets import NAMES
from bench.measuring.tables import Column

Rows = Sequence[Mapping[str, Any]]

_LANES_PX = 320  # of a timeline, at most
_LEAST_WAIT_MS = 0.01
_MS = "ms"
_PLOTTED = (
    ("acquisitions_per_s", "acquisitions/s", "Throughput"),
    ("gap_p50_ms", _MS, "From a release to the next acquire, median"),
    ("gap_p99_ms", _MS, "The same, 99th percentile"),
)
_ABOUT_WAITS = (
    "The share of acquires that took no longer; from 90 % to 99 % is as far as from 99 % to 99.9 %. "
    "An acquire that was not over at the end of a round counts as over then."
)

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --dim: #60646c; --grid: #e4e6ea;
  --s0: #d9480f; --s1: #1c6fd6; --s2: #0f8f8f; --s3: #8347c4; --s4: #6b7a1f; }
@media (prefers-color-scheme: dark) { :root { --back: #15181c; --text: #e8eaed; --dim: #a0a6b0; --grid: #2e343c;
  --s0: #ff8f5a; --s1: #6cb1ff; --s2: #45d0c8; --s3: #c596ff; --s4: #c3d35e; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1400px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { color: var(--dim); margin: .3rem 0; max-width: 62rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: 1.2rem; position: sticky; top: 0; background: var(--back);
  padding: .6rem 0; }
.legend span::before { content: ""; display: inline-block; width: 1.4em; height: .28em; margin-right: .5em;
  vertical-align: middle; border-radius: 2px; background: var(--c); }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--dim); } svg .name { fill: var(--text); font-weight: 600; font-size: 13px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--grid); } .axis { stroke: var(--dim); fill: none; }
.line { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; }
.dot { fill: var(--c); stroke: var(--back); stroke-width: 1.5; } .bar { fill: var(--c); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); } .s4 { --c: var(--s4); }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin-top: .6rem; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { vertical-align: bottom; color: var(--dim); font-weight: 600; white-space: pre-line; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
"""


def page(result: Mapping[str, Any]) -> str:
    """Make the page of a result."""
    rows: Rows = result["results"]
    machine = f"{result['cpu_count']} CPUs, {result['platform']}, Python {result['python']}"
    violations = result["violations"]
    sections = [
        f"<h1>Locks under contention</h1><p>{escape(result['title'])}<br>{escape(machine)}</p>",
        f"<p>Two holders at a time: {violations or 'never, by the records of all workers'}.</p>",
        _legend(rows),
        *_by_processes(rows),
        f"<h2>How long an acquire takes</h2><p>{_ABOUT_WAITS}</p>",
        _charts(map(_waits, _by_workload(rows).values())),
        _timelines(rows),
        "<h2>All figures</h2>",
        _table(tables.SPEED, rows),
        _table(tables.SHARES, rows),
    ]
    head = f'<meta charset="utf-8"><title>Locks under contention</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _series(name: str) -> str:
    return f"s{NAMES.index(name)}"


def _contestants(rows: Rows) -> list[str]:
    return [name for name in NAMES if any(row["contestant"] == name for row in rows)]


def _legend(rows: Rows) -> str:
    names = "".join(f'<span class="{_series(name)}">{escape(name)}</span>' for name in _contestants(rows))
    return f'<div class="legend">{names}</div>'


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
        draw = partial(_lines, counts) if len(counts) > 1 else _columns
        charts = [draw(of_kind, figure, unit, title) for figure, unit, title in _PLOTTED]
        sections += [f"<h2>{escape(title)}</h2>", _charts(charts)]
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
    chart = Chart(title, x, Log.around(unit, values) if unit == _MS else _from_zero(unit, values))
    for name in _contestants(known):
        points = [(float(counts.index(row["processes"])), row[figure]) for row in known if row["contestant"] == name]
        chart.line(points, _series(name), name, dots=True)
    return chart


def _columns(rows: Rows, figure: str, unit: str, title: str) -> Chart:
    """Plot one figure of each contestant, for one number of processes."""
    known = _known(rows, figure)
    names = _contestants(known)
    chart = Chart(title, Names(rows[0]["workload"], names), _from_zero(unit, [row[figure] for row in known]))
    for row in known:
        name = row["contestant"]
        chart.column(names.index(name), row[figure], _series(name), name, tables.three_digits(row[figure]))
    return chart


def _from_zero(title: str, values: Sequence[float]) -> Linear:
    return Linear(title, 0, 1.15 * max(values, default=1.0))


def _waits(rows: Rows) -> Chart:
    values = [max(wait_ms, _LEAST_WAIT_MS) for row in rows for wait_ms, _ in row["wait_cdf"]]
    chart = Chart(rows[0]["workload"], Log.around("wait, ms", values), Nines("share of acquires"))
    for row in rows:
        chart.line(row["wait_cdf"], _series(row["contestant"]), row["contestant"])
    return chart


def _timelines(rows: Rows) -> str:
    """Plot the holders of the lock, for the workload with the number of workers that is nearest to 8."""
    rows = min(_by_workload(rows).values(), key=lambda of: abs(of[0]["processes"] * _crew(of[0]) - 8))
    workers = rows[0]["processes"] * _crew(rows[0])
    lane_px = min(24.0, _LANES_PX / workers)
    charts = []
    for row in rows:
        x = Linear("ms", 0, row["timeline_ms"])
        chart = Chart(row["contestant"], x, Linear("worker", -0.5, workers - 0.5), height=int(90 + lane_px * workers))
        for acquired_ms, released_ms, worker in row["timeline"]:
            words = f"worker {worker}: {released_ms - acquired_ms:.3f} ms"
            visible = max(0.0, acquired_ms), min(released_ms, row["timeline_ms"])
            chart.lane(*visible, worker, 0.8 * lane_px, _series(row["contestant"]), words)
        charts.append(chart)
    about = (
        f"{rows[0]['workload']} ms: from just after acquire until just before release, in the middle of the last round"
    )
    return f"<h2>Holders of the first lock</h2><p>{escape(about)}.</p>{_charts(charts)}"


def _crew(row: Mapping[str, Any]) -> int:
    crew: int = row["tasks"] or row["threads"]
    return crew


def _table(columns: Sequence[Column], rows: Rows) -> str:
    head = "".join(f"<th>{escape(column.heading)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(column.of(row))}</td>' for column in columns)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
