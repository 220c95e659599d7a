"""Stories that hypothesis makes up are told to redis-py's locks and to ours: after each step, nothing may differ.

A story is a list of steps on two lock objects, which may have the same name, and on their keys. Both classes
take each step, each on keys of its own; then the result or the error, the keys and the tokens are compared. What
`docs/explanation/differences.md` lists is left out: no two holders have the same token, keys are strings, times are
numbers that mean something, and a story happens in one thread or task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.helpers import PATIENCE_S, REDIS_PY
from tests.support.worlds import World

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(REDIS_PY < (6, 0), reason="its texts are others"),
]

LOCKS = 2
NAMES = ("report", "é")
FOREIGN = b"foreign"
_RANDOM = 30  # bytes: the shortest of the tokens that a class makes up

# Whole minutes, so that a machine that stalls between two steps makes no difference.
TIMES_S = st.sampled_from([None, 60, 120.0, 600, 2**31])
WAITS_S = st.sampled_from([0, 0.005])
SLEEPS_S = st.sampled_from([0.002, 0.004])
BLOCKING = st.sampled_from([True, False, None, 0, 1])

SETTINGS = st.fixed_dictionaries(
    {"blocking_timeout": WAITS_S, "sleep": SLEEPS_S},
    optional={
        "timeout": TIMES_S,
        "blocking": BLOCKING,
        "thread_local": st.booleans(),
        "raise_on_release_error": st.booleans(),
    },
)
OF_ACQUIRE = st.fixed_dictionaries(
    {},
    optional={
        "blocking": st.sampled_from([True, False, 0]),
        "blocking_timeout": st.sampled_from([-1, 0, 0.005]),
        "token": st.sampled_from(["text", "é", b"bytes", b"\xff\x00", b"flagged+"]),
    },
)
ATTRIBUTES = st.one_of(
    st.tuples(st.just("timeout"), TIMES_S),
    st.tuples(st.just("sleep"), SLEEPS_S),
    st.tuples(st.just("blocking"), st.booleans()),
    st.tuples(st.just("blocking_timeout"), WAITS_S),
    st.tuples(st.just("name"), st.sampled_from(NAMES)),
    st.tuples(st.just("raise_on_release_error"), st.booleans()),
)
NUMBERS = st.integers(0, LOCKS - 1)
ACQUIRE = st.tuples(st.just("acquire"), NUMBERS, OF_ACQUIRE)
CALLS = st.sampled_from(["release", "release", "reacquire", "reacquire", "locked", "owned"])
STEPS = st.one_of(
    ACQUIRE,
    ACQUIRE,  # twice as often as another step: most of these need a lock that is held
    st.tuples(st.just("call"), NUMBERS, CALLS),
    st.tuples(st.just("call"), NUMBERS, st.just("extend"), st.sampled_from([60, 90.5, 3600]), st.booleans()),
    st.tuples(st.sampled_from(["enter", "enter_and_raise", "enter_and_lose"]), NUMBERS),
    st.tuples(st.just("assign"), NUMBERS, ATTRIBUTES),
    st.tuples(st.just("pass_on"), NUMBERS, st.sampled_from([None, *range(LOCKS)])),
    st.tuples(st.sampled_from(["delete", "take", "take_forever", "persist"]), st.sampled_from(NAMES)),
    st.tuples(st.just("expire"), st.sampled_from(NAMES)),
)
MADE = st.tuples(*[st.tuples(st.sampled_from(NAMES), SETTINGS)] * LOCKS)
STORIES = st.tuples(MADE, st.lists(STEPS, min_size=10, max_size=20))


class Failed(Exception):
    """Of the body of a `with`."""


class Stage:
    """Locks of one class, and their keys, which begin with a prefix.

    Args:
        lock_class: the class.
        client: of the locks, and for the keys.
        prefix: of all names.
        made: the name and the settings of each lock.
    """

    def __init__(self, lock_class: Any, client: redis.Redis, prefix: str, made: Any) -> None:
        self._client = client
        self._prefix = prefix
        self._given = 0
        self._locks = [lock_class(client, prefix + name, **settings) for name, settings in made]

    def take(self, step: Any) -> object:
        """Take a step. Returns what it returned or raised, without what is the stage's own."""
        try:
            return getattr(self, f"_{step[0]}")(*step[1:])
        except (redis.RedisError, Failed) as error:
            return type(error), str(error).replace(self._prefix, "")

    def _acquire(self, number: int, settings: dict[str, Any]) -> object:
        token = settings.get("token")
        if token is not None:  # one of its own for each call
            self._given += 1
            settings = {**settings, "token": token[:1] * self._given + token[1:]}
        return self._locks[number].acquire(**settings)

    def _call(self, number: int, method: str, *args: Any) -> object:
        return getattr(self._locks[number], method)(*args)

    def _enter(self, number: int, body: Callable[[Any], object] = lambda lock: lock.owned()) -> object:
        lock = self._locks[number]
        with lock as entered:
            return entered is lock, body(lock)

    def _enter_and_raise(self, number: int) -> object:
        def fail(_: Any) -> object:
            raise Failed

        return self._enter(number, fail)

    def _enter_and_lose(self, number: int) -> object:
        return self._enter(number, lambda lock: self._client.delete(lock.name))

    def _assign(self, number: int, what: tuple[str, Any]) -> None:
        name, value = what
        setattr(self._locks[number], name, self._prefix + value if name == "name" else value)

    def _pass_on(self, number: int, giver: int | None) -> None:
        self._locks[number].local.token = None if giver is None else self._locks[giver].local.token

    def _delete(self, name: str) -> None:
        self._client.delete(self._prefix + name)

    def _take(self, name: str) -> None:
        self._client.set(self._prefix + name, FOREIGN, px=300_000)

    def _take_forever(self, name: str) -> None:
        self._client.set(self._prefix + name, FOREIGN)

    def _expire(self, name: str) -> None:
        self._client.pexpire(self._prefix + name, 200_000)

    def _persist(self, name: str) -> None:
        self._client.persist(self._prefix + name)

    def tokens(self) -> list[bool]:
        """Whether each lock has a token."""
        return [lock.local.token is not None for lock in self._locks]

    def keys(self) -> list[tuple[object, ...]]:
        """Of each key: its value where that is not random, and which locks have it as their token."""
        values: list[Any] = self._client.mget([self._prefix + name for name in NAMES])
        tokens = [unflagged(lock.local.token) for lock in self._locks]
        return [
            (
                None if value is None else unflagged(value) if len(value) < _RANDOM else "random",
                [value is not None and token == unflagged(value) for token in tokens],
            )
            for value in values
        ]

    def ttls_ms(self) -> list[int]:
        """Of each key; -1 for none, -2 for no key."""
        return [self._client.pttl(self._prefix + name) for name in NAMES]


def unflagged(token: bytes | None) -> bytes | None:
    """Without the contended flag. A token of a story's own may end with it, on both stages."""
    return None if token is None else token.removesuffix(b"+")


@settings(
    max_examples=60,
    derandomize=True,
    phases=[Phase.generate],  # to shrink a story takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(story=STORIES)
def test_every_step_of_a_story_is_the_same(world: World, client: redis.Redis, story: Any) -> None:
    made, steps = story
    client.flushdb()
    theirs = Stage(world.lock_class("redis-py"), client, "theirs:", made)
    ours = Stage(world.lock_class("ours"), client, "ours:", made)
    for step in steps:
        assert (theirs.take(step), theirs.tokens(), theirs.keys()) == (ours.take(step), ours.tokens(), ours.keys())
        assert theirs.ttls_ms() == pytest.approx(ours.ttls_ms(), abs=1000 * PATIENCE_S)
