"""The switch between the compiled core and its Python twin.

`REDISLOCK_FAST_IMPLEMENTATION=compiled` or `=python` forces one; without it, the compiled core is taken where it was
built. Which one it is stands in `implementation`: a slow path is never silent.
"""

from __future__ import annotations

import os
from types import ModuleType

from redislock_fast import _core_py

__all__ = ["compiled", "encode", "implementation"]

_wanted = os.environ.get("REDISLOCK_FAST_IMPLEMENTATION", "")
if _wanted not in ("", "compiled", "python"):
    raise ImportError(f"REDISLOCK_FAST_IMPLEMENTATION is {_wanted!r}: it may be 'compiled' or 'python'")

compiled: ModuleType | None = None
encode = _core_py.encode
if _wanted != "python":
    try:
        from redislock_fast import _core as compiled
        from redislock_fast._core_resp import encode
    except ImportError as error:
        if _wanted == "compiled":
            raise ImportError(
                "REDISLOCK_FAST_IMPLEMENTATION=compiled, but the compiled core is not here. Install a wheel, or build "
                "it: with a C compiler and Python's headers, 'pip install --no-binary redislock_fast redislock_fast', "
                "or in a checkout 'pip install -e .'"
            ) from error

implementation = "python" if compiled is None else "compiled"
