"""The access control list of the docs is enough for every feature, and needed for some.

Rules: the rules are read from the page, so page and tests cannot differ. The server's own ACL LOG tells what it has
denied: nothing, for a user with all rules, and the rule itself, for a user without it. Locks of users without a rule
work in a lesser mode, or raise.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError, NoPermissionError, RedisError, ResponseError

import redislock_fast
from redislock_fast import NotReplicatedError
from redislock_fast.fencing import AsyncGuard, Guard
from redislock_fast.server import Server
from tests.conftest import AclUser, Connect, Servers
from tests.support.helpers import CLASSES, PATIENCE_S, ROOT, redislock_main, wait_until
from tests.support.proxy import Proxy
from tests.support.worlds import IN_THREADS, World, waited

pytestmark = pytest.mark.usefixtures("world")

USER = AclUser("smallest", "canary-password")
NAME = "lock:name"
QUEUE, WAITERS = "{lock:name}:rlf:queue", "{lock:name}:rlf:waiters"
TTL_S = 3.0
SERVERS = ("valkey", "redis")
"""Rules for subcommands and channels are those of Redis 7."""


def rows_of_the_page() -> dict[str, list[str]]:
    """The ACL rules of the table "The smallest ACL" of the docs, by what they are for."""
    text = (ROOT / "docs/reference/server-commands.md").read_text()
    section = text.partition("## The smallest ACL\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")][1:]
    return {row[0]: [rule.replace("\\|", "|") for rule in re.findall("`([^`]+)`", row[1])] for row in rows}


ROWS = rows_of_the_page()
OF_CLUSTERS = ROWS.pop("a cluster, besides")
RULES = [rule for rules in ROWS.values() for rule in rules]


class Uses:
    """The features of locks, used by one user on one server.

    Args:
        world: threads, or tasks.
        server: the server.
        admin: a client with all rights.
    """

    def __init__(self, world: World, server: Server, admin: redis.Redis) -> None:
        self.world = world
        self.port = server.port
        self.admin = admin
        self.client = self.connect()

    def connect(self, port: int = 0) -> Any:
        """Another client of the user, whose locks have a connection of their own."""
        return self.world.connect(port or self.port, username=USER.username, password=USER.password)

    def lock(self, client: Any = None, **settings: Any) -> Any:
        """A lock."""
        return self.world.lock(client or self.client, NAME, **{"timeout": TTL_S, "sleep": 0.02} | settings)

    def hand_over(self, **settings: Any) -> Any:
        """Have a lock handed over from one client to another. Returns it, held."""
        holder = self.lock()
        assert holder.acquire()
        waiter = self.lock(self.connect(), thread_local=False, **settings)
        waiting = self.world.start(partial(waiter.acquire, blocking_timeout=PATIENCE_S))
        wait_until(lambda: self.admin.zcard(QUEUE) or waiting.done() or denied(self.admin), "it waits")
        holder.release()
        assert waiting.result(PATIENCE_S)
        return waiter


def use_lock(uses: Uses) -> None:
    for settings in ({}, {"timeout": None}):
        lock = uses.lock(**settings)
        assert lock.acquire()
        assert (lock.owned(), lock.locked()) == (True, True)
        other = uses.lock(uses.connect())
        assert not other.acquire(blocking=False)  # connects
        assert not other.acquire(blocking_timeout=0.3)
        if not settings:
            assert lock.reacquire()
            assert lock.extend(1)
            assert lock.extend(TTL_S, replace_ttl=True)
        lock.release()


def use_queue(uses: Uses) -> None:
    uses.hand_over().release()


def use_queue_where_many_were(uses: Uses) -> None:
    uses.admin.hset(WAITERS, mapping={f"cgone-{number}": 1 for number in range(200)})
    uses.hand_over().release()


def use_replicas(uses: Uses) -> None:
    with pytest.raises(NotReplicatedError):
        uses.lock(wait_replicas=1, wait_timeout=0.01).acquire()


def use_own_token(uses: Uses) -> None:
    for timeout in (TTL_S, None):
        lock = uses.lock(timeout=timeout)
        for _ in range(2):
            assert lock.acquire(token="mine")
        lock.release()


def tracks(admin: redis.Redis) -> bool:
    """Whether a client has asked to be told of changes of keys."""
    return any("t" in row["flags"] for row in admin.client_list())


def use_foreign(uses: Uses) -> None:
    foreign = CLASSES["redis-py"](uses.admin, NAME, timeout=TTL_S)
    assert foreign.acquire()
    waiter = uses.lock(thread_local=False)
    waiting = uses.world.start(partial(waiter.acquire, blocking_timeout=PATIENCE_S))
    wait_until(lambda: tracks(uses.admin) or waiting.done() or denied(uses.admin), "it waits, and tracks the key")
    foreign.release()
    assert waiting.result(PATIENCE_S)
    waiter.release()


def use_renewal(uses: Uses) -> None:
    with uses.lock(auto_renew=True):
        uses.admin.pexpire(NAME, 2_500)
        wait_until(lambda: uses.admin.pttl(NAME) > 2_500 or denied(uses.admin), "it is renewed")


def use_batch(uses: Uses) -> None:
    locker = uses.world.locker(uses.client)
    batch = locker.acquire_many(["lock:a", "lock:b"], TTL_S, all_or_nothing=True)
    assert all(batch.extend(1).values())
    assert all(batch.reacquire().values())
    assert all(batch.release().values())


def use_fencing(uses: Uses) -> None:
    lock = uses.lock(fencing=True)
    assert lock.acquire()
    guard = (Guard if uses.world.in_threads else AsyncGuard)(uses.client)
    waited(guard.set("lock:data", "x", lock.fence, ttl=1))
    lock.release()
    uses.hand_over(fencing=True).release()


def use_semaphore(uses: Uses) -> None:
    """Hold one of one permit, have another caller wait for it in vain, and for a second one; renew, look and resize."""
    ours, name = uses.world.ours, "lock:limited"
    semaphore = ours.Semaphore(uses.client, name, 1, timeout=1)
    other = ours.Semaphore(uses.connect(), name, 1, timeout=TTL_S, sleep=0.02)
    permit = waited(semaphore.acquire())
    held: list[Callable[[], Any]] = [lambda: permit]
    try:
        assert waited(other.acquire(blocking_timeout=0.1)) is None
        waiting = uses.world.start(lambda: waited(other.acquire(blocking_timeout=PATIENCE_S)))
        held.append(lambda: waiting.result(PATIENCE_S))
        wait_until(lambda: uses.admin.zcard("{lock:limited}:rlf:queue") or denied(uses.admin), "it waits")
        seen: Any = uses.admin.zrange(name, 0, -1, withscores=True)
        wait_until(lambda: uses.admin.zscore(name, seen[0][0]) != seen[0][1] or denied(uses.admin), "it is renewed")
        waited(semaphore.resize(2))
        waiting.result(PATIENCE_S)
        assert (waited(semaphore.status()).held, waited(semaphore.status()).limit) == (2, 2)
        if uses.world.in_threads:
            assert [0, 0] == [exit_code(uses, "ls", "lock:*"), exit_code(uses, "show", name)]
            assert [0, 0] == [exit_code(uses, "limit", name, "3"), exit_code(uses, "limit", name)]
        waited(semaphore.resize(None))
    finally:
        for one in held:
            with contextlib.suppress(RedisError):
                waited(one().release())


def use_election(uses: Uses) -> None:
    election = uses.world.ours.Election(uses.client, NAME, timeout=TTL_S)
    term = election.term()
    enter, leave = (term.__enter__, term.__exit__) if uses.world.in_threads else (term.__aenter__, term.__aexit__)
    waited(enter())
    assert waited(election.leader()).term == term.number
    waited(leave(None, None, None))


def use_linger(uses: Uses) -> None:
    heard: list[Any] = []
    lock = uses.lock(linger=TTL_S, on_wanted=uses.world.callback(heard.append))
    assert lock.acquire()
    waiter = uses.lock(uses.connect(), thread_local=False)
    waiting = uses.world.start(partial(waiter.acquire, blocking_timeout=PATIENCE_S))
    wait_until(lambda: heard or waiting.done() or denied(uses.admin), "it is wanted")
    lock.release()
    assert waiting.result(PATIENCE_S)
    waiter.release()


def use_reports(uses: Uses) -> None:
    with uses.lock():
        report = waited(uses.world.ours.holders(uses.connect(), NAME))
        assert (report.holder.alive, report.waiting) == (True, 0)
        if uses.world.in_threads:
            assert [0, 0] == [exit_code(uses, "ls", "lock:*"), exit_code(uses, "show", NAME)]
            assert 0 == exit_code(uses, "top", "-n", "2", "--interval", "0.01", "lock:*")


def use_break(uses: Uses) -> None:
    if uses.world.in_threads:
        lock = uses.lock()
        assert lock.acquire()
        holder = redislock_fast.holders(uses.connect(), NAME).holder
        assert holder is not None
        assert 0 == exit_code(uses, "break", NAME, "--token-id", str(holder.token_id), "--yes")
        with pytest.raises(LockNotOwnedError):
            lock.release()


def use_run(uses: Uses) -> None:
    if uses.world.in_threads:
        command = [sys.executable, "-m", "redislock_fast", "run", "--url", url_of(uses), NAME, "--", "true"]
        assert 0 == subprocess.run(command, check=False).returncode  # it catches signals as long as it lives


def url_of(uses: Uses) -> str:
    """The server, and the user and its password."""
    return f"redis://{USER.username}:{USER.password}@127.0.0.1:{uses.port}"


def exit_code(uses: Uses, *words: str) -> Any:
    """Run the command line."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setenv("REDISLOCK_URL", url_of(uses))
        patching.setattr(sys, "argv", ["redislock", *words])
        with pytest.raises(SystemExit) as end:
            sys.exit(redislock_main())
    return end.value.code


def use_once(uses: Uses) -> None:
    run = uses.world.ours.once(uses.client, NAME, timeout=TTL_S, at_least=1)
    enter, leave = (run.__enter__, run.__exit__) if uses.world.in_threads else (run.__aenter__, run.__aexit__)
    waited(enter())
    waited(leave(None, None, None))


def use_handle(uses: Uses) -> None:
    lock = uses.lock()
    assert lock.acquire()
    attached = waited(uses.world.ours.Lock.attach(uses.client, lock.detach()))
    waited(attached.release())


def use_cleanup(uses: Uses) -> None:
    with Proxy(uses.port) as proxy:
        lock = uses.lock(uses.connect(proxy.port))
        lock.locked()
        proxy.drop_reply("SET")
        assert lock.acquire()
        lock.release()


FEATURES: list[Callable[[Uses], None]] = [
    use_lock, use_queue, use_queue_where_many_were, use_own_token, use_foreign, use_renewal, use_batch, use_fencing,
    use_replicas, use_linger, use_reports, use_break, use_once, use_handle, use_cleanup, use_run,
    use_semaphore, use_election,
]  # fmt: skip


def grant(admin: Any, rules: list[str]) -> None:
    """Make the user anew, with these rules alone and those of them that the server knows."""
    admin.execute_command("ACL", "SETUSER", USER.username, "reset", "on", f">{USER.password}")
    for rule in rules:
        with contextlib.suppress(RedisError):  # an older server does not have the command
            admin.execute_command("ACL", "SETUSER", USER.username, rule)
    admin.execute_command("ACL", "LOG", "RESET")


def denied(admin: Any) -> set[tuple[str, str]]:
    """The denials that the server has logged for the user: "command", "key" or "channel", and its name."""
    return {(row["reason"], row["object"]) for row in admin.acl_log() if row["username"] == USER.username}


@pytest.fixture(params=SERVERS)
def guarded(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Server]:
    """A server of each kind in turn, whose user is deleted behind the test."""
    with flushed(servers.get(request.param)) as server:
        yield server


@contextlib.contextmanager
def flushed(server: Server) -> Iterator[Server]:
    """The server, its database empty. The user is deleted afterwards, which ends its connections."""
    with redis.Redis(port=server.port) as admin:
        admin.flushall()
        yield server
        admin.acl_deluser(USER.username)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_the_rules_are_enough(world: World, guarded: Server, connect: Connect, feature: Callable[[Uses], None]) -> None:
    admin = connect(guarded.port)
    grant(admin, RULES)
    feature(Uses(world, guarded, admin))
    assert set() == denied(admin)


def test_the_rules_are_enough_for_a_redlock(world: World, fleet: list[Server], connect: Connect) -> None:
    admins = [connect(server.port) for server in fleet[:3]]
    for admin in admins:
        grant(admin, RULES)
    clients = [world.connect(server.port, username=USER.username, password=USER.password) for server in fleet[:3]]
    lock = world.redlock(clients, NAME, timeout=TTL_S)
    assert lock.acquire()
    assert (lock.extend(1), lock.owned()) == (True, True)
    assert not world.redlock(clients, NAME, timeout=TTL_S).acquire(blocking=False)
    lock.release()
    for admin in admins:
        assert set() == denied(admin)
        admin.acl_deluser(USER.username)


def wait_somehow(uses: Uses) -> None:
    holder = uses.lock()
    assert holder.acquire()
    waiter = uses.lock(uses.connect(), thread_local=False)
    waiting = uses.world.start(partial(waiter.acquire, blocking_timeout=PATIENCE_S))
    wait_until(lambda: denied(uses.admin), "it tries to wait in the queue")
    assert not waiting.done()
    holder.release()
    assert waiting.result(PATIENCE_S)
    waiter.release()


def report_without_processes(uses: Uses) -> None:
    with uses.lock():
        holder = waited(uses.world.ours.holders(uses.connect(), NAME)).holder
        assert ("redislock_fast", None) == (holder.kind, holder.process)


def fail_to_list(uses: Uses) -> None:
    if uses.world.in_threads:
        assert 0 != exit_code(uses, "ls", "lock:*")


LESSER: dict[str, tuple[Callable[[Uses], None], type[RedisError] | None]] = {
    "every lock": (use_lock, ResponseError),
    "release by one command": (use_lock, None),
    "waiting in the queue": (wait_somehow, None),
    "waiting for a holder of another library": (use_foreign, None),
    "`fencing`": (use_fencing, ResponseError),
    "semaphores": (use_semaphore, ResponseError),
    "`wait_replicas`": (use_replicas, NoPermissionError),
    "tidying up": (use_cleanup, None),
    "`holders`, `redislock show`": (report_without_processes, None),
    "`redislock ls`, `redislock top`": (fail_to_list, None),
}
"""For each row, a use without it, and the error that this raises; None: none."""


@IN_THREADS
def test_the_doctor_has_nothing_to_grant(world: World, guarded: Server, connect: Connect) -> None:
    admin = connect(guarded.port)
    grant(admin, RULES)
    assert 0 == exit_code(Uses(world, guarded, admin), "doctor", "--prefix", "lock:")


@pytest.mark.parametrize("row", ROWS)
def test_without_a_row_locks_do_what_the_page_says(world: World, guarded: Server, connect: Connect, row: str) -> None:
    admin = connect(guarded.port)
    grant(admin, [rule for rule in RULES if rule not in ROWS[row]])
    feature, error = LESSER[row]
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        feature(Uses(world, guarded, admin))


@pytest.mark.parametrize("rule", ROWS["waiting in the queue"])
def test_without_a_rule_of_the_queue_a_waiter_that_gives_up_leaves_nothing(
    world: World, guarded: Server, connect: Connect, rule: str
) -> None:
    admin = connect(guarded.port)
    grant(admin, [other for other in RULES if other != rule])
    uses = Uses(world, guarded, admin)
    holder = uses.lock()
    assert holder.acquire()
    waiter = uses.lock(uses.connect(), thread_local=False)
    with contextlib.suppress(RedisError):
        assert not waiter.acquire(blocking_timeout=0.2)
    wait_until(lambda: not admin.zcard(QUEUE), "its place is gone")
    holder.release()
    assert 0 == admin.exists(NAME)


@pytest.mark.parametrize("rule", ROWS["waiting in the queue"])
def test_without_a_rule_of_the_queue_a_waiter_gets_the_lock(
    world: World, guarded: Server, connect: Connect, rule: str
) -> None:
    admin = connect(guarded.port)
    grant(admin, [other for other in RULES if other != rule])
    waiter = Uses(world, guarded, admin).hand_over()
    assert waiter.owned()
    waiter.release()
    assert 0 == admin.exists(NAME)


def is_of(rule: str, reason: str, what: str) -> bool:
    """Whether the rule allows what the server has denied."""
    if rule.startswith("+"):
        return (reason, what) == ("command", rule[1:])
    return reason == ("key" if rule.startswith("~") else "channel") and fnmatch(what, rule[1:])


def knows(server: Server, rule: str) -> bool:
    """Whether the server knows the rule."""
    with redis.Redis(port=server.port) as client:
        admin: Any = client
        try:
            admin.execute_command("ACL", "SETUSER", USER.username, rule)
        except RedisError:
            return False
        admin.acl_deluser(USER.username)
        return True


@pytest.mark.slow
@IN_THREADS
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(world: World, servers: Servers, connect: Connect, rule: str) -> None:
    without = [other for other in RULES if other != rule]
    for kind in SERVERS:
        with flushed(servers.get(kind)) as server:
            admin = connect(server.port)
            for feature in FEATURES:
                grant(admin, without)
                admin.flushall()
                with contextlib.suppress(RedisError, AssertionError):  # a lesser mode, or an error
                    feature(Uses(world, server, admin))
                if any(is_of(rule, *what) for what in denied(admin)):
                    return
    if not any(knows(servers.get(kind), rule) for kind in SERVERS):
        pytest.skip(f"no server with the command of {rule} here")
    pytest.fail("no feature has asked for it")
