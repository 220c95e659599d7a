"""A private PostgreSQL server: a cluster in a temporary folder, reached by a unix socket only.

Rules: it never touches a cluster of the machine's own. Where the tests run as root, which initdb
refuses, it runs as the user `postgres`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["PostgreSQL", "find_programs"]

_USER = "postgres"
_SETTINGS = "-c listen_addresses= -c fsync=off -c shared_buffers=8MB -c max_connections=20"


def find_programs() -> Path | None:
    """The folder with `initdb` and `pg_ctl`: where the PATH says, else Debian's newest; None where there is none."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    if on_path is not None:
        folders.append(Path(on_path).parent)
    return folders[-1] if folders else None


class PostgreSQL:
    """One server: `with PostgreSQL(programs) as server: psycopg.connect(server.conninfo)`."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="redislock_fast-"))
        self._owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam(_USER)
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            self._owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}
        self.conninfo = f"host={self._folder} user={_USER} dbname=postgres"

    def __enter__(self) -> PostgreSQL:
        try:
            self._run("initdb", "--auth=trust", f"--username={_USER}", "--no-sync", "--encoding=UTF8")
            self._run("pg_ctl", "start", "--wait", f"--options=-k {self._folder} {_SETTINGS}")
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run("pg_ctl", "stop", "--wait", "--mode=immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        output = self._folder / "output"
        with output.open("ab") as sink:  # not a pipe: the server would keep it open
            done = subprocess.run(
                [str(self._programs / program), f"--pgdata={self._folder}/data", *arguments],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=self._folder,
                timeout=60,
                **self._owner,
            )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed:\n{output.read_text()[-2000:]}")
