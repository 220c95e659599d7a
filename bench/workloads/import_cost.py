"""The time that importing the package adds to a process that imports redis.

Every figure comes from a new interpreter, which measures the import alone.
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
    """Measure the seconds that an import takes in a new interpreter.

    Args:
        module: the one to import.
        after: modules that are imported before the clock starts.
    """
    child = [sys.executable, "-c", _CHILD, module, *after]
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    return float(subprocess.run(child, capture_output=True, check=True, env=environment).stdout)


def import_costs_ms(children: int) -> list[float]:
    """Measure the milliseconds that `import redislock_fast` adds in a process that has imported redis.

    The import is timed within one process: between two processes, the noise of importing redis is larger.

    Args:
        children: how many interpreters to start.
    """
    import_s("redislock_fast")  # so that the bytecode is written
    return [1000 * import_s("redislock_fast", "redis") for _ in range(children)]
