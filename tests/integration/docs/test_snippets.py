"""The examples of the README and the site run, against a real server, and print what the page says.

The `python` blocks of a page run in order, in one namespace. A `text` block right behind one is what it prints. A block
behind the comment `<!-- not run: REASON -->` is only parsed. One behind `<!-- from examples/FILE.py -->` is a part of
that program, which `test_examples.py` runs.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
import redis
import redis.asyncio

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.conftest import Servers
from tests.integration.docs import given

_ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
_PAGES = [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")]
_SNIPPET = re.compile(
    r"(?:<!-- not run: (?P<reason>[^\n]*) -->\s*)?(?:<!-- from (?P<example>examples/\w+\.py) -->\s*)?"
    r"^```python\n(?P<source>.*?)^```\n"
    r"(?:[^\n`]*\n)?(?:prints\n\n)?(?:```text\n(?P<prints>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


class Snippet(NamedTuple):
    """One example of a page."""

    source: str
    """Behind as many empty lines as stand above it on the page, so that a traceback names the page's line."""
    prints: str | None
    reason: str | None
    """Why it is not run."""
    example: str | None
    """The program that it is a part of, which another test runs."""


def snippets_of(page: Path) -> list[Snippet]:
    """The examples of a page, in order."""
    text = page.read_text(encoding="utf-8")
    snippets: list[Snippet] = []
    for found in _SNIPPET.finditer(text):
        lines_above = text.count("\n", 0, found.start("source"))
        snippets.append(Snippet("\n" * lines_above + found["source"], *found.group("prints", "reason", "example")))
    return snippets


_WITH_SNIPPETS = {page.relative_to(_ROOT).as_posix(): found for page in _PAGES if (found := snippets_of(page))}


class World:
    """Runs the snippets of a page, those that await in one event loop."""

    def __init__(self, page: str, servers: Servers) -> None:
        self._page = page
        self._server = servers.get("valkey")
        self._loop = asyncio.new_event_loop()
        self._sync_client = redis.Redis(port=self._server.port)
        self._async_client = redis.asyncio.Redis(port=self._server.port)
        self._names: dict[str, Any] = {"__name__": "__main__", "port_of": partial(_port_of, servers)}
        self._run(given.BEFORE.get(page, ""))

    def run(self, snippet: Snippet) -> None:
        """Run one, with the `client` and the `Lock` that the text around it speaks of."""
        port = f"port={self._server.port}"
        source = snippet.source.replace("Redis()", f"Redis({port})")  # the server at the default port
        self._run(source.replace("Redis(host=host)", "Redis(port=port_of(host))"))  # one of several servers

    def check(self) -> None:
        """Check what the snippets of the page have done."""
        self._run(given.AFTER.get(self._page, ""))

    def _run(self, source: str) -> None:
        code = compile(source, str(_ROOT / self._page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        awaits = bool(code.co_flags & inspect.CO_COROUTINE)
        self._names["client"] = self._async_client if awaits else self._sync_client
        self._names["Lock"] = redislock_fast.asyncio.Lock if awaits else redislock_fast.Lock
        if awaits:
            self._loop.run_until_complete(self._await(code))
        else:
            exec(code, self._names)

    async def _await(self, code: CodeType) -> None:
        await eval(code, self._names)

    def close(self) -> None:
        """Close what the snippets have left open, and take back what they have patched and set."""
        redislock_fast.unpatch()
        logging.getLogger("redislock_fast.calls").setLevel(logging.NOTSET)
        for value in [*self._names.values(), self._sync_client, self._async_client]:
            if isinstance(value, redis.Redis):
                value.close()
            elif isinstance(value, redis.asyncio.Redis):
                self._loop.run_until_complete(value.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


def _port_of(servers: Servers, host: str) -> int:
    """The port of one of several servers, on which earlier tests have left nothing."""
    server = servers.get("valkey", " abcde".index(host))
    with redis.Redis(port=server.port) as client:
        client.flushall()
    return server.port


@contextlib.contextmanager
def _world(page: str, servers: Servers) -> Iterator[World]:
    world = World(page, servers)
    try:
        yield world
    finally:
        world.close()


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if "tutorials" in page else []) for page in _WITH_SNIPPETS]
)
def test_snippets_run_and_print_what_the_page_says(
    page: str, servers: Servers, valkey: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", valkey.url)
    if any("fakeredis" in snippet.source for snippet in _WITH_SNIPPETS[page]):
        pytest.importorskip("lupa")  # CPython 3.13 without the GIL has no fakeredis[lua]
    with _world(page, servers) as world:
        for snippet in _WITH_SNIPPETS[page]:
            if snippet.reason is None and snippet.example is None:
                world.run(snippet)
                printed = capsys.readouterr().out
                assert snippet.prints in {None, printed}
        world.check()


@pytest.mark.parametrize("page", _WITH_SNIPPETS)
def test_snippets_of_a_program_stand_in_it(page: str) -> None:
    for snippet in _WITH_SNIPPETS[page]:
        if snippet.example is not None:
            assert snippet.source.strip("\n") in (_ROOT / snippet.example).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", _WITH_SNIPPETS)
def test_snippets_import_what_type_checkers_do_not_find_in_redis_py(page: str) -> None:
    whole = [snippet.source for snippet in _WITH_SNIPPETS[page] if snippet.example is None]
    nodes = [node for source in whole for node in ast.walk(ast.parse(source))]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    of_redis_py = {name for name in used if re.fullmatch(r"redis\.\w+", name)}
    assert of_redis_py - {f"redis.{name}" for name in redis.__all__} - imported == set()


def test_snippets_that_are_not_run_are_few() -> None:
    not_run = {page: [s.reason for s in found if s.reason] for page, found in _WITH_SNIPPETS.items()}
    assert {page: reasons for page, reasons in not_run.items() if reasons} == given.NOT_RUN
