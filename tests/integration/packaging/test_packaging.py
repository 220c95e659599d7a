"""The installed package and its imports: the two cores, the files beside them, `patch()`, subinterpreters.

Rules: whatever depends on how the package is imported happens in a new interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.client
import redis.cluster
import redis.lock

import redislock_fast
from redislock_fast import Lock, patch, unpatch
from redislock_fast.server import Server
from tests.conftest import Connect
from tests.support.helpers import run_script, wait_until

PACKAGE = Path(redislock_fast.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
INNER = {
    "_lease",
    "_linger",
    "_observe",
    "_pipe",
    "_procedures",
    "_protocol",
    "_queue",
    "_renewal",
    "_transport",
    "_util",
    "_version",
}
SHOW = "import redislock_fast; print(redislock_fast.implementation)"
VARIABLE = "REDISLOCK_FAST_IMPLEMENTATION"


def _has_extension() -> bool:
    return any(PACKAGE.joinpath(f"_pipe/threads{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


def _python(code: str, wanted: str | None = None, folder: Path = PACKAGE.parent) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that takes the package from this folder."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, sys.path)])
    if wanted is not None:
        environment[VARIABLE] = wanted
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.fixture(scope="module")
def without_extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package in which the compiled core was never built."""
    folder = tmp_path_factory.mktemp("unbuilt")
    compiled = [f"*{suffix}" for suffix in EXTENSION_SUFFIXES]
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", *compiled))
    return folder


# ---- the two cores ----


def _logged(folder: Path, wanted: str | None) -> list[str]:
    """What an import logs at INFO."""
    code = "import logging, sys; logging.basicConfig(level='INFO', stream=sys.stdout); import redislock_fast.asyncio"
    shown = _python(code, wanted, folder)
    assert (shown.returncode, shown.stderr) == (0, "")
    return shown.stdout.splitlines()


@pytest.mark.parametrize("wanted", ["python", "compiled", None])
def test_import_logs_once_which_core_is_at_work(wanted: str | None) -> None:
    if wanted != "python" and not _has_extension():
        pytest.skip("no compiled core here")
    asked = "The pure-Python implementation is at work, which is slower: REDISLOCK_FAST_IMPLEMENTATION asks for it."
    text = asked if wanted == "python" else "The compiled core is at work."
    assert [f"INFO:redislock_fast:{text}"] == _logged(PACKAGE.parent, wanted)


def test_import_logs_that_there_is_no_compiled_core(without_extension: Path) -> None:
    text = "The pure-Python implementation is at work, which is slower: there is no compiled core for this interpreter."
    assert [f"INFO:redislock_fast:{text}"] == _logged(without_extension, None)


@pytest.mark.parametrize("wanted", ["python", "compiled", None, ""])
def test_the_variable_chooses_the_core(wanted: str | None) -> None:
    if wanted != "python" and not _has_extension():
        pytest.skip("no compiled core here")
    shown = _python(SHOW, wanted)
    assert (shown.stdout.strip(), shown.stderr) == (wanted or "compiled", "")


def test_a_nonsensical_wish_is_an_import_error() -> None:
    shown = _python(SHOW, "nonsense")
    assert shown.returncode != 0
    last = shown.stderr.splitlines()[-1]
    for value in ("ImportError", VARIABLE, "'nonsense'", "'compiled'", "'python'"):
        assert value in last


def test_a_compiled_core_that_is_demanded_and_absent_is_an_import_error(without_extension: Path) -> None:
    shown = _python(SHOW, "compiled", without_extension)
    assert shown.returncode != 0
    last = shown.stderr.splitlines()[-1]
    for value in ("ImportError", VARIABLE, "compiler", "pip install"):
        assert value in last


@pytest.mark.parametrize("wanted", ["python", None])
def test_without_the_compiled_core_the_python_one_serves(wanted: str | None, without_extension: Path) -> None:
    shown = _python(SHOW, wanted, without_extension)
    assert (shown.stdout.strip(), shown.stderr) == ("python", "")


def test_without_the_compiled_core_locks_work(without_extension: Path, valkey: Server) -> None:
    shown = _python(
        f"import redis, redislock_fast\n"
        f"client = redis.Redis(port={valkey.port})\n"
        f"with redislock_fast.Lock(client, 'name', timeout=10) as lock:\n"
        f"    print(redislock_fast.implementation, lock.owned())\n",
        folder=without_extension,
    )
    assert (shown.stdout.strip(), shown.stderr) == ("python True", "")


@pytest.mark.parametrize("damage", ["missing", pytest.param("broken", marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", ["threads", "loop", "resp"])
def test_of_a_core_that_is_there_in_part_nothing_is_used(module: str, damage: str, tmp_path: Path) -> None:
    if not _has_extension():
        pytest.skip("no compiled core here")
    folder = tmp_path / "partly"
    shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (extension,) = folder.glob(f"*/_pipe/{module}{EXTENSION_SUFFIXES[0]}")
    extension.unlink()
    if damage == "broken":
        extension.write_bytes(b"no extension module")
    shown = _python(f"{SHOW}; import redislock_fast._pipe.loop_py", folder=folder)
    assert (shown.stdout.strip(), shown.stderr) == ("python", "")
    demanded = _python(SHOW, "compiled", folder)
    assert demanded.returncode != 0
    assert "not all of it" in demanded.stderr.splitlines()[-1]


@pytest.mark.skipif("coverage" in sys.modules, reason="a core that is traced keeps its symbols")
def test_extensions_are_stripped() -> None:
    if not _has_extension():
        pytest.skip("no compiled core here")
    extensions = list(PACKAGE.glob(f"_pipe/*{EXTENSION_SUFFIXES[0]}"))
    assert 4 == len(extensions)
    assert sum(extension.stat().st_size for extension in extensions) < 1_000_000
    if sys.platform == "linux":
        symbols = (b".symtab", b".debug_")  # names of sections
        assert [] == [file.name for file in extensions if any(name in file.read_bytes() for name in symbols)]


# ---- modules and files ----


@pytest.mark.slow
def test_each_module_imports_alone_and_without_a_warning() -> None:
    shown = _python(f"""
import importlib, os
import redislock_fast  # as any of its modules does first: the children need not
for module in {MODULES}:
    child = os.fork()
    if not child:
        importlib.import_module(module)
        os._exit(0)  # the end of the interpreter takes longer than the import
    if os.waitpid(child, 0)[1]:
        print(module)
""")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")


def test_import_starts_nothing() -> None:
    shown = _python(
        "import threading, redislock_fast\n"
        "print(threading.active_count())"
    )  # fmt: skip
    assert shown.stdout.strip() == "1"


def test_import_brings_few_modules_and_none_of_other_packages() -> None:
    """Each module costs a tenth of a millisecond: a name that few users need belongs into `_WHEN_ASKED_FOR`."""
    shown = _python(
        "import sys, redis\n"
        "before = set(sys.modules)\n"
        "import redislock_fast\n"
        "print(*set(sys.modules) - before)"
    )  # fmt: skip
    brought = shown.stdout.split()
    ours = {name for name in brought if name.split(".")[0] == "redislock_fast"}
    assert [] == [name for name in brought if name not in ours and not name.lstrip("_").startswith("cython_")]
    assert len(ours) <= 94
    assert {"_patch", "lock", "otel"} == {name.split(".")[1] for name in ours if name.count(".") == 1} - INNER


@pytest.mark.parametrize(
    "name",
    ["py.typed", "_pipe/threads.pyi", "_pipe/threads.pxd", "_protocol/lua/release.lua", "_protocol/lua/wait.lua"],
)
def test_file_is_beside_the_package(name: str) -> None:
    assert PACKAGE.joinpath(name).is_file()


def test_what_is_exported_is_there_and_documented() -> None:
    for name in redislock_fast.__all__:
        exported = getattr(redislock_fast, name)
        assert exported
        if callable(exported):
            assert exported.__doc__
    assert issubclass(Lock, redis.lock.Lock)
    assert redislock_fast.LockError is redis.exceptions.LockError


# ---- patch ----


@pytest.fixture
def restored() -> Iterator[type]:
    """redis-py's own class; afterwards everything is as it was."""
    original = redis.lock.Lock
    yield original
    unpatch()
    assert (redis.lock.Lock, redis.client.Lock, redis.cluster.Lock) == (original,) * 3  # type: ignore[attr-defined]


def test_patch_makes_the_client_return_ours(restored: type, valkey: Server, connect: Connect) -> None:
    client = connect(valkey.port)
    assert type(client.lock("name")) is restored
    patch()
    lock = client.lock("name", timeout=10, blocking=False)
    assert type(lock) is Lock
    with lock:
        assert lock.owned()
    assert redis.lock.Lock is Lock
    unpatch()
    assert type(client.lock("name")) is restored
    with lock:
        assert lock.owned()


def test_patch_and_unpatch_may_be_repeated(restored: type, valkey_client: redis.Redis) -> None:
    unpatch()
    assert type(valkey_client.lock("name")) is restored
    for _ in range(2):
        patch()
        patch()
        assert type(valkey_client.lock("name")) is Lock
        unpatch()
        unpatch()
        assert type(valkey_client.lock("name")) is restored


def test_patch_respects_a_class_that_the_caller_gives(restored: type, valkey_client: redis.Redis) -> None:
    class Own(restored):  # type: ignore[misc]
        pass

    patch()
    assert type(valkey_client.lock("name", lock_class=Own)) is Own
    assert type(valkey_client.lock("name", lock_class=restored)) is restored
    unpatch()
    assert type(valkey_client.lock("name", lock_class=Lock)) is Lock


def test_patched_client_takes_the_parameters_of_our_lock(restored: type, valkey_client: redis.Redis) -> None:
    patch()
    client: Any = valkey_client
    lock = client.lock("name", 10, auto_renew=True, wait="poll")
    assert type(lock) is Lock
    with lock:
        assert lock.valid
    with pytest.raises(TypeError, match="timout"):
        client.lock("name", timout=10)
    unpatch()
    with pytest.raises(TypeError, match="auto_renew"):
        client.lock("name", 10, auto_renew=True)


def test_pipeline_of_a_patched_client_makes_redis_pys_lock(restored: type, valkey_client: redis.Redis) -> None:
    patch()
    with valkey_client.pipeline() as pipeline:
        with pytest.warns(RuntimeWarning, match="pipeline"):
            lock = pipeline.lock("name", timeout=10)
        assert type(lock) is restored
        assert type(pipeline.lock("name", lock_class=restored)) is restored


def test_patch_leaves_a_lock_that_was_made_before_alone(restored: type, valkey_client: redis.Redis) -> None:
    before = valkey_client.lock("name", timeout=10)
    patch()
    with before:
        assert not valkey_client.lock("name", blocking=False).acquire()
    assert type(before) is restored


@pytest.mark.slow
def test_patch_reaches_clusters(restored: type, valkey_node: redis.RedisCluster) -> None:
    assert type(valkey_node.lock("name")) is restored
    patch()
    lock = valkey_node.lock("name", timeout=10)
    assert type(lock) is Lock
    with lock:
        assert lock.owned()
    unpatch()
    assert type(valkey_node.lock("name")) is restored


@pytest.fixture
def valkey_node(valkey: Server) -> Iterator[redis.RedisCluster]:
    """A client of a cluster of one node."""
    options = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf"}
    with Server("valkey", options) as server, redis.Redis(port=server.port) as admin:
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"), "the cluster is up")
        with redis.RedisCluster(host="127.0.0.1", port=server.port) as client:
            yield client


# ---- imported anew ----

_ANEW = """
import os, sys
import redis, redislock_fast

for name in [name for name in sys.modules if name.partition(".")[0] == "redislock_fast"]:
    del sys.modules[name]
former = redislock_fast
import redislock_fast

address = {{"host": "127.0.0.1", "port": {port}}}
client, admin = redis.Redis(**address), redis.Redis(**address)
lock, former_lock = (package.Lock(client, "name", timeout=10) for package in (redislock_fast, former))
children, told = [], os.pipe()
for locks in ([lock], [former_lock], [lock, former_lock]):
    for one in locks:
        with one:
            pass
    child = os.fork()
    if child == 0:
        for one in locks:
            with one:
                os.write(told[1], one.local.token[:12] + b" ")
        os._exit(0)
    children.append(child)
print(former is not redislock_fast, [os.waitpid(child, 0)[1] for child in children])
print(len(set(os.read(told[0], 1000).split())))
admin.execute_command("CLIENT", "PAUSE", 300)
try:
    redislock_fast.Lock(client, "name", timeout=10).acquire(blocking_timeout=0.01)
except redis.TimeoutError:
    print("TimeoutError")
"""
"""Each child takes locks of a package that was imported anew, or of the former one, with tokens of its own."""


def test_when_it_is_imported_anew(valkey: Server) -> None:
    # As tests and reloaders do that put `sys.modules` back.
    shown = _python(_ANEW.format(port=valkey.port))
    assert (shown.stdout, shown.stderr) == ("True [0, 0, 0]\n4\nTimeoutError\n", "")


def test_a_compiled_core_that_is_demanded_anew_is_an_import_error() -> None:
    if not _has_extension():
        pytest.skip("no compiled core here")
    forget = "import sys; [sys.modules.pop(name) for name in list(sys.modules) if name.startswith('redislock_fast')]"
    shown = _python(f"{SHOW}; {forget}; {SHOW}", "compiled")
    assert (shown.returncode, shown.stdout) == (1, "compiled\n")
    assert "an earlier import" in shown.stderr.splitlines()[-1]


# ---- subinterpreters ----

_IN_SUBINTERPRETER = """
import {module} as interpreters

if {main_imports}:
    import redislock_fast
code = '''
try:
    import redis, redislock_fast
except ImportError as error:
    print("ImportError:", error, flush=True)
else:
    with redis.Redis(port={port}) as client, redislock_fast.Lock(client, "name", timeout=10) as lock:
        print(redislock_fast.implementation, lock.owned(), flush=True)
'''
identity = interpreters.create()
interpreters.run_string(identity, code)
interpreters.destroy(identity)
"""


def _interpreters_module() -> str | None:
    names = ("_interpreters", "_xxsubinterpreters")
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


@pytest.mark.parametrize("main_imports", [False, True], ids=["alone", "after the main interpreter"])
def test_in_a_subinterpreter(main_imports: bool, valkey: Server) -> None:
    """From Python 3.12 on, hiredis refuses: it was not made for more than one interpreter."""
    module = _interpreters_module()
    if module is None:
        pytest.skip("this Python has no subinterpreters to import")
    if sys.version_info[:2] == (3, 12):
        pytest.skip("this Python aborts when a subinterpreter imports asyncio and ssl, whatever else it does")
    shown = _python(_IN_SUBINTERPRETER.format(module=module, main_imports=main_imports, port=valkey.port))
    assert (shown.returncode, shown.stderr) == (0, "")
    if sys.version_info >= (3, 12):
        assert shown.stdout.startswith("ImportError:")
    else:
        # Cython's module is loaded once per process: the second interpreter gets the Python core.
        is_first = _has_extension() and not main_imports
        assert shown.stdout.split() == ["compiled" if is_first else "python", "True"]


# Where POSIX is missing, as on Windows: what Windows lacks is hidden from an interpreter


PROGRAM = Path(__file__).with_name("portable_program.py")

# The standard library's modules come first: those that are here use POSIX.
_HIDING = """
import asyncio, functools, os, pathlib, runpy, select, signal, socket, ssl, subprocess, sys, tempfile, time, uuid

os.environ["REDISLOCK_FAST_IMPLEMENTATION"] = "python"
for module in ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[module] = None
sys.modules["numpy"] = None  # it was built with POSIX and asks for os.uname; fakeredis does without it
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # for the event loop: Windows has its own
for module, names in {
    os: "fork forkpty getpgid getuid killpg pipe2 posix_spawn register_at_fork setsid uname WNOHANG",
    select: "epoll poll",
    signal: "pthread_kill pthread_sigmask setitimer SIGALRM SIGCHLD SIGHUP SIGKILL SIGSTOP SIGUSR1 SIGUSR2",
    socket: "AF_UNIX MSG_DONTWAIT MSG_NOSIGNAL",
    time: "clock_gettime CLOCK_BOOTTIME CLOCK_MONOTONIC",
}.items():
    for name in names.split():
        vars(module).pop(name, None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_fake_server", [False, True])
def test_locks_of_threads_and_tasks_work_without_posix(on_fake_server: bool, valkey: Server) -> None:
    if on_fake_server:
        pytest.importorskip("lupa", reason="fakeredis runs no scripts without it")
    shown = run_script(_HIDING, PROGRAM, *([] if on_fake_server else [valkey.port]))
    assert ("python True True", "") == (shown.stdout.strip(), shown.stderr)
