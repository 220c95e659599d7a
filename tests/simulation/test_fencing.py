"""Thousands of stories of holders that come and go while requests and replies are lost: their numbers only increase.

Rules: as in `test_one_lock.py`: a story that fails names its seed or its bytes, and planted faults show that the
invariants can fail.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.commands import Release
from redislock_fast._protocol.fenced import AcquireFenced, AcquireOwnFenced, Fence
from redislock_fast._protocol.queue import LeaveQueue
from redislock_fast._util.tokens import CONTENDED_FLAG
from tests.simulation.model import Model
from tests.simulation.one_lock import KEY, Choices, Listed, Seeded, Violation
from tests.support.selection import in_two_runs

_SEEDS = range(4_000)
_BROUGHT = (b"brought", b"brought too")
"""Tokens of a caller's own, which come back."""


@dataclass
class _Client:
    """A client that takes the lock now and then.

    Attributes:
        operation: the one under way.
        token: of the lock that it holds, or believes to hold.
        reply: the one on its way, and the holding in which it was made.
        numbered: the holding in which it got its number.
    """

    operation: AcquireFenced | Fence | None = None
    token: bytes | None = None
    reply: tuple[Reply, int] | None = None
    numbered: int = 0


class _Story:
    """Three clients, one lock.

    A holding begins when the free lock's key is set to a token, or a token replaces another. Invariants: all clients
    get the same number in one holding, and each holding's number is higher than those of all before it.
    """

    def __init__(self, choices: Choices, model: Model) -> None:
        self._choices = choices
        self._model = model
        self._capabilities = Capabilities(model.execute(PROBE))
        self._clients = [_Client() for _ in range(3)]
        self._late: list[Args] = []
        self._made = 0
        self._holding = 0
        self._holder: bytes | None = None
        self._lines: list[str] = []
        self.fences: dict[int, int] = {}

    def run(self) -> None:
        """Play the story.

        Raises:
            Violation: an invariant does not hold.
        """
        for _ in range(40):
            client = self._clients[self._choices.below(3)]
            self._look()
            if client.reply is not None:
                self._feed(client, *client.reply)
            elif client.operation is not None:
                self._send(client, client.operation)
            elif client.token is not None:
                self._leave_off(client, client.token)
            else:
                ttl_ms = (None, 30, 1000)[self._choices.below(3)]
                kind = (AcquireFenced, AcquireOwnFenced)[self._choices.below(2)]
                client.operation = kind(KEY, self._new_token(), ttl_ms)
            if self._late and self._choices.below(4) == 3:
                self._execute(self._late.pop(0))
            self._model.now_ms += (0, 0, 10, 40)[self._choices.below(4)]

    def _new_token(self) -> bytes:
        self._made += 1
        return (b"rlf:%032x" % self._made, *_BROUGHT)[self._choices.below(3)]

    def _look(self) -> None:
        """Note whether another holding has begun."""
        entry = self._model.entry(KEY)
        holder = None if entry is None or entry.value is None else entry.value.removesuffix(CONTENDED_FLAG)
        if holder is not None and holder != self._holder:
            self._holding += 1
        self._holder = holder

    def _execute(self, request: Args) -> Reply:
        self._look()
        reply = self._model.execute(request)
        self._look()
        self._lines.append(f"holding {self._holding}: {request[2:]} -> {reply!r}")
        return reply

    def _send(self, client: _Client, operation: AcquireFenced | Fence) -> None:
        request = operation.request(self._capabilities, 1.0)
        fate = self._choices.below(9)
        if fate == 8:
            self._give_up(client, operation)
        elif fate == 7:
            operation.note_unanswered(sent=False)
        elif fate == 6:  # executed, if ever, at some later time
            self._late.append(request)
            operation.note_unanswered(sent=True)
        else:
            reply = self._execute(request)
            if fate == 5:
                operation.note_unanswered(sent=True)
            else:
                client.reply = (reply, self._holding)

    def _feed(self, client: _Client, reply: Reply, holding: int) -> None:
        operation = client.operation
        assert operation is not None
        client.reply = None
        if isinstance(reply, list) and reply[0] != 0:
            client.numbered = holding
        if not operation.feed(reply, self._capabilities):
            return
        client.operation = None
        client.token = None
        if operation.result:
            client.token = operation.token
            self._check(client.numbered, operation.fence)
        elif operation.unsettled:
            self._clean_up(operation)

    def _check(self, holding: int, fence: int) -> None:
        if self.fences.setdefault(holding, fence) != fence:
            self._fail(f"holding {holding} has the numbers {self.fences[holding]} and {fence}")
        numbers = [self.fences[each] for each in sorted(self.fences)]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            self._fail(f"the numbers do not increase: {numbers}")

    def _fail(self, what: str) -> None:
        raise Violation("\n".join([what, *self._lines]))

    def _give_up(self, client: _Client, operation: AcquireFenced | Fence) -> None:
        client.operation = client.token = None
        if operation.unsettled:
            self._clean_up(operation)

    def _clean_up(self, operation: AcquireFenced | Fence) -> None:
        for key, token in operation.to_clean_up(failed=True):
            leave = LeaveQueue(key, token)
            while not leave.feed(self._execute(leave.request(self._capabilities, 1.0)), self._capabilities):
                pass

    def _leave_off(self, client: _Client, token: bytes) -> None:
        """Let the holder release the lock, hand it over, ask for its number again, or forget it."""
        way = self._choices.below(4)
        heirs = [other for other in self._clients if other.operation is None and other.token is None]
        if way == 3:
            client.operation = Fence(KEY, token)
            return
        client.token = None
        if way == 2 and heirs and self._holder == token:
            heir = b"rlf:%032x" % (1000 + self._made)
            self._made += 1
            self._model.put(KEY, heir + CONTENDED_FLAG, 1000)  # as the script that hands over does
            heirs[0].operation = Fence(KEY, heir)
        elif way == 0:
            release = Release(KEY, token, None)
            while not release.feed(self._execute(release.request(self._capabilities, 1.0)), self._capabilities):
                pass


def _violations(model: type[Model], seeds: range = _SEEDS) -> Iterator[str]:
    for seed in seeds:
        try:
            _Story(Seeded(seed), model()).run()
        except Violation as violation:
            yield f"seed {seed}: {violation}"


@in_two_runs(_SEEDS, 2_000)
def test_numbers_strictly_increase_in_every_story(seeds: range) -> None:
    assert next(_violations(Model, seeds), None) is None


@hypothesis.settings(max_examples=1000, database=None)
@hypothesis.given(story=strategies.binary(max_size=200))
def test_numbers_strictly_increase_in_every_story_that_hypothesis_thinks_of(story: bytes) -> None:
    _Story(Listed(story), Model()).run()


class _ForgetsWhoHasTheNumber(Model):
    """Counts again for a holder that asks again."""

    def _acquire_fenced(
        self, value: bytes | None, lock: Any, fence: Any, token: Any, ttl_ms: Any, count: Any = 1
    ) -> Reply:
        self._items(fence).pop(b"token", None)
        return super()._acquire_fenced(value, lock, fence, token, ttl_ms)


class _TakesATokenForAHolder(Model):
    """Does not count for a token that comes back."""

    def _acquire_fenced(
        self, value: bytes | None, lock: Any, fence: Any, token: Any, ttl_ms: Any, count: Any = 1
    ) -> Reply:
        counted = dict(self._items(fence))
        reply = super()._acquire_fenced(value, lock, fence, token, ttl_ms)
        if counted.get(b"token") != token or not isinstance(reply, list) or reply[0] == 0:
            return reply
        self._items(fence).update(counted)
        return [*reply[:2], counted[b"number"]]


class _LetsTheNumbersExpire(Model):
    """Forgets the counter once the lock is free."""

    def _acquire_fenced(
        self, value: bytes | None, lock: Any, fence: Any, token: Any, ttl_ms: Any, count: Any = 1
    ) -> Reply:
        if value is None:
            self.remove(fence)
        return super()._acquire_fenced(value, lock, fence, token, ttl_ms)


@pytest.mark.parametrize(
    ("model", "violation"),
    [
        (_ForgetsWhoHasTheNumber, "has the numbers"),
        (_TakesATokenForAHolder, "do not increase"),
        (_LetsTheNumbersExpire, "do not increase"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_stories_find_a_planted_fault(model: type[Model], violation: str) -> None:
    assert any(re.search(violation, found) for found in _violations(model))


def test_stories_have_many_holders() -> None:
    most = 0
    for seed in range(100):
        story = _Story(Seeded(seed), Model())
        story.run()
        most = max(most, len(story.fences))
    assert most >= 5
