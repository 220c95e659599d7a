"""Operations on many locks of one server, in one round trip after another until each has a verdict.

Each lock has a machine of `commands.py`. Of many locks under one token, the plain reply to the first request settles
nearly all, so `InBulk` writes and reads these in bulk, and makes a machine only for the other locks.

An error for one lock is raised once all the others have their verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from redislock_fast._pipe.base import Args, Bulk, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.commands import Acquire, Release
from redislock_fast._protocol.operation import NotExecuted, Operation, Redirected, Refused

if TYPE_CHECKING:
    from redislock_fast._protocol.claims import Claim
    from redislock_fast._protocol.operation import FirstOutcome

_ANY_KEY = b""


class Pipeline:
    """One machine per lock, driven together.

    Args:
        operations: fresh machines, at least one.

    Attributes:
        results: the result of each, once finished.
        redirected: the indexes of those for which the last reply has named another node.
    """

    is_pipeline = True
    uses_queue = False
    claim: Claim | None = None
    first_outcome: FirstOutcome | None = None
    result = False
    unsettled = False

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._begin(len(operations))

    def _begin(self, count: int) -> None:
        self._open: Sequence[int] = range(count)  # indexes of those without a verdict
        self._refused: list[int] = []  # of those for which the server answered with an error
        self._refusal: Refused | None = None  # the first one
        self.redirected: list[int] = []
        self.results: list[bool] = [False] * count

    def __len__(self) -> int:
        return len(self.results)

    @property
    def key(self) -> bytes:
        """The first lock without a verdict. The other requests are sent to the same node."""
        without = self._open or self._refused
        return self._machine(without[0] if without else 0).key

    @property
    def unfinished(self) -> list[int]:
        """Indexes of the locks without a verdict."""
        return sorted([*self._open, *self._refused])

    def _machine(self, index: int) -> Operation:
        return self._operations[index]

    def request(self, capabilities: Capabilities, now: float) -> list[Args] | Bulk:
        return [self._machine(index).request(capabilities, now) for index in self._open]

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:
        trouble: Exception | None = None
        still_open: list[int] = []
        refused: list[int] = []
        redirected: list[int] = []
        refusal = self._refusal
        for index, reply in zip(self._open, replies, strict=True):
            machine = self._machine(index)
            try:
                if machine.feed(reply, capabilities):
                    self.results[index] = machine.result
                else:
                    still_open.append(index)
            except Refused as error:
                refused.append(index)
                refusal = refusal or error
            except (NotExecuted, Redirected) as error:
                trouble = trouble or error
                still_open.append(index)
                if isinstance(error, Redirected):
                    redirected.append(index)
        # Not reached where a reply was malformed: then no reply counts, and all are asked again.
        self._open = still_open
        self.redirected = redirected
        self._refused += refused
        self._refusal = refusal
        if trouble is not None:
            raise trouble
        if not still_open and self._refusal is not None:
            raise self._refusal
        return not still_open

    def note_unanswered(self, sent: bool) -> None:
        self.unsettled = self.unsettled or sent
        for index in self._open:
            self._machine(index).note_unanswered(sent)

    def takes(self) -> list[tuple[bytes, bytes]]:
        return [entry for operation in self._operations for entry in operation.takes()]

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:
        return [entry for operation in self._operations for entry in operation.to_clean_up(failed)]


class InBulk(Pipeline):
    """Many locks under one token, most of which are settled by the plain reply to their first request."""

    def __init__(self, keys: list[bytes], token: bytes) -> None:
        self._keys = keys
        self._token = token
        self._template: Acquire | Release | None = None  # has been asked for its first request
        self._bulk = False  # the request under way is the first one, written in bulk
        self._machines: dict[int, Operation] = {}  # of the locks that need more than one request
        self._begin(len(keys))

    def _new_machine(self, key: bytes) -> Acquire | Release:
        raise NotImplementedError

    def _machine(self, index: int) -> Operation:
        machine = self._machines.get(index)
        if machine is None:
            machine = self._machines[index] = self._new_machine(self._keys[index])
        return machine

    def request(self, capabilities: Capabilities, now: float) -> list[Args] | Bulk:
        if self._template is not None:
            self._bulk = False
            return super().request(capabilities, now)
        template = self._new_machine(_ANY_KEY)
        words = template.request(capabilities, now)
        at = words.index(_ANY_KEY)
        self._template = template
        self._bulk = True
        return Bulk(words[:at], self._keys, words[at + 1 :])

    def feed(self, replies: list[Reply], capabilities: Capabilities) -> bool:
        if self._bulk:
            assert self._template is not None
            won, lost_type = self._template.plain_replies()
            if replies.count(won) == len(replies):
                self.results = [True] * len(replies)
                self._open = []
                return True
            self._open = still_open = []
            for index, reply in enumerate(replies):
                if reply == won:
                    self.results[index] = True
                elif type(reply) is not lost_type or (lost_type is int and reply != 0):
                    still_open.append(index)
                    self._continue(index)
            if not still_open:
                return True
            replies = [replies[index] for index in still_open]
        try:
            return super().feed(replies, capabilities)
        except Malformed:
            if self._bulk:  # none of the others counts either
                self._begin(len(self._keys))
            raise

    def note_unanswered(self, sent: bool) -> None:
        if self._bulk:
            self._bulk = False
            for index in self._open:
                self._continue(index)
        super().note_unanswered(sent)

    def takes(self) -> list[tuple[bytes, bytes]]:
        return []

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # only an acquire sets keys
        return []

    def _continue(self, index: int) -> None:
        """Give a lock a machine of its own, in the state in which the first request has left it."""
        assert self._template is not None
        self._machines[index] = machine = copy(self._template)
        machine.key = self._keys[index]


class ReleasePipeline(InBulk):
    """Delete the locks that hold this token. `results` says which did.

    Args:
        expires_at: until when all their leases are certainly valid, in the clock's seconds; None if they do not expire.
        doubtful: whether an earlier release, which left while the leases were valid, may have been executed.
    """

    def __init__(self, keys: list[bytes], token: bytes, expires_at: float | None, doubtful: bool = False) -> None:
        super().__init__(keys, token)
        self._expires_at = expires_at
        self.unsettled = doubtful

    def _new_machine(self, key: bytes) -> Release:
        return Release(key, self._token, self._expires_at, self.unsettled)

    @property
    def valid(self) -> bool:
        """Whether the leases were valid when the first attempt left."""
        return isinstance(self._template, Release) and self._template.valid
