"""The choice between the compiled core and its Python twin.

`REDISLOCK_FAST_IMPLEMENTATION=compiled` or `=python` forces one. Without it, the compiled core is used where all of its
modules can be imported; otherwise the twin does all the work. `implementation` says which one it is, and a record at
INFO does when this is imported.

A compiled module is loaded once per process. Where the package is imported anew, after its modules were taken out of
`sys.modules`, the compiled core still uses the former ones: it tells those alone of a fork, and raises errors that the
new ones do not know. So it serves the first import only.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module
from types import ModuleType

from redislock_fast._pipe import resp_py
from redislock_fast._util import fork

_wanted = os.environ.get("REDISLOCK_FAST_IMPLEMENTATION", "")
if _wanted not in ("", "compiled", "python"):
    raise ImportError(f"REDISLOCK_FAST_IMPLEMENTATION is {_wanted!r}: it may be 'compiled' or 'python'")

_MODULES = ("forks", "threads", "loop", "resp")

compiled: ModuleType | None = None
encode = resp_py.encode
_lack = "there is no compiled core for this interpreter"
if _wanted != "python":
    try:
        _forks, _threads, _, _resp = (import_module(f"redislock_fast._pipe.{name}") for name in _MODULES)
    except Exception as error:  # a module built against other versions of the others raises another error
        if _wanted == "compiled":
            raise ImportError(
                "REDISLOCK_FAST_IMPLEMENTATION=compiled, but the compiled core is not here, or not all of it. Install "
                "a wheel, or build it: with a C compiler and Python's headers, 'pip install --no-cache-dir "
                "--force-reinstall --no-binary redislock_fast redislock_fast', or in a checkout 'pip install -e .'"
            ) from error
    else:
        if _forks.forget_parent is fork.forget_parent:
            compiled, encode = _threads, _resp.encode
            fork.count_by(_forks.generation)
        else:
            _lack = "the compiled core serves an earlier import of the package in this process"
            if _wanted == "compiled":
                raise ImportError(f"REDISLOCK_FAST_IMPLEMENTATION=compiled, but {_lack}")

implementation = "python" if compiled is None else "compiled"

_slow = "The pure-Python implementation is at work, which is slower:"
if compiled is not None:
    _text = "The compiled core is at work."
elif _wanted == "python":
    _text = f"{_slow} REDISLOCK_FAST_IMPLEMENTATION asks for it."
else:
    _text = f"{_slow} {_lack}."
logging.getLogger("redislock_fast").info(_text)
