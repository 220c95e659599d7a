"""The program, its client, loop, connection or server ends while keys linger: nothing is left behind.

Another client stands for another process, but for forked children.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
from typing import Any

import pytest
import redis

import redislock_fast
import redislock_fast.asyncio
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.lingering.test_lingering import LINGERS, SOON_S
from tests.support.async_helpers import run_in_loop
from tests.support.forks import InFork
from tests.support.helpers import PATIENCE_S, full_disk, in_thread, pause, run_script, wait_until
from tests.support.holding import Holders
from tests.support.proxy import Proxy
from tests.support.waiting import FAR_S, Callers, queue_of

BRIEF: dict[str, Any] = {**LINGERS, "linger": SOON_S}


def _until_gone(admin: redis.Redis, *names: str) -> None:
    wait_until(lambda: admin.exists(*(names or ("name",))) == 0, "the key is given back")


# ---- the program ----

_SETTINGS = "'name', timeout=60, linger=60"
_PROGRAMS = {
    "threads": f"""
import redis, sys, redislock_fast
lock = redislock_fast.Lock(redis.Redis(port=int(sys.argv[1])), {_SETTINGS})
assert lock.acquire() and lock.lingers
lock.release()
assert lock.locked()
""",
    "sys.exit in a thread": f"""
import redis, sys, threading, redislock_fast
def work():
    lock = redislock_fast.Lock(redis.Redis(port=int(sys.argv[1])), {_SETTINGS})
    with lock:
        assert lock.lingers
    assert lock.locked()
    sys.exit()
thread = threading.Thread(target=work)
thread.start()
thread.join()  # from Python 3.12 on, no thread can be started once the main one has ended
""",
    "asyncio.run": f"""
import asyncio, redis.asyncio, sys, redislock_fast.asyncio
async def work():
    lock = redislock_fast.asyncio.Lock(redis.asyncio.Redis(port=int(sys.argv[1])), {_SETTINGS})
    async with lock:
        assert lock.lingers
    assert await lock.locked()
asyncio.run(work())
""",
    "an exit handler that is called last": f"""
import atexit, redis, sys
def at_exit():
    with lock:
        pass
    with another:
        pass
atexit.register(at_exit)
import redislock_fast
lock = redislock_fast.Lock(redis.Redis(port=int(sys.argv[1])), {_SETTINGS})
another = redislock_fast.Lock(redis.Redis(port=int(sys.argv[1])), {_SETTINGS.replace("name", "another")})
with lock:
    assert lock.lingers
""",
    "a forked child that exits": f"""
import os, redis, sys, warnings, redislock_fast
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of a fork beside a thread
client = redis.Redis(host="127.0.0.1", port=int(sys.argv[1]))
lock = redislock_fast.Lock(client, {_SETTINGS})
assert lock.acquire() and lock.lingers
lock.release()
if os.fork() == 0:
    sys.exit()
assert os.wait()[1] == 0
assert client.exists("name"), "the child has given it back"
assert lock.acquire(blocking=False) and lock.owned()
lock.release()
""",
}


@pytest.mark.parametrize("program", _PROGRAMS.values(), ids=list(_PROGRAMS))
def test_a_program_that_ends_gives_its_keys_back(valkey: Server, connect: Connect, program: str) -> None:
    ended = run_script(program, valkey.port)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert connect(valkey.port).keys() == []


# ---- the client and the loop ----


def test_a_closed_client_gives_its_keys_back(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect
) -> None:
    lock = holders.hold(valkey.port, **LINGERS)
    lock.release()
    client = lock.lock.redis
    callers.run(client.aclose if callers.kind == "tasks" else client.close)
    _until_gone(connect(valkey.port))
    assert lock.call("acquire") is True
    lock.release()
    assert lock.call("acquire", blocking=False) is True


def test_a_client_that_is_collected_gives_its_keys_back(valkey: Server, connect: Connect) -> None:
    client = redis.Redis(port=valkey.port)
    with redislock_fast.Lock(client, "name", **LINGERS) as lock:
        assert lock.lingers
    del lock, client
    gc.collect()
    _until_gone(connect(valkey.port))


def test_a_client_of_a_loop_that_is_collected_gives_its_keys_back(
    valkey: Server, connect: Connect, each_loop_kind: str
) -> None:
    admin = connect(valkey.port)

    async def use() -> None:
        client = redis.asyncio.Redis(port=valkey.port)
        async with redislock_fast.asyncio.Lock(client, "name", **LINGERS) as lock:
            assert lock.lingers

    async def work() -> None:
        await use()
        gc.collect()
        deadline = time.monotonic() + PATIENCE_S
        while admin.exists("name"):
            assert time.monotonic() < deadline, "the key is given back"
            await asyncio.sleep(0.01)

    in_thread(lambda: run_in_loop(each_loop_kind, work()))


def test_a_loop_that_ends_gives_its_keys_back(valkey: Server, connect: Connect, each_loop_kind: str) -> None:
    client = redis.asyncio.Redis(port=valkey.port)

    async def work() -> None:
        async with redislock_fast.asyncio.Lock(client, "name", **LINGERS) as lock:
            assert lock.lingers

    for _ in range(2):
        in_thread(lambda: run_in_loop(each_loop_kind, work()))
        assert connect(valkey.port).exists("name") == 0


# ---- forked children ----


def test_a_forked_child_has_nothing_and_asks_the_parent(in_fork: InFork, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port, host="127.0.0.1")
    client = connect(valkey.port, host="127.0.0.1")
    lock = redislock_fast.Lock(client, "name", **LINGERS)
    held = redislock_fast.Lock(client, "held", **LINGERS)
    for one in (lock, held):
        assert one.acquire()
    lock.release()
    token = admin.get("name")

    def child() -> str:
        has_kept = admin.get("name") == token
        is_held = held.acquire(blocking=False)
        acquired = lock.acquire(blocking_timeout=PATIENCE_S)
        has_own = admin.get("name") != token
        lock.release()
        again = lock.acquire(blocking=False)
        lock.release()
        for number in range(3):  # the child's own watcher gives back what nobody uses
            brief = redislock_fast.Lock(client, f"brief:{number}", timeout=FAR_S, linger=SOON_S)
            with brief:
                pass
        _until_gone(admin, *(f"brief:{number}" for number in range(3)))
        return f"{has_kept} {is_held} {acquired} {has_own} {again}"

    assert in_fork(child) == "True False True True True"
    assert held.owned()
    held.release()
    assert held.acquire(blocking=False)
    held.release()


# ---- the connection ----


def _kill_all(admin: redis.Redis) -> None:
    for row in admin.client_list():
        if row["id"] != str(admin.client_id()):
            admin.client_kill_filter(_id=row["id"])


@pytest.mark.parametrize("is_held", [False, True], ids=["lingering", "held"])
def test_a_connection_that_is_killed(holders: Holders, valkey: Server, connect: Connect, is_held: bool) -> None:
    admin = connect(valkey.port)
    lock = holders.hold(valkey.port, **LINGERS)
    if not is_held:
        lock.release()
    _kill_all(admin)
    if is_held:
        pause(0.05)
        assert lock.call("owned") is True
        lock.release()
    _until_gone(admin)
    assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    token = admin.get("name")
    lock.release()
    assert lock.call("acquire", blocking=False) is True
    assert admin.get("name") == token
    waiter = holders.make(valkey.port, **LINGERS)
    answer = waiter.acquire()
    pause()
    lock.release()
    assert answer.result(PATIENCE_S) is True


def test_a_server_that_restarts(holders: Holders, mortal_server: Server, connect: Connect) -> None:
    lock = holders.hold(mortal_server.port, **LINGERS)
    lock.release()
    mortal_server.kill()
    mortal_server.start()
    other = holders.make(mortal_server.port, **LINGERS)
    assert other.call("acquire", blocking_timeout=PATIENCE_S) is True
    other.release()
    assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    assert connect(mortal_server.port).get("name") is not None
    lock.release()


def test_a_key_is_given_back_once_the_disk_is_no_longer_full(
    holders: Holders, mortal_server: Server, connect: Connect
) -> None:
    admin = connect(mortal_server.port)
    lock = holders.hold(mortal_server.port, **BRIEF)
    with full_disk(mortal_server, admin):
        lock.release()
        wait_until(lambda: admin.info("stats")["total_error_replies"] >= 10, "it was tried again and again")
        assert admin.exists("name")
    _until_gone(admin)


def test_a_connection_that_is_silent_for_a_while(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    with Proxy(valkey.port) as proxy:
        lock = holders.hold(proxy.port, **BRIEF)
        lock.release()
        assert lock.call("acquire") is True
        proxy.hold()
        lock.release()
        pause(3 * SOON_S)
        proxy.resume()
        _until_gone(admin)
        assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
        lock.release()


def test_a_key_is_given_back_on_a_new_connection_where_the_old_one_is_silent(
    holders: Holders, callers: Callers, valkey: Server, connect: Connect
) -> None:
    with Proxy(valkey.port) as proxy:
        lock = holders.on(callers.client(proxy.port, socket_timeout=10 * SOON_S), **BRIEF)
        assert lock.call("acquire")
        proxy.stall()
        lock.release()
        _until_gone(connect(valkey.port))
        proxy.thaw()


def _listeners() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "redislock_fast-linger"}


def test_nobody_listens_for_the_reply_to_the_release_of_a_key_that_has_expired(valkey: Server) -> None:
    before = _listeners()
    with Proxy(valkey.port) as proxy:
        client = redis.Redis(port=proxy.port, socket_timeout=None)
        lock = redislock_fast.Lock(client, "name", timeout=SOON_S, linger=SOON_S)
        assert lock.acquire()
        proxy.stall()
        lock.release()
        assert _listeners() - before
        del lock, client
        wait_until(lambda: _listeners() <= before, "the thread has ended")
        proxy.thaw()


# ---- the server's data ----


@pytest.mark.parametrize("loss", [["FLUSHALL"], ["DEL", "name"]], ids=" ".join)
def test_a_key_that_was_deleted_while_it_lingered_goes_to_another_owner(
    holders: Holders, valkey: Server, connect: Connect, loss: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    admin = connect(valkey.port)
    lock = holders.hold(valkey.port, **{**LINGERS, "linger": 10 * SOON_S})  # it still lingers then
    with caplog.at_level(logging.WARNING, "redislock_fast"):
        lock.release()
        admin.execute_command(*loss)  # type: ignore[no-untyped-call]
        other = holders.hold(valkey.port, timeout=FAR_S)
        wait_until(lambda: caplog.records, "the loss is found")
    assert [record.getMessage() for record in caplog.records] == ["The lock 'name' was lost while its key lingered."]
    assert other.call("owned") is True
    assert lock.call("acquire", blocking=False) is False


def test_scripts_that_were_flushed(holders: Holders, valkey: Server, connect: Connect) -> None:
    admin = connect(valkey.port)
    lock = holders.hold(valkey.port, **LINGERS)
    waiter = holders.make(valkey.port, **LINGERS)
    for _ in range(2):
        lock.release()
        admin.script_flush()
        assert waiter.call("acquire", blocking_timeout=PATIENCE_S) is True
        waiter.release()
        admin.script_flush()
        assert lock.call("acquire", blocking_timeout=PATIENCE_S) is True
    lock.release()
    assert admin.zcard(queue_of("name")) == 0


def test_a_process_that_is_killed_leaves_its_key_for_no_longer_than_its_ttl(valkey: Server, connect: Connect) -> None:
    program = _PROGRAMS["threads"].replace("timeout=60, linger=60", "timeout=0.2, linger=0.1")
    program += "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    assert run_script(program, valkey.port).returncode == -signal.SIGKILL
    assert redislock_fast.Lock(connect(valkey.port), "name", 1).acquire(blocking_timeout=PATIENCE_S)
