"""Builds the compiled core; everything else is in pyproject.toml.

Where the core cannot be built as a whole, nothing of it is installed, and the pure-Python twin does all the work. A
wheel is pure then (`py3-none-any`): pip keeps the wheels that it builds, by their tags. With
`REDISLOCK_FAST_IMPLEMENTATION=compiled`, and for wheels (`CIBUILDWHEEL=1`), that is an error instead.

Three switches, read from the environment:

- ``REDISLOCK_FAST_DEBUG=1``: no optimisation, C assertions on.
- ``REDISLOCK_FAST_COVERAGE=1``: line tracing for coverage.py. Slow: never benchmark it. Code without the GIL is not
  traced: tracing takes the GIL, also under the core's mutex, for which other threads wait with the GIL.
- ``REDISLOCK_FAST_SANITIZE=address,undefined`` (or ``thread``): the compiler's sanitizers.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

DEMANDED = os.environ.get("REDISLOCK_FAST_IMPLEMENTATION") == "compiled" or os.environ.get("CIBUILDWHEEL") == "1"
DEBUG = os.environ.get("REDISLOCK_FAST_DEBUG") == "1"
COVERAGE = os.environ.get("REDISLOCK_FAST_COVERAGE") == "1"
SANITIZE = os.environ.get("REDISLOCK_FAST_SANITIZE", "")

# The core reads file descriptors with POSIX calls, and is for CPython. Elsewhere the twin does the work.
IS_POSSIBLE = sys.platform != "win32" and platform.python_implementation() == "CPython"


def say(why: object) -> None:
    """Print that the package is installed without the core; pip shows it with -v."""
    sys.stderr.write(
        f"redislock_fast: THE COMPILED CORE IS NOT BUILT ({why}). redislock_fast is installed as pure Python, which is "
        f'slower, and redislock_fast.implementation is "python".\n'
    )


class BuildCore(build_ext):
    """Builds the whole core, or nothing of it."""

    def run(self) -> None:
        """Build; if that fails, remove what has been built, now or before."""
        is_inplace = bool(self.inplace)
        try:
            super().run()
        except (CCompilerError, BaseError, OSError) as error:
            if DEMANDED:
                raise
            for self.inplace in (False, is_inplace):
                for extension in self.extensions:
                    Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
            self.extensions: list[Any] = []
            self._leave_pure()
            say(error)

    def _leave_pure(self) -> None:
        """Have the commands that come after this one treat the package as pure Python."""
        self.distribution.ext_modules = []
        wheel: Any = self.distribution.get_command_obj("bdist_wheel", create=False)
        if wheel is not None:
            wheel.root_is_pure = True


def core() -> list[Extension]:
    """The extension modules, as C."""
    from Cython.Build import cythonize  # noqa: PLC0415  # not needed where the core is not built

    compile_args = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    compile_args += ["-O0", "-g3", "-UNDEBUG"] if DEBUG else ["-O2", "-fstack-protector-strong"]
    link_args: list[str] = []
    macros: list[tuple[str, str | None]] = []
    if not (DEBUG or COVERAGE or SANITIZE):  # Python's own flags ask for -g: four fifths of each file
        compile_args += ["-g0"]
        link_args += ["-Wl,-s"] if sys.platform == "linux" else []  # Apple's linker does not know it
    if COVERAGE:
        macros += [("CYTHON_TRACE", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]
    if SANITIZE:
        flags = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"]
        compile_args += flags
        link_args += flags
    extensions = [
        Extension(
            f"redislock_fast._pipe.{name}",
            [f"src/redislock_fast/_pipe/{name}.pyx"],
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            define_macros=macros,
        )
        for name in ("forks", "threads", "loop", "resp")
    ]
    directives = {"language_level": 3, "freethreading_compatible": True, "linetrace": COVERAGE}
    cythonized: list[Extension] = cythonize(
        extensions, compiler_directives=directives, force=COVERAGE or DEBUG or bool(SANITIZE)
    )
    return cythonized


if not IS_POSSIBLE:
    here = f"{platform.python_implementation()} on {sys.platform}"
    if DEMANDED:
        sys.exit(f"redislock_fast: the compiled core is demanded, but {here} cannot have it")
    say(f"{here} cannot have it")

setup(ext_modules=core() if IS_POSSIBLE else [], cmdclass={"build_ext": BuildCore})
