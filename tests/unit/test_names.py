"""Names follow CONTRIBUTING.md."""

from __future__ import annotations

import ast

from tests.support.helpers import ROOT


def test_procedures_are_named_by_verbs() -> None:
    procedures = {
        f"{path.relative_to(ROOT)}::{node.name}": node.name.strip("_").partition("_")[0]
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and isinstance(node.returns, ast.Name) and node.returns.id == "Steps"
    }
    assert len(procedures) > 100
    assert [name for name, word in procedures.items() if word.endswith("ing")] == []
