"""The C programs of the bench, compiled when they are needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.contestants import AbsentError


def compiled(source: Path, folder: Path) -> Path:
    """Compile a program.

    Args:
        source: its one file.
        folder: for the program.

    Returns:
        The path of the program.

    Raises:
        AbsentError: without a C compiler, or when the program does not compile on this system.
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
