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


def import_costs_ms(children: int) -> list[float]:
    """Milliseconds that `import redislock_fast` adds in a process that has imported redis.

    Timed within one process: the difference between two processes that import 300 ms of redis each is all noise.

    Args:
        children: how many interpreters to start.
    """
    import_s("redislock_fast")  # writes the bytecode
    return [1000 * import_s("redislock_fast", "redis") for _ in range(children)]
