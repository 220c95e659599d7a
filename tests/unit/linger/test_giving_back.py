"""How keys that lingered are given back: posted releases, lost connections, replies that do not come.

Rules: no server, no thread and no running loop: the test has the connection, and calls what the watching calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hiredis
import pytest

from redislock_fast._linger.key_cache import KeyLease
from redislock_fast._linger.loop import LoopLingering
from redislock_fast._linger.threads import ThreadLingering
from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._util.times import clock
from tests.support.async_helpers import eventually
from tests.support.bare_locks import KEY, TOKEN, lease_of
from tests.support.helpers import PATIENCE_S, start, wait_until
from tests.support.interrupts import each_line, interrupt_kind

__all__ = ["interrupt_kind"]


class _Closed:
    def add_done_callback(self, _: object) -> None:
        """Never call it."""


class _Connection:
    """A connection, its pipe, and its registry in one: replies come when the test says so."""

    capabilities = Capabilities()
    broken = False
    silence_s = 1.0
    closed = _Closed()
    on_wanted: Any = None

    def __init__(self) -> None:
        self.pipe = self.registry = self
        self.posted: list[Args] = []
        self.takers: list[Callable[[Any], object]] = []

    def channel_of(self, _: bytes) -> bytes:
        return b"channel"

    def mailbox(self) -> object:
        return object()

    def note_hand_over(self, key: bytes, handed_over: bool) -> None:
        """Note nothing."""

    def post_many(self, requests: list[Args], on_replies: Callable[[list[Reply]], object]) -> None:
        """Send requests of a thread."""
        self.posted += requests
        self.takers.append(on_replies)

    def post(self, request: Args, on_reply: Callable[[Reply], object]) -> None:
        """Send a request of a loop."""
        self.posted.append(request)
        self.takers.append(lambda replies: [on_reply(reply) for reply in replies])

    def call(self, request: Args, timeout_s: float) -> Reply:
        """Wait for the reply to a request of a thread. Those to what was posted, one each, come before it."""
        assert request == (b"PING",)
        assert timeout_s > 0
        while self.takers:
            self.takers.pop(0)([1])
        return b"PONG"


class _Server:
    """A transport, which is its own client."""

    def __init__(self) -> None:
        self.connection: Any = _Connection()
        self.cleaned_up: list[tuple[bytes, bytes]] = []

    def owner(self) -> _Server:
        return self

    def clean_up(self, entries: list[tuple[bytes, bytes]]) -> None:
        self.cleaned_up += entries

    def leave_if_silent(self, connection: Any) -> None:
        """Go on with it."""

    def close_if_idle(self) -> None:
        """Keep the connection."""


class _OfThreads(_Server):
    def __init__(self, kind: type[ThreadLingering] = ThreadLingering) -> None:
        super().__init__()
        self.inside: set[int] = set()
        self.is_entered = False
        server: Any = self
        self.lingering = kind(server)

    def wait_for_message(self, mailbox: Any, timeout_s: float) -> object:
        return None

    def look(self) -> None:
        """What its thread does again and again."""
        self.lingering.watch_keys(threading.Lock())


class _Watched(ThreadLingering):
    def watch_until_rest(self) -> None:
        """The test looks after the keys."""


class _OfALoop(_Server):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        server: Any = self
        self.lingering = LoopLingering(server)

    def in_loop(self, call: Callable[..., object], *args: Any) -> None:
        call(*args)

    call = in_loop

    def look(self) -> None:
        """What its timer does again and again."""
        server: Any = self
        self.lingering.watch_keys(self.lingering._turn, server)


@pytest.fixture(params=["threads", "loop"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A transport whose keys are watched by the test."""
    if request.param == "threads":
        yield _OfThreads(_Watched)
        return
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: loop)
    yield _OfALoop(loop)
    monkeypatch.undo()
    loop.close()


def _give_back(transport: Any) -> Any:
    """Let a key linger that its connection has granted, and give it up. Returns the connection."""
    connection = transport.connection
    cached = transport.lingering.key_cache.of(KEY)
    cached.lease = lease_of(clock(), registry=connection)
    transport.lingering.key_cache.watch()
    transport.look()
    transport.lingering.key_cache.take_wanted(KEY)
    return connection


def test_release_that_is_answered_is_done_with(transport: Any) -> None:
    connection = _give_back(transport)
    assert transport.lingering.has_unconfirmed
    assert [request[0] for request in connection.posted] == [b"EVALSHA"]
    connection.takers[0]([1])
    assert not transport.lingering.has_unconfirmed
    assert transport.cleaned_up == []


def test_release_without_a_reply_is_cleaned_up_once_there_is_another_connection(transport: Any) -> None:
    _give_back(transport)
    transport.connection = _Connection()
    transport.look()
    assert transport.cleaned_up == [(KEY, TOKEN)]
    assert not transport.lingering.has_unconfirmed


def test_release_without_a_reply_is_cleaned_up_once_the_connection_is_gone(transport: Any) -> None:
    _give_back(transport)
    transport.connection = None
    transport.look()
    assert transport.cleaned_up == [(KEY, TOKEN)]


def test_what_another_connection_has_granted_is_cleaned_up(transport: Any) -> None:
    transport.lingering.key_cache.of(KEY).lease = lease_of(clock(), registry="another registry")
    transport.lingering.key_cache.drop_all()
    assert transport.cleaned_up == [(KEY, TOKEN)]
    assert transport.connection.posted == []


def test_forked_child_leaves_the_keys_to_its_parent(transport: Any) -> None:
    connection = _give_back(transport)
    transport.lingering.key_cache.of(KEY).lease = lease_of(clock(), registry=connection)
    transport.lingering.forget()
    transport.lingering.key_cache.drop_all()
    transport.lingering.clean_up_unconfirmed()
    assert transport.lingering.key_cache.of(KEY).lease is None
    assert transport.cleaned_up == []
    assert len(connection.posted) == 1


def test_release_that_has_no_reply_yet_is_watched(transport: Any) -> None:
    connection = _give_back(transport)
    connection.takers[0]([1])
    cached = transport.lingering.key_cache.of(KEY)
    assert cached.try_lock()
    assert transport.lingering.key_cache.rests()
    cached.lease = lease_of(clock(), registry=connection)
    cached.drop()
    cached.free()
    assert transport.lingering.has_unconfirmed
    assert transport.lingering.key_cache.is_watched


@pytest.mark.parametrize("is_entered", [False, True])
def test_keys_are_given_up_where_no_thread_can_be_started(is_entered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    transport = _OfThreads()
    transport.is_entered = is_entered
    for name in (b"first", b"second"):
        cached = transport.lingering.key_cache.of(name)
        assert cached.try_lock()
        cached.lease = lease_of(clock(), registry=transport.connection)
        cached.release(clock(), linger_s=1.0)
    assert len(transport.connection.posted) == 2
    assert not transport.lingering.key_cache.is_watched
    assert not transport.lingering.has_unconfirmed
    cleaned_up = [(KEY, TOKEN), (KEY, TOKEN)] if is_entered else []
    assert transport.cleaned_up == cleaned_up, "a signal handler waits for no reply"


class _Asleep:
    """A watching thread that has gone to sleep, since no key lingers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rest_s: float) -> None:
        self.transport = _OfThreads()
        self.started = 0
        monkeypatch.setattr(self.transport.lingering, "_start_watching", self._note_start)
        self.transport.lingering.key_cache.watch()
        self.woken = threading.Lock()
        self.woken.acquire()
        self.transport.lingering._watcher[0] = self.woken
        self.goes_on = start(lambda: self.transport.lingering._sleep(self.woken, rest_s))
        wait_until(lambda: not self.transport.lingering.key_cache.is_watched, "it sleeps")

    def _note_start(self) -> None:
        self.started += 1

    def give_back(self) -> None:
        cached = self.transport.lingering.key_cache.of(KEY)
        assert cached.try_lock()
        cached.lease = lease_of(clock(), registry=self.transport.connection)
        cached.drop()
        cached.free()


def test_thread_that_sleeps_is_woken_by_the_next_key_that_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = _Asleep(monkeypatch, PATIENCE_S)
    cached = asleep.transport.lingering.key_cache.of(KEY)
    assert cached.try_lock()
    cached.lease = lease_of(clock(), registry=asleep.transport.connection)
    cached.release(clock(), linger_s=1.0)
    assert asleep.goes_on.result(PATIENCE_S) is True
    assert asleep.transport.lingering.key_cache.is_watched
    assert asleep.started == 1


def test_thread_that_sleeps_is_not_woken_by_what_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = _Asleep(monkeypatch, PATIENCE_S)
    heard = threading.Event()
    monkeypatch.setattr(asleep.transport.lingering, "_listen", lambda _: heard.set())
    asleep.give_back()
    assert not asleep.transport.lingering.key_cache.is_watched
    assert heard.wait(PATIENCE_S), "it looks for the reply"
    asleep.transport.lingering.key_cache.watch()
    assert asleep.goes_on.result(PATIENCE_S) is True
    assert asleep.started == 1


def test_thread_that_sleeps_ends_where_no_key_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = _Asleep(monkeypatch, 0.0)
    assert asleep.goes_on.result(PATIENCE_S) is False
    asleep.give_back()
    assert asleep.started == 2, "another thread looks for the reply"


def test_thread_that_is_woken_when_it_is_about_to_end_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = _Asleep(monkeypatch, PATIENCE_S)
    asleep.transport.lingering.key_cache.watch()
    assert asleep.goes_on.result(PATIENCE_S) is True
    asleep.woken.release()  # once more, by a caller that has seen it asleep
    assert asleep.transport.lingering._ends(asleep.woken) is False
    assert asleep.transport.lingering._watcher == {0: asleep.woken}
    assert asleep.transport.lingering._ends(asleep.woken) is True
    assert asleep.transport.lingering._watcher == {}


def test_error_does_not_end_the_watching(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    transport = _OfThreads()
    errors = iter([RuntimeError("a bug")])

    def sweep(_now: float) -> bool:
        for error in errors:
            raise error
        transport.lingering.key_cache.is_watched = False
        return False

    monkeypatch.setattr(transport.lingering.key_cache, "sweep", sweep)
    monkeypatch.setattr(transport.lingering, "_sleep", lambda *_: False)
    transport.lingering.watch_until_rest()
    assert not transport.lingering.key_cache.is_watched, "it went on"
    assert [record.getMessage() for record in caplog.records] == ["Keys that linger could not be watched."]


def test_end_of_a_program_waits_for_what_the_watching_has_just_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = _OfThreads()
    connection = transport.connection
    cached = transport.lingering.key_cache.of(KEY)
    cached.lease = lease_of(clock(), registry=connection)
    give_up = transport.lingering.key_cache.give_up
    taken_out, may_give_up = threading.Event(), threading.Event()

    def give_up_later(leases: list[KeyLease], is_wanted: bool) -> None:
        taken_out.set()
        assert may_give_up.wait(PATIENCE_S)
        give_up(leases, is_wanted)

    monkeypatch.setattr(transport.lingering.key_cache, "give_up", give_up_later)
    monkeypatch.setattr(transport.lingering, "_start_watching", lambda: None)
    sweeping = start(transport.lingering.watch_until_rest)
    assert taken_out.wait(PATIENCE_S)
    monkeypatch.setattr("redislock_fast._linger.threads.time.sleep", lambda _: may_give_up.set())
    monkeypatch.setattr("redislock_fast._linger.threads._ended", [True])
    transport.lingering.end(PATIENCE_S)
    assert len(connection.posted) == 1, "the key is given up"
    assert not connection.takers, "and its reply is waited for"
    may_give_up.set()
    sweeping.result(PATIENCE_S)


def test_one_thread_listens_however_many_are_started() -> None:
    transport = _OfThreads()
    listening, may_end = threading.Semaphore(0), threading.Event()

    def listen(_: threading.Lock) -> bool:
        listening.release()
        return not may_end.wait(PATIENCE_S)

    transport.lingering.watch_keys = listen  # type: ignore[assignment,method-assign]
    first = start(transport.lingering.watch_until_rest)
    assert listening.acquire(timeout=PATIENCE_S)
    start(transport.lingering.watch_until_rest).result(PATIENCE_S)
    may_end.set()
    first.result(PATIENCE_S)
    assert not listening.acquire(blocking=False)


def test_release_that_was_cleaned_up_is_not_sent_again(transport: Any) -> None:
    connection = _give_back(transport)
    transport.connection = _Connection()
    transport.look()
    connection.takers[0]([hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")])
    assert len(connection.posted) == 1
    assert not transport.lingering.has_unconfirmed


def test_release_is_sent_again_where_the_server_does_not_know_the_script(transport: Any) -> None:
    connection = _give_back(transport)
    connection.takers[0]([hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")])
    assert [request[0] for request in connection.posted] == [b"EVALSHA", b"EVAL"]
    connection.takers[1]([1])
    assert not transport.lingering.has_unconfirmed
    assert transport.cleaned_up == []


def test_release_on_a_connection_that_ends_before_the_keys_are_watched_is_cleaned_up(transport: Any) -> None:
    connection = transport.connection
    cached = transport.lingering.key_cache.of(KEY)
    cached.lease = lease_of(clock(), registry=connection)
    transport.lingering.key_cache.watch()
    transport.lingering.key_cache.take_wanted(KEY)
    transport.connection = None
    transport.look()
    assert transport.cleaned_up == [(KEY, TOKEN)]


@pytest.mark.usefixtures("interrupt_kind")
def test_key_is_given_back_after_an_interrupt_at_any_line_of_the_watching(transport: Any) -> None:
    files = ("_linger/key_cache.py", "_linger/threads.py", "_linger/loop.py")
    for strike in each_line(10):
        transport.connection, transport.cleaned_up = _Connection(), []
        cached = transport.lingering.key_cache.of(KEY)
        cached.lease = lease_of(clock(), registry=transport.connection)
        cached.idle_until = clock() - 1
        transport.lingering._sweeps_at = 0.0
        transport.lingering.key_cache.watch()
        place = strike(transport.look, *files)
        transport.lingering._sweeps_at = 0.0
        transport.look()
        assert any(TOKEN in words for words in (*transport.cleaned_up, *transport.connection.posted)), place
        assert transport.lingering.key_cache.of(KEY).locked_by == {}, place
        assert transport.lingering.key_cache.of(KEY).lease is None, place
        transport.lingering._unconfirmed.clear()


def test_release_that_was_begun_twice_reports_no_loss(transport: Any, caplog: pytest.LogCaptureFixture) -> None:
    connection = transport.connection
    cached = transport.lingering.key_cache.of(KEY)
    lease = cached.lease = lease_of(clock(), registry=connection)
    assert cached.try_lock()
    cached.drop()
    cached.lease = lease  # as an interrupt leaves it
    cached.free()
    for take, reply in zip(connection.takers, (1, 0), strict=True):
        take([reply])
    assert caplog.records == []
    assert cached.lease is None


def test_loop_goes_on_watching_where_an_interrupt_strikes_the_callback_at_its_start() -> None:
    async def scenario() -> None:
        transport = _OfALoop(asyncio.get_running_loop())
        lingering = transport.lingering
        watch, struck = lingering.watch_keys, asyncio.Event()
        looked: list[object] = []

        def strike_first(turn: object, _server: Any) -> None:
            if not struck.is_set():
                struck.set()
                raise LookupError("as an interrupt that is an error")
            looked.append(turn)
            watch(turn, _server)

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        lingering.watch_keys = strike_first  # type: ignore[method-assign]
        lingering.key_cache.watch()
        await eventually(lambda: looked, "the second timer has called")

    asyncio.run(scenario())
