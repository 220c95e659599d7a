"""When a waiter looks whether all is well: an interval after he came, and later where the last one was told late.

Rules: no server, and no time passes: whoever waited has come so much earlier.
"""

from __future__ import annotations

from typing import Any

import pytest

from redislock_fast._procedures.steps import Execute
from redislock_fast._procedures.waiters import RECKON, Grant, Room, Seat
from redislock_fast._procedures.waiting import Waiting
from redislock_fast._protocol.capabilities import Dialect
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import MARK, new_token

KEY = b"name"
INTERVAL_S = 0.1


class Channel:
    """A channel, its connection and a mailbox in one, of which nothing is needed."""

    dialect = Dialect()

    def is_current(self, _: Seat) -> bool:
        return True

    def post(self, *_: Any) -> None:
        """Send nothing."""

    def tell(self, _: object) -> None:
        """Keep nothing."""


@pytest.fixture
def room() -> Room:
    """One in which waiters hear of the lock."""
    room = Room(Channel.dialect)
    room.note_subscription(room.channel_for(KEY), allowed=True)
    return room


def take(room: Room, after_s: float = 0.0, key: bytes = KEY, interval_s: float = INTERVAL_S) -> Seat:
    """A seat that was taken so many seconds ago, and joined the queue."""
    channel = Channel()
    seat = room.take(key, new_token(), channel, channel, channel)
    assert seat is not None
    seat.taken_at -= after_s
    seat.interval_s = interval_s
    seat.line.enqueue(seat)
    return seat


def waiting_in(seat: Seat) -> Waiting:
    return Waiting(KEY, seat.token, 60_000, INTERVAL_S, Limit(None))


def be_granted(seat: Seat) -> None:
    """He is told that the lock is his, and goes."""
    assert waiting_in(seat).granted(seat, Grant(seat.token + MARK, clock()))
    seat.room.leave(seat)


def looks_after_s(seat: Seat) -> float:
    due_at = seat.due_at()
    assert due_at is not None
    return due_at - seat.line.looked_at


@pytest.mark.parametrize(("last_s", "looks_s"), [(0.0, 0.1), (0.25, 0.35), (30.0, 0.5)])
def test_the_first_look_is_put_off_by_the_last_wait_and_four_intervals_at_most(
    room: Room, last_s: float, looks_s: float
) -> None:
    be_granted(take(room, after_s=last_s))
    assert looks_after_s(take(room)) == pytest.approx(looks_s, abs=0.01)


def test_who_has_not_waited_before_looks_after_an_interval(room: Room) -> None:
    assert looks_after_s(take(room)) == pytest.approx(INTERVAL_S)


def test_waits_for_a_thousand_locks_are_remembered_and_with_more_all_forgotten(room: Room) -> None:
    for number in range(1000):
        be_granted(take(room, after_s=0.2, key=b"%d" % number))
    assert looks_after_s(take(room, key=b"0")) == pytest.approx(0.3, abs=0.01)
    assert looks_after_s(take(room, key=b"1")) == pytest.approx(INTERVAL_S)


def test_who_gives_up_changes_nothing(room: Room) -> None:
    be_granted(take(room, after_s=0.2))
    room.leave(take(room, after_s=30.0))
    assert looks_after_s(take(room)) == pytest.approx(0.3, abs=0.01)


def test_a_request_without_a_reply_for_a_second_more_than_an_interval_is_not_waited_for_any_longer(room: Room) -> None:
    be_granted(take(room, after_s=30.0))
    seat = take(room, interval_s=10.0)
    seat.asked_at = seat.line.looked_at
    due_at = seat.due_at()
    assert due_at is not None
    assert due_at - seat.asked_at == pytest.approx(11.0)


def test_only_the_first_look_is_put_off_and_none_after_a_grant_that_only_a_look_has_found(room: Room) -> None:
    be_granted(take(room, after_s=0.2))
    seat = take(room, after_s=0.3)
    seat.line.looked_at -= 30.0  # it is time to look
    steps = waiting_in(seat).steps((seat, None))
    look = next(steps)
    assert isinstance(look, Execute)
    assert looks_after_s(seat) == pytest.approx(INTERVAL_S)
    assert look.operation.feed([1, seat.token + MARK], Channel.dialect)
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value.word == seat.token + MARK
    assert looks_after_s(take(room)) == pytest.approx(INTERVAL_S)


def test_the_shortest_interval_looks_and_of_equals_the_last(room: Room) -> None:
    short, long = take(room), take(room, interval_s=10.0)
    assert (short.line.watchman, long.due_at()) == (short, None)
    equal = take(room)
    assert equal.line.watchman is equal
    assert looks_after_s(equal) == pytest.approx(INTERVAL_S)
    room.leave(equal)
    assert short.line.watchman is short
    room.leave(short)
    assert long.line.watchman is long


def test_seat_that_looks_is_told_when_another_hears_of_a_lease_that_ends_sooner(room: Room) -> None:
    watchman, other = take(room), take(room, interval_s=10.0)
    told: list[object] = []
    mailbox: Any = watchman.mailbox
    mailbox.tell = told.append
    watchman.until = clock() + INTERVAL_S
    other.note(b"another's", clock(), 60_000)
    assert told == []
    other.note(b"another's", clock(), 1)
    assert told == [RECKON]
