"""A plugin of pytest: `patch()` before any test is imported. At the end it writes how many locks of ours were made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import redislock_fast
import redislock_fast.asyncio

made = 0


def _count(lock_class: Any) -> None:
    init = lock_class.__init__

    def counted(self: Any, *args: Any, **settings: Any) -> None:
        global made  # noqa: PLW0603  # of the whole run
        made += 1
        init(self, *args, **settings)

    lock_class.__init__ = counted


def pytest_sessionfinish() -> None:
    """Write the number."""
    Path(os.environ["REDISLOCK_FAST_MADE"]).write_text(str(made))


for lock_class in (redislock_fast.Lock, redislock_fast.asyncio.Lock):
    _count(lock_class)
redislock_fast.patch()
