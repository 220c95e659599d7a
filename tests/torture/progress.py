"""The rules about times and ends: who gets a lock when, and what is there when all has ended. No I/O, no clock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator

from tests.torture.history import INFO, OK, SECOND, Attempt, History, Span, place_of
from tests.torture.violations import Violation, breach, by_name

__all__ = [
    "CHECK_S",
    "all_are_answered",
    "limits_are_kept",
    "losses_are_told",
    "no_error_without_a_fault",
    "no_key_is_orphaned",
    "no_waiter_is_forgotten",
    "nothing_is_left",
    "turns_are_kept",
]

FORGOTTEN_S = 0.25
CHECK_S = 1.0
"""The interval of health checks, `sleep`: they find the end of a lease that a waiter has not heard of."""

TOLERANCE_S = 0.1
ROUND_TRIP_S = 0.05
JOINS_WITHIN_S = 0.1
"""So long after its call, a waiter on a healthy link stands in the queue."""

CAUSED = frozenset({"CancelledError", "KeyboardInterrupt", "GeneratorExit", "dropped"})
"""The errors that a caller causes itself."""

ROUND_TRIPS_TO_CONNECT = 6

ROUND_TRIPS_TO_TAKE = 2
"""A waiter whose lease ends before it can use the lock finds that out by one, and asks for the lock by another."""

ROUND_TRIPS_OF_TOPOLOGY = 10
"""Before a client of a cluster connects, redis-py reads which node has which slots."""

TURNS = 4
"""Caller, server and proxy each wait for a turn on a busy machine; a tick shows one such wait."""

NO_LIMIT = frozenset({"batch", "redlock", "redis-py"})
"""Where `blocking_timeout` does not bound requests under way."""

SHORT_S = 0.5
"""Within a shorter limit, an acquire may end before any reply has come."""

FOREVER = 1 << 63


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


def _ends_unheard(attempts: list[Attempt], at: int, waiter: Attempt) -> bool:
    """Whether the lease that ended last was not released, and began after the waiter had asked for its end."""
    before = [one for one in attempts if one.is_held and (one.answered or 0) <= at]
    last = max(before, key=lambda one: one.answered or 0, default=None)
    return (
        last is not None
        and (last.answered or 0) > waiter.asked
        and (last.release != OK or (last.releasing or 0) > last.until)
    )


def no_waiter_is_forgotten(history: History) -> Iterator[Violation]:
    """A lock is not free for 250 ms and two round trips while a caller waits; longer by a check, behind some leases.

    In clusters before Redis 7.0, whose channels have no slots, callers poll each second.
    """
    if (history.settings.get("topology"), history.settings.get("server")) == ("cluster", "redis-6.2"):
        return
    free: defaultdict[str, list[Span]] = defaultdict(list)
    for span in history.free:
        free[span.name].append(span)
    for attempts in by_name(history.attempts):
        got = sorted(attempt.answered or 0 for attempt in attempts if attempt.is_held)
        for waiter in attempts:
            if not waiter.waits or waiter.answered is None:
                continue
            joined = waiter.asked + int(_connecting_s(history, waiter) * SECOND)
            for span in free[waiter.name]:
                since, until = max(span.since, joined), min(span.until, waiter.answered)
                waited = until - since - TURNS * history.stalled(since, until, waiter.process)
                longest_s = FORGOTTEN_S + ROUND_TRIPS_TO_TAKE * _delay_s(history, waiter)
                longest_s += CHECK_S * _ends_unheard(attempts, span.since, waiter)
                if waited < longest_s * SECOND or bisect_left(got, until) > bisect_right(got, since):
                    continue
                text = f"{waiter.name} was free for {(until - since) / 1e6:.0f} ms while {waiter.id} waited for it"
                yield breach("forgotten", since, until, text, waiter)


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

    uses = {attempts[0].name: _uses_by_token(history, attempts) for attempts in by_name(history.attempts)}
    for span in history.kept:
        of_tokens = [max(_gaps(span, of_token), key=lasts) for of_token in uses.get(span.name) or [[]]]
        since, until = gap = min(of_tokens, key=lasts)
        if lasts(gap) >= FORGOTTEN_S * SECOND:
            text = f"{span.name} had a key for {(until - since) / 1e6:.0f} ms although nobody held it"
            yield Violation("orphan", since, until, text, span.name)


def turns_are_kept(history: History) -> Iterator[Violation]:
    """A waiter in a lock's queue gets the lock before all waiters that came later.

    Promised for the queue of one server ("push"), from when a waiter has joined it, and while each holder releases: not
    behind one whose lease ended, and not where a holder or another waiter is outside of the queue, such as redis-py's,
    a batch or a poller; not where keys linger, since a process may serve its own callers first.
    """
    if history.settings.get("topology", "single") != "single":
        return
    for attempts in by_name(history.attempts):
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
                    yield breach("turn", waiter.asked, other.answered or 0, text, waiter, other)
                    break


def limits_are_kept(history: History) -> Iterator[Violation]:
    """An acquire ends with its time limit, or 100 ms and a round trip later; a batch may end with its last round."""
    for attempt in history.attempts:
        if attempt.limit_s is None or attempt.answered is None or attempt.by in NO_LIMIT:
            continue
        took_s = (attempt.answered - attempt.asked) / SECOND
        if took_s > attempt.limit_s + TOLERANCE_S + _held_up_s(history, attempt, attempt.answered):
            text = f"{attempt.id} took {took_s:.3f} s for {attempt.name}, and its limit was {attempt.limit_s:.3f} s"
            yield breach("limit", attempt.asked, attempt.answered, text, attempt)


def all_are_answered(history: History) -> Iterator[Violation]:
    """Each acquire and release ends while its process lives."""
    for attempt in history.attempts:
        if attempt.process not in history.ended:
            continue
        if attempt.answered is None or (attempt.releasing is not None and attempt.released is None):
            what = "acquire" if attempt.answered is None else "release"
            yield breach("hang", attempt.asked, FOREVER, f"the {what} of {attempt.id} never ended", attempt)


def losses_are_told(history: History) -> Iterator[Violation]:
    """A holder that watches its lease is told of the loss by the time at which the lease is over."""
    for hold in history.attempts:
        if not (hold.is_held and hold.is_watched) or hold.invalid is None or hold.process not in history.ended:
            continue
        late = hold.invalid + int((TOLERANCE_S + ROUND_TRIP_S) * SECOND)
        late += TURNS * history.stalled(hold.invalid, late, hold.process)
        if (hold.releasing is None or hold.releasing > late) and (hold.lost is None or hold.lost > late):
            text = f"{hold.id} was not told of the loss of {hold.name} {(late - hold.invalid) / 1e6:.0f} ms after it"
            yield breach("told", hold.invalid, late, text, hold)


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
            yield breach("error", attempt.asked, attempt.answered, text, attempt)
        elif attempt.release == INFO and attempt.released is not None and attempt.releasing is not None:
            text = f"the release of {attempt.id} raised {attempt.reason}"
            yield breach("error", attempt.releasing, attempt.released, text, attempt)
    for process, at, text in history.errors:
        yield Violation("crash", at, at, f"{process}: {text}", "", frozenset({place_of(process)}))


def nothing_is_left(history: History) -> Iterator[Violation]:
    """When all is healed and released, no key, queue, socket or thread is left ("left", "left queue").

    Nor is a task when its client has been closed for some seconds ("left task").
    """
    for rule, at, text in history.left:
        since, until = (at, at) if rule == "left task" else (0, FOREVER)
        yield Violation(rule, since, until, text)
