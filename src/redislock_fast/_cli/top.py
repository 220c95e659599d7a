"""`redislock top`: the most contended locks and semaphores, looked at again and again."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from redislock_fast._cli.connecting import add_query, client_of, servers_of
from redislock_fast._cli.exits import Exit
from redislock_fast._cli.printing import holder_text, permits_text, print_json, state_text, table, text_of
from redislock_fast._cli.scanning import Row, Scan, add_budget, positive_int
from redislock_fast._protocol.keys import fence_key

if TYPE_CHECKING:
    import redis

__all__ = ["add_to"]

_HEAD = ("NAME", "HOLDER", "STATE", "SEEN", "TTL", "WAITING", "ACQ/S", "CHANGES")

_SHORTEST = 8
"""How many characters of a name and of a holder are shown at least."""


@dataclass(frozen=True)
class _Seen:
    """A lock or a semaphore, as it was seen last.

    Attributes:
        server: a client of its server.
        row: what was found.
        since: when its holding was seen first, in the clock's seconds.
        changes: how often another holding was seen than before.
        number: its last fencing number; None without fencing.
        looked_at: when that was read.
        acquisitions_per_s: by its fencing numbers; None without.
    """

    server: redis.Redis
    row: Row
    since: float
    changes: int
    number: int | None
    looked_at: float
    acquisitions_per_s: float | None


def add_to(commands: Any) -> None:
    """Add the command to the parsers of commands."""
    parser = add_query(commands, "top", "watch the most contended locks and semaphores", _watch)
    add_budget(parser)
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks (default: %(default)s)"
    )
    parser.add_argument("-n", dest="ticks", type=positive_int, metavar="LOOKS", help="end after so many looks")
    parser.add_argument(
        "--most", type=positive_int, default=20, metavar="LOCKS", help="show so many at most (default: %(default)s)"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _watch(arguments: argparse.Namespace) -> int:
    scan = Scan(servers_of(client_of(arguments)), arguments.pattern)
    seen: dict[bytes, _Seen] = {}
    with contextlib.suppress(KeyboardInterrupt), _screen(arguments.json) as show:
        for tick in itertools.count(1):
            seen = _look(scan, seen, arguments.budget, arguments.most)
            show(list(seen.values()), scan)
            if tick == arguments.ticks:
                break
            time.sleep(arguments.interval)
    return Exit.OK


def _look(scan: Scan, before: dict[bytes, _Seen], budget: int, most: int) -> dict[bytes, _Seen]:
    """The most contended locks among those of before and those that a walk over so many keys finds."""
    found: dict[bytes, tuple[redis.Redis, Row]] = {}
    known: defaultdict[redis.Redis, dict[str, list[bytes]]] = defaultdict(lambda: {"lock": [], "semaphore": []})
    for name, seen in before.items():
        known[seen.server][seen.row.kind].append(name)
    reads = ((server, scan.read(server, names["lock"], names["semaphore"])) for server, names in known.items())
    looks = itertools.chain(reads, scan.rows(budget))
    for server, rows in looks:
        found.update((row.name, (server, row)) for row in rows)
        if len(found) > most:
            found = dict(sorted(found.items(), key=lambda item: _rank(item[1][1]))[:most])
    ranked = sorted(found.values(), key=lambda item: _rank(item[1]))
    numbers = _numbers(ranked)
    now = time.monotonic()
    return {row.name: _note(server, row, numbers.get(row.name), before.get(row.name), now) for server, row in ranked}


def _rank(row: Row) -> tuple[int, bool, bytes]:
    return -(row.waiting or 0), not row.contended, row.name


def _note(server: redis.Redis, row: Row, number: int | None, before: _Seen | None, now: float) -> _Seen:
    """The state of a lock now. `number` is its last fencing number."""
    if before is None:
        return _Seen(server, row, now, 0, number, now, None)
    is_same = _token_id(before.row) == _token_id(row)
    since, changes = (before.since, before.changes) if is_same else (now, before.changes + 1)
    per_s = None
    if number is not None and before.number is not None and now > before.looked_at:
        per_s = max(number - before.number, 0) / (now - before.looked_at)
    return _Seen(server, row, since, changes, number, now, per_s)


def _token_id(row: Row) -> str | None:
    """Of the present holding; None for a semaphore, which has several."""
    return None if row.holder is None else row.holder.token_id


def _numbers(locks: list[tuple[redis.Redis, Row]]) -> dict[bytes, int]:
    """The last fencing numbers that were given for these locks, by name, where there are any."""
    names: defaultdict[redis.Redis, list[bytes]] = defaultdict(list)
    for server, row in locks:
        if row.kind == "lock":
            names[server].append(row.name)
    numbers: dict[bytes, int] = {}
    for server, asked in names.items():
        pipeline = server.pipeline(transaction=False)
        for name in asked:
            pipeline.hget(fence_key(name), "number")
        replies = pipeline.execute(raise_on_error=False)
        numbers.update((name, int(reply)) for name, reply in zip(asked, replies, strict=True) if _is_number(reply))
    return numbers


def _is_number(reply: object) -> bool:
    return isinstance(reply, bytes) and reply.isdigit()


@contextlib.contextmanager
def _screen(as_json: bool) -> Iterator[Callable[[list[_Seen], Scan], None]]:
    """Give a function that shows one look as JSON, on a screen that changes (where that is possible), or as text."""
    is_terminal = sys.stdout.isatty()
    console = _console() if is_terminal and not as_json else None
    if as_json:
        yield lambda seen, scan: print_json({"complete": scan.is_complete, "locks": [_object(one) for one in seen]})
    elif console is None:
        yield lambda seen, scan: print(_text(seen, scan, is_terminal), end="\n\n", flush=True)
    else:
        live, text = importlib.import_module("rich.live"), importlib.import_module("rich.text")
        with _ended_by_term(), live.Live(console=console, screen=True, auto_refresh=False) as screen:
            yield lambda seen, scan: screen.update(text.Text(_text(seen, scan, is_terminal)), refresh=True)


def _console() -> Any:
    """The terminal, if a screen on it can change; None if it cannot, or rich is not installed."""
    if importlib.util.find_spec("rich") is None:
        return None
    console: Any = importlib.import_module("rich.console").Console()
    return console if console.is_terminal and not console.is_dumb_terminal else None


@contextlib.contextmanager
def _ended_by_term() -> Iterator[None]:
    """Let SIGTERM, as of `timeout(1)`, end the block as an exception does: the terminal gets its screen back."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _object(seen: _Seen) -> dict[str, Any]:
    return {
        **asdict(seen.row),
        "name": text_of(seen.row.name),
        "seen_s": round(seen.looked_at - seen.since, 3),
        "acquisitions_per_s": seen.acquisitions_per_s,
        "changes_seen": seen.changes,
    }


def _text(seen: list[_Seen], scan: Scan, fits: bool) -> str:
    """A look as text; `fits`: no line is longer than those of the terminal."""
    head = time.strftime("%H:%M:%S") + ("" if scan.is_complete else ", other keys will be looked at next")
    rows = [_words(one) for one in seen]
    body = table(_HEAD, _fitting(rows, shutil.get_terminal_size().columns) if fits else rows) if rows else "no locks"
    return "\n".join(filter(None, (head, body, scan.hint())))


def _fitting(rows: list[tuple[str, ...]], columns: int) -> list[tuple[str, ...]]:
    """The rows, with names and holders cut so far that a table of them has so many columns."""
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    room = columns - sum(widths[2:]) - 2 * (len(_HEAD) - 1)
    holder = min(widths[1], max(room - widths[0], room // 2, _SHORTEST))
    name = max(room - holder, _SHORTEST)
    return [(_cut(row[0], name), _cut(row[1], holder), *row[2:]) for row in rows]


def _cut(word: str, width: int) -> str:
    """The begin and the end of a word that is too long: the pid stands at the end."""
    end = (width - 2) // 2
    return word if len(word) <= width else f"{word[: width - 2 - end]}..{word[-end:]}"


def _words(seen: _Seen) -> tuple[str, ...]:
    row = seen.row
    return (
        text_of(row.name),
        permits_text(row.held, row.limit) if row.holder is None else holder_text(row.holder),
        state_text(row.holder),
        _short(seen.looked_at - seen.since),
        "no end" if row.ttl_s is None else _short(row.ttl_s),
        "?" if row.waiting is None else str(row.waiting),
        "?" if seen.acquisitions_per_s is None else f"{seen.acquisitions_per_s:.1f}",
        str(seen.changes),
    )


def _short(seconds: float) -> str:
    """A time in seven characters."""
    if seconds < 1000:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 60_000 else f"{seconds / 3600:.0f} h"
