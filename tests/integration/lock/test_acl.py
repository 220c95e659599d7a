"""A lock of a user with few rights, for threads and for tasks: scripts, native commands, handshakes, reads.

Rules: users are made on the running servers. "Native" are the commands that replace scripts (Valkey has them, Redis up
to 7 has not).
"""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError, NoPermissionError

from redislock_fast.server import Server
from tests.conftest import Connect, MakeUser
from tests.support.helpers import LockClass, capabilities_of

pytestmark = pytest.mark.usefixtures("world")

NO_SCRIPTS = ("-eval", "-evalsha", "-script")
NO_COMMAND = ("-command",)


def exercise(our_lock: Any, client: redis.Redis) -> None:
    """Every operation of our Lock once."""
    lock = our_lock(client, "name", timeout=10)
    for _ in range(2):
        assert lock.acquire(blocking=False)
        assert not our_lock(client, "name").acquire(blocking=False)
        assert lock.extend(10)
        assert 10_000 < client.pttl("name") <= 20_000
        assert lock.extend(5, replace_ttl=True)
        assert client.pttl("name") <= 5_000
        assert lock.reacquire()
        assert 5_000 < client.pttl("name") <= 10_000
        lock.release()
        assert not client.exists("name")
    lock.acquire()
    client.set("name", "stolen")
    for fails in (lambda: lock.extend(1), lock.reacquire, lock.release):
        with pytest.raises(LockNotOwnedError):
            fails()
    assert b"stolen" == client.get("name")
    client.delete("name")


@pytest.mark.parametrize("protocol", [2, 3])
def test_native_commands_do_without_scripts(
    our_lock: Any, native: Server, connect: Connect, acl_user: MakeUser, protocol: int
) -> None:
    user = acl_user(native, *NO_SCRIPTS)
    exercise(our_lock, connect(native.port, protocol=protocol, **user.options()))


def no_release(server: Server) -> str:
    """The rule that forbids what a release is sent as."""
    release = capabilities_of(server).release
    return "-script" if release is None else f"-{release.decode().lower()}"


@pytest.mark.parametrize("forbidden", ["release", "release and command", "command"])
def test_scripts_do_without_native_commands(
    our_lock: Any, native: Server, connect: Connect, acl_user: MakeUser, forbidden: str
) -> None:
    rules = {"release": [no_release(native)], "command": NO_COMMAND}
    user = acl_user(native, *(rule for kind in forbidden.split(" and ") for rule in rules[kind]))
    exercise(our_lock, connect(native.port, **user.options()))


@pytest.mark.parametrize("rules", [NO_COMMAND, ("-client",), ("-script",), ("-eval", "+evalsha", "+script")], ids=str)
def test_every_server_does_without_a_command(
    our_lock: Any, server: Server, connect: Connect, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    user = acl_user(server, *rules)
    if rules[0] == "-eval":
        # The user may only run scripts that are loaded already.
        exercise(our_lock, connect(server.port))
    exercise(our_lock, connect(server.port, **user.options()))


@pytest.mark.parametrize("rules", [("-hello",), ("-hello", *NO_COMMAND)], ids=str)
def test_every_server_does_without_hello(
    our_lock: Any, server: Server, connect: Connect, acl_user: MakeUser, rules: tuple[str, ...]
) -> None:
    exercise(our_lock, connect(server.port, protocol=2, **acl_user(server, *rules).options()))


def test_release_without_any_means_raises_no_permission(
    lock_class: LockClass, scripts_only: Server, connect: Connect, acl_user: MakeUser
) -> None:
    user = acl_user(scripts_only, *NO_SCRIPTS)
    lock = lock_class(connect(scripts_only.port, **user.options()), "name", timeout=10)
    lock.acquire()
    with pytest.raises(NoPermissionError):
        lock.extend(10)
    with pytest.raises(NoPermissionError):
        lock.release()


def test_release_refused_by_the_server_keeps_the_token(
    our_lock: Any, scripts_only: Server, connect: Connect, acl_user: MakeUser
) -> None:
    user = acl_user(scripts_only, *NO_SCRIPTS)
    lock = our_lock(connect(scripts_only.port, **user.options()), "name", timeout=10)
    lock.acquire()
    with pytest.raises(NoPermissionError):
        lock.release()
    assert lock.owned()
    with redis.Redis(port=scripts_only.port) as admin:
        admin.execute_command("ACL", "SETUSER", user.username, "+@all")
    lock.release()
    assert not lock.locked()


def test_acquire_without_set_raises_no_permission(
    lock_class: LockClass, server: Server, connect: Connect, acl_user: MakeUser
) -> None:
    user = acl_user(server, "-set")
    lock = lock_class(connect(server.port, **user.options()), "name")
    with pytest.raises(NoPermissionError):
        lock.acquire()
    assert lock.local.token is None


def test_acquire_of_a_forbidden_key_raises_no_permission(
    lock_class: LockClass, server: Server, connect: Connect, acl_user: MakeUser
) -> None:
    user = acl_user(server, "resetkeys", "~mine:*")
    client = connect(server.port, **user.options())
    with pytest.raises(NoPermissionError):
        lock_class(client, "name").acquire()
    with lock_class(client, "mine:name"):
        pass


def test_acquire_does_without_get(lock_class: LockClass, server: Server, connect: Connect, acl_user: MakeUser) -> None:
    client = connect(server.port, **acl_user(server, "-get").options())
    lock = lock_class(client, "name", timeout=10)
    assert lock.acquire(blocking=False)
    assert not lock_class(client, "name").acquire(blocking=False)
    for fails in (lock.owned, lock.locked):
        with pytest.raises(NoPermissionError):
            fails()


def test_first_acquire_with_linger_does_without_get(
    our_lock: Any, server: Server, connect: Connect, acl_user: MakeUser
) -> None:
    client = connect(server.port, **acl_user(server, "-get").options())
    lock = our_lock(client, "name", timeout=10, linger=1)
    assert lock.acquire(blocking=False)
    lock.release()


def test_permission_taken_away_while_held(our_lock: Any, server: Server, connect: Connect, acl_user: MakeUser) -> None:
    user = acl_user(server)
    client = connect(server.port, **user.options())
    exercise(our_lock, client)
    lock = our_lock(client, "name", timeout=10)
    lock.acquire()
    with redis.Redis(port=server.port) as admin:
        admin.execute_command("ACL", "SETUSER", user.username, no_release(server))
    lock.release()
    assert not lock.locked()
