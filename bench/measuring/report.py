"""The output of a command: a progress bar, tables, a JSON file, a warning that other programs keep the machine busy.

Progress and errors go to stderr, results to stdout. Both are readable without a terminal.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import redislock_fast
from bench.contestants import OURS

_WIDER_THAN_ANY_TABLE = 1000
_LOOK_S = 0.3
_BUSY_SHARE = 0.15
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait: proc(5)


@contextmanager
def progress(total_steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar; without a terminal, one line for each new stage.

    Yields the function to call before each step, with the name of its stage.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("", total=total_steps, completed=-1)  # the first step begins with none done
        (task,) = bar.tasks

        def step(stage: str) -> None:
            if not console.is_terminal and stage != task.description:
                say(stage)
            bar.update(task.id, description=stage, advance=1)

        yield step


def say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    heading: str  # above the column
    cell: Callable[..., str]  # the text for a row that has all figures of the column; a dash stands for a missing one
    figures: tuple[str, ...]  # the keys of the row that the text needs
    is_wide: bool = False  # whether the column is left out without `--wide`, so that the table fits into 80 columns

    def of(self, row: Mapping[str, Any]) -> str:
        """The text for a row."""
        values = [row[figure] for figure in self.figures]
        return "-" if None in values else self.cell(*values)


def print_rows(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    absent: Mapping[str, str] | None = None,
    is_wide: bool = True,
    words: int = 2,
) -> None:
    """Print the columns of the rows, those that are wide only if wanted, and why names are absent from the table."""
    columns = [column for column in columns if is_wide or not column.is_wide]
    cells = [[column.of(row) for column in columns] for row in rows]
    table(title, [column.heading for column in columns], cells, words)
    for name, reason in (absent or {}).items():
        print(f"{name}: {reason}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> None:
    """Print a table, as wide as it needs to be: no figure is cut, whatever the terminal's width.

    The first columns, as many as `words` says, hold words and are aligned at the left, the others at the right.
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


def title(what: str, rounds: int, seconds: float, rtt_ms: float = 0.0) -> str:
    """The title of a table: what was measured, how far away, for how long, and with which of our implementations."""
    away = f", {rtt_ms:g} ms away" if rtt_ms else ""
    return f"{what}{away}; {rounds} rounds of {seconds:g} s; {OURS} is {redislock_fast.implementation}"


def three_digits(value: float | None) -> str:
    """Write a figure with three significant digits, for example 0.123, 1.44, 30.1, 502 or 1,512; a dash for None."""
    if value is None:
        return "-"
    for below, form in ((1, ".3f"), (10, ".2f"), (100, ".1f")):
        if value < below:
            return format(value, form)
    return format(value, ",.0f")


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """The command as it was called, the machine and the interpreter, for every saved result.

    The URL of the server, which may have a password, is not among the words of the command.
    """
    server = getattr(options, "server", "")
    words = [word.replace(server, "URL") if "://" in server else word for word in sys.argv[1:]]
    return {
        "command_line": shlex.join(["python", "-m", "bench", *words]),
        "redislock_fast.implementation": redislock_fast.implementation,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
    }


def new_file(text: str) -> Path:
    """Parse the path of a file to write, in a folder that is there: else a long measurement would be lost."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no such folder: {path.parent}")
    return path


def warn_if_busy() -> None:
    """Say on stderr how many processors other programs use, where that is more than 15 % of all. Linux only."""
    if not _STAT.exists():
        return
    before = _jiffies()
    time.sleep(_LOOK_S)
    share = busy_share(before, _jiffies())
    if share > _BUSY_SHARE:
        used = share * (os.cpu_count() or 1)
        say(
            f"the machine is busy: other programs use {used:.1f} of {os.cpu_count()} processors; "
            "figures are lower than they can be, ratios less exact"
        )


def busy_share(before: list[int], after: list[int]) -> float:
    """The share of all processors' time that was not idle, between two readings of `/proc/stat`'s first line."""
    spent = [later - earlier for earlier, later in zip(before, after, strict=True)]
    return 1 - sum(spent[index] for index in _IDLE) / max(sum(spent), 1)


def _jiffies() -> list[int]:
    return list(map(int, _STAT.read_text().splitlines()[0].split()[1:9]))  # later ones are counted in user already
