"""The drivers of threads and of tasks: steps that raise, requests that are sent again, failures that end the queue.

Rules: no server, and no time passes but by `clock`. The transports do what the test says.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError
from redis.retry import Retry

from redislock_fast._pipe.base import ConnectionBroken, Forked
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire
from redislock_fast._protocol.operation import NOAUTH, SUBSCRIBED, Exchange, NotExecuted
from redislock_fast._protocol.queue import Watch
from redislock_fast._protocol.steps import CleanupEntries, Do, Steps
from redislock_fast._transport import base
from redislock_fast._transport.base import LATER_PAUSE_S, Attempts
from redislock_fast._transport.loop import driver as loop_driver
from redislock_fast._transport.threads import cluster as thread_cluster
from redislock_fast._transport.threads import driver as thread_driver
from redislock_fast._transport.threads import server as thread_server
from redislock_fast._transport.threads.driver import transport_of
from redislock_fast._transport.threads.server import ThreadServerTransport
from redislock_fast._util import fork
from redislock_fast._util.redis_py import RetryPolicy
from redislock_fast._util.times import GRACE_S
from redislock_fast._util.tokens import TokenSource
from tests.support.helpers import PATIENCE_S, start

ENTRY = (b"name", b"token")

Drive = Callable[["Transport", Steps, CleanupEntries], Any]


class Transport:
    """Notes what is to be cleaned up."""

    def __init__(self) -> None:
        self.cleaned_up: CleanupEntries = []

    def of_running_loop(self) -> Transport:
        """The same for each loop."""
        return self

    def clean_up(self, entries: CleanupEntries) -> None:
        """Note the entries."""
        self.cleaned_up += entries


def in_thread(transport: Transport, steps: Steps, to_clean_up: CleanupEntries) -> Any:
    """Drive the steps in this thread."""
    return thread_driver.drive(transport, steps, to_clean_up)


def in_task(transport: Transport, steps: Steps, to_clean_up: CleanupEntries) -> Any:
    """Drive the steps in a task."""
    return asyncio.run(loop_driver.drive(transport, steps, to_clean_up))


BY_EACH = pytest.mark.parametrize("drive", [in_thread, in_task], ids=["threads", "tasks"])


@BY_EACH
@pytest.mark.parametrize("fails", [True, False])
def test_entries_of_steps_are_cleaned_up_when_they_have_ended(drive: Drive, fails: bool) -> None:
    transport = Transport()
    to_clean_up: CleanupEntries = []

    def steps() -> Steps:
        yield Do("sleep", 0)
        to_clean_up.append(ENTRY)
        if fails:
            raise LookupError
        return "done"

    if fails:
        with pytest.raises(LookupError):
            drive(transport, steps(), to_clean_up)
    else:
        assert drive(transport, steps(), to_clean_up) == "done"
    assert transport.cleaned_up == [ENTRY]


def test_steps_in_which_a_signal_handler_forks_end_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hook() -> None:
        asked.append("a hook")
        monkeypatch.setattr(fork, "generation", lambda: -1)

    def steps() -> Steps:
        yield Do("call", hook)
        yield Do("call", hook)

    with pytest.raises(Forked):
        in_thread(Transport(), steps(), [])
    assert asked == ["a hook"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forked_cluster_and_its_node_share_a_new_set_of_callers(order: tuple[int, int]) -> None:
    former = {1}
    cluster: Any = object.__new__(thread_cluster.ThreadClusterTransport)
    node: Any = object.__new__(thread_cluster._Node)
    node._cluster = weakref.ref(cluster)
    for transport in (cluster, node):
        transport._child, transport.inside = 0, former
    for index in order:
        (cluster, node)[index].forget_inside()
    assert node.inside is cluster.inside
    assert cluster.inside == set()
    assert former == {1}, "its lock may be taken: it is not touched"


# When a request is sent again, and how long its reply may take


NOW = 100.0
BROKEN = ConnectionBroken(True, "broken")
LATER = NotExecuted("LOADING", "LOADING Redis is loading the dataset in memory")
UNAUTHENTICATED = NotExecuted(NOAUTH, "NOAUTH Authentication required.")


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "clock", lambda: NOW)


def attempts(limit_s: float | None = None, reply_s: float = -1.0, after: int = 2, pause_s: float = 0.5) -> Attempts:
    return Attempts(RetryPolicy(Retry(ConstantBackoff(pause_s), after)), limit_s, reply_s)


@pytest.mark.parametrize(
    ("limit_s", "reply_s", "timeout_s"),
    [
        (None, -1.0, -1.0),
        (None, 5.0, 5.0),
        (1e10, 5.0, 5.0),
        (2.0, -1.0, 2.0 + GRACE_S),
        (2.0, 5.0, 2.0 + GRACE_S),
        (2.0, 1.0, 1.0),
        (-GRACE_S / 2, 1.0, GRACE_S / 2),
        (-1.0, 1.0, 0.0),
    ],
)
def test_a_reply_is_waited_for_until_the_servers_or_the_callers_time_is_up(
    limit_s: float | None, reply_s: float, timeout_s: float
) -> None:
    assert attempts(limit_s, reply_s).timeout_s(NOW) == pytest.approx(timeout_s)


def test_the_callers_time_is_counted_from_the_beginning() -> None:
    limited, unlimited = attempts(2.0), attempts()
    assert (limited.left_s(), unlimited.left_s()) == (2.0, None)
    assert limited.bounded_s() == pytest.approx(2.0 + GRACE_S)
    assert limited.ends_at == pytest.approx(NOW + 2.0 + GRACE_S)
    assert unlimited.bounded_s() is unlimited.ends_at is None
    assert attempts(-1.0).bounded_s() == 0.0


def test_the_first_retry_leaves_at_once_and_the_policy_says_when_to_give_up() -> None:
    unlimited = attempts()
    assert [unlimited.pause_s(BROKEN) for _ in range(3)] == [0.0, 0.5, None]


def test_no_pause_lasts_longer_than_the_callers_time() -> None:
    limited = attempts(0.3, after=-1)
    assert [limited.pause_s(BROKEN) for _ in range(2)] == [0.0, None]


def test_a_server_that_answers_later_is_asked_until_the_callers_time_ends() -> None:
    assert [*map(attempts(60.0).pause_s, [LATER] * 5)] == [LATER_PAUSE_S, *[0.5] * 4]
    assert [*map(attempts().pause_s, [LATER] * 3)] == [LATER_PAUSE_S, 0.5, None]


def test_a_server_that_answers_later_is_not_asked_without_a_pause() -> None:
    assert {*map(attempts(60.0, pause_s=0.0).pause_s, [LATER] * 5)} == {LATER_PAUSE_S}


def test_a_connection_on_which_nothing_is_executed_is_replaced_once() -> None:
    assert [*map(attempts(60.0, after=5).pause_s, [UNAUTHENTICATED] * 2)] == [0.0, None]


def test_the_error_of_the_last_attempt_is_raised_alone_and_nothing_keeps_it() -> None:
    last = attempts()
    for _ in range(2):
        last.note_failure(BROKEN, ConnectionError("not the last"))
        assert last.next_pause_s() >= 0.0
    error = ConnectionError("broken")
    last.note_failure(BROKEN, error)
    gc.disable()
    try:
        with pytest.raises(ConnectionError, match=r"^broken$") as raised:
            last.next_pause_s()
        assert raised.value is error
        assert error.__context__ is None
        is_there = weakref.ref(error)
        del error, raised
        assert is_there() is None
    finally:
        gc.enable()


# The failures after which a transport does without the queue


OF_THE_QUEUE = Watch(b"name")
OF_A_LOCK = Acquire(b"name", b"token", None)


@pytest.mark.parametrize("is_tried", [True, False], ids=["a request is under way", "none is"])
@pytest.mark.parametrize("is_proven", [True, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("closed_by_peer", [True, False], ids=["by the peer", "by an interrupt"])
@pytest.mark.parametrize("operation", [OF_THE_QUEUE, OF_A_LOCK], ids=["of the queue", "of a lock"])
def test_two_connections_in_a_row_that_the_peer_closes_for_the_queue_end_its_use(
    is_tried: bool, is_proven: bool, closed_by_peer: bool, operation: Exchange
) -> None:
    client = redis.Redis()
    transport = transport_of(client)
    assert isinstance(transport, ThreadServerTransport)
    greeted = []
    for number in range(2):
        lost: Any = SimpleNamespace(
            pipe=SimpleNamespace(closed_by_peer=closed_by_peer),
            registry=SimpleNamespace(is_tried=is_tried, is_proven=is_proven, identifier=b"%d" % number),
        )
        for _ in range(2):  # two callers notice it
            transport._note_queue_trouble(ConnectionBroken(True, "closed"), lost, operation)
        greeted.append(transport.greets)
    ends = closed_by_peer and not is_proven and (is_tried or operation is OF_THE_QUEUE)
    assert greeted == [True, not ends]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_loss_that_two_callers_find_at_the_same_time_counts_once(number: int) -> None:
    client = redis.Redis()
    transport = transport_of(client)
    assert isinstance(transport, ThreadServerTransport)
    reads = itertools.count(1)

    class Registry:
        is_tried, is_proven, identifier = True, False, b"first"

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if next(reads) == number:
                find()
            return value

    lost: Any = SimpleNamespace(pipe=SimpleNamespace(closed_by_peer=True), registry=Registry())

    def find() -> None:
        assert transport._note_queue_trouble(ConnectionBroken(True, "closed"), lost, OF_A_LOCK)

    find()
    assert next(reads) > number  # the other has come
    assert transport.greets


def test_request_refused_beside_a_subscription_is_sent_again_whatever_failed_before() -> None:
    client = redis.Redis()
    transport = transport_of(client)
    assert isinstance(transport, ThreadServerTransport)
    attempts = transport._attempts(None)
    refused = NotExecuted(SUBSCRIBED, "ERR only (P)SUBSCRIBE allowed in this context")
    for trouble in (ConnectionBroken(True, "closed for the error of another caller"), refused):
        connection: Any = SimpleNamespace(
            pipe=SimpleNamespace(closed_by_peer=True),
            registry=SimpleNamespace(is_tried=False, is_proven=False),
            close=lambda: None,
        )
        assert transport._note_trouble(attempts, connection, OF_A_LOCK, trouble, [])
    assert (attempts.next_pause_s(), transport.greets) == (0.0, False)


# A connection that several threads give up at the same time


class _Tokens(TokenSource):
    """Calls a function before it makes its successor."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def successor(self) -> TokenSource:
        """As always."""
        self.meanwhile()
        return super().successor()


@pytest.fixture
def transport() -> Iterator[ThreadServerTransport]:
    """One with a connection that it gives up, and no server."""
    client = redis.Redis()
    made = transport_of(client)
    made.connection = _connection()
    yield made
    made.connection = None


def _connection() -> Any:
    return SimpleNamespace(
        ending=(b"CLIENT", b"KILL"),
        registry=None,
        capabilities=Capabilities(),
        close=lambda: None,
        pipe=SimpleNamespace(post=lambda *_: None),
    )


def test_who_finds_no_connection_has_the_tokens_of_the_next_and_ends_the_last(transport: ThreadServerTransport) -> None:
    connection: Any = transport.connection
    found = []
    transport.tokens = tokens = _Tokens()
    tokens.meanwhile = lambda: found.append((transport.connection, {*transport.cleanup.endings}))
    transport._drop(connection)
    assert found == [(connection, {connection.ending})]
    assert transport.connection is None
    assert transport.tokens is not tokens


def test_connection_that_another_thread_has_replaced_meanwhile_is_not_given_up(
    transport: ThreadServerTransport,
) -> None:
    first: Any = transport.connection
    second = _connection()

    def replace() -> None:
        tokens.meanwhile = lambda: None
        transport._drop(first)
        transport.connection = second

    transport.tokens = tokens = _Tokens()
    tokens.meanwhile = replace
    transport._drop(first)
    assert transport.connection is second


class _Watched(ThreadServerTransport):
    """Calls a function once, when the attribute of this name has been set."""

    meanwhile: tuple[str, Callable[[], object]] = ("", lambda: None)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        watched, call = self.meanwhile
        if name == watched:
            self.meanwhile = ("", lambda: None)
            call()


class _Mutex:
    """Says when a thread must wait for it."""

    def __init__(self, awaited: threading.Event) -> None:
        self._awaited = awaited
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.fixture
def watched(transport: ThreadServerTransport) -> _Watched:
    """The transport, watched."""
    transport.__class__ = _Watched
    assert isinstance(transport, _Watched)
    return transport


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[TokenSource]:
    """The tokens of each connection that is made."""
    made: list[TokenSource] = []

    def connect(_pool: object, tokens: TokenSource, *_: object, **__: object) -> Any:
        made.append(tokens)
        return _connection()

    monkeypatch.setattr(thread_server, "open_connection", connect)
    return made


def test_connection_that_another_thread_has_made_meanwhile_is_not_given_up(
    watched: _Watched, used: list[TokenSource]
) -> None:
    """It finds the first one in its place while this one takes that away, and waits, or has connected by then."""
    first: Any = watched.connection
    goes_on = threading.Event()

    def connect() -> Any:
        watched._drop(first)
        second = watched.connect(None)
        goes_on.set()
        return second

    watched._giving_up = _Mutex(goes_on)
    connecting: list[Future[Any]] = []

    def meanwhile() -> None:
        connecting.append(start(connect))
        goes_on.wait(PATIENCE_S)

    watched.meanwhile = ("tokens", meanwhile)
    watched._drop(first)
    second = connecting[0].result(PATIENCE_S)
    assert watched.connection is second
    assert used == [watched.tokens]


def test_connection_that_another_thread_gives_up_at_once_leaves_its_tokens(
    watched: _Watched, used: list[TokenSource]
) -> None:
    watched.connection = None
    watched.meanwhile = ("connection", lambda: watched._drop(watched.connection))
    watched.connect(None)
    watched.connect(None)
    assert len({tokens.identifier for tokens in used}) == len(used) == 2


def test_connection_that_is_given_up_at_once_is_that_of_the_caller_that_has_made_it(
    transport: ThreadServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport.connection, opened = None, _connection()
    monkeypatch.setattr(thread_server, "open_connection", lambda *_, **__: opened)
    monkeypatch.setattr(thread_server, "notice_closing", lambda *_: transport._drop(opened))
    assert transport.connect(None) is opened
    assert transport.connection is None
