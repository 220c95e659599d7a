"""The output of a command: a progress bar, tables, a JSON file.

Progress and errors go to stderr, results to stdout. Both are readable without a terminal.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_WIDER_THAN_ANY_TABLE = 1000


class Step(Protocol):
    """A function to call before each step."""

    def __call__(self, stage: str) -> None:
        """Begin a step of the stage, and end the step before it."""


@contextmanager
def progress(total_steps: int) -> Iterator[Step]:
    """Show a progress bar; without a terminal, one line for each new stage.

    Args:
        total_steps: the number of steps.

    Yields:
        The function to call before each step.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total_steps)
        shown = ""
        begun = 0

        def step(stage: str) -> None:
            nonlocal shown, begun
            if not console.is_terminal and stage != shown:
                say(stage)
            shown = stage
            bar.update(task, description=stage, completed=begun)
            begun += 1

        yield step


def say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> None:
    """Print a table, as wide as it needs to be: no figure is cut, whatever the terminal's width.

    Args:
        title: above the table.
        columns: the headings.
        rows: the cells, one sequence per row.
        words: how many columns, from the left, hold words; the others hold figures.
    """
    drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, heading in enumerate(columns):
        drawn.add_column(heading, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    print(title)
    console = Console(width=_WIDER_THAN_ANY_TABLE)
    console.width = drawn.__rich_measure__(console, console.options).maximum
    console.print(drawn)


def environment() -> dict[str, Any]:
    """The machine and the interpreter, for every saved result."""
    return {
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
    }


def save_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result to a file."""
    path.write_text(json.dumps(result, indent=2) + "\n")
