"""The page of `python -m bench contention --html`: all figures and plots of a saved result.

It is one file, without scripts and without requests to the network. matplotlib draws the plots.
"""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench import contestants
from bench.contestants import LINGER_S, OURS, OURS_LINGERING, REDIS_PY, libraries
from bench.measuring import columns
from bench.measuring.report import Column, three_digits

Rows = Sequence[Mapping[str, Any]]

_LEAST_WAIT_MS = 0.01
_TOP_SHARE = 0.9995
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
_ABOUT_HOLDERS = (
    "A bar is one turn of a worker with the lock, from just after acquire until just before release. Between bars, "
    "nobody has it. {} ms hold/think, in the middle of the last round."
)
_ABOUT_FIGURES = (
    f"A ratio (: {REDIS_PY}) is to the figure of {REDIS_PY} in the same round. Gap: from a release to the next acquire "
    "while a worker waits. Wait: how long acquire takes. Jain: fairness, 1 where all workers have the lock equally "
    "often. Longest without: the longest time for which a worker did not get a lock. Server and client: CPU time. "
    "Left waiting: acquires that were not over at the end. Two holders: acquires of a lock that another worker held."
)
_MEANINGS = {
    contestants.OURS_POLLING: f"{OURS} that asks again and again instead of queueing",
    contestants.BARE_SOCKETS: f"no library, but the requests of {OURS} on plain sockets and nothing else",
    OURS_LINGERING: f"{OURS} whose keys stay with the process for {LINGER_S:g} s after a release",
    contestants.HALF_LINGERING: f"each other process with {OURS_LINGERING}, the others with {OURS}",
}
_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --dim: #60646c; --grid: #e4e6ea; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8eaed; --dim: #a0a6b0; --grid: #2e343c; --back: #15181c; }
  img { filter: invert(.9) hue-rotate(180deg); }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p { color: var(--dim); margin: .3rem 0; max-width: 62rem; } a { color: var(--text); } code { overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem; }
img { width: 100%; } .table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin-top: .6rem; }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { vertical-align: bottom; color: var(--dim); font-weight: 600; white-space: pre-line; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
"""


def page(result: Mapping[str, Any], back: str | None = None) -> str:
    """Make the page of what was measured, with a link at the top that leads back, if wanted."""
    rows: Rows = result["results"]
    machine = f"{result['cpu_count']} CPUs, {result['platform']}, Python {result['python']}"
    meanings = [f"{name}: {_MEANINGS[name]}" for name in _contestants(rows) if name in _MEANINGS]
    violations = result["violations"] or "never, by the records of all workers"
    holders = min(_by_workload(rows), key=lambda of: abs(of[0]["workers"] - 8))  # few enough to see each
    sections = [
        f'<p><a href="{escape(back)}">&larr; redislock_fast</a></p>' if back else "",
        f"<h1>Locks under contention</h1><p>{escape(result['title'])}<br>{escape(machine)}<br>",
        f"Made by <code>{escape(result['command_line'])}</code></p>",
        f"<p>{_ABOUT_WORKERS}<br>Two holders at a time: {violations}.</p>",
        f"<p>{escape('; '.join(meanings))}.</p>" if meanings else "",
        *(_section(title, _ABOUT_PLOTTED, charts) for title, charts in _by_processes(rows)),
        _section("How long an acquire takes", _ABOUT_WAITS, map(_waits, _by_workload(rows))),
        _section("Holders of the first lock", _ABOUT_HOLDERS.format(holders[0]["workload"]), map(_timeline, holders)),
        _section("All figures", _ABOUT_FIGURES, ()),
        _table(columns.SPEED, rows),
        _table(columns.COSTS, rows),
    ]
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>Locks under contention</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _section(title: str, about: str, charts: Iterable[str]) -> str:
    return f'<h2>{escape(title)}</h2><p>{escape(about)}</p><div class="charts">{"".join(charts)}</div>'


def _table(chosen: Sequence[Column], rows: Rows) -> str:
    head = "".join(f"<th>{escape(column.heading)}</th>" for column in chosen)
    body = "".join(f"<tr>{''.join(f'<td>{escape(column.of(row))}</td>' for column in chosen)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _contestants(rows: Rows) -> list[str]:
    """Those of the rows, in the order that all pages have."""
    return sorted({row["contestant"] for row in rows}, key=libraries.NAMES.index)


def _by_workload(rows: Rows) -> list[Rows]:
    labels = dict.fromkeys(row["workload"] for row in rows)
    return [[row for row in rows if row["workload"] == label] for label in labels]


# ---- plots ----


def _chart(title: str, height: float = 3.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes: Any = figure.subplots()
    axes.set_title(title, loc="left", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _image(figure: Figure, about: str) -> str:
    drawn = io.BytesIO()
    # Texts stay texts, and a plot of the same figures is the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return f'<img alt="{escape(about)}" src="data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}">'


def look(name: str) -> dict[str, Any]:
    """The colour and the dashes of a contestant, the same in every plot and on every page."""
    colours = mpl.color_sequences["petroff10"]  # made for the colour-blind, too
    is_dashed = name in (contestants.BARE_SOCKETS, contestants.OURS_POLLING, contestants.HALF_LINGERING)
    return {"color": colours[libraries.NAMES.index(name)], "linestyle": "--" if is_dashed else "-", "label": name}


def _by_processes(rows: Rows) -> Iterable[tuple[str, list[str]]]:
    """Plot throughput and gap against the number of processes, for each kind of workload."""
    kinds: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        kind = tuple(row[name] for name in ("threads", "tasks", "hold_ms", "think_ms"))
        kinds.setdefault(kind, []).append(row)
    for (threads, tasks, hold_ms, think_ms), of_kind in kinds.items():
        each = f"{tasks:,} tasks in each process, " if tasks else ""
        if threads != 1:
            each = f"{threads} threads in each process, "
        draw = _lines if len({row["processes"] for row in of_kind}) > 1 else _bars
        charts = [draw([row for row in of_kind if row[plotted[0]] is not None], *plotted) for plotted in _PLOTTED]
        yield f"{each}one key, hold {hold_ms:g} ms, think {think_ms:g} ms", charts


def _lines(rows: Rows, figure_: str, unit: str, title: str) -> str:
    """Plot one figure against the number of processes."""
    figure, axes = _chart(title)
    counts = sorted({row["processes"] for row in rows})
    for name in _contestants(rows):
        points = [(counts.index(row["processes"]), row[figure_]) for row in rows if row["contestant"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", **look(name))
    axes.set_xticks(range(len(counts)), [f"{count:,}" for count in counts])
    axes.set(xlabel="processes", ylabel=unit, yscale="log" if figure_.endswith("_ms") else "linear")
    if figure_.endswith("_ms"):
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    return _image(figure, f"{title}, by the number of processes")


def _bars(rows: Rows, figure_: str, unit: str, title: str) -> str:
    """Plot one figure of each contestant, for one number of processes."""
    figure, axes = _chart(title)
    for row in sorted(rows, key=lambda row: libraries.NAMES.index(row["contestant"]), reverse=True):
        drawn = axes.barh(row["contestant"], row[figure_], color=look(row["contestant"])["color"])
        axes.bar_label(drawn, [three_digits(row[figure_])], padding=4)
    axes.margins(x=0.15)
    axes.set_xlabel(unit)
    return _image(figure, f"{title} of each contestant")


def _waits(rows: Rows) -> str:
    """Plot the distribution of the waits of one workload."""
    title = f"{rows[0]['workload']} ms hold/think"
    figure, axes = _chart(title)
    for row in rows:
        points = [(max(wait_ms, _LEAST_WAIT_MS), min(share, _TOP_SHARE)) for wait_ms, share in row["wait_cdf"]]
        axes.plot(*zip(*points, strict=True), **look(row["contestant"]))
    axes.set(xscale="log", yscale="logit", xlabel="wait, ms", ylabel="share of acquires", ylim=(0.1, _TOP_SHARE))
    shares = (0.1, 0.5, 0.9, 0.99, 0.999)
    axes.set_yticks(shares, [f"{100 * share:g} %" for share in shares])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    return _image(figure, f"How long an acquire takes: {title}")


def _timeline(row: Mapping[str, Any]) -> str:
    """Plot the holders of the first lock."""
    name, workers = row["contestant"], row["workers"]
    figure, axes = _chart(name, height=1.4 + min(4.0, 0.25 * workers))
    for acquired_ms, released_ms, worker in row["timeline"]:
        axes.barh(worker, released_ms - acquired_ms, left=acquired_ms, height=0.8, color=look(name)["color"])
    axes.set(xlim=(0, row["timeline_ms"]), ylim=(-0.5, workers - 0.5), xlabel="time, ms", ylabel="worker")
    return _image(figure, f"Holders of the first lock: {name}")
