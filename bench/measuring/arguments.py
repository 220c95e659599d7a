"""Options that several commands have, and parsers that refuse a value out of range."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.measuring import servers


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare `--server`."""
    parser.add_argument(
        "--server",
        default="embedded",
        metavar=f"{{{','.join(servers.CHOICES)},URL}}",
        help="the server to start, or the URL of a running one (default: %(default)s, a Valkey)",
    )


def add_rtt(parser: argparse.ArgumentParser) -> None:
    """Declare `--rtt`."""
    parser.add_argument(
        "--rtt",
        type=not_negative,
        default=0.0,
        metavar="MS",
        help="a round trip that is added to the way to the server (default: %(default)g)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help="save every figure here")


def add_wide(parser: argparse.ArgumentParser) -> None:
    """Declare `--wide`."""
    parser.add_argument("--wide", action="store_true", help="all figures, not only those that fit into 80 columns")


def new_file(text: str) -> Path:
    """Parse the path of a file to write, in a folder that is there: else a long measurement would be lost."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {path.parent}")
    return path


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


def counts(text: str) -> list[int]:
    """Parse whole numbers above 0, separated by commas."""
    return [int(positive(int)(part)) for part in text.split(",")]


def lengths(text: str) -> list[float]:
    """Parse numbers above 0, separated by commas."""
    return [positive(float)(part) for part in text.split(",")]


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Make a parser of known names, separated by commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen).difference(names):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
        return chosen

    return parse
