"""The lease of a shared owner while several requests prolong it at once.

Rules: the bookkeeping alone, against a lease that a played server keeps; then by threads and by tasks on real servers,
where each request ends when the test says so.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import hiredis
import pytest
import redis

from redislock_fast._lease.owner import SharedOwner
from redislock_fast._lease.prolonging import Prolonging, Prolongings
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.commands import Extend
from redislock_fast._util.times import clock, drift_s
from redislock_fast.server import Server
from tests.simulation.model import SERVERS, Model
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.holding import Losses
from tests.support.waiting import FAR_S, Callers, Contender, Threads, transport_in_use

STORIES = 3000
FLIGHT_S = 1.0


class _Played:
    """One request of a story: it is executed some time after it began, and ends some time after that."""

    def __init__(self, rng: random.Random, began_at: float, ttls_s: list[float]) -> None:
        self.sent_at = began_at
        self.executed_at = began_at + rng.random() * FLIGHT_S
        self.ended_at = self.executed_at + rng.random() * FLIGHT_S
        self.is_certain = rng.random() < 0.9
        self.ttl_s = rng.choice(ttls_s) if rng.random() < 0.6 else None
        self.added_s = rng.choice([0.0, 5.0])
        self.one: Prolonging | None = None
        self.ends_at: float | None = None


def _play(seed: int, ttls_s: list[float]) -> Iterator[tuple[float, float, float | None]]:
    """The time, when the server ends the lease, and what is believed of that, after each event of a story."""
    rng = random.Random(seed)
    book, server_s = Prolongings(b"token", 20.0), 20.0
    requests = [_Played(rng, rng.random() * 6, ttls_s) for _ in range(rng.randint(1, 8))]
    events = [(at, n, request) for request in requests for n, at in enumerate(_times_of(request))]
    for now, what, request in sorted(events, key=lambda event: event[:2]):
        if what == 0:
            so_far = book.ends_at
            request.ends_at = None if so_far is None else so_far + request.added_s
            request.one = book.begin(now, request.ttl_s, request.added_s)
        elif what == 1:
            server_s = server_s + request.added_s if request.ttl_s is None else now + request.ttl_s
        else:
            assert request.one is not None
            book.under_way.remove(request.one)
            if request.ttl_s is not None:
                book.set(request.one, request.sent_at, request.is_certain)
            elif request.is_certain:
                book.add(request.one, request.added_s, request.ends_at, may_cut=False)
        yield now, server_s, book.ends_at


def _times_of(request: _Played) -> tuple[float, float, float]:
    return request.sent_at, request.executed_at, request.ended_at


@pytest.mark.parametrize("ttls_s", [[30.0], [2.0, 30.0, 60.0]], ids=["one ttl", "several"])
def test_lease_is_believed_to_end_no_later_than_the_servers(ttls_s: list[float]) -> None:
    for seed in range(STORIES):
        for _, server_s, believed_s in _play(seed, ttls_s):
            assert believed_s is not None
            assert believed_s <= server_s, f"seed {seed}"


def test_uncertainty_is_no_longer_than_the_requests_under_way() -> None:
    book, ttl_s = Prolongings(b"token", 30.0), 30.0
    earlier = book.begin(0.0, ttl_s, 0.0)
    for now in range(1, 100):
        later = book.begin(float(now), ttl_s, 0.0)
        book.under_way.remove(earlier)
        book.set(earlier, now - 1.0, is_certain=True)
        assert book.ends_at == now - 1.0 + ttl_s
        earlier = later


def test_what_several_have_added_at_once_is_all_believed() -> None:
    book = Prolongings(b"token", 30.0)
    under_way = [book.begin(0.0, None, 10.0) for _ in range(3)]
    for one in under_way:
        book.under_way.remove(one)
        book.add(one, 10.0, 40.0, may_cut=False)
    assert book.ends_at == 60.0


def test_what_was_repeated_may_have_cut_what_others_have_added() -> None:
    book = Prolongings(b"token", 30.0)
    repeated, other = (book.begin(0.0, None, 10.0) for _ in range(2))
    for one, may_cut in ((repeated, True), (other, False)):
        book.under_way.remove(one)
        book.add(one, 10.0, 40.0, may_cut)
    assert book.ends_at == 40.0


def test_what_is_added_without_scripts_may_cut_the_lease() -> None:
    now, capabilities = clock(), Capabilities(Model(SERVERS["Valkey 9"]).execute(PROBE))
    holding, extend = SharedOwner(), Extend(b"name", b"token", 5_000, False, now + 10)
    holding.token, holding.expiry = b"token", (b"token", now + 10)
    one = holding.begin_prolonging(b"token", None, 5_000)
    for reply in (hiredis.ReplyError("NOPERM"), b"token", 8_000):  # PTTL, executed two seconds after it was sent
        extend.request(capabilities, now)
        assert not extend.feed(reply, capabilities)
    assert extend.request(capabilities, now)[-1] in {12_999, 13_000}
    assert extend.feed(b"OK", capabilities)
    holding.prolonged(one, extend, 5_000)
    assert holding.expires_at(b"token") == pytest.approx(now + 13)


# ---- on real servers ----


class Gated:
    """Makes the operations of a lock end one by one: each was executed, and its caller is told when the test says so.

    Args:
        callers: whose lock it is.
        contender: the lock.
    """

    def __init__(self, callers: Callers, contender: Contender) -> None:
        self._contender = contender
        self.executed = 0
        self._gates: list[Future[None]] = []
        transport = transport_in_use(contender)
        execute, begin = transport.execute, transport.begin

        def in_thread(operation: Any, limit_s: float | None = None) -> None:
            execute(operation, limit_s)
            self._gate().result(PATIENCE_S)

        async def in_task(operation: Any, limit_s: float | None = None) -> None:
            await execute(operation, limit_s)
            await asyncio.wrap_future(self._gate())

        def begin_in_thread(call: Any) -> Any:
            reply = begin(call)
            if reply == call.ours:  # else it goes on by `execute`
                self._gate().result(PATIENCE_S)
            return reply

        async def begin_in_task(call: Any) -> Any:
            reply = await begin(call)
            if reply == call.ours:
                await asyncio.wrap_future(self._gate())
            return reply

        in_threads = isinstance(callers, Threads)
        self._transport = transport
        transport.execute = in_thread if in_threads else in_task
        transport.begin = begin_in_thread if in_threads else begin_in_task

    def _gate(self) -> Future[None]:
        gate: Future[None] = Future()
        self._gates.append(gate)
        return gate

    def begin(self, verb: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method. Returns once the server has executed its request."""
        known = len(self._gates)
        answer = self._contender.ask(verb, *args, **kwargs)
        wait_until(lambda: len(self._gates) > known or answer.done(), "it is executed")
        return answer

    def end(self, number: int) -> None:
        """The caller of this operation, from 0, is told."""
        self._gates[number].set_result(None)

    def close(self) -> None:
        """As it was."""
        del self._transport.execute, self._transport.begin


SETTINGS = pytest.mark.parametrize("settings", [{}, {"on_lost": True}, {"auto_renew": True}], ids=str)


def shared_lock(callers: Callers, server: Server, losses: Losses, settings: dict[str, Any]) -> Contender:
    if "on_lost" in settings:
        settings = {"on_lost": losses}
    shared = callers.contender(callers.client(server.port), timeout=FAR_S, **settings)
    assert shared.lock.thread_local is False
    assert shared.call("acquire") is True
    return shared


@SETTINGS
@pytest.mark.parametrize("prolong", [("reacquire",), ("extend", FAR_S, True)], ids=["reacquire", "extend"])
def test_lease_that_is_always_being_prolonged_is_as_long_as_the_servers(
    callers: Callers,
    valkey: Server,
    valkey_client: redis.Redis,
    losses: Losses,
    settings: dict[str, Any],
    prolong: tuple[Any, ...],
) -> None:
    shared = shared_lock(callers, valkey, losses, settings)
    gated = Gated(callers, shared)
    began_at = [clock()]
    answers = [gated.begin(*prolong)]
    for number in itertools.count():
        began_at.append(clock())
        answers.append(gated.begin(*prolong))
        gated.end(number)
        assert answers[number].result(PATIENCE_S) is True
        ends_at = shared.lock._deadline(shared.lock._held()) + drift_s(FAR_S)
        assert ends_at >= began_at[number] + FAR_S
        ttl_s = valkey_client.pttl("name") / 1000  # before: time may pass between the two
        assert shared.lock.remaining() <= ttl_s
        if number == 5:
            break
    gated.end(number + 1)
    assert answers[-1].result(PATIENCE_S) is True
    gated.close()
    assert losses.reasons == []
    shared.release()


@SETTINGS
def test_remaining_is_the_ttl_less_what_clocks_may_drift(
    callers: Callers, valkey: Server, losses: Losses, settings: dict[str, Any]
) -> None:
    holder = shared_lock(callers, valkey, losses, settings)
    assert 0 < holder.lock.remaining() <= FAR_S - drift_s(FAR_S)
    holder.release()


@SETTINGS
def test_all_that_was_added_at_once_is_believed(
    callers: Callers, valkey: Server, valkey_client: redis.Redis, losses: Losses, settings: dict[str, Any]
) -> None:
    shared = shared_lock(callers, valkey, losses, settings)
    before_s = shared.lock.remaining()
    gated = Gated(callers, shared)
    began_at = clock()
    answers = [gated.begin("extend", FAR_S) for _ in range(3)]
    for number, answer in enumerate(answers):
        gated.end(number)
        assert answer.result(PATIENCE_S) is True
    gated.close()
    left_s = before_s + 3 * FAR_S - (clock() - began_at)
    ttl_s = valkey_client.pttl("name") / 1000  # before: time may pass between the two
    assert left_s - 1 < shared.lock.remaining() <= ttl_s
    shared.release()


@SETTINGS
def test_shorter_ttl_that_may_be_set_already_is_believed(
    callers: Callers, valkey: Server, valkey_client: redis.Redis, losses: Losses, settings: dict[str, Any]
) -> None:
    shared = shared_lock(callers, valkey, losses, settings)
    gated = Gated(callers, shared)
    longer, shorter = gated.begin("reacquire"), gated.begin("extend", FAR_S / 2, replace_ttl=True)
    ttl_s = valkey_client.pttl("name") / 1000  # before: time may pass between the two
    assert shared.lock.remaining() <= ttl_s
    for number, answer in enumerate((longer, shorter)):
        gated.end(number)
        assert answer.result(PATIENCE_S) is True
        ttl_s = valkey_client.pttl("name") / 1000  # before: time may pass between the two
        assert 0 < shared.lock.remaining() <= ttl_s
    gated.close()
    shared.release()
