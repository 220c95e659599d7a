"""Charts as inline SVG: scales, axes, lines, lanes.

A chart has classes instead of colours. The style sheet of the page gives them colours, for light and for dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Protocol

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 24, 26, 44  # px around the plot, for titles and labels
_MOST_TICKS = 6


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
    """A linear axis."""

    title: str
    low: float
    high: float

    def place(self, value: float) -> float:
        """The position of a value."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values."""
        rough = (self.high - self.low) / _MOST_TICKS
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
        width: of the chart, in px.
        height: of the chart, in px.
    """

    title: str
    x: Scale
    y: Scale
    width: int = 440
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
        at = " ".join(f"{self._across(x):.1f},{self._down(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {series}" points="{at}"><title>{escape(name)}</title></polyline>')
        if dots:
            for x, y in points:
                tip = f"<title>{escape(name)}: {y:,.4g}</title>"
                where = f'cx="{self._across(x):.1f}" cy="{self._down(y):.1f}" r="4"'
                self._marks.append(f'<circle class="dot {series}" {where}>{tip}</circle>')

    def column(self, x: float, y: float, series: str, name: str, words: str) -> None:
        """Draw a bar from the axis up to y, with words above it."""
        across, down, width = self._across(x), self._down(y), 46
        size = f'width="{width}" height="{self.height - _BOTTOM - down:.1f}"'
        tip = f"<title>{escape(name)}: {escape(words)}</title>"
        self._marks.append(
            f'<rect class="bar {series}" x="{across - width / 2:.1f}" y="{down:.1f}" {size}>{tip}</rect>'
            f'<text class="middle" x="{across:.1f}" y="{down - 5:.1f}">{escape(words)}</text>'
        )

    def lane(self, x_from: float, x_to: float, y: float, thickness: float, series: str, name: str) -> None:
        """Draw a bar from one x to another, wide enough to be visible."""
        left, right = self._across(x_from), self._across(x_to)
        size = f'width="{max(right - left, 0.8):.2f}" height="{thickness:.2f}"'
        where = f'x="{left:.2f}" y="{self._down(y) - thickness / 2:.2f}"'
        self._marks.append(f'<rect class="bar {series}" {where} {size}><title>{escape(name)}</title></rect>')

    @property
    def plot_height(self) -> int:
        """The height of the part between the axes, in px."""
        return self.height - _TOP - _BOTTOM

    def svg(self) -> str:
        """Render the chart."""
        left, right, top, bottom = _LEFT, self.width - _RIGHT, _TOP, self.height - _BOTTOM
        parts = [f'<text class="name" x="{left}" y="15">{escape(self.title)}</text>']
        for value, words in self.x.ticks():
            x = f"{self._across(value):.1f}"
            parts.append(f'<line class="grid" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>')
            parts.append(f'<text class="middle" x="{x}" y="{bottom + 15}">{escape(words)}</text>')
        for value, words in self.y.ticks():
            y = f"{self._down(value):.1f}"
            parts.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>')
            parts.append(f'<text class="end" x="{left - 6}" y="{y}" dy="4">{escape(words)}</text>')
        middle = (top + bottom) / 2
        parts += [
            f'<text class="middle" x="{(left + right) / 2}" y="{self.height - 8}">{escape(self.x.title)}</text>',
            f'<text class="middle" transform="translate(12 {middle}) rotate(-90)">{escape(self.y.title)}</text>',
            f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>',
        ]
        box = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return f'<svg {box} role="img">{"".join(parts + self._marks)}</svg>'

    def _across(self, x: float) -> float:
        return _LEFT + self.x.place(x) * (self.width - _LEFT - _RIGHT)

    def _down(self, y: float) -> float:
        return self.height - _BOTTOM - self.y.place(y) * self.plot_height
