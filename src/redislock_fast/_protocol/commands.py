"""The operations on one lock, as state machines without I/O, clock or randomness.

An operation is asked for its next request, is fed the reply, or is told that the connection was lost, until it is
finished and `result` stands. The same machines serve every transport, and tests drive them with a pen.

Rules:
- Every request is idempotent for its token, so an operation whose outcome is unknown is simply asked for its request
  again. What makes it so stands at each class.
- A `Dialect` says what the server of one connection understands. A machine that learns that it does not (an ACL, a
  proxy) lowers the dialect and goes on with the next best; it never fails for a missing native command.
- Errors that mean "not executed, try later" raise `NotExecuted`; the rest of the server's errors raise `Refused`.
- A reply of a type or shape that the request cannot have raises `Malformed`: it may be the reply to another request.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import hiredis

from redislock_fast._pipe.base import NOT_ASKED, Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Dialect, native_release
from redislock_fast._protocol.keys import queue_keys
from redislock_fast._protocol.scripts import EXTEND, PASS_ON, REACQUIRE, RELEASE, Script
from redislock_fast._util.tokens import MARK, is_held_with, is_ours

if TYPE_CHECKING:
    from redislock_fast._protocol.claims import Claim

__all__ = [
    "HANDED_OVER",
    "NOAUTH",
    "Acquire",
    "Exchange",
    "Extend",
    "Look",
    "NotExecuted",
    "Operation",
    "Reacquire",
    "Redirected",
    "Refused",
    "Release",
    "TokenOperation",
    "acquire_request",
    "release_request",
]

Begun: TypeAlias = "tuple[Any, Any, BaseException | None]"
"""What has come of an operation's first request, which left without it: the connection, the reply, what was raised.

NOT_ASKED in place of the reply: it is to be asked for again."""

HANDED_OVER = 2
"""What a release answers when a waiter has the lock now."""

_DELEX_WRONGTYPE = "should be of string type"
"""Part of what Redis 8.4 and later answer to `DELEX key IFEQ` instead of WRONGTYPE."""

NOAUTH = "NOAUTH"
"""The code of the error that means: this connection has lost its authentication, or never had any."""

_TRY_LATER = frozenset({"LOADING", "MASTERDOWN", "BUSY", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "READONLY", NOAUTH})


class NotExecuted(Exception):
    """The server did not execute the request and may do so later. `code` is the error's first word."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Redirected(Exception):
    """Another node of the cluster executes the request: it has the lock's slot (MOVED), or is being given it (ASK)."""


class Refused(Exception):
    """The server answered with an error that no retry mends."""


class Exchange(Protocol):
    """Requests and replies, until it is finished: what a connection needs to know of an operation.

    Attributes:
        key: the lock's name on the wire.
        many: whether `request` gives a list of requests and `feed` wants the list of their replies.
        claim: what hears the replies to its requests also when nobody waits for them; mostly None.
        begun: what has come of its first request, where that left before it was driven. Whatever drives it takes it.
    """

    many: bool
    claim: Claim | None
    begun: Begun | None

    @property
    def key(self) -> bytes: ...

    def request(self, dialect: Dialect, now: float) -> Any:
        """What to send next. `now` is read just before the first byte leaves."""

    def feed(self, reply: Any, dialect: Dialect) -> bool:
        """Take the reply to the last request. True: finished. False: ask for the next request.

        Raises:
            NotExecuted: try the same request later.
            Redirected: try it at another node.
            Refused: the server's error.
            Malformed: the reply is none that the request can have; the connection must be left.
        """

    def lost(self, sent: bool) -> None:
        """The connection broke, or the time was up, before the reply came."""

    def takes(self) -> list[tuple[bytes, bytes]]:
        """The keys and tokens that it is about to set, so that undoing them must come first."""


class Operation(Exchange, Protocol):
    """What a transport drives.

    Attributes:
        unsettled: True once a request may have been, or may yet be, executed without our knowing.
        result: what came of it, once finished; False until then.
    """

    unsettled: bool
    result: bool

    def to_undo(self, failed: bool) -> list[tuple[bytes, bytes]]:
        """The keys and tokens that may be set on the server without being held: `failed` if the caller got an error."""


class TokenOperation:
    """What every operation on one token shares.

    The defaults stand on the classes: an operation is made for every acquire and release, and assigns what differs.
    """

    many = False
    claim: Claim | None = None
    begun: Begun | None = None
    unsettled = False
    result = False
    with_text = False

    def __init__(self, key: bytes, token: bytes) -> None:
        self.key = key
        self.token = token

    @abstractmethod
    def request(self, dialect: Dialect, now: float) -> Any: ...

    def begin(self, request: Args, dialect: Dialect, now: float, begun: Begun) -> None:
        """Take over a first request that has left without the operation.

        Args:
            request: it.
            dialect: of its connection, as it is now.
            now: when it left, by the clock.
            begun: what has come of it.
        """
        link, _, interruption = begun
        if self.request(dialect, now) != request:  # the dialect has fallen: the reply is to another form
            self.lost(True)
            begun = (link, NOT_ASKED, interruption)
        self.begun = begun

    def lost(self, sent: bool) -> None:
        self.unsettled = self.unsettled or sent

    def takes(self) -> list[tuple[bytes, bytes]]:
        return []

    def to_undo(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # an acquire alone sets a key
        return []

    def script(self, script: Script, *args: bytes | int) -> Args:
        if self.with_text:
            return (b"EVAL", script.text, 1, self.key, self.token, *args)
        return (b"EVALSHA", script.sha, 1, self.key, self.token, *args)

    def queue_script(self, script: Script, *args: bytes | int) -> Args:
        name, body = (b"EVAL", script.text) if self.with_text else (b"EVALSHA", script.sha)
        return (name, body, 3, self.key, *queue_keys(self.key), self.token, *args)

    def error_code(self, reply: hiredis.ReplyError) -> str:
        """The code of an error that the operation itself deals with; every other one is raised."""
        text = str(reply)
        code = text.split(" ", 1)[0]
        if code == "NOSCRIPT":
            self.with_text = True
        elif code in ("MOVED", "ASK"):
            raise Redirected(text)
        elif code in _TRY_LATER:
            raise NotExecuted(code, text)
        elif code == "ERR":
            # Before Redis 7.0 a script wraps the error of the command that failed in it: "... -READONLY You ...".
            for word in text.split():
                if word.startswith("-") and word[1:] in _TRY_LATER:
                    raise NotExecuted(word[1:], text)
            if "WRONGTYPE" in text or _DELEX_WRONGTYPE in text:
                return "WRONGTYPE"
        return code

    def queue_error_code(self, reply: hiredis.ReplyError) -> str:
        """The same for a script with several keys, which a slot that is just moving does not take (TRYAGAIN)."""
        try:
            return self.error_code(reply)
        except NotExecuted as later:
            if later.code == "TRYAGAIN":
                return later.code
            raise


def _syntax_or_permission(code: str, text: str) -> bool:
    """Whether the server cannot or may not do this form of the command, while another form may still do."""
    return code == "NOPERM" or (code == "ERR" and ("syntax error" in text or "unknown command" in text))


def _is_verdict(reply: Reply, native: bool) -> bool:
    """Whether it is a reply to SET ... IFEQ, or to a script that answers 1 or 0."""
    return (reply is None or reply == b"OK") if native else type(reply) is int and reply in (0, 1)


def acquire_request(dialect: Dialect, key: bytes, token: bytes, ttl_ms: int | None) -> tuple[Args, Reply]:
    """The first request of an `Acquire`, and the reply that means "ours"."""
    if dialect.set_get:
        if ttl_ms is None:
            return (b"SET", key, token, b"NX", b"GET"), None
        return (b"SET", key, token, b"NX", b"PX", ttl_ms, b"GET"), None
    if ttl_ms is None:
        return (b"SET", key, token, b"NX"), b"OK"
    return (b"SET", key, token, b"NX", b"PX", ttl_ms), b"OK"


class Acquire(TokenOperation):
    """Take the lock if it is free.

    Idempotent: a lock that already holds this very token, after an attempt of unknown outcome, was taken by it.

    `result` is True when the lock is ours. Else `holder` is the value that stands there, None where it could not be
    read. `sent_at` is the time of the first request: the lease counts from there. `refused` is True once the server has
    said that the lock is another's, even where its value has not been read yet.
    """

    holder: bytes | None = None
    refused = False
    sent_at = 0.0
    _looking = False
    with_get = False  # the form of the request under way: the dialect may fall before its reply is here

    def __init__(self, key: bytes, token: bytes, ttl_ms: int | None) -> None:
        self.key = key
        self.token = token
        self.ttl_ms = ttl_ms

    def request(self, dialect: Dialect, now: float) -> Args:
        if not self.sent_at:
            self.sent_at = now
        if self._looking:
            return (b"GET", self.key)
        self.with_get = dialect.set_get
        return acquire_request(dialect, self.key, self.token, self.ttl_ms)[0]

    def plain_replies(self) -> tuple[Reply, type | None]:
        """The reply to the request under way that means "ours", and the type of those that mean "another's"."""
        return (None, bytes) if self.with_get else (b"OK", None)

    def feed(self, reply: Reply, dialect: Dialect) -> bool:
        if reply is None:
            if self._looking:  # freed since the SET failed: held by nobody, and not by us
                return True
            if self.with_get:
                self.result = True
                return True
            self._looking = True
            self.refused = not self.unsettled  # else it may be ours by an earlier attempt
            return False
        if type(reply) is bytes:
            if self._looking or self.with_get:
                self.holder = reply
                self.result = self.unsettled and is_held_with(reply, self.token)
            elif reply == b"OK":
                self.result = True
            else:
                raise Malformed(reply)
            return True
        return self._refused(reply, dialect)

    @property
    def took(self) -> bool:
        """Whether the lock is ours because a request took the key, not because another had taken it with the token."""
        return self.result

    def takes(self) -> list[tuple[bytes, bytes]]:
        return [(self.key, self.token)]

    def to_undo(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # either way
        # Finished without the lock, an earlier attempt may still be under way.
        return [(self.key, self.token)] if self.unsettled and not self.result else []

    def _refused(self, reply: Reply, dialect: Dialect) -> bool:
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        text = str(reply)
        code = self.error_code(reply)
        if self._looking and code == "NOPERM" and not self.unsettled:
            return True  # may not read: held by somebody
        if self.with_get and not self._looking and _syntax_or_permission(code, text):
            dialect.set_get = False
            return False
        raise Refused(text)


class _NativeOrScript(TokenOperation):
    """An operation that some servers have a command for, and the others a script."""

    _native = False  # the form of the request under way: the dialect may fall before its reply is here

    def _refusal(self, reply: Reply, dialect: Dialect) -> bool:
        """Deal with what is no verdict. True: the lock is not held. False: ask again, in the next form."""
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        text = str(reply)
        code = self.error_code(reply)
        if code == "WRONGTYPE":
            return True
        if code == "NOSCRIPT":
            return False
        if self._native and _syntax_or_permission(code, text):
            self._lower(dialect)
            return False
        raise Refused(text)

    @abstractmethod
    def _lower(self, dialect: Dialect) -> None:
        """Note that this connection does not take the command."""


def release_request(dialect: Dialect, key: bytes, token: bytes, queued: bool) -> tuple[Args, Reply]:
    """The first request of a `Release`, and the usual reply: "it was ours", and with `queued`, "it is handed over"."""
    if queued:
        return (b"EVALSHA", PASS_ON.sha, 3, key, *queue_keys(key), token), HANDED_OVER
    if dialect.release is not None:
        return native_release(dialect, key, token), 1
    return (b"EVALSHA", RELEASE.sha, 1, key, token, b"1"), 1


class Release(_NativeOrScript):
    """Delete the lock if it holds this token, or hand it over to who waits in the queue.

    The first request deletes an unmarked lock. Only where that finds none, and the token is one that may be marked, the
    queue is looked at. Where the queue's scripts cannot be executed, a marked lock is deleted: who waits finds out.

    Idempotent: finding nothing of ours, after an attempt of unknown outcome that left while the lease was valid, means
    that the attempt was executed.

    Args:
        expires_at: until when the lease is certainly valid, in the clock's seconds; None where it does not expire or
            is not known.
        queued: whether somebody is known to wait: the first request hands over.

    `valid` says whether the lease was valid when the first attempt left, `handed_over` whether a waiter has the lock
    now; None where the queue was not looked at.
    """

    handed_over: bool | None = None
    _step = "delete"

    def __init__(
        self, key: bytes, token: bytes, expires_at: float | None, unsettled: bool = False, queued: bool = False
    ) -> None:
        self.key = key
        self.token = token
        self.expires_at = expires_at
        self.unsettled = unsettled
        self.valid = unsettled
        if queued:
            self._step = "pass on"

    def request(self, dialect: Dialect, now: float) -> Args:
        if not self.unsettled:
            self.valid = self.expires_at is None or now < self.expires_at
        passes_on = self._step == "pass on"
        self._native = not passes_on and dialect.release is not None
        if self._step == "delete marked":
            return native_release(dialect, self.key, self.token + MARK) if self._native else self.script(RELEASE)
        if self.with_text and not self._native:
            return self.queue_script(PASS_ON) if passes_on else self.script(RELEASE, b"1")
        return release_request(dialect, self.key, self.token, passes_on)[0]

    @property
    def may_be_done(self) -> bool:
        """Whether it was executed, or may have been while the lease was valid: a second release finds nothing then."""
        return self.result or (self.unsettled and self.valid)

    def plain_replies(self) -> tuple[Reply, type | None]:
        """The reply that means "it was ours", and the type of those that mean "it was not"."""
        return 1, None if self.unsettled or is_ours(self.token) else int

    def feed(self, reply: Reply, dialect: Dialect) -> bool:
        if type(reply) is int and 0 <= reply <= HANDED_OVER:
            if self._step == "delete" and (reply == 2 or (reply == 0 and self._native and is_ours(self.token))):
                self._step = "pass on"
                return False
            if self._step == "pass on":
                self.handed_over = reply == HANDED_OVER
            self.result = reply > 0 or (self.unsettled and self.valid)
            return True
        if self._step == "pass on" and isinstance(reply, hiredis.ReplyError):
            # Forbidden, or the queue has become of another type, or the slot moves.
            if self.queue_error_code(reply) != "NOSCRIPT":
                self._step = "delete marked"
            return False
        return self._refusal(reply, dialect)

    def _lower(self, dialect: Dialect) -> None:
        dialect.release = None


class Reacquire(_NativeOrScript):
    """Set the ttl of the lock if it holds this token. Idempotent as it is.

    Args:
        ttl_ms: None takes the ttl away.
        queued: whether the lock is known to be marked.
    """

    sent_at = 0.0

    def __init__(self, key: bytes, token: bytes, ttl_ms: int | None, queued: bool = False) -> None:
        super().__init__(key, token)
        self.ttl_ms = ttl_ms
        self._value = token + MARK if queued and is_ours(token) else token

    @property
    def queued(self) -> bool:
        """Whether the lock was marked, as far as is known."""
        return self._value is not self.token

    def request(self, dialect: Dialect, now: float) -> Args:
        if not self.sent_at:
            self.sent_at = now
        self._native = dialect.set_ifeq
        if not self._native:
            return self.script(REACQUIRE, self.ttl_ms or 0)
        if self.ttl_ms is None:
            return (b"SET", self.key, self._value, b"IFEQ", self._value)
        return (b"SET", self.key, self._value, b"IFEQ", self._value, b"PX", self.ttl_ms)

    def feed(self, reply: Reply, dialect: Dialect) -> bool:
        if reply is None and self._native and self._value is self.token and is_ours(self.token):
            self._value = self.token + MARK  # a lock that was marked stays so until it is handed over
            return False
        if _is_verdict(reply, self._native):
            self.result = bool(reply)
            return True
        return self._refusal(reply, dialect)

    def _lower(self, dialect: Dialect) -> None:
        dialect.set_ifeq = False


class Extend(TokenOperation):
    """Add to the ttl of the lock, or replace it, if it holds this token and has a ttl.

    Idempotent: after an attempt of unknown outcome the script gets the longest ttl that one execution could have left.
    That needs the time at which the lease ends; where it is not known (a token set by hand), PTTL is asked first.
    Where scripts are forbidden and `SET ... IFEQ` is not, the new ttl is computed here from GET and PTTL.

    `expires_at` is, at the end, until when the lease is certainly valid.
    """

    sent_at = 0.0
    _native = False
    _now = 0.0

    def __init__(self, key: bytes, token: bytes, add_ms: int, replace: bool, expires_at: float | None) -> None:
        super().__init__(key, token)
        self._add_ms = add_ms
        self._replace = replace
        self.expires_at = expires_at
        self._value = token  # what stands at the key, marked or not
        self._step = "PTTL" if expires_at is None and not replace else "extend"

    def request(self, dialect: Dialect, now: float) -> Args:  # noqa: ARG002  # scripts first, for every server
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
        """What one execution leaves of the lease by now; 1 ms at least, which servers take."""
        if self._replace or self.expires_at is None:
            return self._add_ms
        return max(self._add_ms + math.floor((self.expires_at - now) * 1000), 1)

    def feed(self, reply: Reply, dialect: Dialect) -> bool:
        if isinstance(reply, hiredis.ReplyError):
            return self._refused(reply, dialect)
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
                return True  # gone, or without a ttl: nothing that could be extended
            self.expires_at = self._now + reply / 1000
            self._step = "extend"
            return False
        if not _is_verdict(reply, self._native):
            raise Malformed(reply)
        if reply is None and self._value is self.token and is_ours(self.token):
            self._value = self.token + MARK  # marked since it was read
            return False
        self.result = bool(reply)
        if self.result:
            base = self._now if self._replace or self.expires_at is None else self.expires_at
            self.expires_at = base + self._add_ms / 1000
        return True

    def _refused(self, reply: hiredis.ReplyError, dialect: Dialect) -> bool:
        code = self.error_code(reply)
        if code == "WRONGTYPE":
            return True
        if code == "NOSCRIPT":
            return False
        if code == "NOPERM" and self._step == "extend" and not self._native and dialect.set_ifeq:
            self._native = True
            self._step = "GET"
            return False
        raise Refused(str(reply))


class Look(TokenOperation):
    """Read the lock: `result` is True when the key exists, `holder` is its value (None for what is no string)."""

    holder: bytes | None = None

    def __init__(self, key: bytes) -> None:
        super().__init__(key, b"")

    def request(self, dialect: Dialect, now: float) -> Args:  # noqa: ARG002  # the same for every server, at any time
        return (b"GET", self.key)

    def feed(self, reply: Reply, dialect: Dialect) -> bool:  # noqa: ARG002  # likewise
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
