"""The bench of the scripts: each row is measured, on a short queue."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench import scripts


def test_command_prints_and_saves(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    scripts.add_arguments(parser)
    saved = tmp_path / "figures.json"
    assert scripts.run(parser.parse_args(["--waiters", "200", "--count", "3", "--json", str(saved)])) == 0
    rows = json.loads(saved.read_text())["results"]
    assert [(row["script"], row["queue"]) for row in rows] == [
        (story.script, story.queue) for story in scripts._stories(200)
    ]
    assert all(0 < row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in rows)
