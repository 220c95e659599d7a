"""How each contestant looks on the page: its colour, in light and in dark, and the dashes of its lines.

The looks are fixed, so a contestant looks the same on every page. The colours are those of Okabe and Ito and some more,
made lighter or darker until each can be seen on the background of the page and no two look alike to the colour-blind.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.contestants import (
    AUTO_RENEW,
    BARE_HOLDINGS,
    BARE_SOCKETS,
    FENCING,
    HALF_LINGERING,
    OURS,
    OURS_LINGERING,
    OURS_POLLING,
    POTTERY,
    PYTHON_REDIS_LOCK,
    REDIS_PY,
    REENTRANT,
)

BACKGROUND_LIGHT, BACKGROUND_DARK = "#ffffff", "#15181c"

_SOLID, _DASHED, _DOTTED = "none", "7 3", "2 3"
_GOLDEN_RATIO = 0.618034  # of the colour circle, from one hue to the next: all are far apart


@dataclass(frozen=True)
class Look:
    """The look of a contestant.

    Attributes:
        light: its colour on a light page, such as "#a55823".
        dark: its colour on a dark page.
        dashes: of its lines, as in SVG's `stroke-dasharray`.
    """

    light: str
    dark: str
    dashes: str = _SOLID


LOOKS: Mapping[str, Look] = {
    REDIS_PY: Look("#a55823", "#fea983"),
    OURS: Look("#3877cd", "#64b8e7"),
    OURS_POLLING: Look("#126f8b", "#258bda", _DASHED),
    PYTHON_REDIS_LOCK: Look("#42a18d", "#37fabe"),
    POTTERY: Look("#ba2a7e", "#e736ce"),
    BARE_SOCKETS: Look("#704807", "#b17929", _DOTTED),
    BARE_HOLDINGS: Look("#7c9002", "#f4f377", _DOTTED),
    OURS_LINGERING: Look("#8000d0", "#d8e3ff"),
    HALF_LINGERING: Look("#a282c7", "#c0a0aa", _DASHED),
    AUTO_RENEW: Look("#563517", "#907368"),
    REENTRANT: Look("#907360", "#aaccd8"),
    FENCING: Look("#1c3b84", "#667e9e"),
}


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """The looks of contestants; those without a fixed one get further ones, in the order of their names."""
    wanted = set(names)
    new = sorted(wanted.difference(LOOKS))
    return {name: look for name, look in LOOKS.items() if name in wanted} | {
        name: _further(number) for number, name in enumerate(new)
    }


def _further(number: int) -> Look:
    hue = number * _GOLDEN_RATIO % 1
    return Look(_hex(hue, lightness=0.3), _hex(hue, lightness=0.7), _DASHED)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, 0.7))
