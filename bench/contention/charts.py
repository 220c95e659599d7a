"""Charts as inline SVG: scales, axes, lines, bars, lanes.

A chart is as wide as its place on the page: positions across are shares of the width, and texts keep their size.
It has classes instead of colours. The style sheet of the page gives them colours, for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Protocol

Point = tuple[float, float]

_RIGHT, _TOP, _BOTTOM = 24, 26, 48  # px around the plot, for titles and labels
_AXIS_TITLE, _LETTER = 30, 7.7  # px to the left of the plot, for the title of the axis and for each letter of a label
_STRETCHED = 1000  # the width of the plot in the coordinates of a line


class Scale(Protocol):
    """An axis: its title, and the positions of values on it, from 0 to 1."""

    @property
    def title(self) -> str:
        """The title of the axis."""

    def place(self, value: float) -> float:
        """The position of a value."""

    def ticks(self) -> list[tuple[float, str]]:
        """The values to mark, and their labels."""


@dataclass(frozen=True)
class Linear:
    """A linear axis.

    Attributes:
        title: of the axis.
        low: the value where it begins.
        high: the value where it ends.
        most_ticks: how many parts the ticks make of the axis, at most.
    """

    title: str
    low: float
    high: float
    most_ticks: int = 6

    def place(self, value: float) -> float:
        """The position of a value."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values."""
        rough = (self.high - self.low) / self.most_ticks
        magnitude = 10 ** math.floor(math.log10(rough))
        step = next(times * magnitude for times in (1, 2, 5, 10) if times * magnitude >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [(count * step, f"{count * step:,.10g}") for count in range(first, last + 1)]


@dataclass(frozen=True)
class Log:
    """A logarithmic axis, from one power of ten to another."""

    title: str
    low: float
    high: float

    @classmethod
    def around(cls, title: str, values: Sequence[float]) -> Log:
        """Make the axis of the decades that hold all values."""
        logs = [math.log10(value) for value in values if value > 0] or [0.0]
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        return cls(title, 10.0**low, 10.0 ** max(high, low + 1))

    def place(self, value: float) -> float:
        """The position of a value; a value below the axis is placed at its beginning."""
        return max(0.0, math.log(max(value, self.low) / self.low) / math.log(self.high / self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten; where there are few, values between them, too."""
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 2 else (1,)
        values = [times * 10.0**power for power in range(first, last + 1) for times in steps]
        return [(value, f"{value:,.10g}") for value in values if value <= self.high * (1 + 1e-9)]


@dataclass(frozen=True)
class Nines:
    """An axis of shares, wider towards 1: 90 %, 99 % and 99.9 % are a step apart."""

    title: str
    top: float = 0.9995

    def place(self, value: float) -> float:
        """The position of a value."""
        return math.log(1 - min(value, self.top)) / math.log(1 - self.top)

    def ticks(self) -> list[tuple[float, str]]:
        """The usual percentiles."""
        return [(percent / 100, f"{percent:g} %") for percent in (0, 50, 90, 99, 99.9)]


@dataclass(frozen=True)
class Names:
    """An axis of names; the values are 0, 1, 2 and so on."""

    title: str
    names: Sequence[str]

    def place(self, value: float) -> float:
        """The position of a name, in the middle of its part."""
        return (value + 0.5) / len(self.names)

    def ticks(self) -> list[tuple[float, str]]:
        """All names."""
        return [(float(index), name) for index, name in enumerate(self.names)]


@dataclass
class Chart:
    """A plot between two axes.

    Attributes:
        title: above the plot.
        x: the axis below the plot.
        y: the axis to the left of the plot.
        height: of the chart, in px.
    """

    title: str
    x: Scale
    y: Scale
    height: int = 280
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], series: str, name: str, *, dots: bool = False) -> None:
        """Draw a line through the points, with a dot at each if wanted.

        Args:
            points: from left to right.
            series: the class of its colour.
            name: the tooltip of the line.
            dots: whether each point has a dot with a tooltip.
        """
        at = " ".join(f"{_STRETCHED * self.x.place(x):.1f},{self._down(y):.1f}" for x, y in points)
        box = f'viewBox="0 0 {_STRETCHED} {self.plot_height}" preserveAspectRatio="none"'
        line = f'<polyline class="line {series}" points="{at}"><title>{escape(name)}</title></polyline>'
        self._marks.append(f"<svg {box}>{line}</svg>")
        if dots:
            for x, y in points:
                tip = f"<title>{escape(name)}: {y:,.4g}</title>"
                where = f'cx="{self._across(x)}" cy="{self._down(y):.1f}" r="4"'
                self._marks.append(f'<circle class="dot {series}" {where}>{tip}</circle>')

    def bar(self, x: float, y: float, thickness: float, series: str, words: str) -> None:
        """Draw a bar from the axis to x, with words behind it."""
        down = self._down(y)
        size = f'width="{self._across(x)}" height="{thickness:.2f}"'
        self._marks.append(
            f'<rect class="bar {series}" y="{down - thickness / 2:.2f}" {size}/>'
            f'<text x="{self._across(x)}" y="{down:.2f}" dx="6" dy="4">{escape(words)}</text>'
        )

    def lane(self, x_from: float, x_to: float, y: float, thickness: float, series: str, name: str) -> None:
        """Draw a bar from one x to another, wide enough to be visible."""
        width = f"max(0.8px, {100 * (self.x.place(x_to) - self.x.place(x_from)):.3f}%)"
        where = f'x="{self._across(x_from)}" y="{self._down(y) - thickness / 2:.2f}" height="{thickness:.2f}"'
        tip = f"<title>{escape(name)}</title>"
        self._marks.append(f'<rect class="bar {series}" {where} style="width:{width}">{tip}</rect>')

    @property
    def plot_height(self) -> int:
        """The height of the part between the axes, in px."""
        return self.height - _TOP - _BOTTOM

    def svg(self) -> str:
        """Render the chart."""
        y_ticks = self.y.ticks()
        title = escape(self.title)
        left = round(_AXIS_TITLE + _LETTER * max(len(words) for _, words in y_ticks))
        bottom = self.plot_height
        grid = []
        for value, words in self.x.ticks():
            x = self._across(value)
            grid.append(f'<line class="grid" x1="{x}" x2="{x}" y2="{bottom}"/>')
            grid.append(f'<text class="middle" x="{x}" y="{bottom + 20}">{escape(words)}</text>')
        for value, words in y_ticks:
            y = f"{self._down(value):.1f}"
            grid.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
            grid.append(f'<text class="end" x="-6" y="{y}" dy="4">{escape(words)}</text>')
        axes = (
            f'<text class="middle" transform="translate({14 - left} {bottom / 2}) rotate(-90)">'
            f"{escape(self.y.title)}</text>"
            f'<text class="middle" x="50%" y="{bottom + 40}">{escape(self.x.title)}</text>'
            f'<line class="axis" y2="{bottom}"/><line class="axis" x2="100%" y1="{bottom}" y2="{bottom}"/>'
        )
        return (
            f'<div class="chart" style="padding:{_TOP}px {_RIGHT}px {_BOTTOM}px {left}px">'
            f'<svg height="{bottom}" role="img" aria-label="{title}">'
            f'<text class="name" x="{-left}" y="{15 - _TOP}">{title}</text>'
            f"{''.join([*grid, axes, *self._marks])}</svg></div>"
        )

    def _across(self, x: float) -> str:
        return f"{100 * self.x.place(x):.3f}%"

    def _down(self, y: float) -> float:
        return (1 - self.y.place(y)) * self.plot_height
