"""No module keeps what gevent and eventlet replace in the standard library: they may patch it after the import.

That no object keeps it is tested in `integration/lock/test_patched_later.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import redislock_fast

PACKAGE = Path(redislock_fast.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
PATCHED = ("_thread", "select", "selectors", "socket", "threading", "time")

BOUND = {
    "_observe/profiling/recorder.py": ["threading.__file__"],
    "_util/patching.py": ["threading.local", "time.sleep", "threading.local"],  # as they were before a patch
    "_util/times.py": ["time.clock_gettime", "time.CLOCK_BOOTTIME", "time.monotonic"],  # which no library replaces
}
"""What may be bound when a module is imported."""


def evaluated_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node that is evaluated when its module is imported. No annotation is."""
    for name, value in ast.iter_fields(node):
        is_later = (name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))) or (
            name in ("annotation", "returns")
        )
        for child in [] if is_later else value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from evaluated_at_import(child)


@pytest.mark.parametrize("module", MODULES)
def test_module_looks_up_what_a_patch_replaces_when_it_uses_it(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports if node.module in PATCHED] == []
    bound = [
        ast.unparse(node)
        for node in evaluated_at_import(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PATCHED
    ]
    assert bound == BOUND.get(module, [])


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.pyx")), ids=lambda path: path.name)
def test_compiled_module_binds_nothing_that_a_patch_replaces(path: Path) -> None:
    imports = re.compile(rf"^ *from (?:{'|'.join(PATCHED)}) import .*", re.MULTILINE)
    assert imports.findall(path.read_text(encoding="utf-8")) == []
