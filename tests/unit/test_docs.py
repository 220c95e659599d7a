"""The Markdown pages: links lead to a file and a heading, files and names exist, and examples parse.

Links to other sites are not followed. `tests/integration/docs` runs the examples.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio.lock
import redis.lock

import redislock_fast
import redislock_fast.asyncio

_ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
_PAGES = sorted(path.relative_to(_ROOT).as_posix() for path in [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")])
_FOLDERS = (_ROOT, _ROOT / "src" / "redislock_fast", _ROOT / "src" / "redislock_fast" / "_protocol")

_PUBLIC_MODULES = sorted(
    path.relative_to(_ROOT / "src").as_posix()
    for path in (_ROOT / "src").rglob("*.py")
    if not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(_ROOT / "src").parts)
)

_SITE = "https://redislock-fast.github.io/redislock_fast/"
_OURS = "https://github.com/redislock-fast/redislock_fast/blob/main/"

_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
_FILE = re.compile(r"`(\w[\w./-]*(?:\.(?:py|pyx|pxd|lua|md)|/))`")
_NAME = re.compile(r"`(?=[A-Z_]*[a-z])([A-Za-z_][\w.]*)[`(]")  # not in capitals alone, as commands of servers are

_PUBLIC = ("", "asyncio", "fencing", "inspection", "otel", "profiling", "prometheus", "server", "testing")

# The changelog may name what is gone, and a tutorial names the files that its reader makes.
_OF_TODAY = [page for page in _PAGES if page != "CHANGELOG.md" and not page.startswith("docs/tutorials/")]
_OF_THE_CODE = [page for page in _PAGES if page == "docs/architecture.md" or page.startswith("docs/decisions/")]


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while anchor in anchors:
            number += 1
            anchor = f"{base}-{number}"
        anchors.add(anchor)
    return anchors


def _anchors_of(page: Path) -> set[str]:
    return _anchors(page.read_text(encoding="utf-8"))


@cache
def _words_of_the_code() -> set[str]:
    code = [path for ending in ("py", "pyx", "pxd", "lua") for path in (_ROOT / "src").rglob(f"*.{ending}")]
    return {word for path in code for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


def _object(path: str) -> Any:
    """A module of the package, or what a module of it has: "" is the package."""
    found: Any = redislock_fast
    for name in filter(None, path.split(".")):
        if not hasattr(found, name):
            importlib.import_module(f"{found.__name__}.{name}")
        found = getattr(found, name)
    return found


def _broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    text = page.read_text(encoding="utf-8")
    for link in _LINK.findall(_CODE.sub("", _FENCED.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in _anchors_of(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", _PAGES)
def test_relative_links_resolve(page: str) -> None:
    assert _broken_links(_ROOT / page) == []


@pytest.mark.parametrize("page", _OF_TODAY)
def test_files_that_are_named_exist(page: str) -> None:
    names = set(_FILE.findall((_ROOT / page).read_text(encoding="utf-8")))
    assert {name for name in names if not any((folder / name).exists() for folder in _FOLDERS)} == set()


@pytest.mark.parametrize("page", _OF_THE_CODE)
def test_names_are_those_of_the_code(page: str) -> None:
    text = _FILE.sub("", (_ROOT / page).read_text(encoding="utf-8"))
    names = {part for name in _NAME.findall(text) for part in name.split(".")}
    assert names - _words_of_the_code() == set()


@pytest.mark.parametrize("page", _PAGES)
def test_python_examples_parse(page: str) -> None:
    for example in _PYTHON.findall((_ROOT / page).read_text(encoding="utf-8")):
        ast.parse(textwrap.dedent(example))


@pytest.mark.parametrize("page", _PAGES)
def test_absolute_links_to_the_repository_lead_to_a_file(page: str) -> None:
    text = (_ROOT / page).read_text(encoding="utf-8")
    links = [found.partition("#") for found in re.findall(re.escape(_OURS) + r"([^\s)>]*)", text)]
    assert [path for path, _, _ in links if not (_ROOT / path).exists()] == []
    assert [(path, anchor) for path, _, anchor in links if anchor and anchor not in _anchors_of(_ROOT / path)] == []


@pytest.mark.parametrize("module", _PUBLIC_MODULES)
def test_docstrings_name_nothing_that_a_wheel_lacks(module: str) -> None:
    tree = ast.parse((_ROOT / "src" / module).read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    text = "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented))
    pages = {f"docs/{page}.md" for page in re.findall(re.escape(_SITE) + r"([\w/-]+)\.html", text)}
    assert re.findall(r"\bdocs/\S*|README|CONTRIBUTING", text) == []
    assert pages - set(_PAGES) == set()


@pytest.mark.parametrize("lock_class", [redislock_fast.Lock, redislock_fast.asyncio.Lock])
def test_help_begins_with_an_example(lock_class: type) -> None:
    _, example, *_ = (lock_class.__doc__ or "").split("\n\n")
    assert "with Lock(client," in example
    ast.parse(f"async def main():\n{example}")


def test_readme_is_short_and_its_links_work_on_pypi() -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    labels = set(re.findall(r"\]\[([^\]]+)\]", text))
    targets = dict(re.findall(r"^\[([^\]]+)\]: (\S+)$", text, re.MULTILINE))
    assert labels == set(targets)
    assert [link for link in [*targets.values(), *_LINK.findall(text)] if not link.startswith("https://")] == []
    assert len(text.splitlines()) <= 120


def test_first_page_of_the_site_has_the_code_and_the_figures_of_the_readme() -> None:
    readme, first = ((_ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md"))
    assert _PYTHON.findall(first) == _PYTHON.findall(readme)[:1]
    rows = re.compile(r"^\| ([^|\n]+) \| ([\d.]+(?: to [\d.]+)?) \|", re.MULTILINE)
    assert rows.findall(first) == rows.findall(readme)
    assert len(rows.findall(first)) == 6
    assert "(https://github.com/redislock-fast/redislock_fast)" in first


def test_page_says_of_free_threading_what_the_classifier_says() -> None:
    (status,) = re.findall(r"Free Threading :: \d - (\w+)", (_ROOT / "pyproject.toml").read_text())
    assert f"supported as {status.lower()}" in (_ROOT / "docs/reference/connections.md").read_text()


def test_each_public_name_is_described_once() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (_ROOT / "docs" / "reference" / "api").glob("*.md")]
    described = [
        name for page in pages for name in re.findall(r"^\.\. auto\w+:: redislock_fast\.(\S+)", page, re.MULTILINE)
    ]
    objects = [_object(name) for name in described]
    public = [_object(f"{module}.{name}".lstrip(".")) for module in _PUBLIC for name in _object(module).__all__]
    assert [one for one in public if not any(one is other for other in objects)] == []
    assert sorted(described) == sorted(set(described))


@pytest.mark.parametrize(
    ("ours", "theirs"), [(redislock_fast.Lock, redis.lock.Lock), (redislock_fast.asyncio.Lock, redis.asyncio.lock.Lock)]
)
def test_what_a_lock_has_beside_redis_pys_is_listed(ours: type, theirs: type) -> None:
    page = (_ROOT / "docs/explanation/differences.md").read_text(encoding="utf-8")
    additions = page.partition("## Additions\n")[2].partition("\n## ")[0]
    attributes = {
        "local",
        *inspect.signature(theirs).parameters,
    }  # which redis-py's class does not have, but its objects
    has = {name for name in dir(ours) if not name.startswith("_")} | set(inspect.signature(ours).parameters)
    assert has - attributes - set(dir(theirs)) - set(re.findall(r"`(\w+)[`(]", additions)) == set()


def test_check_finds_broken_links(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title`, twice\n\n# A `title`, twice\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-title-twice) [b](other.md#a-title-twice-1) [c](https://example.org/) [d](#here)\n\n## Here\n\n"
        "[gone](gone.md) [no anchor](other.md#a-title-twice-2) `[code](code.md)`\n\n```\n[code](code.md)\n```\n",
        encoding="utf-8",
    )
    assert _broken_links(page) == ["gone.md", "other.md#a-title-twice-2"]
