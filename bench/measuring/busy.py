"""Says when other programs keep the machine busy, since every figure is then worse than the machine can do."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.measuring import report

_LOOK_S = 0.3
_BUSY_SHARE = 0.15
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait: proc(5)


def warn_if_busy() -> None:
    """Say on stderr how many processors other programs use, where that is more than 15 % of all. Linux only."""
    if not _STAT.exists():
        return
    before = _jiffies()
    time.sleep(_LOOK_S)
    share = busy_share(before, _jiffies())
    if share > _BUSY_SHARE:
        used = share * (os.cpu_count() or 1)
        report.say(
            f"the machine is busy: other programs use {used:.1f} of {os.cpu_count()} processors; "
            "figures are lower than they can be, ratios less exact"
        )


def busy_share(before: list[int], after: list[int]) -> float:
    """The share of all processors' time that was not idle.

    Args:
        before: the counters in the first line of `/proc/stat`, in jiffies.
        after: the same, later.
    """
    spent = [later - earlier for earlier, later in zip(before, after, strict=True)]
    return 1 - sum(spent[index] for index in _IDLE) / max(sum(spent), 1)


def _jiffies() -> list[int]:
    return list(map(int, _STAT.read_text().splitlines()[0].split()[1:9]))  # later ones are counted in user already
