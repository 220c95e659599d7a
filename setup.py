"""Builds the Cython core; everything else is in pyproject.toml.

Three switches, read from the environment:

- ``REDISLOCK_FAST_DEBUG=1``: no optimisation, C assertions on.
- ``REDISLOCK_FAST_COVERAGE=1``: line tracing, so that coverage.py sees the core. Slow: never benchmark it. Code without
  the GIL is not traced: tracing takes the GIL, also under the core's mutex, for which others wait with the GIL.
- ``REDISLOCK_FAST_SANITIZE=address,undefined`` (or ``thread``): the compiler's sanitizers.
"""

import os
import sys

from setuptools import Extension, setup  # isort: skip  # must come before Cython
from Cython.Build import cythonize

DEBUG = os.environ.get("REDISLOCK_FAST_DEBUG") == "1"
COVERAGE = os.environ.get("REDISLOCK_FAST_COVERAGE") == "1"
SANITIZE = os.environ.get("REDISLOCK_FAST_SANITIZE", "")

compile_args: list[str] = []
link_args: list[str] = []
macros: list[tuple[str, str | None]] = []

if sys.platform != "win32":
    compile_args += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
    compile_args += ["-O0", "-g3", "-UNDEBUG"] if DEBUG else ["-O2", "-fstack-protector-strong"]
if COVERAGE:
    macros += [("CYTHON_TRACE", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]
if SANITIZE:
    flags = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"]
    compile_args += flags
    link_args += flags

extensions = [
    Extension(
        f"redislock_fast.{name}",
        [f"src/redislock_fast/{name}.pyx"],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
        define_macros=macros,
        # The pure-Python twins serve where there is no compiler; a wheel must have the core.
        optional=os.environ.get("CIBUILDWHEEL") != "1"
        and os.environ.get("REDISLOCK_FAST_IMPLEMENTATION") != "compiled",
    )
    for name in ("_core", "_core_loop", "_core_resp", "_core_tally")
]

setup(
    # The core reads file descriptors with POSIX calls; elsewhere the pure-Python twin does the work.
    ext_modules=[]
    if sys.platform == "win32"
    else cythonize(
        extensions,
        compiler_directives={
            "language_level": 3,
            "freethreading_compatible": True,
            "linetrace": COVERAGE,
        },
        force=COVERAGE or DEBUG or bool(SANITIZE),
    ),
)
