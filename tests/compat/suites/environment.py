"""The source distribution of a project, and an environment with what its tests need."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
from pathlib import Path

from tests.compat.suites.catalogue import Suite

__all__ = ["NotPreparedError", "prepare"]

_LIMIT_S = 600
_FOR_ALL = ("pytest", "pytest-timeout", "hiredis")


class NotPreparedError(Exception):
    """The project or what it needs could not be installed."""


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise NotPreparedError("\n".join([" ".join(map(str, command)), done.stdout[-2000:], done.stderr[-2000:]]))


def prepare(suite: Suite, folder: Path) -> tuple[Path, Path]:
    """Download and unpack the project, and install it with what its tests need.

    Args:
        suite: of the project.
        folder: for all this; made if it does not exist.

    Returns:
        The folder of the sources, and the interpreter of the environment.

    Raises:
        NotPreparedError: pip has failed.
    """
    python = folder / "venv" / "bin" / "python"
    sources = folder / "sources"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    wanted = f"{suite.project}=={suite.version}" if suite.version else suite.project
    _run(*pip, "download", "--no-deps", "--no-binary", suite.project, "--dest", sources, wanted)
    archive = next(sources.glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        if sys.version_info >= (3, 12):
            packed.extractall(sources, filter="data")
        else:
            packed.extractall(sources)  # of a project that is executed next
    root = next(path for path in sources.iterdir() if path.is_dir())
    _run(*pip, "install", archive, *_FOR_ALL, *suite.requirements)
    return root, python
