"""What must hold in every history, and what each class of fault may break.

Each rule looks at a whole history and gives each breach of it, with the time in which a fault would explain the breach.
`check` leaves out those that a fault explains, by the table `ALLOWED`. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.torture.history import SECOND, Fault, History
from tests.torture.progress import (
    all_are_answered,
    limits_are_kept,
    losses_are_told,
    no_error_without_a_fault,
    no_key_is_orphaned,
    no_waiter_is_forgotten,
    nothing_is_left,
    turns_are_kept,
)
from tests.torture.safety import LONGEST_LEASE_S, exclusion, fences_rise, no_update_is_lost, nobody_takes_what_is_held
from tests.torture.violations import Violation

__all__ = ["ALLOWED", "RULES", "SAFETY", "check"]

LONGEST_CHECK_S = 4.5
"""A waiter that missed its message finds out by its health check after so long at most: four times `sleep`, 1 s here,
and a round trip."""

LONGEST_PAUSE_S = 4.0
"""A cleanup asks the server again so soon after a fault, however often it has asked in vain: its pauses double."""

RULES: tuple[Callable[[History], Iterator[Violation]], ...] = (
    exclusion,
    fences_rise,
    no_update_is_lost,
    nobody_takes_what_is_held,
    no_waiter_is_forgotten,
    no_key_is_orphaned,
    turns_are_kept,
    limits_are_kept,
    all_are_answered,
    losses_are_told,
    no_error_without_a_fault,
    nothing_is_left,
)

SAFETY = frozenset({"exclusion", "fence", "lost update", "taken", "crash"})
"""The rules that hold at any speed; the others are about times, and want a machine that does nothing else."""

_ORPHANED = {"orphan": LONGEST_LEASE_S + 1.0}
_DELAYED = {"forgotten": LONGEST_CHECK_S, "turn": LONGEST_CHECK_S, "error": 1.0, "left task": LONGEST_PAUSE_S}
_DELAYED |= _ORPHANED
_LOST_KEY = {"exclusion": LONGEST_LEASE_S, "taken": LONGEST_LEASE_S, "forgotten": LONGEST_CHECK_S}
_LOST_KEY |= {"turn": LONGEST_CHECK_S, "error": 0.5}  # an acquire that has yet to get its fence raises LockLostError

ALLOWED: dict[str, dict[str, float]] = {
    "server stopped": _DELAYED,
    "server killed": _DELAYED,
    "clients paused": _DELAYED,
    "clients killed": _DELAYED,
    "rights taken": _DELAYED,
    "out of memory": _DELAYED,
    "no replicas": _DELAYED,
    "link cut": _DELAYED,
    "reply lost": _DELAYED,
    "request lost": _DELAYED,
    "link half open": _DELAYED,
    "link slow": _DELAYED,
    "link delayed": {},
    "messages lost": _DELAYED,
    "late bytes": _DELAYED,
    "authentication lost": _DELAYED,
    "scripts flushed": {},
    "slot moved": _DELAYED,
    "replica promoted": _DELAYED,
    "key deleted": _LOST_KEY,
    "all deleted": {**_LOST_KEY, "fence": LONGEST_LEASE_S, "lost update": LONGEST_LEASE_S},
    "primary split": {**_DELAYED, **_LOST_KEY, "fence": LONGEST_LEASE_S, "lost update": LONGEST_LEASE_S, "error": 1.0},
    "client stopped": {"limit": 0.0, "told": 0.0, "turn": LONGEST_CHECK_S, "forgotten": 0.5, "error": 0.5, **_ORPHANED},
    "client killed": {"turn": LONGEST_LEASE_S, "left queue": 0.0, **_ORPHANED},
    "fork": {},
    "interrupt": {"turn": LONGEST_LEASE_S, "hang": 0.0, **_ORPHANED},
    "loop ended": {},
    "loop closed": {"turn": LONGEST_LEASE_S, "hang": 0.0, "left queue": 0.0, **_ORPHANED},
}
"""For each class of fault the rules that may be broken in its time, and for how many seconds after its end.

The queue of waiters that have died ends by its ttl, after an hour. A caller that is interrupted while it notes
something, or whose loop is closed over it, leaves a gap in the record, which looks like a hang.
"""

ALLOWED_TO_REDIS_PY = frozenset({"taken", "error", "forgotten", "limit", "turn"})
"""What redis-py's own lock may break while any fault lasts: it takes its own second request for another's, and it has
no time limit on the socket."""


def _explains(fault: Fault, violation: Violation) -> bool:
    if fault.names and violation.name and violation.name not in fault.names:
        return False
    is_elsewhere = fault.processes and violation.processes and not fault.processes & violation.processes
    if is_elsewhere and violation.rule != "turn":  # a lock that is handed to a frozen link is free after its ttl
        return False
    settles_s = ALLOWED[fault.kind].get(violation.rule)
    if settles_s is None and "redis-py" in violation.by and violation.rule in ALLOWED_TO_REDIS_PY:
        settles_s = LONGEST_LEASE_S
    if settles_s is None:
        return False
    return fault.since <= violation.until and violation.since <= fault.until + int(settles_s * SECOND)


def check(history: History) -> list[Violation]:
    """The breaches of all rules that no fault explains."""
    return [
        violation
        for rule in RULES
        for violation in rule(history)
        if not any(_explains(fault, violation) for fault in history.faults)
    ]
