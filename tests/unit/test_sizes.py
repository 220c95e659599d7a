"""No file and no function is longer than CONTRIBUTING.md allows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 500
MOST_LINES_OF_A_FUNCTION = 60
_LONGER = {"src/redislock_fast/_pipe/threads.pyx", "src/redislock_fast/_pipe/loop.pyx"}


def _files(*suffixes: str) -> Iterator[Path]:
    for folder in ("src", "tests", "bench"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def test_no_file_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in _files(".py", ".pyx", ".lua")}
    assert {file for file, count in lines.items() if count > MOST_LINES} == _LONGER


def test_no_function_is_too_long() -> None:
    functions = {
        f"{path.relative_to(ROOT)}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in _files(".py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: count for name, count in functions.items() if count > MOST_LINES_OF_A_FUNCTION} == {}
