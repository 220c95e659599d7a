"""The projects whose tests are run, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["SUITES", "Suite"]


@dataclass(frozen=True)
class Suite:
    """The tests of one project.

    In `options`, `variables` and the sources of the tests, `{port}` is the port of the server.

    Attributes:
        project: the name of the source distribution on PyPI.
        version: which one; empty for the newest.
        requirements: what the tests need beside the project and pytest.
        options: of pytest, with the files or folders of the tests.
        variables: of the environment.
        uses_6379: the folder of the sources in which the port 6379 is to be replaced by the server's; empty for none.
        differ: the tests that may have another result on our locks, each with the reason.
    """

    project: str
    version: str = ""
    requirements: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    uses_6379: str = ""
    differ: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The project, and its version where there are several."""
        return f"{self.project} {self.version}".rstrip()


_FILES = ("tests/test_lock.py", "tests/test_asyncio/test_lock.py")
_AT_SERVER = ("--redis-url=redis://127.0.0.1:{port}/0", "-o", "asyncio_mode=auto")
_NEWER_NEEDS = ("pytest-asyncio", "redis-entraid", "pybreaker", "opentelemetry-sdk")

_THREADS = "tests.test_lock.TestLock::"
_TASKS = "tests.test_asyncio.test_lock.TestLock::"


def _redis_py(version: str, needs: tuple[str, ...], differ: dict[str, str]) -> Suite:
    return Suite("redis", version, ("packaging", "requests", "numpy", *needs), (*_FILES, *_AT_SERVER), differ=differ)


def _of_tasks(test: str, reason: str) -> dict[str, str]:
    return {f"{_TASKS}{test}[{client}]": reason for client in ("pool", "single")}


_WHOLE = "blocking_timeout is waited to its end, however long the pauses are (docs/explanation/differences.md)"
_MOD_TIME = "replaces the clock in redis-py's module"

_TO_THE_END = {
    f"{_THREADS}test_high_sleep_small_blocking_timeout": _WHOLE,
    **_of_tasks("test_high_sleep_small_blocking_timeout", _WHOLE),
    **_of_tasks("test_blocking_timeout", _WHOLE),
}
_BY_THE_CLOCK = {
    f"{_THREADS}test_blocking_timeout": _MOD_TIME,
    f"{_THREADS}test_context_manager_blocking_timeout": _MOD_TIME,
    **_of_tasks("test_blocking_timeout", _MOD_TIME),
}


SUITES = (
    _redis_py("5.0.8", ("pytest-asyncio<0.24",), _TO_THE_END),
    _redis_py("6.4.0", _NEWER_NEEDS, _TO_THE_END),
    _redis_py("7.1.0", _NEWER_NEEDS, _TO_THE_END),
    _redis_py("", _NEWER_NEEDS, _BY_THE_CLOCK),
    Suite(
        "django-redis",
        requirements=("pytest-django", "pytest-mock", "pytest-cov", "pytest-xdist", "lz4", "msgpack", "hiredis"),
        options=("tests/test_backend.py", "-k", "lock", "-o", "addopts=", "--ds=tests.settings.sqlite"),
        uses_6379="tests/settings",
    ),
    Suite(
        "dogpile.cache",
        requirements=("redis", "valkey", "mako", "pytest-xdist"),
        options=("tests/cache/test_redis_backend.py",),
        variables={"DOGPILE_REDIS_PORT": "{port}"},
    ),
    Suite("celery-redbeat", requirements=("redis", "fakeredis[lua]", "pytz"), options=("tests",)),
    Suite(
        "kombu",
        requirements=("redis", "hypothesis<7", "pytest-freezer", "Pyro4"),
        options=("t/unit/transport/test_redis.py", "t/integration/test_redis.py", "-k", "redis"),
        variables={"REDIS_HOST": "127.0.0.1", "REDIS_6379_TCP": "{port}"},
    ),
    Suite(
        "tooz",
        requirements=("redis", "etcd3gw", "sysv_ipc", "pymemcache", "testtools", "fixtures", "ddt", "requests"),
        options=("tooz/tests/test_coordination.py",),
        variables={"TOOZ_TEST_URL": "redis://127.0.0.1:{port}"},
    ),
    Suite(
        "aiogram",
        requirements=("redis>=6.2,<8", "pymongo", "motor", "pytest-asyncio", "pytz", "pycryptodomex"),
        options=(
            *("tests/test_fsm/storage", "-k", "redis", "--redis=redis://127.0.0.1:{port}/0"),
            *("-o", "asyncio_default_fixture_loop_scope=function"),
        ),
    ),
)
