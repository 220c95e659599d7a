"""The operation on the mark of a job that is done: look for it, and note it. See `operation.py` for their rules."""

from __future__ import annotations

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.keys import done_key
from redislock_fast._protocol.operation import TokenOperation
from redislock_fast._protocol.scripts import DONE


class Done(TokenOperation):
    """Note that a job is done, or look whether it is. `result` is whether it counts as done.

    A note is refused where the lock is not held with the token. Idempotent: the mark is set again, for as long.

    A look is a script, too, though `GET` could do it: a user who may run no script gets the error before the job.

    Args:
        key: the job's lock.
        token: with which the lock is held; empty: only look.
        done_for_ms: for how long the job counts as done, in milliseconds; 0 for a look.
    """

    def __init__(self, key: bytes, token: bytes = b"", done_for_ms: int = 0) -> None:
        super().__init__(key, token)
        self._done_for_ms = done_for_ms

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server
        name, body = (b"EVAL", DONE.text) if self.with_text else (b"EVALSHA", DONE.sha)
        return (name, body, 2, self.key, done_key(self.key), self.token, self._done_for_ms)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if type(reply) is int and reply in (0, 1):
            self.result = reply == 1
            return True
        self.go_on_with_text(reply)
        return False
