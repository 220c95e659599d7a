"""What importing the package costs a process that imports redis anyway.

Rules: every figure comes from a fresh interpreter, which times only the import itself. Must not
know: locks or servers.
"""

from __future__ import annotations

import os
import subprocess
import sys

_CHILD = """
import sys, time
for module in sys.argv[2:]:
    __import__(module)
began = time.perf_counter()
__import__(sys.argv[1])
print(time.perf_counter() - began)
"""


def import_s(module: str, *after: str) -> float:
    """Seconds that importing the module takes in a fresh interpreter.

    Args:
        module: what to import.
        after: modules that are imported before the clock starts.
    """
    child = [sys.executable, "-c", _CHILD, module, *after]
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    return float(subprocess.run(child, capture_output=True, check=True, env=environment).stdout)


def import_costs_ms(pairs: int) -> list[float]:
    """Milliseconds that `import redislock_fast` takes over `import redis`.

    Args:
        pairs: how many pairs of interpreters to start, one for each of the two imports.

    Returns:
        The difference within each pair.
    """
    import_s("redislock_fast")  # writes the bytecode
    return [1000 * (import_s("redislock_fast") - import_s("redis")) for _ in range(pairs)]
