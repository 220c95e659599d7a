"""The programs of `examples/` run against real servers, and print what they should."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from redislock_fast.server import Server
from tests.conftest import Servers

_EXAMPLES = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists()) / "examples"

_BESIDE = "new beside old: False\nold beside new: False\nnew alone: True\n"
_PRINTS = {
    "apscheduler_app": ("apscheduler", "runs: ['nightly']\n"),
    "celery_app": ("celery", "synchronised: ['acme', 'acme']\nthe second had to wait: True\n"),
    "django_app": ("django", "reserved: [0, 1, 2]\nsold out: 2\n"),
    "fastapi_app": ("fastapi", "at once: [200, 409]\nafterwards: 200\n"),
    "flask_app": ("flask", "first: 202\nsecond: 409\nafterwards: 202\nreports: ['acme', 'acme']\n"),
    "from_pottery": ("pottery", _BESIDE),
    "from_python_redis_lock": ("redis_lock", _BESIDE),
    "from_redlock_py": ("redlock", _BESIDE),
    "gunicorn_app": ("gunicorn", "each number once: True\n"),
    "llm_gateway": ("redis", "while it is full: 429\nanswered: 10\nmost at once: 3\n"),
    "roll_out": (
        "redis",
        "ours beside redis-py's: False\nredis-py's beside ours: False\nredis-py's alone: True\nours alone: True\n",
    ),
}
"""What each program needs, and prints."""

_ON_SEVERAL_SERVERS = {"from_pottery", "from_redlock_py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", _PRINTS)
def test_example_prints_what_it_should(name: str, servers: Servers) -> None:
    needs, prints = _PRINTS[name]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    urls = [servers.get("valkey", number).url for number in ((1, 2, 3) if name in _ON_SEVERAL_SERVERS else (0,))]
    done = subprocess.run(
        [sys.executable, str(_EXAMPLES / f"{name}.py")],
        env={**os.environ, "REDIS_URL": " ".join(urls)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.returncode) == (prints, 0), done.stderr


@pytest.mark.slow
def test_cron_job_runs_its_program_once_a_night(valkey: Server) -> None:
    manifest = (_EXAMPLES / "kubernetes" / "cronjob.yaml").read_text(encoding="utf-8")
    command = [word.strip('"') for word in re.findall(r"^ {16}- (\S+)", manifest, re.MULTILINE)]
    options = command[1 : command.index("--") + 1]
    program = [sys.executable, "-c", "print('report')"]
    for prints in ("report\n", ""):
        done = subprocess.run(
            [sys.executable, "-m", "redislock_fast", *options, *program],
            env={**os.environ, "REDISLOCK_URL": valkey.url},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (done.stdout, done.returncode) == (prints, 0), done.stderr
    assert command[0] == "redislock"


def test_every_example_is_run() -> None:
    assert {path.stem for path in _EXAMPLES.glob("*.py")} == set(_PRINTS)
