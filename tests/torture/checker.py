"""What must hold in every history, and what each class of fault may break.

Each rule looks at a whole history and gives each breach of it, with the time in which a fault would explain the breach.
`check` leaves out those that a fault explains, by the table `ALLOWED`. No I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from tests.torture.history import INFO, NOT_OWNED, OK, SECOND, Attempt, Fault, History, Span, place_of

__all__ = ["ALLOWED", "LONGEST_LEASE_S", "RULES", "SAFETY", "Violation", "check"]

LONGEST_LEASE_S = 2.0
"""No lease of a history lasts longer, lingering included."""

LONGEST_CHECK_S = 4.5
"""A waiter that missed its message finds out by its health check after so long at most: four times `sleep`, 1 s here,
and a round trip."""

LONGEST_PAUSE_S = 4.0
"""A cleanup asks the server again so soon after a fault, however often it has asked in vain: its pauses double."""

FORGOTTEN_S = 0.25
TOLERANCE_S = 0.1
ROUND_TRIP_S = 0.05
JOINS_WITHIN_S = 0.1
"""So long after its call, a waiter on a healthy link stands in the queue."""

CAUSED = frozenset({"CancelledError", "KeyboardInterrupt", "GeneratorExit", "dropped"})
"""What a caller causes itself."""

ROUND_TRIPS_TO_CONNECT = 6

ROUND_TRIPS_OF_TOPOLOGY = 10
"""Before a client of a cluster connects, redis-py reads which node has which slots."""

TURNS = 4
"""Caller, server and proxy each wait for a turn on a busy machine; a tick shows one such wait."""

NO_LIMIT = frozenset({"batch", "redlock", "redis-py"})
"""Where `blocking_timeout` does not bound requests under way."""

SHORT_S = 0.5
"""Within a shorter limit, an acquire may end before any reply has come."""

FOREVER = 1 << 63


@dataclass(frozen=True)
class Violation:
    """A breach of a rule.

    Attributes:
        rule: which.
        since: from when on a fault would explain it.
        until: until when.
        text: what was wrong.
        name: the lock.
        processes: the processes that it happened to. A fault that concerns none of them does not explain it.
        by: the ways of acquiring that are concerned.
    """

    rule: str
    since: int
    until: int
    text: str
    name: str = ""
    processes: frozenset[str] = frozenset()
    by: frozenset[str] = field(default=frozenset(), compare=False)


def _breach(rule: str, since: int, until: int, text: str, *attempts: Attempt) -> Violation:
    processes = frozenset(place_of(attempt.process) for attempt in attempts)
    return Violation(rule, since, until, text, attempts[0].name, processes, frozenset(one.by for one in attempts))


def _by_name(attempts: Iterable[Attempt]) -> Iterator[list[Attempt]]:
    """The attempts at each lock, in the order in which they were called."""
    names: defaultdict[str, list[Attempt]] = defaultdict(list)
    for attempt in sorted(attempts, key=attrgetter("asked")):
        names[attempt.name].append(attempt)
    yield from names.values()


def _held_up_s(history: History, attempt: Attempt, until: int) -> float:
    """How long a round trip of an attempt may take, and the machine may have stood still, in seconds."""
    stalled_s = history.stalled(attempt.asked, until, attempt.process) / SECOND
    return ROUND_TRIP_S + _delay_s(history, attempt) + TURNS * stalled_s


def _delay_s(history: History, attempt: Attempt) -> float:
    """By how long each round trip of an attempt is delayed, in seconds."""
    place = place_of(attempt.process)
    return max((fault.delay_s for fault in history.faults if place in fault.processes), default=0.0)


def _connecting_s(history: History, attempt: Attempt) -> float:
    """By how long the first use of a client is delayed, in seconds."""
    is_cluster = history.settings.get("topology") == "cluster"
    return (ROUND_TRIPS_TO_CONNECT + is_cluster * ROUND_TRIPS_OF_TOPOLOGY) * _delay_s(history, attempt)


# ---- safety ----


class _Shared:
    """Ends the holds of callers that brought the same token: the release of one releases the lock of all of them."""

    def __init__(self, history: History) -> None:
        self._callers: defaultdict[tuple[str, str], list[Attempt]] = defaultdict(list)
        for attempt in history.attempts:
            if attempt.label:
                self._callers[attempt.name, attempt.label].append(attempt)

    def release_by_another(self, hold: Attempt) -> int | None:
        """When another caller called the first release that may have been executed during the hold, or failed.

        A failed acquire deletes the key that its own request took, even where a caller in another process has found its
        token there and holds the lock by it: the library does not promise more.
        """
        calls = [
            at
            for other in (self._callers[hold.name, hold.label] if hold.label else ())
            if other is not hold and (at := self._gives_back_at(other)) is not None
            if not self._is_over(other, hold.asked)
        ]
        return min(calls, default=None)

    @staticmethod
    def _gives_back_at(other: Attempt) -> int | None:
        return other.releasing if other.is_held else other.answered

    @staticmethod
    def _is_over(other: Attempt, at: int) -> bool:
        if not other.is_held:
            return other.answered is not None and other.answered + LONGEST_LEASE_S * SECOND < at
        return other.released is not None and other.release != INFO and other.released < at

    def end_of(self, hold: Attempt) -> int:
        """Until when the holder might rely on the hold."""
        by_another = self.release_by_another(hold)
        return hold.ends if by_another is None else min(hold.ends, by_another)


def exclusion(history: History) -> Iterator[Violation]:
    """No two validated holds of a lock overlap, but those of one token that several callers brought."""
    shared = _Shared(history)
    for attempts in _by_name(attempt for attempt in history.attempts if attempt.is_held):
        latest: Attempt | None = None
        latest_end = 0
        for hold in sorted(attempts, key=lambda hold: hold.answered or 0):
            ends = shared.end_of(hold)
            begins = hold.answered or 0
            if ends <= begins:
                continue
            if latest is not None and begins < latest_end and not (hold.label and hold.label == latest.label):
                overlap_ms = (min(ends, latest_end) - begins) / 1e6
                text = f"{latest.id} and {hold.id} held {hold.name} at once for {overlap_ms:.3f} ms"
                yield _breach("exclusion", min(latest.asked, hold.asked), begins, text, latest, hold)
            if latest is None or ends > latest_end:
                latest, latest_end = hold, ends


def fences_rise(history: History) -> Iterator[Violation]:
    """A holder that asked after another was answered has a higher fence, and no two have the same."""
    for attempts in _by_name(one for one in history.attempts if one.is_held and one.fence is not None):
        answered = sorted(attempts, key=lambda one: one.answered or 0)
        highest: Attempt | None = None
        position = 0
        for attempt in attempts:
            while position < len(answered) and (answered[position].answered or 0) < attempt.asked:
                if highest is None or (answered[position].fence or 0) > (highest.fence or 0):
                    highest = answered[position]
                position += 1
            if highest is not None and (attempt.fence or 0) <= (highest.fence or 0):
                text = f"{attempt.id} has fence {attempt.fence} of {attempt.name} after {highest.id}'s {highest.fence}"
                yield _breach("fence", highest.asked, attempt.answered or attempt.asked, text, highest, attempt)
        by_fence: dict[int, Attempt] = {}
        for attempt in attempts:
            twin = by_fence.setdefault(attempt.fence or 0, attempt)
            if twin is not attempt:
                text = f"{twin.id} and {attempt.id} have the same fence {attempt.fence} of {attempt.name}"
                later = max(twin.answered or 0, attempt.answered or 0)  # who asked first may have waited for longer
                yield _breach("fence", twin.asked, later, text, twin, attempt)


def no_update_is_lost(history: History) -> Iterator[Violation]:
    """No two writes that a fence admitted were made from the same number."""
    seen: dict[tuple[str, int], int] = {}
    for write in sorted(history.writes, key=attrgetter("at")):
        if not write.is_accepted:
            continue
        earlier = seen.setdefault((write.name, write.read), write.at)
        if earlier != write.at:
            text = f"fence {write.fence} of {write.name} wrote over an update of {write.read}"
            yield Violation("lost update", earlier, write.at, text, write.name)


def nobody_takes_what_is_held(history: History) -> Iterator[Violation]:
    """A holder's key stays its own until the release or the end of its lease: nobody's cleanup takes it away.

    A holder that was told so in time: by a loss, or by a release that says that the lock is not owned.
    """
    shared = _Shared(history)
    for hold in history.attempts:
        if not hold.is_held:
            continue
        told = hold.lost if hold.lost is not None else hold.released if hold.release == NOT_OWNED else None
        if told is None or told >= hold.until:
            continue
        by_another = shared.release_by_another(hold)
        if by_another is None or by_another > told:
            early_ms = (hold.until - told) / 1e6
            text = f"{hold.id} lost {hold.name} {early_ms:.3f} ms before its lease ended ({hold.reason})"
            yield _breach("taken", hold.asked, told, text, hold)


# ---- progress ----


def no_waiter_is_forgotten(history: History) -> Iterator[Violation]:
    """A lock is not free for 250 ms while a caller waits for it.

    In clusters before Redis 7.0, whose channels have no slots, callers poll each second.
    """
    if (history.settings.get("topology"), history.settings.get("server")) == ("cluster", "redis-6.2"):
        return
    free: defaultdict[str, list[Span]] = defaultdict(list)
    for span in history.free:
        free[span.name].append(span)
    for attempts in _by_name(history.attempts):
        got = sorted(attempt.answered or 0 for attempt in attempts if attempt.is_held)
        for waiter in attempts:
            if not waiter.waits or waiter.answered is None:
                continue
            joined = waiter.asked + int(_connecting_s(history, waiter) * SECOND)
            for span in free[waiter.name]:
                since, until = max(span.since, joined), min(span.until, waiter.answered)
                waited = until - since - TURNS * history.stalled(since, until, waiter.process)
                if waited < FORGOTTEN_S * SECOND or bisect_left(got, until) > bisect_right(got, since):
                    continue
                text = f"{waiter.name} was free for {(until - since) / 1e6:.0f} ms while {waiter.id} waited for it"
                yield _breach("forgotten", since, until, text, waiter)


def _uses(history: History, attempts: list[Attempt]) -> Iterator[tuple[int, int]]:
    """From when to when each caller may have had the key, and a while before and after: (since, until)."""
    for attempt in attempts:
        if attempt.answered is None:
            continue
        ends = attempt.answered
        if attempt.is_held:
            ends = max(attempt.released or attempt.until, ends)
        margin = int((TOLERANCE_S + _held_up_s(history, attempt, ends) + _delay_s(history, attempt)) * SECOND)
        yield attempt.answered - margin, ends + margin


def _uses_by_token(history: History, attempts: list[Attempt]) -> list[list[tuple[int, int]]]:
    """The uses of one lock, those with the same token together.

    Each acquire has a token of its own. But where keys linger, the callers of a process have the same one for a while,
    and so have callers that bring it.
    """
    tokens: defaultdict[object, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        lingers = attempt.by == "linger"
        tokens[("process", attempt.process) if lingers else attempt.label or ("id", attempt.id)].append(attempt)
    return [sorted(_uses(history, with_token)) for with_token in tokens.values()]


def _gaps(span: Span, uses: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of the span that lie in none of these uses."""
    used = span.since
    for since, until in uses:
        if since > used:
            yield used, min(since, span.until)
        used = max(used, until)
    yield used, span.until


def no_key_is_orphaned(history: History) -> Iterator[Violation]:
    """The key of an acquire that was cancelled, or of a holder that was dropped, is deleted, not left to its ttl.

    So no key has the same token for longer than until 250 ms after the only use that explains it.
    """

    def lasts(gap: tuple[int, int]) -> float:
        return gap[1] - gap[0] - TURNS * history.stalled(*gap)

    uses = {attempts[0].name: _uses_by_token(history, attempts) for attempts in _by_name(history.attempts)}
    for span in history.kept:
        of_tokens = [max(_gaps(span, of_token), key=lasts) for of_token in uses.get(span.name) or [[]]]
        since, until = gap = min(of_tokens, key=lasts)
        if lasts(gap) >= FORGOTTEN_S * SECOND:
            text = f"{span.name} had a key for {(until - since) / 1e6:.0f} ms although nobody held it"
            yield Violation("orphan", since, until, text, span.name)


def turns_are_kept(history: History) -> Iterator[Violation]:
    """Who waits in a lock's queue gets the lock before any who came later.

    Promised for the queue of one server ("push"), from when a waiter has joined it, and while each holder releases: not
    behind one whose lease ended, and not where a holder or another waiter is outside of the queue, such as redis-py's,
    a batch or a poller; not where keys linger, since a process may serve its own callers first.
    """
    if history.settings.get("topology", "single") != "single":
        return
    for attempts in _by_name(history.attempts):
        if any(attempt.by != "push" for attempt in attempts):
            continue
        held = [one for one in attempts if one.is_held]
        for waiter in attempts:
            connecting_s = _connecting_s(history, waiter)
            joined = waiter.asked + int((JOINS_WITHIN_S + connecting_s) * SECOND)
            if not waiter.waits or waiter.answered is None or waiter.answered < joined or waiter.outcome == INFO:
                continue
            joined += TURNS * history.stalled(waiter.asked, waiter.answered, waiter.process)
            gave_up = waiter.answered - (0 if waiter.is_held else int(TOLERANCE_S * SECOND))
            for other in held:
                if joined < other.asked and (other.answered or 0) < gave_up and not (waiter.label or other.label):
                    if any(one.release != OK and waiter.asked < one.until < gave_up for one in held):
                        continue
                    text = f"{other.id} got {waiter.name} before {waiter.id}, which had come earlier"
                    yield _breach("turn", waiter.asked, other.answered or 0, text, waiter, other)
                    break


def limits_are_kept(history: History) -> Iterator[Violation]:
    """An acquire ends with its time limit, or 100 ms and a round trip later; a batch may end with its last round."""
    for attempt in history.attempts:
        if attempt.limit_s is None or attempt.answered is None or attempt.by in NO_LIMIT:
            continue
        took_s = (attempt.answered - attempt.asked) / SECOND
        if took_s > attempt.limit_s + TOLERANCE_S + _held_up_s(history, attempt, attempt.answered):
            text = f"{attempt.id} took {took_s:.3f} s for {attempt.name}, and its limit was {attempt.limit_s:.3f} s"
            yield _breach("limit", attempt.asked, attempt.answered, text, attempt)


def all_are_answered(history: History) -> Iterator[Violation]:
    """Each acquire and release ends while its process lives."""
    for attempt in history.attempts:
        if attempt.process not in history.ended:
            continue
        if attempt.answered is None or (attempt.releasing is not None and attempt.released is None):
            what = "acquire" if attempt.answered is None else "release"
            yield _breach("hang", attempt.asked, FOREVER, f"the {what} of {attempt.id} never ended", attempt)


def losses_are_told(history: History) -> Iterator[Violation]:
    """A holder that watches its lease is told of the loss by the time at which the lease is over."""
    for hold in history.attempts:
        if not (hold.is_held and hold.is_watched) or hold.invalid is None or hold.process not in history.ended:
            continue
        late = hold.invalid + int((TOLERANCE_S + ROUND_TRIP_S) * SECOND)
        late += TURNS * history.stalled(hold.invalid, late, hold.process)
        if (hold.releasing is None or hold.releasing > late) and (hold.lost is None or hold.lost > late):
            text = f"{hold.id} was not told of the loss of {hold.name} {(late - hold.invalid) / 1e6:.0f} ms after it"
            yield _breach("told", hold.invalid, late, text, hold)


# ---- what should not happen at all ----


def _is_too_short(history: History, attempt: Attempt) -> bool:
    """Whether the acquire has ended with its limit, or with its lease, because no reply came in so short a time."""
    if attempt.answered is None:
        return False
    held_up_s = _held_up_s(history, attempt, attempt.answered)
    if attempt.reason == "LockLostError":  # on completing it
        return held_up_s > TOLERANCE_S
    connecting_s = _connecting_s(history, attempt)
    is_timeout = attempt.limit_s is not None and attempt.reason == "TimeoutError"
    return is_timeout and (attempt.limit_s or 0.0) < SHORT_S + connecting_s + held_up_s


def no_error_without_a_fault(history: History) -> Iterator[Violation]:
    """An acquire or release raises only what a fault explains, or what its caller has caused."""
    for attempt in history.attempts:
        if attempt.reason in CAUSED or _is_too_short(history, attempt):
            continue
        if attempt.outcome == INFO and attempt.answered is not None:
            text = f"the acquire of {attempt.id} raised {attempt.reason}"
            yield _breach("error", attempt.asked, attempt.answered, text, attempt)
        elif attempt.release == INFO and attempt.released is not None and attempt.releasing is not None:
            text = f"the release of {attempt.id} raised {attempt.reason}"
            yield _breach("error", attempt.releasing, attempt.released, text, attempt)
    for process, at, text in history.errors:
        yield Violation("crash", at, at, f"{process}: {text}", "", frozenset({place_of(process)}))


def nothing_is_left(history: History) -> Iterator[Violation]:
    """When all is healed and released, no key, queue, socket or thread is left ("left", "left queue").

    Nor is a task when its client has been closed for some seconds ("left task").
    """
    for rule, at, text in history.left:
        since, until = (at, at) if rule == "left task" else (0, FOREVER)
        yield Violation(rule, since, until, text)


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
