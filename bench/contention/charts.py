"""Charts as inline SVG: scales, axes, lines, lanes.

Rules: no colours here, only classes that a page's style sheet gives colours to, so that a chart reads in light and in
dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Protocol

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 24, 26, 44  # px around the plot, for titles and the words at the ticks
_MOST_TICKS = 6


class Scale(Protocol):
    """An axis: its title, and from 0 to 1 where a value lies on it."""

    @property
    def title(self) -> str:
        """What stands along it."""

    def place(self, value: float) -> float:
        """Where it lies."""

    def ticks(self) -> list[tuple[float, str]]:
        """Values to mark, and what stands beside the marks."""


@dataclass(frozen=True)
class Linear:
    """From one value to another, evenly."""

    title: str
    low: float
    high: float

    def place(self, value: float) -> float:
        """Where it lies."""
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
    """From one power of ten to another, each as wide as the next."""

    title: str
    low: float
    high: float

    @classmethod
    def around(cls, title: str, values: Sequence[float]) -> Log:
        """The decades that hold all the values."""
        logs = [math.log10(value) for value in values if value > 0] or [0.0]
        low, high = math.floor(min(logs)), math.ceil(max(logs))
        return cls(title, 10.0**low, 10.0 ** max(high, low + 1))

    def place(self, value: float) -> float:
        """Where it lies; what is below the axis lies at its begin."""
        return max(0.0, math.log(max(value, self.low) / self.low) / math.log(self.high / self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten, and what lies between them where there are few."""
        first, last = round(math.log10(self.low)), round(math.log10(self.high))
        steps = (1, 2, 5) if last - first <= 2 else (1,)
        values = [times * 10.0**power for power in range(first, last + 1) for times in steps]
        return [(value, f"{value:,.10g}") for value in values if value <= self.high * (1 + 1e-9)]


@dataclass(frozen=True)
class Nines:
    """Shares, the nearer to 1 the wider: 90 %, 99 % and 99.9 % are a step apart."""

    title: str
    top: float = 0.9995

    def place(self, value: float) -> float:
        """Where it lies."""
        return math.log(1 - min(value, self.top)) / math.log(1 - self.top)

    def ticks(self) -> list[tuple[float, str]]:
        """Those that people name."""
        return [(percent / 100, f"{percent:g} %") for percent in (0, 50, 90, 99, 99.9)]


@dataclass(frozen=True)
class Names:
    """One place for each name; the values are 0, 1, 2 and so on."""

    title: str
    names: Sequence[str]

    def place(self, value: float) -> float:
        """Where it lies, in the middle of its part."""
        return (value + 0.5) / len(self.names)

    def ticks(self) -> list[tuple[float, str]]:
        """All of them."""
        return [(float(index), name) for index, name in enumerate(self.names)]


@dataclass
class Chart:
    """A plot between two axes.

    Attributes:
        title: what stands above it.
        x: the axis below it.
        y: the axis to its left.
        width: of all, in px.
        height: of all, in px.
    """

    title: str
    x: Scale
    y: Scale
    width: int = 440
    height: int = 280
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Point], series: str, name: str, *, dots: bool = False) -> None:
        """Draw a line through the points, with a dot at each where that is wanted.

        Args:
            points: from left to right.
            series: the class of its colour.
            name: what a pointer over it shows.
            dots: whether to mark the points and to show their values.
        """
        at = " ".join(f"{self._across(x):.1f},{self._down(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {series}" points="{at}"><title>{escape(name)}</title></polyline>')
        if dots:
            for x, y in points:
                tip = f"<title>{escape(name)}: {y:,.4g}</title>"
                where = f'cx="{self._across(x):.1f}" cy="{self._down(y):.1f}" r="4"'
                self._marks.append(f'<circle class="dot {series}" {where}>{tip}</circle>')

    def column(self, x: float, y: float, series: str, name: str, words: str) -> None:
        """Draw a bar from the axis up to y, and words above it."""
        across, down, width = self._across(x), self._down(y), 46
        size = f'width="{width}" height="{self.height - _BOTTOM - down:.1f}"'
        tip = f"<title>{escape(name)}: {escape(words)}</title>"
        self._marks.append(
            f'<rect class="bar {series}" x="{across - width / 2:.1f}" y="{down:.1f}" {size}>{tip}</rect>'
            f'<text class="middle" x="{across:.1f}" y="{down - 5:.1f}">{escape(words)}</text>'
        )

    def lane(self, x_from: float, x_to: float, y: float, thickness: float, series: str, name: str) -> None:
        """Draw a bar from one x to another, no thinner than can be seen."""
        left, right = self._across(x_from), self._across(x_to)
        size = f'width="{max(right - left, 0.8):.2f}" height="{thickness:.2f}"'
        where = f'x="{left:.2f}" y="{self._down(y) - thickness / 2:.2f}"'
        self._marks.append(f'<rect class="bar {series}" {where} {size}><title>{escape(name)}</title></rect>')

    @property
    def plot_height(self) -> int:
        """Of the part between the axes, in px."""
        return self.height - _TOP - _BOTTOM

    def svg(self) -> str:
        """The chart."""
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
