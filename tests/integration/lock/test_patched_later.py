"""Locks that gevent or eventlet overtakes: the standard library is patched after the import, and after their first use.

gunicorn does so in each worker where the application is imported in the parent process: `--preload -k gevent`.

Rules: gunicorn, gevent and eventlet are real. Each test runs in an interpreter of its own. What eventlet writes to
stderr does not count: it writes there that it is deprecated, and replaces locks on which native threads wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from redislock_fast.server import Server, free_port
from tests.conftest import Connect, Servers
from tests.support.helpers import run_script, wait_until

pytestmark = pytest.mark.slow

GEVENT = """
from gevent import monkey
monkey.patch_all()
from gevent import joinall, sleep, spawn

def run(*functions):
    joinall([spawn(function) for function in functions], raise_error=True)
"""

EVENTLET = """
import eventlet
eventlet.monkey_patch()
from eventlet import sleep, spawn

def run(*functions):
    for green in [spawn(function) for function in functions]:
        green.wait()
"""

PATCHES = {"gevent": GEVENT, "eventlet": EVENTLET}

MAKE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import redis
from redislock_fast import Lock, Locker, Redlock

port, *others = map(int, sys.argv[1:])
client = redis.Redis(port=port, socket_timeout=30)
KINDS = {
    "plain": {},
    "polls": {"wait": "poll", "sleep": 0.002},
    "reentrant": {"reentrant": True},
    "linger": {"linger": 0.05},
    "renewed": {"auto_renew": True},
    "renewed and lingers": {"auto_renew": True, "linger": 0.05, "reentrant": True},
}
locks = {name: Lock(client, name, timeout=30, **options) for name, options in KINDS.items()}
"""

MAKE_MAJORITY = """
clients = [client, *(redis.Redis(port=other, socket_timeout=30) for other in others)]
locks["majority"] = Redlock(clients, "majority", timeout=30, sleep=0.01, auto_renew=True, limit=10)
"""

USE = """
for lock in locks.values():
    with lock:
        pass
with Locker(client).acquire_many(["first", "second"], timeout=30):
    pass
"""

FORK = """
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""

# Each greenlet is an owner of its own, and while one waits the others go on.
CONTEND = """
def contend(lock):
    inside, most, rounds, former = 0, 0, 0, set()
    def one():
        nonlocal inside, most, rounds
        former.add(lock.local.token)
        for _ in range(5):
            with lock:
                inside += 1
                most = max(most, inside)
                sleep(0.002)
                assert lock.owned()
                inside -= 1
                rounds += 1
    run(*[one] * 8)
    return most, rounds, former

print("made later", *contend(Lock(client, "made later", timeout=30)))
for name, lock in locks.items():
    print(name, *contend(lock))

def wait_beside_others(name):
    lock, order = locks[name], []
    other = Lock(redis.Redis(port=port, socket_timeout=30), name, timeout=30, thread_local=False)
    other.acquire()
    def wait():
        with lock:
            order.append("acquired")
    def go_on():
        for _ in range(20):
            sleep(0.005)
        order.append("others went on")
        other.release()
    run(wait, go_on)
    return order

for name in ("plain", "reentrant", "renewed"):
    print(name, *wait_beside_others(name))
"""

NAMES = "made later", "plain", "polls", "reentrant", "linger", "renewed", "renewed and lingers", "majority"
CONTENDED = [
    *[f"{name} 1 40 {{None}}" for name in NAMES],
    *[f"{name} others went on acquired" for name in ("plain", "reentrant", "renewed")],
]


@pytest.mark.parametrize("library", [*PATCHES, "gevent without sockets"])
@pytest.mark.parametrize("before", ["made", "used", "used, forked"])
def test_each_greenlet_is_an_owner_of_a_lock_from_before_the_patch(servers: Servers, before: str, library: str) -> None:
    parts = {"made": "", "used": USE, "used, forked": USE + FORK}
    patch = PATCHES.get(library, GEVENT.replace("patch_all()", "patch_all(socket=False)"))
    ports = [servers.get("valkey", number).port for number in (0, 1, 2)]
    finished = run_script(MAKE + MAKE_MAJORITY + parts[before] + patch + CONTEND, *ports)
    assert (finished.stdout.splitlines(), finished.returncode) == (CONTENDED, 0)
    assert library == "eventlet" or finished.stderr == ""


BATCH = """
other = Lock(redis.Redis(port=port, socket_timeout=30), "first", timeout=30, thread_local=False)
other.acquire()
"""

WAIT_FOR_BATCH = """
order = []
def wait():
    batch = Locker(client).acquire_many(["first", "second"], timeout=30, blocking_timeout=5, all_or_nothing=True)
    order.append(batch.missed)
    batch.release()
def go_on():
    for _ in range(20):
        sleep(0.005)
    order.append("others went on")
    other.release()

run(wait, go_on)
print(order)
"""


@pytest.mark.parametrize("library", PATCHES)
def test_batch_after_the_patch_lets_other_greenlets_go_on(valkey: Server, library: str) -> None:
    finished = run_script(MAKE + USE + BATCH + PATCHES[library] + WAIT_FOR_BATCH, valkey.port)
    assert (finished.stdout, finished.returncode) == ("['others went on', []]\n", 0)


HELD = """
for lock in locks.values():
    lock.acquire()
"""

GIVE_BACK = """
other = redis.Redis(port=port, socket_timeout=30)

def look():
    print(sorted(name for name, lock in locks.items() if lock.local.token or lock.acquire(blocking=False)))

run(look)
print(all(lock.owned() for lock in locks.values()))
for lock in locks.values():
    lock.release()

def take():
    for name, options in KINDS.items():
        with Lock(other, name, timeout=30, **options) as lock:
            assert lock.owned()
    print("taken")

run(take)
"""


@pytest.mark.parametrize("library", PATCHES)
def test_lock_that_is_held_across_the_patch_stays_its_holders(valkey: Server, library: str) -> None:
    finished = run_script(MAKE + USE + HELD + PATCHES[library] + GIVE_BACK, valkey.port)
    assert (finished.stdout, finished.returncode) == ("[]\nTrue\ntaken\n", 0)
    assert library == "eventlet" or finished.stderr == ""


RENEW = """
lock = Lock(client, "name", timeout=0.6, auto_renew=True)
lock.acquire()
"""

SLEEP = """
def spend():
    for _ in range(30):
        sleep(0.05)

run(spend)  # nothing has found the patch
print(lock.owned(), lock.valid)
run(spend)
print(lock.owned(), lock.valid)
lock.release()
"""


def test_lock_that_is_held_across_the_patch_is_renewed(valkey: Server) -> None:
    finished = run_script(MAKE + RENEW + GEVENT + SLEEP, valkey.port)
    assert (finished.stdout, finished.stderr, finished.returncode) == ("True True\nTrue True\n", "", 0)


HOLD = """
lost = []
locks = [
    Lock(client, name, timeout=0.3, auto_renew=True, on_lost=lambda *what: lost.append(what), **options)
    for name, options in {"renewed": {}, "lingers": {"linger": 0.05}, "shared": {"thread_local": False}}.items()
]
inside, most, rounds = set(), 0, 0

def hold():
    global most, rounds
    for lock in locks:
        with lock:
            most = max(most, (lock.name in inside) + 1)
            inside.add(lock.name)
            for _ in range(18):
                sleep(0.05)
            assert lock.owned() and lock.valid
            inside.discard(lock.name)
            rounds += 1

run(hold, hold)
print(most, rounds, lost)
"""


@pytest.mark.parametrize("library", PATCHES)
@pytest.mark.parametrize("before", ["patched", "made", "used"])
def test_greenlets_hold_renewed_locks_for_several_ttls(valkey: Server, library: str, before: str) -> None:
    parts = {"patched": PATCHES[library] + MAKE, "made": MAKE + PATCHES[library], "used": MAKE + USE + PATCHES[library]}
    finished = run_script(parts[before] + HOLD, valkey.port)
    assert (finished.stdout, finished.returncode) == ("1 6 []\n", 0)


LOOK = """
import gc, sys, threading, warnings
warnings.simplefilter("ignore")
NATIVE = type(threading.Lock()), type(threading.RLock())
import redis, prometheus_client
import redislock_fast.asyncio, redislock_fast.prometheus
from redislock_fast import Lock, Locker, Redlock
from redislock_fast.profiling import profile

redislock_fast.prometheus.install(prometheus_client.CollectorRegistry())
clients = [redis.Redis(port=int(port)) for port in sys.argv[1:]]
locks = [
    Lock(clients[0], "plain", timeout=30),
    Lock(clients[0], "linger", timeout=30, linger=0.05),
    Lock(clients[0], "renewed", timeout=30, auto_renew=True, reentrant=True),
    Redlock(clients, "majority", timeout=30, auto_renew=True, limit=10),
]

def use():
    for lock in locks:
        with lock:
            pass
    with Locker(clients[0]).acquire_many(["first", "second"], timeout=30):
        pass

with profile():
    use()
    from gevent import monkey
    monkey.patch_all()
    use()

def names_of(kind):
    return {name for base in kind.__mro__ for name in getattr(base, "__slots__", ())}

gc.collect()
for found in gc.get_objects():
    kind = type(found)
    if str(kind.__module__).startswith("redislock_fast") and not isinstance(found, (type, threading.local)):
        attributes = {name: getattr(found, name, None) for name in names_of(kind)} | getattr(found, "__dict__", {})
        for name, value in attributes.items():
            lock = value._lock if isinstance(value, threading.Condition) else value
            if isinstance(lock, NATIVE):
                print(kind.__qualname__, name)
print("looked")
"""


def test_no_object_keeps_a_lock_from_before_the_patch(servers: Servers) -> None:
    finished = run_script(LOOK, *(servers.get("valkey", number).port for number in (0, 1, 2)))
    assert (finished.stdout, finished.stderr) == ("looked\n", "")


LINGER = """
lock = Lock(client, "lingers", timeout=30, linger=20)
with lock:
    pass
"""

WANT = """
def want():
    with locks["plain"]:
        pass
    print(Lock(redis.Redis(port=port), "lingers", timeout=30, blocking_timeout=10).acquire())

run(want)
"""


@pytest.mark.parametrize("library", PATCHES)
def test_key_that_lingers_across_the_patch_is_given_back(valkey: Server, library: str) -> None:
    finished = run_script(MAKE + LINGER + PATCHES[library] + WANT, valkey.port)
    assert (finished.stdout, finished.returncode) == ("True\n", 0)


# gunicorn


APP = """
import json, os
import gevent
import redis
from redislock_fast import Lock

client = redis.Redis.from_url(os.environ["REDIS_URL"], socket_timeout=30)
KINDS = {
    "plain": {},
    "reentrant": {"reentrant": True},
    "linger": {"linger": 0.05},
    "renewed": {"auto_renew": True},
}
LOCKS = {name: Lock(client, name, timeout=30, **options) for name, options in KINDS.items()}
for lock in LOCKS.values():  # in the parent process
    with lock:
        pass
inside = dict.fromkeys(KINDS, 0)
waiting = []

def hold(name):
    waiting.append(name)
    with LOCKS[name] as lock:
        waiting.remove(name)
        inside[name] += 1
        most = inside[name]
        gevent.sleep(0.002)
        most = max(most, inside[name])
        owned = lock.owned()
        inside[name] -= 1
    return [most, owned]

def app(environ, start_response):
    name = environ["PATH_INFO"].strip("/")
    try:
        answer = hold(name) if name else waiting
    except Exception as error:
        answer = repr(error)
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
"""


KINDS = ("plain", "reentrant", "linger", "renewed")
"""The locks of the application."""


class Gunicorn:
    """A gunicorn with one worker."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/"

    def get(self, name: str = "") -> Any:
        """The answer of the application."""
        with urllib.request.urlopen(self._url + name, timeout=30) as response:
            return json.load(response)

    def answers(self) -> bool:
        try:
            return bool(self.get() == [])
        except urllib.error.URLError:
            return False


@pytest.fixture
def gunicorn(valkey: Server, tmp_path: Path) -> Iterator[Gunicorn]:
    (tmp_path / "overtaken_app.py").write_text(APP, encoding="utf-8")
    port = free_port()
    options = ["--preload", "-k", "gevent", "--bind", f"127.0.0.1:{port}", "--log-level", "warning"]
    command = [sys.executable, "-m", "gunicorn", *options, "overtaken_app:app"]
    log = tmp_path / "log"
    environment = dict(os.environ, REDIS_URL=valkey.url, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output) as process,
    ):
        served = Gunicorn(port)
        try:
            wait_until(served.answers, "gunicorn serves", patience_s=60)
            yield served
        finally:
            process.terminate()
    print(log.read_text(encoding="utf-8"))


def test_gunicorns_worker_that_is_patched_after_the_import_excludes(gunicorn: Gunicorn) -> None:
    with ThreadPoolExecutor(16) as clients:
        for name in KINDS:
            assert list(clients.map(gunicorn.get, [name] * 100)) == [[1, True]] * 100


def test_gunicorns_worker_answers_while_requests_wait(gunicorn: Gunicorn, valkey: Server, connect: Connect) -> None:
    client: redis.Redis = connect(valkey.port)
    for name in KINDS:
        client.set(name, "another process's")
        with ThreadPoolExecutor(3) as clients:
            waiting = [clients.submit(gunicorn.get, name) for _ in range(3)]
            wait_until(lambda name=name: gunicorn.get() == [name] * 3, "all are about to wait")  # type: ignore[misc]
            for _ in range(20):
                assert gunicorn.get() == [name] * 3
            client.delete(name)
            assert [answer.result(30) for answer in waiting] == [[1, True]] * 3
