"""Installing from the source distribution: without a compiler, with one that fails halfway, where the core is demanded.

Rules: nothing is fetched from the network: setuptools, Cython, pip and what the package depends on are this
interpreter's own, and each installation goes into a fresh environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

import pytest

from redislock_fast.server import Server
from tests.support.helpers import ROOT

LIMIT_S = 110
VARIABLE = "REDISLOCK_FAST_IMPLEMENTATION"
WARNING = "THE COMPILED CORE IS NOT BUILT"
SUFFIX = EXTENSION_SUFFIXES[0]

_needed = [name for name in ("pip", "setuptools", "Cython") if find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(_needed), reason=f"not at hand: {', '.join(_needed)}"),
    pytest.mark.skipif(not ROOT.joinpath("setup.py").is_file(), reason="only the tests are here"),
]


def _run(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter, or another one that is named first, without what the environment says of building."""
    dropped = (VARIABLE, "PYTHONPATH", "CIBUILDWHEEL", "CC")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.run(
        [*map(str, arguments)],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what the source distribution is made from, in which nothing was built."""
    folder = tmp_path / "source"
    unbuilt = shutil.ignore_patterns("*.so", "*.c", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=unbuilt)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        if ROOT.joinpath(name).is_file():
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def sdist(source: Path, tmp_path: Path) -> Path:
    """The source distribution."""
    code = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"
    built = _run(sys.executable, "-c", code, tmp_path, folder=source)
    assert built.returncode == 0, built.stderr
    return tmp_path / built.stdout.split()[-1]


class Environment:
    """A fresh environment that finds, behind what is installed into it, what this interpreter has."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self._folder = folder
        self._python = folder / "bin" / "python"
        (self._site,) = folder.glob("lib/python*/site-packages")
        self._site.joinpath("ours.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))

    def install(self, what: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """Have pip install a source distribution."""
        pip = [sys.executable, "-m", "pip", "--python", self._python, "install", "-v", "--no-cache-dir", "--no-index"]
        options = ["--no-deps", "--no-build-isolation", "--ignore-installed"]
        return _run(*pip, *options, what, folder=self._folder, **environment)

    def run(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run code."""
        return _run(self._python, "-W", "error", "-c", code, folder=self._folder)

    def extensions(self) -> list[Path]:
        """The extension modules of the package."""
        return list(self._site.glob("redislock_fast/**/*.so"))

    @property
    def package(self) -> Path:
        """The folder of the installed package."""
        return self._site / "redislock_fast"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture
def fails_at(tmp_path: Path) -> Callable[[str], str]:
    """Makes compilers that write files without looking at what they compile, and fail for one module."""

    def make(module: str) -> str:
        compiler = tmp_path / "cc"
        compiler.write_text(
            f"#!{sys.executable}\n"
            f"import pathlib, sys\n"
            f"if any('/{module}.c' in argument for argument in sys.argv):\n"
            f"    sys.exit(1)\n"
            f"pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('')\n"
        )
        compiler.chmod(0o755)
        return str(compiler)

    return make


def test_with_no_compiler_on_the_path_pure_python_is_installed_and_works(
    sdist: Path, environment: Environment, tmp_path: Path, valkey: Server
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert [None] * 3 == [shutil.which(compiler, path=str(empty)) for compiler in ("gcc", "cc", "clang")]
    installed = environment.install(sdist, PATH=str(empty))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert WARNING in installed.stdout + installed.stderr
    shown = environment.run(
        f"import pathlib, redis, redislock_fast\n"
        f"client = redis.Redis(port={valkey.port})\n"
        f"with redislock_fast.Lock(client, 'name', timeout=10) as lock:\n"
        f"    print(redislock_fast.implementation, lock.owned())\n"
        f"print(lock.locked(), pathlib.Path(redislock_fast.__file__).parent)\n"
    )
    assert (["python", "True", "False", str(environment.package)], "") == (shown.stdout.split(), shown.stderr)


def test_without_a_compiler_a_core_that_is_demanded_is_an_error(sdist: Path, environment: Environment) -> None:
    installed = environment.install(sdist, CC="false", **{VARIABLE: "compiled"})
    assert installed.returncode != 0
    assert not environment.package.exists()


def test_of_a_core_that_is_built_in_part_nothing_is_installed(
    sdist: Path, environment: Environment, fails_at: Callable[[str], str]
) -> None:
    installed = environment.install(sdist, CC=fails_at("resp"))
    assert installed.returncode == 0, installed.stdout + installed.stderr
    assert WARNING in installed.stdout + installed.stderr
    assert [] == environment.extensions()
    shown = environment.run("import redislock_fast; print(redislock_fast.implementation)")
    assert ("python", "") == (shown.stdout.strip(), shown.stderr)


@pytest.mark.parametrize("fails", ["threads", "resp"])
def test_wheel_without_the_core_is_pure(source: Path, fails_at: Callable[[str], str], fails: str) -> None:
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    built = _run(sys.executable, "-c", code, source / "dist", folder=source, CC=fails_at(fails))
    assert (built.returncode, WARNING in built.stderr) == (0, True)
    [wheel] = source.glob("dist/*.whl")
    assert "py3-none-any" == wheel.stem.split("-", 2)[2]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [tags] = [name for name in names if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: true" in archive.read(tags).decode()
    assert ([], True) == ([name for name in names if ".so" in name], "redislock_fast/_pipe/threads_py.py" in names)


def test_build_that_fails_in_place_removes_what_was_built_before(source: Path, fails_at: Callable[[str], str]) -> None:
    package = source / "src" / "redislock_fast" / "_pipe"
    for name in ("threads", "loop", "resp"):
        package.joinpath(name + SUFFIX).write_bytes(b"built before")
    built = _run(sys.executable, "setup.py", "build_ext", "--inplace", "--force", folder=source, CC=fails_at("resp"))
    assert (built.returncode, WARNING in built.stderr) == (0, True)
    assert [] == [*package.glob("*.so"), *source.glob("build/lib*/**/*.so")]


@pytest.mark.parametrize(("wanted", "fails"), [("", False), ("compiled", True)])
def test_pypy_gets_a_pure_wheel_without_trying_to_build_the_core(source: Path, wanted: str, fails: bool) -> None:
    code = (
        "import platform, runpy, sys\n"
        "platform.python_implementation = lambda: 'PyPy'\n"
        "sys.modules['Cython'] = None\n"
        "sys.argv = ['setup.py', 'bdist_wheel']\n"
        "runpy.run_path('setup.py')\n"
    )
    built = _run(sys.executable, "-c", code, folder=source, **{VARIABLE: wanted})
    assert (fails, "PyPy on" in built.stderr) == (built.returncode != 0, True)
    assert [] == list(source.glob("**/*.so"))
    assert ([] if fails else ["py3-none-any"]) == [wheel.stem.split("-", 2)[2] for wheel in source.glob("dist/*.whl")]
