"""How leases are renewed once, and how they are found to be lost: for renewals, releases and batches.

Rules: a lost lock stays lost. A renewal that comes after the end of its lease does not recreate it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.metrics import report_call
from redislock_fast._protocol.commands import ReadHolder
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._util.errors import LossReason, shown, shown_held
from redislock_fast._util.times import GRACE_S, clock
from redislock_fast._util.tokens import is_permit

logger = logging.getLogger("redislock_fast.renewal")  # docs/how-to/holding.md names it

_SHORTEST_LIMIT_S = 0.05
_LONGEST_LIMIT_S = 1.0  # threads renew one batch after another: it must not delay the next, or the report of a loss
_LIMIT = 1 / 3  # the part of the first lease's remaining time that one attempt may take

_deadline_of = operator.attrgetter("deadline")
_danger_of = operator.attrgetter("danger_at")


class LeaseLoss(NamedTuple):
    """A lease that was lost, and is to be reported."""

    lease: Lease
    reason: LossReason


class Verdict(NamedTuple):
    """The result of one renewal.

    Attributes:
        held: whether the lock is held; None where that is not known.
        expires_at: until when its lease is valid by the renewal, in the clock's seconds; None: nothing was sent.
    """

    held: bool | None
    expires_at: float | None


@contextlib.contextmanager
def ignoring_errors() -> Iterator[None]:
    """Suppress any error: a renewal is retried until the lease ends, and its result may stay unknown.

    The traceback is dropped, because it would keep the lease's frames alive, and a dropped lock would be renewed until
    the next garbage collection.
    """
    try:
        yield
    except Exception as error:
        error.__traceback__ = None


def renewable(leases: list[Lease], losses: list[LeaseLoss]) -> list[Lease]:
    """The leases that can be renewed. Adds the leases that were lost to `losses`."""
    now = clock()
    open_ones: list[Lease] = []
    for lease in leases:
        if now >= lease.deadline:
            lose(lease, LossReason.SERVER_GONE if lease.troubled else LossReason.EXPIRED, losses)
        elif lease.options.auto_renew and not lease.over:
            open_ones.append(lease)
    late = [lease for lease in open_ones if lease.is_late(now)]
    if late:
        message = "%d locks, such as %s, are renewed late by more than half of their ttl: something blocks the renewer."
        logger.warning(message, len(late), shown(late[0].key))
    return open_ones


def lose(lease: Lease, reason: LossReason, losses: list[LeaseLoss], by_release: bool = False) -> None:
    """Note a loss, unless it was noted before. It is logged where no `on_lost` tells it."""
    if lease.lose(reason, by_release):
        losses.append(LeaseLoss(lease, reason))
        if lease.options.on_lost is None:
            logger.warning("The %s was lost: %s.", shown_held(lease.key, lease.token), reason)


def _log_series(leases: list[Lease], were_troubled: list[bool]) -> None:
    """Log the first failure of a series of renewals, and its end."""
    failed = [lease for lease, was in zip(leases, were_troubled, strict=True) if lease.troubled and not was]
    if failed:
        message = "%d locks, such as %s, could not be renewed. It is tried again until their leases end."
        logger.warning(message, len(failed), shown(failed[0].key))
    mended = [
        lease for lease, was in zip(leases, were_troubled, strict=True) if was and not lease.troubled and not lease.loss
    ]
    if mended:
        logger.warning("%d locks, such as %s, are renewed again.", len(mended), shown(mended[0].key))


def attempt_renewal(
    leases: list[Lease], step: Do, verdicts: Callable[[], list[Verdict]], losses: list[LeaseLoss]
) -> Steps:
    """Make the step that renews these leases, and note its verdicts, which `verdicts` returns by lease.

    Returns:
        The leases that are certainly not held any more, for a reason that is not known yet.
    """
    began = clock()
    try:
        with ignoring_errors():
            yield step
    except BaseException:  # cancelled: requests under way may still be executed
        for lease in leases:
            lease.troubled = True
        raise
    finally:
        for lease in leases:
            lease.renewing = False
    now = clock()
    gone: list[Lease] = []
    were_troubled = [lease.troubled for lease in leases]
    for lease, verdict in zip(leases, verdicts(), strict=True):
        lease.troubled = verdict.held is None
        if lease.troubled:
            lease.report("record_renewal_failure")
        elif verdict.held:
            report_call(lease.options, "renewed {} in", lease.key, now - began, lease.token)
        if not _note(lease, verdict, now, losses):
            gone.append(lease)
    _log_series(leases, were_troubled)
    return gone


def _note(lease: Lease, verdict: Verdict, now: float, losses: list[LeaseLoss]) -> bool:
    """Note the result of a renewal. Returns False where the lock is not held any more, and the reason is not known."""
    if now >= lease.deadline:  # a renewal that came too late does not recreate it
        lose(lease, LossReason.SERVER_GONE if lease.troubled else LossReason.EXPIRED, losses)
    elif verdict.held is False:
        return lease.over
    elif verdict.expires_at is not None:
        lease.renewed(verdict.expires_at, certainly=not lease.troubled)
    return True


def limit_s(leases: list[Lease], now: float) -> float:
    """How long to wait for the replies, in seconds: there must be time for another attempt, and to tell of a danger."""
    first_deadline: float = min(map(_deadline_of, leases))
    dangers = (danger_at - GRACE_S for danger_at in map(_danger_of, leases) if danger_at > now)
    ends_by = min(dangers, default=math.inf)
    return min(max(min((first_deadline - now) * _LIMIT, ends_by - now), _SHORTEST_LIMIT_S), _LONGEST_LIMIT_S)


def find_out_why(leases: list[Lease], losses: list[LeaseLoss], by_release: bool = False) -> Steps:
    """Find out why locks on one server are not held any more. Adds each to `losses`, once."""
    unclear = [lease for lease in leases if not is_permit(lease.token)]
    for lease in leases:
        if is_permit(lease.token):
            lose(lease, LossReason.DELETED, losses, by_release)  # nobody can take it: others have permits of their own
    if not unclear:
        return
    reads = [ReadHolder(lease.key) for lease in unclear]
    operation = Pipeline(reads)
    with ignoring_errors():
        yield Do("execute", operation, limit_s(unclear, clock()))
    unanswered = len(operation.unfinished) > 0  # then the reason stays unknown
    for lease, read in zip(unclear, reads, strict=True):
        lose(lease, LossReason.SERVER_GONE if unanswered else reason_of(read), losses, by_release)


def reason_of(read: ReadHolder) -> LossReason:
    """Why a lock was lost whose lease has not ended, judged by the value that its key has now."""
    return LossReason.TAKEN if read.result else LossReason.DELETED
