"""The operations on one lock: acquire, release, reacquire, extend and read. See `operation.py` for their rules."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import hiredis

from redislock_fast._pipe.base import Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities, native_release
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.operation import MISCONF, Refused, TokenOperation, is_verdict
from redislock_fast._protocol.scripts import EXTEND, PASS_ON, REACQUIRE, RELEASE
from redislock_fast._util.tokens import CONTENDED_FLAG, is_held_with, is_ours, is_permit

HANDED_OVER = 2
"""The reply to a release that has handed the lock over to a waiter."""

_GOES_ON = 3  # the reply of pass_on.lua that asks for another request


_OF_ANY_SET = ("WRONGTYPE", "OOM", MISCONF)
"""The codes of errors that say nothing about the form of a SET."""


_PLAIN = Capabilities()


def acquire_request(capabilities: Capabilities, key: bytes, token: bytes, ttl_ms: int | None) -> tuple[Args, Reply]:
    """The first request of an `Acquire`, and the reply that means that the lock is ours."""
    if capabilities.set_get:
        if ttl_ms is None:
            return (b"SET", key, token, b"NX", b"GET"), None
        return (b"SET", key, token, b"NX", b"PX", ttl_ms, b"GET"), None
    if ttl_ms is None:
        return (b"SET", key, token, b"NX"), b"OK"
    return (b"SET", key, token, b"NX", b"PX", ttl_ms), b"OK"


class Acquire(TokenOperation):
    """Take the lock if it is free.

    Idempotent: a lock that holds this token after an attempt of unknown outcome was taken by that attempt.

    Attributes:
        result: whether the lock is ours.
        holder: the value of a lock that is not ours; None where it could not be read.
        sent_at: the time of the first request: the lease counts from there.
        refused: whether the server has said that the lock is another's, even where its value has not been read yet.
    """

    at_once = MISCONF  # as with redis-py: a disk that is full may stay so
    holder: bytes | None = None
    refused = False
    sent_at = 0.0
    _looking = False
    _get_refused = False  # to this operation
    with_get = False  # the form of the request under way: `capabilities` may be lowered before its reply comes
    # Called on the class alone: Python 3.11 takes 200 instructions longer to find a static method.
    first_request: ClassVar[Callable[[Capabilities, bytes, bytes, int | None], tuple[Args, Reply]]] = acquire_request

    @classmethod
    def terms(cls, ttl_ms: int | None) -> bytes | int:
        """What a waiter for it wants, as the scripts of the key queue take it: the ttl in milliseconds, 0 for none."""
        return ttl_ms or 0

    def __init__(self, key: bytes, token: bytes, ttl_ms: int | None) -> None:
        self.key = key
        self.token = token
        self.ttl_ms = ttl_ms

    def request(self, capabilities: Capabilities, now: float) -> Args:
        if not self.sent_at:
            self.sent_at = now
        if self._looking:
            return (b"GET", self.key)
        form = _PLAIN if self._get_refused else capabilities
        self.with_get = form.set_get
        return acquire_request(form, self.key, self.token, self.ttl_ms)[0]

    def plain_replies(self) -> tuple[Reply, type | None]:
        """The reply to the request under way that means "ours", and the type of the replies that mean "another's"."""
        return (None, bytes) if self.with_get else (b"OK", None)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        if reply is None:
            if self._looking:  # freed since the SET failed, and not taken by us
                return True
            if self.with_get:
                self.result = True
                return True
            self._note_plain(capabilities)
            self._looking = True
            self.refused = not self.unsettled  # else it may be ours by an earlier attempt
            return False
        if type(reply) is bytes:
            if self._looking or self.with_get:
                self.holder = reply
                self.result = self.unsettled and is_held_with(reply, self.token)
            elif reply == b"OK":
                self._note_plain(capabilities)
                self.result = True
            else:
                raise Malformed(reply)
            return True
        return self._refused(reply)

    @property
    def expiry(self) -> tuple[bytes, float | None]:
        """The token of a lock that is ours, and until when its lease is certainly valid; None: it does not expire."""
        return self.token, None if self.ttl_ms is None else self.sent_at + self.ttl_ms / 1000

    @property
    def took(self) -> bool:
        """Whether the lock is ours because a request took the key, not because another holder has this token."""
        return self.result

    def takes(self) -> list[tuple[bytes, bytes]]:
        return [(self.key, self.token)]

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # either way
        # An earlier attempt may still be under way although the operation has finished without the lock.
        return [(self.key, self.token)] if self.unsettled and not self.result else []

    def _refused(self, reply: Reply) -> bool:
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        text = str(reply)
        code = self.error_code(reply)
        if self._looking and code != "WRONGTYPE" and not self.unsettled:
            return True  # reading is forbidden: the lock is held by another
        if self.with_get and not self._looking and code not in _OF_ANY_SET:
            self._get_refused = True
            return False
        raise Refused(text)

    def _note_plain(self, capabilities: Capabilities) -> None:
        """Note that a plain SET was executed."""
        if self._get_refused:
            capabilities.set_get = False


class _NativeOrScript(TokenOperation):
    """An operation for which some servers have a command; the others execute a script."""

    _native = False  # the form of the request under way: `capabilities` may be lowered before its reply comes
    _refusal_code: str | None = None  # why the command was refused to this operation

    def _refusal(self, reply: Reply) -> bool:
        """Handle a reply that is no verdict. True: the lock is not held. False: send the next form of the request."""
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        code = self.error_code(reply)
        if code == "WRONGTYPE":
            return True
        if code == "NOSCRIPT":
            return False
        if self._native:
            self._refusal_code = code
            return False
        raise Refused(str(reply))

    def _note_verdict(self, capabilities: Capabilities) -> None:
        """Note that the request under way was executed. Where it is the script, it was not the moment that forbade."""
        if not self._native and self._refusal_code not in (None, "OOM"):  # the scripts need no memory
            self._lower(capabilities)

    @abstractmethod
    def _lower(self, capabilities: Capabilities) -> None:
        """Note that the server of this connection refuses the command, and executes the script."""


def release_request(capabilities: Capabilities, key: bytes, token: bytes, contended: bool) -> tuple[Args, Reply]:
    """The first request of a `Release`, and the reply that settles it: "it was ours"; if `contended`, "handed over"."""
    if contended:
        if not capabilities.queues:  # then a contended lock is deleted, too
            return (b"EVALSHA", RELEASE.sha, 1, key, token), 1
        return (b"EVALSHA", PASS_ON.sha, 3, key, *queue_keys(key), token), HANDED_OVER
    if capabilities.release is not None:
        return native_release(capabilities, key, token), 1
    return (b"EVALSHA", RELEASE.sha, 1, key, token, b"1"), 1


class Release(_NativeOrScript):
    """Delete the lock if it holds this token, or hand it over to the first waiter.

    The first request deletes a lock without the contended flag. The key queue is used only where that finds no such
    lock and the token is one that may have the flag. Where the scripts of the queue cannot be executed, a contended
    lock is deleted, and its waiters notice that by their health checks.

    Idempotent: if the token is not found after an attempt of unknown outcome that left while the lease was valid, that
    attempt was executed.

    Args:
        expires_at: until when the lease is certainly valid, in the clock's seconds; None where it does not expire or is
            not known.
        unsettled: whether an earlier release, which left while the lease was valid, may have been executed.
        contended: whether a waiter is known, or the token cannot have the flag: then the first request hands over.

    Attributes:
        valid: whether the lease was valid when the first attempt left.
        handed_over: whether a waiter has the lock now; None where the queue was not used.
    """

    handed_over: bool | None = None
    _step = "delete"
    first_request: ClassVar[Callable[[Capabilities, bytes, bytes, bool], tuple[Args, Reply]]] = release_request  # ditto

    def __init__(
        self, key: bytes, token: bytes, expires_at: float | None, unsettled: bool = False, contended: bool = False
    ) -> None:
        self.key = key
        self.token = token
        self.expires_at = expires_at
        self.unsettled = unsettled
        self.valid = unsettled
        if contended:
            self._step = "pass on"

    def request(self, capabilities: Capabilities, now: float) -> Args:
        if not self.unsettled:
            self.valid = self.expires_at is None or now < self.expires_at
        if self._step == "pass on" and not capabilities.queues:
            self._step = "delete marked"
        passes_on = self._step == "pass on"
        self._native = not passes_on and capabilities.release is not None and self._refusal_code is None
        if self._step == "delete marked":
            if not self._native:
                return self.script(RELEASE)
            value = self.token + CONTENDED_FLAG if is_ours(self.token) else self.token
            return native_release(capabilities, self.key, value)
        if self._native:
            return native_release(capabilities, self.key, self.token)
        return self.queue_script(PASS_ON) if passes_on else self.script(RELEASE, b"1")

    @property
    def may_be_done(self) -> bool:
        """Whether it was executed, or may have been while the lease was valid: then a second release finds no lock."""
        return self.result or (self.unsettled and self.valid)

    def plain_replies(self) -> tuple[Reply, type | None]:
        """The reply that means "it was ours", and the type of those that mean "it was not"."""
        return 1, None if self.unsettled or is_ours(self.token) else int

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        if self._step == "pass on" and type(reply) is int and reply == _GOES_ON:
            self.unsettled = self.valid = True  # it was ours: if the lease ends before the next request, it is released
            return False
        if type(reply) is int and 0 <= reply <= HANDED_OVER:
            self._note_verdict(capabilities)
            if self._step == "delete" and (reply == 2 or (reply == 0 and self._native and is_ours(self.token))):
                self._step = "pass on"
                return False
            if self._step == "pass on":
                self.handed_over = reply == HANDED_OVER
            self.result = reply > 0 or (self.unsettled and self.valid)
            return True
        if self._step == "pass on" and isinstance(reply, hiredis.ReplyError):
            # Forbidden, or the queue's key holds another type now, or the slot moves.
            if self.queue_error_code(reply) != "NOSCRIPT":
                self._step = "delete marked"
            return False
        return self._refusal(reply)

    def _lower(self, capabilities: Capabilities) -> None:
        capabilities.release = None


class Reacquire(_NativeOrScript):
    """Set the ttl of the lock if it holds this token. Idempotent.

    A server without memory refuses `SET`. The script, whose `PEXPIRE` needs none, is then sent.

    Args:
        ttl_ms: None removes the ttl.
        contended: whether the lock is known to have the contended flag.
    """

    sent_at = 0.0

    def __init__(self, key: bytes, token: bytes, ttl_ms: int | None, contended: bool = False) -> None:
        super().__init__(key, token)
        self.ttl_ms = ttl_ms
        self._value = token + CONTENDED_FLAG if contended and is_ours(token) else token

    @property
    def contended(self) -> bool:
        """Whether the lock has the contended flag, as far as is known."""
        return self._value is not self.token

    def request(self, capabilities: Capabilities, now: float) -> Args:
        if not self.sent_at:
            self.sent_at = now
        self._native = capabilities.set_ifeq and self._refusal_code is None and not is_permit(self.token)
        if not self._native:
            return self.script(REACQUIRE, self.ttl_ms or 0)
        if self.ttl_ms is None:
            return (b"SET", self.key, self._value, b"IFEQ", self._value)
        return (b"SET", self.key, self._value, b"IFEQ", self._value, b"PX", self.ttl_ms)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        if reply is None and self._native and self._value is self.token and is_ours(self.token):
            self._value = self.token + CONTENDED_FLAG  # the flag, once set, stays until the lock is handed over
            return False
        if is_verdict(reply, self._native):
            self._note_verdict(capabilities)
            self.result = bool(reply)
            return True
        return self._refusal(reply)

    def _lower(self, capabilities: Capabilities) -> None:
        capabilities.set_ifeq = False


class Extend(TokenOperation):
    """Add to the ttl of the lock, or replace it, if it holds this token and has a ttl.

    Idempotent: after an attempt of unknown outcome the script gets the longest ttl that one execution could have left.
    That needs the time at which the lease ends; where it is not known (a token set by hand), PTTL is asked first.
    Where the script is refused and `SET ... IFEQ` is there, the new ttl is computed here from GET and PTTL.

    Once finished, `expires_at` is the time until which the lease is certainly valid.
    """

    sent_at = 0.0
    _native = False
    _now = 0.0

    def __init__(self, key: bytes, token: bytes, add_ms: int, replace: bool, expires_at: float | None) -> None:
        super().__init__(key, token)
        self._add_ms = add_ms
        self._replace = replace
        self.expires_at = expires_at
        self._value = token  # the key's value, with the contended flag or without
        self._step = "PTTL" if expires_at is None and not replace else "extend"

    @property
    def may_cut(self) -> bool:
        """Whether the lease may end sooner than its earlier end plus the addition: its new ttl was computed here."""
        return self.unsettled or self._native

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # scripts first, for every server
        self._now = now
        if not self.sent_at:
            self.sent_at = now
        if self._step != "extend":
            return (self._step.encode(), self.key)
        if self._native:
            return (b"SET", self.key, self._value, b"IFEQ", self._value, b"PX", self._new_ttl_ms(now))
        if not self.unsettled or self._replace:
            return self.script(EXTEND, self._add_ms, b"1" if self._replace else b"0")
        return self.script(EXTEND, self._add_ms, b"0", self._new_ttl_ms(now))

    def _new_ttl_ms(self, now: float) -> int:
        """The ttl that one execution leaves by now; at least 1 ms, the least that servers take."""
        if self._replace or self.expires_at is None:
            return self._add_ms
        return max(self._add_ms + math.floor((self.expires_at - now) * 1000), 1)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:
        if isinstance(reply, hiredis.ReplyError):
            return self._refused(reply, capabilities)
        if self._step == "GET":
            if reply is not None and type(reply) is not bytes:
                raise Malformed(reply)
            if reply is None or not is_held_with(reply, self.token):
                return True
            self._value = reply
            self._step = "PTTL"
            return False
        if self._step == "PTTL":
            if type(reply) is not int:
                raise Malformed(reply)
            if reply < 0:
                return True  # gone, or without a ttl: it cannot be extended
            self.expires_at = self._now + reply / 1000
            self._step = "extend"
            return False
        if not is_verdict(reply, self._native):
            raise Malformed(reply)
        if reply is None and self._value is self.token and is_ours(self.token):
            self._value = self.token + CONTENDED_FLAG  # the flag was set since the value was read
            return False
        self.result = bool(reply)
        if self.result:
            base = self._now if self._replace or self.expires_at is None else self.expires_at
            self.expires_at = base + self._add_ms / 1000
        return True

    def _refused(self, reply: hiredis.ReplyError, capabilities: Capabilities) -> bool:
        code = self.error_code(reply)
        if code == "WRONGTYPE":
            return True
        if code == "NOSCRIPT":
            return False
        if self._step == "extend" and not self._native and capabilities.set_ifeq:
            self._native = True
            self._step = "GET"
            return False
        raise Refused(str(reply))


class ReadHolder(TokenOperation):
    """Read the lock: `result` is True when the key exists, `holder` is its value (None where it is no string)."""

    holder: bytes | None = None

    def __init__(self, key: bytes) -> None:
        super().__init__(key, b"")

    def request(self, capabilities: Capabilities, now: float) -> Args:  # noqa: ARG002  # the same for every server, at any time
        return (b"GET", self.key)

    def feed(self, reply: Reply, capabilities: Capabilities) -> bool:  # noqa: ARG002  # the same for every server
        if reply is None or type(reply) is bytes:
            self.result = reply is not None
            self.holder = reply
            return True
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        if self.error_code(reply) == "WRONGTYPE":
            self.result = True
            return True
        raise Refused(str(reply))
