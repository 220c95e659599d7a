"""The tutorials work in the consoles that they tell their readers to start, where each block is pasted.

Rules: these are the consoles of the interpreter that runs the tests, which read from a pipe. As those of Python 3.12
and older in a terminal, they want an empty line after an indented block, and print the value of each expression.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from redislock_fast.server import Server
from tests.integration.docs.test_snippets import Snippet, snippets_of
from tests.support.helpers import ROOT

OPTIONS = {"threads": ["-i", "-q"], "asyncio": ["-m", "asyncio"], "semaphores": ["-i", "-q"]}
"""Of the interpreter: `-i` is not needed where it reads from a terminal, and `-q` switches its greeting off."""

PROMPTS = re.compile(r"^(?:(?:>>>|\.\.\.) )+", re.MULTILINE)


def console_snippets(page: Path) -> list[Snippet]:
    """The examples that the reader pastes, not those that the reader saves in a file."""
    lines = page.read_text(encoding="utf-8").splitlines()
    snippets = snippets_of(page)
    above = [len(snippet.source) - len(snippet.source.lstrip("\n")) for snippet in snippets]
    return [snippet for snippet, at in zip(snippets, above, strict=True) if "Save this as" not in lines[at - 3]]


def typed_into(options: list[str], typed: str, server: Server) -> tuple[str, str]:
    """What a console prints, without prompts, and what it says beside that: greetings, logs and errors."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"REDIS_URL": server.url, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, *options],
        input=typed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return PROMPTS.sub("", done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_tutorial_may_be_pasted_into_the_console_that_it_starts(name: str, valkey: Server) -> None:
    if name == "asyncio" and sys.version_info >= (3, 13):
        pytest.skip("this console takes statements of several lines from a terminal alone")
    page = ROOT / "docs" / "tutorials" / f"{name}.md"
    snippets = console_snippets(page)
    pasted = "".join(snippet.source.strip("\n") + "\n\n" for snippet in snippets)  # and Enter twice
    prints = "".join(snippet.prints or "" for snippet in snippets)
    printed, complaint = typed_into(OPTIONS[name], pasted, valkey)
    assert (printed, "Error" in complaint) == (prints, False), complaint


def test_console_complains_where_an_empty_line_is_missing(valkey: Server) -> None:
    typed = "if True:\n    print(1)\nprint(2)\n\nprint(3)\n3 + 1\n"
    printed, complaint = typed_into(OPTIONS["threads"], typed, valkey)
    assert (printed, "Error" in complaint) == ("3\n4\n", True), complaint
