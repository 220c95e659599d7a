"""The page of the contention bench: all figures and plots in one file, each contestant with a colour of its own.

Rules: the command runs as users run it, but its windows are made up.
"""

from __future__ import annotations

import argparse
import re
import sys
from array import array
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import redis

pytest.importorskip("bench.contention", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")
pytest.importorskip("matplotlib", reason="what the bench draws its plots with")

from bench.contention import command
from bench.contention.command import NAMES, Plan
from bench.contention.figures import Span, Window
from bench.contention.page import look
from bench.contention.workload import Workload
from bench.contestants import Contestant, libraries
from bench.measuring import report
from redislock_fast.server import find_binary
from tests.conftest import absent

WORKLOADS = (*(Workload(processes) for processes in (2, 8, 64)), Workload(1, threads=16, hold_ms=0, think_ms=0))


def no_lock(_client: object, _name: str) -> object:
    raise NotImplementedError


def contestant(name: str, _lease_s: int) -> Contestant:
    return Contestant(name, "1.0", no_lock)


def window(
    _url: str, _witness: redis.Redis, entrant: Contestant, _lease_s: int, workload: Workload, _seconds: float
) -> Window:
    """A window in which the workers hold the lock for a millisecond in turn, with a gap of the contestant's own."""
    turn_s = 0.001 + 0.0002 * (1 + NAMES.index(entrant.name)) ** 2
    records = [array("d") for _ in range(workload.workers)]
    for number in range(round(1 / turn_s)):
        acquired_s = number * turn_s
        asked_s = max(0.0, acquired_s - (workload.workers - 1) * turn_s)
        records[number % workload.workers].extend((0, asked_s, acquired_s, acquired_s + 0.001))
    span = Span(0.0, 1.0)
    return Window(span, span, records, Counter(SET=100), 0.1, 0.05, workload.processes)


@pytest.fixture
def made(bench: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    """Makes the page of a run of all contestants: one workload in three sizes, and another one."""
    if find_binary("valkey") is None:
        absent("no valkey server here")

    def made(saved: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["bench", "contention", "--html", "report.html"])
        races = tuple((workload, NAMES) for workload in WORKLOADS)
        monkeypatch.setattr(command, "plan_of", lambda _: Plan("", races))
        monkeypatch.setattr(command, "open_window", window)
        monkeypatch.setattr(libraries, "find", contestant)
        assert bench("contention", "--rounds", 1, "--html", saved) == 0
        return saved.read_text()

    return made


@pytest.mark.slow
def test_page_has_all_plots_and_figures_and_needs_nothing_else(made: Callable[[Path], str], tmp_path: Path) -> None:
    page = made(tmp_path / "report.html")
    assert "<code>python -m bench contention --html report.html</code>" in page
    plots = [b64decode(plot).decode() for plot in re.findall('data:image/svg\\+xml;base64,([^"]+)', page)]
    assert len(plots) == 2 * 3 + len(WORKLOADS) + len(NAMES)  # figures of each kind, waits, holders
    for plot in plots:
        texts = [text.text for text in ElementTree.fromstring(plot).iter("{http://www.w3.org/2000/svg}text")]
        assert texts != []
    assert re.findall("<script|https?://|<a ", re.sub('data:image[^"]+', "", page)) == []
    assert [name for name in NAMES if page.count(f"<td>{name}</td>") != 2 * len(WORKLOADS)] == []


@pytest.mark.slow
def test_page_on_the_site_has_a_way_back(made: Callable[[Path], str], tmp_path: Path) -> None:
    folder = tmp_path / "_extra"
    folder.mkdir()
    assert re.findall("<a [^>]*>", made(folder / "report.html")) == ['<a href="index.html">']


def test_command_on_the_page_does_not_tell_the_url_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "redis://user:secret@localhost"
    monkeypatch.setattr(sys, "argv", ["bench", "contention", f"--server={url}"])
    facts = report.environment(argparse.Namespace(server=url))
    assert facts["command_line"] == "python -m bench contention --server=URL"


def test_each_contestant_has_a_colour_of_its_own() -> None:
    colours = [look(name)["color"] for name in libraries.NAMES]
    assert len(set(colours)) == len(libraries.NAMES)
