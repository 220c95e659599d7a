"""When a waiter makes its health check, which grants it takes, and how it leaves the queue when its waiting fails.

Rules: no server, and no time passes: a waiter that has waited is made with an earlier time.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import hiredis
import pytest

from redislock_fast._pipe.base import Args
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.own_token import LOST, TAKEN, Redeem
from redislock_fast._protocol.queue import JoinQueue, LeaveQueue, Watch
from redislock_fast._queue.waiters import BROKEN, CHECK, RECKON, Grant, Waiter, WaiterRegistry
from redislock_fast._queue.waiting import Waiting
from redislock_fast._util.times import Limit, clock
from redislock_fast._util.tokens import CONTENDED_FLAG, TokenSource, new_token
from tests.support.helpers import PATIENCE_S, start

KEY = b"name"
INTERVAL_S = 0.1


class ServerTransport:
    """A channel, its connection and a mailbox in one, of which nothing is needed."""

    capabilities = Capabilities()

    def is_current(self, _: Waiter) -> bool:
        return True

    def new_token(self, _key: bytes, _kind: bytes = b"0") -> bytes:
        return new_token()

    def post(self, *_: Any) -> None:
        """Send nothing."""

    def put(self, _: object) -> None:
        """Keep nothing."""


@pytest.fixture
def registry() -> WaiterRegistry:
    """One in which waiters hear of the lock."""
    registry = WaiterRegistry(ServerTransport.capabilities, TokenSource())
    registry.note_subscription(registry.channel_for(KEY), allowed=True)
    return registry


def take(registry: WaiterRegistry, after_s: float = 0.0, key: bytes = KEY, interval_s: float = INTERVAL_S) -> Waiter:
    """A waiter that joined the queue so many seconds ago."""
    channel = ServerTransport()
    waiter = registry.take(key, new_token(), channel, channel, channel)
    assert waiter is not None
    waiter.taken_at -= after_s
    waiter.interval_s = interval_s
    waiter.key_queue.enqueue(waiter)
    return waiter


def waiting_in(waiter: Waiter) -> Waiting:
    return Waiting(KEY, waiter.token, 60_000, INTERVAL_S, Limit(None))


def be_granted(waiter: Waiter) -> None:
    """It gets a grant, and goes."""
    assert waiting_in(waiter).granted(waiter, Grant(waiter.token + CONTENDED_FLAG, clock()))
    waiter.registry.leave(waiter)


def looks_after_s(waiter: Waiter) -> float:
    due_at = waiter.due_at()
    assert due_at is not None
    return due_at - waiter.key_queue.checked_at


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no time pass, however busy the machine is."""
    now = clock()
    for module in ("redislock_fast._queue.waiters", "redislock_fast._queue.waiting", __name__):
        monkeypatch.setattr(f"{module}.clock", lambda: now)


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(("last_s", "looks_s"), [(0.0, 0.1), (0.25, 0.35), (30.0, 0.5)])
def test_the_first_look_is_put_off_by_the_last_wait_and_four_intervals_at_most(
    registry: WaiterRegistry, last_s: float, looks_s: float
) -> None:
    be_granted(take(registry, after_s=last_s))
    assert looks_after_s(take(registry)) == pytest.approx(looks_s, abs=0.01)


def test_first_waiter_makes_its_health_check_after_an_interval(registry: WaiterRegistry) -> None:
    assert looks_after_s(take(registry)) == pytest.approx(INTERVAL_S)


@pytest.mark.usefixtures("stopped")
def test_waits_for_a_thousand_locks_are_remembered_and_with_more_all_forgotten(registry: WaiterRegistry) -> None:
    for number in range(1000):
        be_granted(take(registry, after_s=0.2, key=b"%d" % number))
    assert looks_after_s(take(registry, key=b"0")) == pytest.approx(0.3, abs=0.01)
    assert looks_after_s(take(registry, key=b"1")) == pytest.approx(INTERVAL_S)


def test_waiter_that_gives_up_changes_nothing(registry: WaiterRegistry) -> None:
    be_granted(take(registry, after_s=0.2))
    registry.leave(take(registry, after_s=30.0))
    assert looks_after_s(take(registry)) == pytest.approx(0.3, abs=0.01)


def test_a_request_without_a_reply_for_a_second_more_than_an_interval_is_not_waited_for_any_longer(
    registry: WaiterRegistry,
) -> None:
    be_granted(take(registry, after_s=30.0))
    waiter = take(registry, interval_s=10.0)
    waiter.asked_at = waiter.key_queue.checked_at
    due_at = waiter.due_at()
    assert due_at is not None
    assert due_at - waiter.asked_at == pytest.approx(11.0)


def test_only_the_first_look_is_put_off_and_none_after_a_grant_that_only_a_look_has_found(
    registry: WaiterRegistry,
) -> None:
    be_granted(take(registry, after_s=0.2))
    waiter = take(registry, after_s=0.3)
    waiter.key_queue.checked_at -= 30.0  # it is time to look
    steps = waiting_in(waiter).steps((waiter, None))
    look = next(steps)
    assert look.method == "execute"
    assert looks_after_s(waiter) == pytest.approx(INTERVAL_S)
    assert look.args[0].feed([1, waiter.token + CONTENDED_FLAG], ServerTransport.capabilities)
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert end.value.value.value == waiter.token + CONTENDED_FLAG
    assert looks_after_s(take(registry)) == pytest.approx(INTERVAL_S)


def test_the_shortest_interval_looks_and_of_equals_the_last(registry: WaiterRegistry) -> None:
    short, long = take(registry), take(registry, interval_s=10.0)
    assert (short.key_queue.poller, long.due_at()) == (short, None)
    equal = take(registry)
    assert equal.key_queue.poller is equal
    assert looks_after_s(equal) == pytest.approx(INTERVAL_S)
    registry.leave(equal)
    assert short.key_queue.poller is short
    registry.leave(short)
    assert long.key_queue.poller is long


def test_seat_that_looks_is_told_when_another_hears_of_a_lease_that_ends_sooner(registry: WaiterRegistry) -> None:
    poller, other = take(registry), take(registry, interval_s=10.0)
    told: list[object] = []
    mailbox: Any = poller.mailbox
    mailbox.put = told.append
    poller.until = clock() + INTERVAL_S
    other.note(b"another's", clock(), 60_000)
    assert told == []
    other.note(b"another's", clock(), 1)
    assert told == [RECKON]


def test_grant_of_an_earlier_place_in_the_queue_is_not_taken(registry: WaiterRegistry) -> None:
    waiter = take(registry)
    waiter.arrival = 2
    steps = waiting_in(waiter).steps((waiter, Grant(waiter.token + CONTENDED_FLAG, clock(), b"1")))
    assert next(steps).method == "next_message"
    grant = Grant(waiter.token + CONTENDED_FLAG, clock(), b"2")
    with pytest.raises(StopIteration) as end:
        steps.send(grant)
    assert end.value.value is grant


@pytest.mark.parametrize("error", [ConnectionError("gone"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_waiting_that_fails_leaves_the_queue(
    registry: WaiterRegistry, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    posted: list[Args] = []
    monkeypatch.setattr(ServerTransport, "post", lambda _self, _connection, request: posted.append(request))
    waiter = take(registry)
    steps = waiting_in(waiter).steps((waiter, RECKON))
    next(steps)
    with pytest.raises(type(error)):
        steps.throw(error)
    leave = LeaveQueue(KEY, waiter.token)
    leave.with_text = True
    assert posted == [leave.request(ServerTransport.capabilities, 0.0)]
    assert registry.is_contended(KEY, True) is False


def test_waiter_that_is_woken_long_after_its_deadline_leaves_within_its_deadline(registry: WaiterRegistry) -> None:
    waiter, limit = take(registry), Limit(0.0)
    limit.deadline = clock() - 1.0
    leave = next(Waiting(KEY, waiter.token, 60_000, INTERVAL_S, limit).steps((waiter, None)))
    assert leave.method == "execute"
    assert isinstance(leave.args[0], LeaveQueue)
    assert leave.args[1] <= -1.0


@pytest.mark.parametrize("value", [b"redis-py's", None], ids=["as it was", "gone"])
def test_lock_that_changed_before_the_watch_was_armed_is_asked_for_again(
    registry: WaiterRegistry, value: bytes | None
) -> None:
    waiter = take(registry)
    steps = waiting_in(waiter).steps((waiter, CHECK))
    join = next(steps)
    assert join.method == "execute"
    assert join.args[0].feed([2, b"redis-py's", 60_000, 1, 1], ServerTransport.capabilities)
    watch = steps.send(None)
    assert watch.method == "execute"
    assert isinstance(watch.args[0], Watch)
    assert watch.args[0].feed([b"OK", b"OK", value], ServerTransport.capabilities)
    step = steps.send(None)
    if value is None:
        assert step.method == "execute"
        assert isinstance(step.args[0], JoinQueue)
    else:
        assert step.method == "next_message"


def test_waiter_that_loses_its_connection_starts_again_with_a_new_token(registry: WaiterRegistry) -> None:
    waiter = take(registry)
    waiting = waiting_in(waiter)
    steps = waiting.steps((waiter, BROKEN))
    leave = next(steps)
    assert leave.method == "execute"
    assert leave.args[0].feed(None, ServerTransport.capabilities)
    enter = steps.send(None)
    assert enter.method == "enter"
    assert enter.args[1] == waiting.token != waiter.token


@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
def test_ticket_is_redeemed_whatever_the_age_of_its_grant(registry: WaiterRegistry, is_old: bool) -> None:
    waiter = take(registry)
    waiting = Waiting(KEY, waiter.token, 60_000, INTERVAL_S, Limit(None), b"own")
    grant = Grant(waiter.token + CONTENDED_FLAG, clock() - 30.0 * is_old, b"1")
    assert waiting.granted(waiter, grant) is None
    steps = waiting.steps((waiter, grant))
    redeem = next(steps)
    assert redeem.method == "execute"
    assert isinstance(redeem.args[0], Redeem)
    redeem.args[0].request(ServerTransport.capabilities, 7.0)
    assert redeem.args[0].feed([TAKEN], ServerTransport.capabilities)
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    assert (end.value.value.since, waiting.held_with, waiting.attempt) == (7.0, b"own", redeem.args[0])


def test_waiter_whose_ticket_was_lost_starts_again_with_a_new_one(registry: WaiterRegistry) -> None:
    waiter = take(registry)
    waiting = Waiting(KEY, waiter.token, 60_000, INTERVAL_S, Limit(None), b"own")
    steps = waiting.steps((waiter, Grant(waiter.token + CONTENDED_FLAG, clock(), b"1")))
    redeem = next(steps)
    assert redeem.method == "execute"
    assert redeem.args[0].feed([LOST], ServerTransport.capabilities)
    leave = steps.send(None)
    assert leave.method == "execute"
    assert isinstance(leave.args[0], LeaveQueue)
    assert leave.args[0].feed(None, ServerTransport.capabilities)
    enter = steps.send(None)
    assert enter.method == "enter"
    assert enter.args[1] == waiting.token != waiter.token


@pytest.mark.parametrize("is_there", [0, 1], ids=["lost", "kept"])
def test_health_check_that_finds_the_places_of_all_lost_wakes_the_others(
    registry: WaiterRegistry, is_there: int
) -> None:
    oldest, poller = take(registry), take(registry)
    told: list[object] = []
    mailbox: Any = oldest.mailbox
    mailbox.put = told.append
    poller.key_queue.checked_at -= 30.0  # a health check is due
    steps = waiting_in(poller).steps((poller, None))
    check = next(steps)
    assert check.method == "execute"
    answer: list[Any] = [0, new_token() + CONTENDED_FLAG, 60_000, 0, is_there]
    assert check.args[0].feed(answer, ServerTransport.capabilities)
    assert steps.send(None).method == "next_message"
    assert told == ([] if is_there else [CHECK])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [([KEY], [KEY]), ([b"other", b"third"], [b"other"]), (None, [KEY, b"other"])],
    ids=["one", "the other", "all of a flushed server"],
)
def test_change_of_keys_wakes_the_waiters_of_these_keys(
    registry: WaiterRegistry, keys: list[bytes] | None, expected: list[bytes]
) -> None:
    told: list[tuple[bytes, object]] = []
    for key in (KEY, b"other"):
        mailbox: Any = take(registry, key=key).mailbox
        mailbox.put = lambda message, key=key: told.append((key, message))
    registry.take_push([b"invalidate", keys])  # type: ignore[list-item]  # as hiredis gives it
    assert told == [(key, CHECK) for key in expected]


def test_waiter_in_a_slot_that_moves_tries_once_and_pauses(registry: WaiterRegistry) -> None:
    waiter = take(registry)
    steps = waiting_in(waiter).steps((waiter, CHECK))
    join = next(steps)
    assert join.method == "execute"
    assert join.args[0].feed(hiredis.ReplyError("TRYAGAIN Multiple keys"), ServerTransport.capabilities)
    attempt = steps.send(None)
    assert attempt.method == "execute"
    assert isinstance(attempt.args[0], Acquire)
    assert attempt.args[0].token != waiter.token
    pause = steps.send(None)
    assert pause.method == "sleep"
    assert pause.args[0] == INTERVAL_S
    assert steps.send(None).method == "enter"


def test_late_reply_brings_back_no_waiter_that_has_left(registry: WaiterRegistry) -> None:
    waiter, other = take(registry), take(registry)
    registry.leave(waiter)
    waiter.key_queue.enqueue(waiter)
    assert (waiter.is_queued, other.key_queue.poller) == (False, other)
    registry.leave(other)
    other.key_queue.enqueue(other)
    assert (other.is_queued, other.key_queue.poller, registry.is_contended(KEY, False)) == (False, None, False)


class _Interrupted(dict[bytes, Any]):
    """A dict whose next entry that is removed is removed only after another thread has done something."""

    def __init__(self, entries: dict[bytes, Any], before: Any) -> None:
        super().__init__(entries)
        self._before = before

    def pop(self, *arguments: Any) -> Any:
        before, self._before = self._before, lambda: None
        before()
        return super().pop(*arguments)


def test_waiter_that_comes_as_the_last_one_leaves_shares_its_key_queue(registry: WaiterRegistry) -> None:
    last = take(registry)
    came: list[Waiter] = []
    registry.key_queues = _Interrupted(registry.key_queues, lambda: came.append(take(registry)))
    registry.leave(last)
    assert take(registry).key_queue is came[0].key_queue
    assert registry.is_contended(KEY, False)


@pytest.mark.slow
def test_threads_that_come_and_go_at_once_leave_nothing(registry: WaiterRegistry) -> None:
    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        waiters: list[Waiter] = []
        for _ in range(3000):
            if len(waiters) < 3 and chance.random() < 0.6:
                waiters.append(take(registry, interval_s=chance.choice([0.1, 1.0])))
            elif waiters:
                waiter = waiters.pop(chance.randrange(len(waiters)))
                chance.choice([registry.leave, waiter.key_queue.dequeue])(waiter)
                waiter.key_queue.enqueue(waiter)
                registry.leave(waiter)
        for waiter in waiters:
            assert waiter.is_queued
            poller = waiter.key_queue.poller
            assert poller is not None
            registry.leave(waiter)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for work in [start(lambda seed=seed: come_and_go(seed)) for seed in range(4)]:  # type: ignore[misc]
            work.result(6 * PATIENCE_S)
    finally:
        sys.setswitchinterval(before)
    assert (registry._by_token, registry.key_queues) == ({}, {})


def test_waiter_queues_whose_connection_is_subscribed_by_another_thread_meanwhile(
    registry: WaiterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = registry.channel_for(b"anew")
    registry.note_end(channel)
    has_tried = registry.has_tried

    def subscribe_and_look(key: bytes) -> bool:
        registry.note_subscription(channel, True)
        return has_tried(key)

    monkeypatch.setattr(registry, "has_tried", subscribe_and_look)
    assert take(registry, key=b"anew").channel == channel


def test_text_of_the_script_for_leaving_is_sent_before_others_do_without_it(registry: WaiterRegistry) -> None:
    first, second, third = (take(registry) for _ in range(3))
    sent: list[Any] = []

    class Posting(ServerTransport):
        def post(self, _: object, args: Args, *__: Any) -> None:
            if len(coming) > 1:
                coming.pop().withdraw()  # another thread
            sent.append(args[0])

    coming = [first, second]
    for waiter in (first, second, third):
        waiter.node = Posting()
    first.withdraw()
    assert sent == [b"EVAL", b"EVAL"]
    third.withdraw()
    assert sent[2:] == [b"EVALSHA"]
