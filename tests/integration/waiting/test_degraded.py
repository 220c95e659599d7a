"""Waiting where the server knows less, allows less, or is more than one: it works, by the next best means.

Rules: real servers, users without a right, awkward names, clusters, other ways to connect. A waiter that must be
notified has an interval longer than any test; one that can only make health checks has a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from redislock_fast.server import KINDS, Server
from tests.conftest import MakeUser, TlsServer
from tests.integration.sentinel.test_sentinel import Watch, watch  # noqa: F401
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.scenes import Scene
from tests.support.sentinels import SERVICE
from tests.support.waiting import FAR_S, LATE, Callers, Contender, Threads, queue_of, queue_up, serve

SOON: dict[str, Any] = {"timeout": FAR_S, "sleep": 0.02}
"""Settings of a lock that looks soon."""


class Way:
    """How a waiter waits, as seen from the server."""

    def __init__(self, admin: Any) -> None:
        self._admin = admin

    def queueing(self, contender: Contender) -> Future[Any]:
        """Let it acquire, and return once it stands in the queue."""
        (answer,) = queue_up([contender], self._admin)
        return answer

    def watching(self, contender: Contender) -> Future[Any]:
        """Let it acquire, and return once it watches the key."""
        answer = contender.acquire()
        wait_until(lambda: answer.done() or self._admin.info("stats")["tracking_total_keys"], "somebody watches")
        assert not answer.done(), answer.result()
        return answer

    def polling(self, contender: Contender) -> Future[Any]:
        """Let it acquire, and return once it has tried some times."""
        before = self._sets()
        answer = contender.acquire()
        wait_until(lambda: answer.done() or self._sets() >= before + 4, "somebody tries again and again")
        assert not answer.done(), answer.result()
        return answer

    def _sets(self) -> int:
        stats = self._admin.info("commandstats").get("cmdstat_set", {})
        return int(stats.get("calls", 0))


@pytest.fixture
def way(client: redis.Redis) -> Way:
    """Of the server of `client`."""
    return Way(client)


def hand_over(holder: Contender, waiter: Contender, begins_to_wait: Callable[[Contender], Future[Any]]) -> None:
    """The waiter waits for the holder's lock in this way, and gets it."""
    assert holder.call("acquire")
    answer = begins_to_wait(waiter)
    holder.release()
    assert answer.result(PATIENCE_S) is True


# Commands that a waiter may not send


WATCHES = [("-subscribe",), ("resetchannels",), ("-eval", "-evalsha"), ("resetkeys", "~name")]


def release_for(waiter: Contender, admin: redis.Redis) -> None:
    """Release, or let an operator do it where the user has no means."""
    try:
        waiter.release()
    except redis.ResponseError:  # the user may not run the script, or not what is in it
        admin.delete("name")


@pytest.mark.parametrize("rules", WATCHES, ids=" ".join)
def test_a_waiter_that_may_not_queue_watches_the_key(
    scene: Scene, acl_user: MakeUser, way: Way, rules: tuple[str, ...]
) -> None:
    user = acl_user(scene.server, *rules)
    holder = scene.contender()
    waiter = scene.contender(scene.connect(**user.options()))
    for _ in range(2):
        assert holder.call("acquire")
        answer = way.watching(waiter)
        assert holder.call("extend", 1)
        holder.release()
        assert answer.result(PATIENCE_S) is True
        assert scene.client.get("name") == waiter.lock.local.token
        release_for(waiter, scene.client)
    assert scene.client.keys() == []


@pytest.mark.parametrize("rules", WATCHES, ids=" ".join)
def test_a_waiter_that_watches_gets_the_lock_behind_the_queue(
    scene: Scene, acl_user: MakeUser, way: Way, rules: tuple[str, ...]
) -> None:
    user = acl_user(scene.server, *rules)
    holder, first = scene.contenders(2)
    watcher = scene.contender(scene.connect(**user.options()))
    assert holder.call("acquire")
    watching = way.watching(watcher)
    queueing = way.queueing(first)
    holder.release()
    assert queueing.result(PATIENCE_S) is True
    assert not watching.done()
    first.release()
    assert watching.result(PATIENCE_S) is True


@pytest.mark.parametrize(
    "rules",
    [("-subscribe", "-client"), ("-eval", "-evalsha", "-client"), ("-subscribe", "-client", "-command"), ("-get",)],
    ids=" ".join,
)
def test_a_waiter_that_may_neither_queue_nor_watch_polls(
    scene: Scene, acl_user: MakeUser, way: Way, rules: tuple[str, ...]
) -> None:
    user = acl_user(scene.server, *rules)
    holder = scene.contender(**SOON)
    waiter = scene.contender(scene.connect(**user.options()), **SOON)
    for _ in range(2):
        hand_over(holder, waiter, way.polling)
        release_for(waiter, scene.client)


def test_a_single_forbidden_subcommand_is_enough_to_poll(scene: Scene, acl_user: MakeUser, way: Way) -> None:
    if scene.server.kind == "redis-6.2":
        pytest.skip("no rules for subcommands")
    user = acl_user(scene.server, "-subscribe", "-client|tracking")
    holder = scene.contender(**SOON)
    waiter = scene.contender(scene.connect(**user.options()), **SOON)
    hand_over(holder, waiter, way.polling)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_can_be_pushed_waiters_poll(
    callers: Callers, spare_server: Callable[..., Server], kind: str
) -> None:
    server = spare_server(kind, {"rename-command HELLO": ""})
    holder, waiter = (callers.contender(callers.client(server.port, protocol=2), **SOON) for _ in range(2))
    with redis.Redis(port=server.port, protocol=2) as admin:
        way = Way(admin)
        assert holder.call("acquire")
        answer = way.polling(waiter)
        assert admin.keys() == [b"name"]
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


def test_a_waiter_that_may_not_watch_redis_pys_lock_makes_health_checks(
    scene: Scene, acl_user: MakeUser, way: Way
) -> None:
    user = acl_user(scene.server, "-client")
    waiter = scene.contender(scene.connect(**user.options()), **SOON)
    theirs = redis.lock.Lock(scene.client, "name", timeout=FAR_S)
    assert theirs.acquire()
    answer = way.queueing(waiter)
    theirs.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()


# Commands that a holder may not send


@pytest.mark.parametrize(
    "rules",
    [("-publish",), ("-pubsub",), ("resetchannels",), ("resetkeys", "~name"), ("-eval", "-evalsha")],
    ids=" ".join,
)
def test_a_holder_that_may_not_hand_over_releases_and_the_waiters_find_out(
    scene: Scene, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    if "-eval" in rules and scene.server.kind != "valkey":
        pytest.skip("without scripts, only native commands release")
    user = acl_user(scene.server, *rules)
    holder = scene.holder(scene.connect(**user.options()))
    waiters = scene.contenders(3, **SOON)
    answers = scene.queue_up(waiters)
    assert scene.client.get("name") == holder.lock.local.token + b"+"
    holder.release()
    for waiter, answer in zip(waiters, answers, strict=True):
        assert answer.result(PATIENCE_S) is True
        assert waiter.call("owned")
        waiter.release()
    wait_until(lambda: scene.client.keys() == [], "nothing is left")


@pytest.mark.parametrize("right", ["set", "zpopmin", "hget", "hdel"])
def test_a_waiter_is_told_of_no_lock_that_the_holder_could_not_give_it(
    scene: Scene, acl_user: MakeUser, right: str
) -> None:
    user = acl_user(scene.server)
    holder = scene.holder(scene.connect(**user.options()))
    waiters = scene.contenders(2, **SOON)
    answers = scene.queue_up(waiters)
    scene.client.execute_command("ACL", "SETUSER", user.username, f"-{right}")  # type: ignore[no-untyped-call]
    holder.release()
    assert sorted(serve(waiters, answers)) == [0, 1]
    wait_until(lambda: scene.client.keys() == [], "nothing is left")


def test_users_that_may_not_publish_get_the_lock_by_health_checks(scene: Scene, acl_user: MakeUser) -> None:
    user = acl_user(scene.server, "-publish")
    contenders = scene.contenders(6, scene.connect(**user.options()), **SOON)
    assert contenders[0].call("acquire")
    answers = {waiter.acquire(): waiter for waiter in contenders[1:]}
    scene.until_queued(5)
    contenders[0].release()
    while answers:
        wait_until(lambda: any(answer.done() for answer in answers), "somebody gets it")
        (done,) = (answer for answer in answers if answer.done())
        assert done.result() is True
        answers.pop(done).release()
    wait_until(lambda: scene.client.keys() == [], "nothing is left")


# Names


NAMES: list[str | bytes] = [
    b"",
    b"{",
    b"}",
    b"{}",
    b"}{",
    b"{}}",
    b"a{b}c",
    b"a{}{b}",
    b"{a",
    b"a}",
    b"\xff\x00\r\n:+",
    b"a+",
    "schloß 🔒",
    "n" * 300,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_a_lock_of_any_name_is_handed_over(scene: Scene, way: Way, name: str | bytes) -> None:
    holder = scene.contender(name=name)
    waiter = scene.contender(name=name)
    for _ in range(2):
        hand_over(holder, waiter, way.queueing)
        assert scene.client.get(name) == waiter.lock.local.token
        waiter.release()
    assert scene.client.keys() == []


def is_flagged(admin: Any, name: str) -> bool:
    marked: bool = admin.get(name).endswith(b"+")
    return marked


def test_a_lock_whose_name_is_anothers_tag_is_handed_over_to_its_own_waiters(scene: Scene) -> None:
    names = ("a", "{a}")
    client_of_holders, client_of_waiters = scene.connect(), scene.connect()
    holders = {name: scene.contender(client_of_holders, name) for name in names}
    waiters = {name: scene.contender(client_of_waiters, name) for name in names}
    answers = {}
    for name in reversed(names):
        assert holders[name].call("acquire")
        answers[name] = waiters[name].acquire()
        wait_until(partial(is_flagged, scene.client, name), "somebody waits")
    for name in names:
        holders[name].release()
        assert answers[name].result(PATIENCE_S) is True


def test_a_queue_of_another_type_stands_in_no_waiters_way(scene: Scene, way: Way) -> None:
    holder, waiter = scene.contenders(2)
    scene.client.set(queue_of("name"), "a string")
    hand_over(holder, waiter, way.watching)
    waiter.release()
    assert not scene.client.exists("name")


def test_a_queue_that_has_become_of_another_type_stands_in_no_holders_way(scene: Scene, way: Way) -> None:
    holder, waiter = scene.holder_and(1, **SOON)
    answer = way.queueing(waiter)
    scene.client.delete(queue_of("name"))
    scene.client.set(queue_of("name"), "a string")
    holder.release()
    assert answer.result(PATIENCE_S) is True
    waiter.release()
    assert not scene.client.exists("name")


# Other ways to connect


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": 2},
        {"protocol": 3},
        {"decode_responses": True},
        {"encoding": "latin-1"},
        {"db": 3},
        {"socket_timeout": 0.5},
        {"socket_timeout": None},
        {"single_connection_client": True},
        {"max_connections": 1},
        {"health_check_interval": 1},
    ],
    ids=str,
)
def test_client_options(scene: Scene, way: Way, options: dict[str, Any]) -> None:
    admin = redis.Redis(port=scene.server.port, db=options.get("db", 0))
    holder, waiter = (scene.contender(scene.connect(**options)) for _ in range(2))
    with admin:
        hand_over(holder, waiter, Way(admin).queueing)
    waiter.release()


def test_unix_socket(scene: Scene, way: Way) -> None:
    holder, waiter = (scene.contender(scene.connect(0, unix_socket_path=scene.server.unix_path)) for _ in range(2))
    hand_over(holder, waiter, way.queueing)


def test_tls(callers: Callers, tls_server: TlsServer) -> None:
    options: dict[str, Any] = {"host": "127.0.0.1", "ssl": True, "ssl_ca_certs": tls_server.ca_path}
    holder, waiter = (callers.contender(callers.client(tls_server.port, **options), **LATE) for _ in range(2))
    with redis.Redis(port=tls_server.port, **options) as admin:
        hand_over(holder, waiter, Way(admin).queueing)
    waiter.release()


def test_sentinel(callers: Callers, watch: Watch) -> None:  # noqa: F811  # the fixture
    (sentinel,) = watch.sentinel.sentinels
    kind: Any = redis.sentinel if isinstance(callers, Threads) else redis.asyncio.sentinel
    asked = kind.Sentinel([("127.0.0.1", sentinel.connection_pool.connection_kwargs["port"])])
    clients = [asked.master_for(SERVICE) for _ in range(2)]
    for client in (*clients, *asked.sentinels):
        callers.keep(client)
    holder, waiter = (callers.contender(client, **LATE) for client in clients)
    with redis.Redis(port=watch.primary.port) as admin:
        hand_over(holder, waiter, Way(admin).queueing)
    waiter.release()
