"""Programs in C beside the bench, compiled on the spot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.contestants import AbsentError


def compiled(source: Path, folder: Path) -> Path:
    """Compile a program.

    Args:
        source: its one file.
        folder: where the program is put.

    Raises:
        AbsentError: without a C compiler, or on a system that the program is not for.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise AbsentError("no C compiler")
    program = folder / source.stem
    command = [compiler, "-std=gnu11", "-O2", "-Wall", "-Wextra", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AbsentError(f"{source.name} does not compile: {done.stderr}")
    return program
