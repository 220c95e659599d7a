"""Programs whose clock of the day is set forward and back while they run: servers, and clients."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


class SteppedClock:
    """A clock of the day that a test sets: for all programs that are started by `wrapped` or with `environment`.

    Args:
        folder: for what it needs.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler here: the clock of a server cannot be set")
        library = folder / "stepped.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
        subprocess.run(command, check=True)  # a file of ours
        self._folder = folder
        self._shared = folder / "offset"
        self._shared.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._shared)}

    def wrapped(self, binary: Path) -> str:
        """A program that starts this one with the clock."""
        script = self._folder / "server"
        words = " ".join(f"{name}={value}" for name, value in self.environment.items())
        script.write_text(f'#!/bin/sh\n{words} exec {binary} "$@"\n')
        script.chmod(0o755)
        return str(script)

    def set_to(self, seconds: float) -> None:
        """Set the clock to so many seconds after the true time of day, or before it."""
        with self._shared.open("r+b") as shared:
            shared.write(int(seconds * 1e6).to_bytes(8, "little", signed=True))
