"""Renewal off the loop: what a thread does about leases whose loop runs, hangs, is stopped or closed. No server."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from redislock_fast import LossReason
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._procedures.lease import lost_error
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._renewal import off_loop
from redislock_fast._renewal.loop import LoopRenewer
from redislock_fast._renewal.off_loop import OffLoopRenewer
from redislock_fast._util.times import clock
from tests.support.async_helpers import in_loop, settle

TTL_MS = 60_000
NATIVE = Capabilities([[b"delifeq"], None, [b"lmpop"]])


class Holder:
    """Stands for a lock object: something to refer to weakly."""

    name = "name"


HOLDER = Holder()


class Thread:
    """Stands for the server as the renewing thread has it.

    Attributes:
        sent: how many requests it has got.
        first: is called before the first answer.
        held: whether it holds each lock.
        is_away: whether it answers nothing.
    """

    has_connected = True

    def __init__(self) -> None:
        self.sent = 0
        self.first: Callable[[], object] = lambda: None
        self.held = True
        self.is_away = False

    def split(self, keys: list[bytes], _: float | None = None) -> list[range]:
        return [range(len(keys))]

    def execute(self, operation: Pipeline, _: float | None) -> None:
        """Answer until the operation has its results."""
        if self.is_away:
            raise ConnectionError
        first, self.first = self.first, lambda: None
        first()
        finished = False
        while not finished:
            requests: Any = operation.request(NATIVE, clock())
            self.sent += len(requests)
            finished = operation.feed([b"OK" if self.held else None for _ in requests], NATIVE)

    def clean_up(self, entries: list[Any]) -> None:
        """Do nothing."""

    def rest(self) -> None:
        """Do nothing."""


class Renewing(OffLoopRenewer):
    """One without a thread: `renew` does what its thread would do."""

    def _start(self) -> None:
        """Start nothing."""

    def renew(self, lease: Lease) -> None:
        """Renew a lease that is due."""
        self._take_changes()
        self._schedule.remove(lease.record)
        self._renew([lease])

    def schedules(self, lease: Lease) -> bool:
        """Whether the thread would renew the lease later."""
        self._take_changes()
        return lease.record.side is not None and lease.record.ticks is not None


class Kept:
    """A lease that a thread renews for the running loop; a third of its time has passed.

    Attributes:
        server: the thread's.
        off_loop: what renews.
        told: the losses that were told.
        lease: the lease.
    """

    def __init__(self, **options: Any) -> None:
        self.server = Thread()
        server: Any = self.server
        self.off_loop = Renewing(server)
        self.side = LoopRenewer(weakref.ref(server), asyncio.get_running_loop(), lambda *_: None, self.off_loop)
        self.told: list[LossReason] = []
        terms = Options(auto_renew=True, on_lost=lambda _, reason: self.told.append(reason), **options)
        self.lease = Lease(weakref.ref(HOLDER), b"name", b"token", TTL_MS, clock() + TTL_MS / 1500, terms)
        self.side.keep(self.lease)

    def renew(self) -> None:
        """Have the thread renew the lease."""
        self.off_loop.renew(self.lease)

    def state(self) -> tuple[LossReason | None, bool, int]:
        """Why the lease is lost, whether the thread would renew it later, and how many requests were sent."""
        return self.lease.loss, self.off_loop.schedules(self.lease), self.server.sent


def after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the renewer's clock be ahead by so many seconds."""
    monkeypatch.setattr(off_loop, "clock", lambda: clock() + seconds)


@in_loop
async def test_release_that_overtakes_a_renewal_is_told_as_no_loss() -> None:
    kept = Kept()
    kept.server.held, kept.server.first = False, kept.lease.end
    kept.renew()
    await settle()
    assert (kept.server.sent > 0, kept.told, kept.lease.loss) == (True, [], None)


@in_loop
async def test_loss_is_told_in_the_loop_alone() -> None:
    kept = Kept()
    kept.server.held = False
    kept.renew()
    assert (kept.told, kept.lease.loss) == ([], LossReason.DELETED)
    await settle()
    assert kept.told == [LossReason.DELETED]


@in_loop
async def test_loop_is_stalled_since_the_first_question_that_it_has_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept(max_stall=90)
    kept.renew()  # asks
    await settle()  # it answers
    after(100, monkeypatch)
    kept.lease.expires_at = clock() + 150
    kept.renew()  # asks again
    assert kept.state()[:2] == (None, True)
    after(189, monkeypatch)
    kept.lease.expires_at = clock() + 240
    kept.renew()
    assert kept.state()[:2] == (None, True)
    sent = kept.server.sent
    after(191, monkeypatch)
    kept.lease.expires_at = clock() + 240
    kept.renew()
    assert (kept.state(), kept.told) == ((LossReason.STALLED, False, sent), [])
    await settle()
    assert kept.told == [LossReason.STALLED]


@in_loop
async def test_max_stall_is_three_ttls_unless_it_is_given() -> None:
    assert [Kept().lease.max_stall_s, Kept(max_stall=70).lease.max_stall_s] == [3 * TTL_MS / 1000, 70]


def test_lease_of_a_closed_loop_is_let_go_and_that_of_a_stopped_one_waits() -> None:
    loop = asyncio.new_event_loop()

    async def make() -> Kept:
        return Kept()

    kept = loop.run_until_complete(make())
    kept.renew()
    assert kept.state() == (None, True, 0)
    loop.close()
    kept.renew()
    assert kept.state() == (None, False, 0)


@in_loop
async def test_loop_takes_over_what_a_thread_that_never_connected_could_not_renew() -> None:
    kept = Kept()
    kept.server.is_away, kept.server.has_connected = True, False
    kept.renew()
    assert kept.lease.troubled
    assert kept.off_loop.schedules(kept.lease)  # until the loop runs
    await settle()
    kept.off_loop.schedules(kept.lease)
    await settle()
    assert (kept.lease.record.side, kept.lease.record.ticks is None) == (None, False)  # in the loop's schedule
    kept.off_loop.forget_soon(kept.lease.record)
    assert not kept.off_loop.schedules(kept.lease)
    assert kept.lease.record.ticks is not None
    kept.side.let_go(kept.lease)


@in_loop
async def test_thread_that_has_connected_goes_on_after_a_failure() -> None:
    kept = Kept()
    kept.server.is_away = True
    kept.renew()
    assert (kept.lease.troubled, kept.off_loop.schedules(kept.lease)) == (True, True)


@in_loop
async def test_task_that_has_met_the_loss_before_it_is_told_is_not_cancelled() -> None:
    kept = Kept(cancel_on_lost=True)
    task = asyncio.current_task()
    assert task is not None
    kept.lease.task = weakref.ref(task)
    kept.server.held = False
    kept.renew()
    lock: Any = HOLDER
    assert lost_error(lock, "extend", kept.lease).reason is LossReason.DELETED
    await settle()  # a cancel would end it here
    assert kept.told == [LossReason.DELETED]


@in_loop
async def test_danger_is_not_told_of_what_was_released_meanwhile() -> None:
    dangers: list[Any] = []
    kept = Kept(on_danger=dangers.append)
    for held, told in ((True, [HOLDER]), (False, [HOLDER])):
        if not held:
            kept.lease.endangered = False
        kept.lease.troubled, kept.lease.expires_at = True, clock() + TTL_MS / 4000
        kept.server.is_away = True
        kept.renew()
        if not held:
            kept.lease.end()
        await settle()
        assert dangers == told
