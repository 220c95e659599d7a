"""Whatever a server writes, the compiled pipes tell what hiredis makes of it: libFuzzer searches, led by coverage.

`make fuzz` builds the core with libFuzzer's counters and AddressSanitizer, and runs this with a folder for inputs, in
which it begins with the streams of `test_hostile.py`. An input is a stream behind the places at which it is cut. One
that crashes, that the pipes tell otherwise, or that takes two gigabytes ends the run, and is kept in a file; with the
file in place of the folder, this program plays it again.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from redislock_fast._pipe.loop_py import new_pipe
from tests.pipe.test_hostile import CASES, REPLIES, cut, told_by_a_loop, told_by_hiredis, told_by_threads
from tests.support.pipes import MESSAGES, compiled_pipe, new_pair

_CUTS = bytes([3, 7, 32, 80])


def play(data: bytes) -> None:
    """Play one input on both pipes."""
    stream = data[len(_CUTS) :]
    pieces = cut(stream, data[: len(_CUTS)])
    expected = told_by_hiredis(stream)
    assert expected == told_by_threads(partial(new_pair, compiled_pipe, over_tls=False), pieces)
    assert expected == told_by_a_loop(new_pipe, "asyncio", pieces)


def write_first(folder: Path) -> None:
    """Write the inputs to begin with."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate([*REPLIES, *MESSAGES, *CASES]):
        if len(data) < 1000:
            (folder / f"{number:03}").write_bytes(_CUTS + b":1\r\n" + data + b"_\r\n")


def main() -> None:
    """Fuzz, with libFuzzer's arguments."""
    atheris: Any = importlib.import_module("atheris")
    if not Path(sys.argv[1]).is_file():
        write_first(Path(sys.argv[1]))
    atheris.Setup(sys.argv, play)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
