"""Costs that a renewed lock does not have: needless requests, and needless wake-ups of the renewer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.pipeline import Pipeline
from redislock_fast._renewal.schedule import Record, Schedule, renewing
from redislock_fast._util.times import clock
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.waiting import FAR_S, LATE, Callers, queue_up, sent_by

TOKEN = b"rlf:" + b"0" * 32
MARKED = TOKEN + b"+"
NATIVE = Capabilities([[b"delifeq"], None, [b"lmpop"]])


class Holder:
    """Something that can be referred to weakly."""


def values_sent(lease: Lease, held: bytes) -> list[bytes]:
    """The values that one renewal compares with the key, request by request, where the server has this value."""
    values: list[bytes] = []
    steps = renewing([lease], [])
    assert next(steps).method == "split"
    step = steps.send([[0]])
    assert step.method == "execute"
    assert isinstance(step.args[0], Pipeline)
    finished = False
    while not finished:
        requests: Any = step.args[0].request(NATIVE, clock())
        values.append(requests[0][2])
        finished = step.args[0].feed([b"OK" if values[-1] == held else None], NATIVE)
    with pytest.raises(StopIteration):
        next(steps)
    return values


def test_a_mark_is_found_once() -> None:
    holder = Holder()
    lease = Lease(weakref.ref(holder), b"name", TOKEN, 60_000, clock() + 30, Options(auto_renew=True))
    assert values_sent(lease, held=TOKEN) == [TOKEN]
    lease.expires_at = clock() + 30
    assert values_sent(lease, held=MARKED) == [TOKEN, MARKED]
    lease.expires_at = clock() + 30
    assert values_sent(lease, held=MARKED) == [MARKED]


def test_release_hands_over_at_once_what_was_renewed_for_a_waiter(
    valkey: Server, connect: Connect, callers: Callers
) -> None:
    admin = connect(valkey.port)
    name = type(callers).__name__
    holder = callers.contender(callers.client(valkey.port, client_name=name), timeout=1.0, auto_renew=True)
    holder.call("acquire")
    (answer,) = queue_up([callers.contender(callers.client(valkey.port), **LATE)], admin)
    wait_until(lambda: holder.lock._held().lease.contended, "a renewal has found the mark")
    with sent_by(admin, name) as sent:
        holder.release()
        assert answer.result(PATIENCE_S) is True
    assert "DELIFEQ" not in sent.commands
    assert admin.pttl("name") > 1000 * FAR_S / 2


def test_renewer_is_woken_only_for_what_is_due_before_its_next_look() -> None:
    holder = Holder()
    lease = Lease(weakref.ref(holder), b"name", TOKEN, 60_000, clock() + 60, Options(auto_renew=True))
    record = Record(lease, lambda _: None)
    schedule = Schedule()
    assert schedule.add(record, 100.0, 0.001) is True
    schedule.looks_at = 90.0
    assert schedule.add(record, 100.0, 0.001) is False
    assert schedule.add(record, 80.0, 0.001) is True
    schedule.remove(record)
    assert schedule.next_at() is None
