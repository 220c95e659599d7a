"""The rules that hold at any speed: who may have a lock, and in which order. No I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from operator import attrgetter

from tests.torture.history import INFO, NOT_OWNED, SECOND, Attempt, History, limit_of
from tests.torture.violations import Violation, breach, by_name

__all__ = ["exclusion", "fences_rise", "no_update_is_lost", "nobody_takes_what_is_held"]

LONGEST_LEASE_S = 2.0
"""No lease of a history lasts longer, lingering included."""


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
    """No more validated holds overlap than may: one of a lock. Those of one token that several brought are one."""
    shared = _Shared(history)
    for attempts in by_name(attempt for attempt in history.attempts if attempt.is_held):
        limit = limit_of(attempts[0].name)
        current: list[tuple[int, Attempt]] = []  # with their ends
        for hold in sorted(attempts, key=lambda hold: hold.answered or 0):
            ends = shared.end_of(hold)
            begins = hold.answered or 0
            if ends <= begins:
                continue
            current = [one for one in current if one[0] > begins]
            others = [one for one in current if not (hold.label and hold.label == one[1].label)]
            if len(others) >= limit:
                overlap_ms = (min(ends, *(end for end, _ in others)) - begins) / 1e6
                holds = [other for _, other in others]
                text = f"{', '.join(other.id for other in holds)} and {hold.id} held {hold.name} at once"
                text += f" for {overlap_ms:.3f} ms"
                yield breach("exclusion", min(one.asked for one in (*holds, hold)), begins, text, *holds, hold)
            current.append((ends, hold))


def fences_rise(history: History) -> Iterator[Violation]:
    """A holder that asked after another was answered has a higher fence, and no two have the same."""
    for attempts in by_name(one for one in history.attempts if one.is_held and one.fence is not None):
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
                yield breach("fence", highest.asked, attempt.answered or attempt.asked, text, highest, attempt)
        by_fence: dict[int, Attempt] = {}
        for attempt in attempts:
            twin = by_fence.setdefault(attempt.fence or 0, attempt)
            if twin is not attempt:
                text = f"{twin.id} and {attempt.id} have the same fence {attempt.fence} of {attempt.name}"
                later = max(twin.answered or 0, attempt.answered or 0)  # who asked first may have waited for longer
                yield breach("fence", twin.asked, later, text, twin, attempt)


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
            yield breach("taken", hold.asked, told, text, hold)
