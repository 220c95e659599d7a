"""The page of the contention bench: each contestant has its colour, no label is on another, the width is used.

Rules: the command runs as users run it, but its windows are made up. Chromium lays the page out.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("bench.contention", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.contention import command
from bench.contention.looks import BACKGROUND_DARK, BACKGROUND_LIGHT, LOOKS, Look, looks_of
from bench.contention.presets import NAMES, Plan, Race
from bench.contention.records import Span, Window
from bench.contention.workload import Workload
from bench.contestants import AnyLock, Contestant, Options, libraries
from redislock_fast.server import find_binary
from tests.conftest import absent
from tests.support.helpers import ROOT

WIDTHS_PX = (400, 800, 1600)
MARGIN_PX, RIGHT_OF_PLOT_PX = 16, 24
LEAST_CONTRAST = 3.0  # of graphics, by WCAG
ALIKE = 0.06  # in OKLab; the nearest two of the eight colours of Okabe and Ito are 0.076 apart

Colour = tuple[float, float, float]
Matrix = Sequence[Sequence[float]]

# How the colour-blind see linear RGB (Machado, Oliveira and Fernandes 2009), and the colour space OKLab.
SIGHTS: Mapping[str, Matrix] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
TO_CONES: Matrix = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
TO_LAB: Matrix = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))

MEASURE = """
addEventListener("load", () => {
  const pages = [...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument);
  const box = (element) => {
    const {left, top, right, bottom} = element.getBoundingClientRect();
    return [element.textContent, left, top, right, bottom];
  };
  const colour = (element) => {
    const style = getComputedStyle(element);
    return [element.classList[1], style.fill == "none" ? style.stroke : style.fill];
  };
  const measured = pages.map((page) => ({
    labels: [...page.querySelectorAll("svg text, .legend span, h1, h2, p")].map(box),
    charts: [...page.querySelectorAll(".charts")].map((charts) => [...charts.querySelectorAll(".axis")].map(box)),
    colours: [...page.querySelectorAll("[class*=' of-']")].map(colour),
    background: getComputedStyle(page.body).backgroundColor,
    width: page.documentElement.clientWidth,
  }));
  document.getElementById("measured").textContent = JSON.stringify(measured);
});
"""


class Box(NamedTuple):
    """Where an element is, in px."""

    words: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether both have a part of the page in common."""
        beside = self.right <= other.left or other.right <= self.left
        return not beside and self.top < other.bottom and other.top < self.bottom


def times(matrix: Matrix, vector: Colour) -> Colour:
    x, y, z = (sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)
    return x, y, z


def linear(colour: str) -> Colour:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def contrast(one: str, other: str) -> float:
    low, high = sorted(sum(times(((0.2126, 0.7152, 0.0722),) * 3, linear(colour))) / 3 for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def seen(colour: str, sight: Matrix) -> Colour:
    red, green, blue = (min(max(part, 0.0), 1.0) for part in times(sight, linear(colour)))
    long, medium, short = (part ** (1 / 3) for part in times(TO_CONES, (red, green, blue)))
    return times(TO_LAB, (long, medium, short))


def distance(one: Colour, other: Colour) -> float:
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)


def rgb(colour: str) -> str:
    """As browsers write it."""
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


def no_lock(_client: object, _name: str) -> AnyLock:
    raise NotImplementedError


def contestant(name: str, _terms: Options) -> Contestant:
    return Contestant(name, "1.0", no_lock, str)


def window(
    _url: str, _witness: object, entrant: Contestant, _terms: Options, workload: Workload, _seconds: float
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


def made(saved: Path) -> str:
    """The page of a run of all contestants, which is saved here: one workload in three sizes, and another one."""
    if find_binary("valkey") is None:
        absent("no valkey server here")
    workloads = (*(Workload(processes) for processes in (2, 8, 64)), Workload(1, threads=16, hold_ms=0, think_ms=0))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", "contention", "--html", "report.html"])
        patch.setattr(command, "plan_of", lambda _: Plan("", tuple(Race(workload, NAMES) for workload in workloads)))
        patch.setattr(command, "open_window", window)
        patch.setattr(libraries, "find", contestant)
        assert command.run(parser.parse_args(["--rounds", "1", "--html", str(saved)])) == 0
    return saved.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as it is on the site."""
    folder = tmp_path_factory.mktemp("page") / "_extra"
    folder.mkdir()
    return made(folder / "report.html")


def laid_out(page: str, scheme: str, folder: Path) -> list[dict[str, Any]]:
    """What Chromium makes of the page, at each of `WIDTHS_PX`."""
    browser = next(filter(None, map(shutil.which, ("google-chrome", "chromium", "chromium-browser"))), None)
    if browser is None:
        absent("no Chromium here")
    frames = "".join(f'<iframe width="{width}" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS_PX)
    file = folder / "frames.html"
    file.write_text(f'<meta charset="utf-8"><script>{MEASURE}</script>{frames}<pre id="measured"></pre>')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    dark = ["--force-dark-mode"] if scheme == "dark" else []
    dump = [browser, *flags, *dark, "--dump-dom", file.as_uri()]
    run = subprocess.run(dump, capture_output=True, text=True, check=False)
    measured = re.search('<pre id="measured">(.+)</pre>', run.stdout)
    assert measured is not None, run.stderr
    pages: list[dict[str, Any]] = json.loads(html.unescape(measured[1]))
    return pages


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_colours_no_label_on_another_and_uses_the_width(page: str, scheme: str, tmp_path: Path) -> None:
    background = BACKGROUND_DARK if scheme == "dark" else BACKGROUND_LIGHT
    colours = {f"of-{name}": rgb(getattr(look, scheme)) for name, look in LOOKS.items() if name in NAMES}
    pages = laid_out(page, scheme, tmp_path)
    assert len(pages) == len(WIDTHS_PX)
    for measured in pages:
        right_px = measured["width"] - MARGIN_PX
        labels = [Box(*label) for label in measured["labels"]]
        plots = [[Box(*axis) for axis in axes] for axes in measured["charts"]]
        assert measured["background"] == rgb(background)
        assert {(of, colour) for of, colour in measured["colours"]} == set(colours.items())
        assert [(one.words, other.words) for one, other in combinations(labels, 2) if one.overlaps(other)] == []
        assert [label.words for label in labels if not MARGIN_PX <= label.left <= label.right <= right_px] == []
        assert [max(axis.right for axis in axes) for axes in plots] == pytest.approx(
            [right_px - RIGHT_OF_PLOT_PX] * len(plots), abs=1
        )


def test_page_says_which_command_made_it(page: str) -> None:
    assert "<code>python -m bench contention --html report.html</code>" in page


def test_page_on_the_site_has_a_way_back_and_a_page_elsewhere_has_none(page: str, tmp_path: Path) -> None:
    assert re.findall("<a [^>]*>", page) == ['<a href="index.html">']
    assert "<a " not in made(tmp_path / "report.html")


def test_page_of_the_site_has_the_head_and_the_way_back_of_a_new_one(page: str) -> None:
    on_the_site = (ROOT / "docs" / "_extra" / "contention.html").read_text()
    heads = [re.split(r":root \{ --back|<h1>", text) for text in (on_the_site, page)]
    assert heads[0][0] == heads[1][0]
    assert heads[0][1].partition("<body>")[2] == heads[1][1].partition("<body>")[2]


def test_command_on_the_page_does_not_tell_the_url_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "redis://user:secret@localhost"
    monkeypatch.setattr(sys, "argv", ["bench", "contention", f"--server={url}"])
    assert command._command_line(url) == "python -m bench contention --server=URL"


def test_every_contestant_has_a_look() -> None:
    assert set(libraries.NAMES) == set(LOOKS)


def test_contestants_without_a_look_get_further_ones_whatever_their_order() -> None:
    looks = looks_of(["b", "redis-py", "a"])
    assert looks == looks_of(["a", "b", "redis-py"])
    assert looks["redis-py"] == LOOKS["redis-py"]
    assert len({look.light for look in (*LOOKS.values(), *looks.values())}) == len(LOOKS) + 2


@pytest.mark.parametrize("look", [*LOOKS.values(), *looks_of(map(str, range(12))).values()])
def test_colour_can_be_seen_on_its_background(look: Look) -> None:
    assert contrast(look.light, BACKGROUND_LIGHT) >= LEAST_CONTRAST
    assert contrast(look.dark, BACKGROUND_DARK) >= LEAST_CONTRAST


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_no_two_colours_look_alike(scheme: str, sight: str) -> None:
    colours = {name: seen(getattr(look, scheme), SIGHTS[sight]) for name, look in LOOKS.items()}
    pairs = combinations(colours, 2)
    assert [pair for pair in pairs if distance(colours[pair[0]], colours[pair[1]]) < ALIKE] == []
