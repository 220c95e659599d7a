"""The clock of leases, and the documented allowance for drift."""

from __future__ import annotations

import time
from functools import partial

clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


def drift_s(lease_s: float) -> float:
    """By how many seconds sooner than the server a holder believes its lease to end."""
    return 0.01 * lease_s + 0.002
