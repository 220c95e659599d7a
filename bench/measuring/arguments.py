"""Options that several commands have, and parsers that refuse a value out of range."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from bench.measuring import servers


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare `--server`."""
    about = "the server to start, or the URL of a running one (default: %(default)s, a Valkey)"
    metavar = f"{{{','.join(servers.CHOICES)},URL}}"
    parser.add_argument("--server", default="embedded", metavar=metavar, help=about)


def add_kind(parser: argparse.ArgumentParser) -> None:
    """Declare `--server` of a command that starts its servers itself."""
    parser.add_argument("--server", choices=servers.CHOICES, default="embedded", help="default: %(default)s, a Valkey")


def add_rtt(parser: argparse.ArgumentParser) -> None:
    """Declare `--rtt`."""
    about = "a round trip that is added to the way to the server (default: %(default)g)"
    parser.add_argument("--rtt", type=not_negative, default=0.0, metavar="MS", help=about)


def add_rounds(parser: argparse.ArgumentParser, rounds: int, seconds: float, of: str = "contestant") -> None:
    """Declare `--rounds` and `--seconds`, with these defaults."""
    parser.add_argument("--rounds", type=positive(int), default=rounds, help="default: %(default)s")
    about = f"for each {of} and round (default: %(default)s)"
    parser.add_argument("--seconds", type=positive(float), default=seconds, help=about)


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Declare `--wide`."""
    parser.add_argument("--wide", action="store_true", help="all figures, not only those that fit into 80 columns")


def positive(number: Callable[[str], float]) -> Callable[[str], float]:
    """Make a parser of a number above 0."""

    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be positive: {text}")
        return value

    return parse


def not_negative(text: str) -> float:
    """Parse a number that is 0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be negative: {text}")
    return value


def several(number: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Make a parser of numbers above 0, separated by commas."""
    return lambda text: list(map(positive(number), text.split(",")))


def add_names(
    parser: argparse.ArgumentParser,
    option: str,
    names: Iterable[str],
    about: str | None = None,
    default: Sequence[str] | None = None,
) -> None:
    """Declare an option that chooses some of these names, separated by commas; by default all, or the given ones."""
    known = list(names)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen).difference(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return chosen

    usual = known if default is None else default
    parser.add_argument(option, type=parse, default=usual, metavar="NAME,...", help=about or ", ".join(known))
