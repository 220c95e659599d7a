"""The command line: `python -m bench COMMAND`. Where something is not installed, it says how to install it."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from bench.commands import main
    except ModuleNotFoundError as missing:
        print(
            f"python -m bench needs {missing.name}, which is not installed; "
            "in the checkout, `python -m pip install -e . --group bench` installs it (pip 25.1 or newer)",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(main())
