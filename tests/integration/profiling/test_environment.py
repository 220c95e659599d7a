"""`REDISLOCK_PROFILE`: a profile of a whole process, written when it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redislock_fast.server import Server
from tests.support.helpers import run_script

PROGRAM = """
import sys, redis
from redislock_fast import Lock
for name in ("a", "b"):
    with Lock(redis.Redis(port=int(sys.argv[1])), name, timeout=60):
        pass
"""
FORKING = (
    PROGRAM
    + """
import os
if os.fork() == 0:
    with Lock(redis.Redis(port=int(sys.argv[1])), "child", timeout=60):
        pass
else:
    os.wait()
"""
)
IS_IMPORTED = "import sys, redislock_fast; print('redislock_fast.profiling' in sys.modules)"


def test_the_table_of_a_process_goes_to_stderr(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDISLOCK_PROFILE", "1")
    ended = run_script(PROGRAM, valkey.port)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "2 locks, 2 acquisitions" in ended.stderr.splitlines()[0]
    assert "<string>:5 <module>" in ended.stderr


def test_the_report_of_each_process_goes_to_a_file(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REDISLOCK_PROFILE", str(tmp_path / "locks-{pid}.json"))
    ended = run_script(FORKING, valkey.port)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    reports = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(reports) == {f"locks-{report['pid']}.json" for report in reports.values()}
    names = sorted(sorted(lock["name"] for lock in report["locks"]) for report in reports.values())
    assert names == [["a", "b"], ["child"]]


@pytest.mark.parametrize("wanted", [None, "", "0"])
def test_without_a_wish_the_profiler_is_not_imported(wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDISLOCK_PROFILE", raising=False)
    if wanted is not None:
        monkeypatch.setenv("REDISLOCK_PROFILE", wanted)
    ended = run_script(IS_IMPORTED)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


def test_a_nonsensical_wish_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDISLOCK_PROFILE", "true")
    ended = run_script(IS_IMPORTED)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: REDISLOCK_PROFILE is 'true': it may be '1', '0' or a path that ends with '.json'"
    )
