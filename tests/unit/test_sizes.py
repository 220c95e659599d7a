"""No function is longer than CONTRIBUTING.md allows."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES_OF_A_FUNCTION = 60


def test_no_function_is_too_long() -> None:
    functions = {
        f"{path.relative_to(ROOT)}::{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for folder in ("src", "tests", "bench")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: count for name, count in functions.items() if count > MOST_LINES_OF_A_FUNCTION} == {}
