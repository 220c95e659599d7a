"""The common part of all operations on a lock: their contract, their errors, and how they read a server's errors.

An operation is a state machine without I/O, clock or randomness. A transport asks it for its next request, and feeds it
the reply or notes that the connection broke, until it is finished and `result` is set. The same machines serve every
transport, and tests drive them by hand.

Rules:
- Every request is idempotent for its token, so after an unknown outcome an operation is asked for its request again.
  Each class gives the reason.
- A `Capabilities` says what the server of one connection understands. A machine whose request is refused (an ACL, a
  proxy) goes on with the next best form, whatever the words of the error are, and lowers the capabilities once that
  form has been executed. A missing native command is never an error.
- An error that means "not executed, try later" raises `NotExecuted`; any other error of the server raises `Refused`.
- A reply of a type or shape that the request cannot have raises `Malformed`: it may be the reply to another request.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import hiredis

from redislock_fast._pipe.base import NOT_ASKED, Args, Malformed, Reply
from redislock_fast._protocol.capabilities import Capabilities
from redislock_fast._protocol.keys import permit_keys, queue_keys
from redislock_fast._protocol.scripts import FOR_PERMITS, Script
from redislock_fast._util.redis_py import command_error
from redislock_fast._util.tokens import is_permit

if TYPE_CHECKING:
    from redislock_fast._protocol.claims import Claim
    from redislock_fast._util.tokens import TokenSource

FirstOutcome: TypeAlias = "tuple[Any, Any, BaseException | None]"
"""The outcome of a first request that was sent before its operation was made: the connection, the reply, the error.

The reply is `NOT_ASKED` where the request must be sent again in another form."""

_DELEX_WRONGTYPE = "should be of string type"
"""Part of what Redis 8.4 and later answer to `DELEX key IFEQ` instead of WRONGTYPE."""

NOAUTH = "NOAUTH"
"""The code of the error by which a server says that this connection is not authenticated, or not any more."""

SUBSCRIBED = "allowed in this context"
"""Part of the error of a server that executes nothing on a connection with a subscription, even in RESP3."""

_QUOTE = ", with args beginning with"
"""Stands before the arguments in the error for a command that a server does not know."""

MISCONF = "MISCONF"
"""The code of the error for a write, and for `PING`, on a server that could not save its data to the disk."""

_TRY_LATER = frozenset(
    {"LOADING", "MASTERDOWN", "BUSY", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "READONLY", NOAUTH, MISCONF}
)


def without_arguments(text: str) -> str:
    """A server's error without the arguments that it quotes: a token may be among them."""
    return text.partition(_QUOTE)[0]


def later_code(text: str) -> str:
    """The code of an error by which a server says "not executed, try later"; empty for any other error."""
    code = command_error(text).partition(" ")[0]
    return code if code in _TRY_LATER else ""


class NotExecuted(Exception):
    """The server did not execute the request and may execute it later.

    Attributes:
        code: the error's first word, or `SUBSCRIBED`.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[type[NotExecuted], tuple[str, str]]:
        """Be copied: each caller that waits for a connection gets an error of its own."""
        return type(self), (self.code, str(self))


class Redirected(Exception):
    """Another node of the cluster executes the request: it has the lock's slot (MOVED), or is being given it (ASK)."""


class Refused(Exception):
    """The server answered with an error that a retry does not help. `text` is the error's."""

    def __init__(self, text: str) -> None:
        super().__init__(without_arguments(text))


class FirstRequest:
    """The request of a call that leaves before its operation is made. The usual reply settles the call there and then.

    Attributes:
        key: the lock.
        connection: on which it left, until it is settled or handed on to an operation; None: on none.
        request: the request.
        ours: the reply to it that means that the lock is held, or was.
        sent_at: when it left, in the clock's seconds; 0: it has not.
        wait_s: how long the caller waits at most, in seconds; None: as the client's settings say.
    """

    # Without an `__init__`, whose call would cost as much as the rest. What an uncontended acquire reads is assigned:
    # Python 3.11 reads an instance's own attributes eight times faster than those that it finds in the class.
    key: bytes
    connection: Any = None
    request: Args
    ours: Reply = None
    sent_at: float = 0.0
    wait_s: float | None = None

    @abstractmethod
    def request_on(self, connection: Any, tokens: TokenSource) -> Args | None:
        """The request, in the form for this connection, and note the connection; None: send nothing."""

    def __init_subclass__(cls) -> None:
        """Have all instances share the table of their attributes' names, each of which is annotated.

        CPython 3.11 closes the table as instances are made. Where many calls begin before the first has sent its
        request, each would have a dict of its own: with 100 tasks, a pair would take 4 % more instructions.
        """
        call = cls()
        for name in {**FirstRequest.__annotations__, **cls.__annotations__}:
            setattr(call, name, None)


class Exchange(Protocol):
    """Requests and replies until it is finished: the part of an operation that a connection needs.

    Attributes:
        key: the lock's name on the wire.
        is_pipeline: whether `request` gives a list of requests and `feed` takes the list of their replies.
        claim: gets every reply to its requests, even when no caller waits for it; None for most operations.
        first_outcome: of its first request, where that was sent before the operation was made; the transport takes it
            out.
        uses_queue: whether its requests are of the kinds for which a server may close the connection.
    """

    is_pipeline: bool
    uses_queue: bool
    claim: Claim | None
    first_outcome: FirstOutcome | None

    @property
    def key(self) -> bytes: ...

    def request(self, capabilities: Capabilities, now: float) -> Any:
        """The request to send next. `now` is read just before the first byte leaves."""

    def feed(self, reply: Any, capabilities: Capabilities) -> bool:
        """Take the reply to the last request. True: finished. False: ask for the next request.

        Raises:
            NotExecuted: try the same request later.
            Redirected: try it at another node.
            Refused: the server's error.
            Malformed: the request cannot have this reply; the connection must be given up.
        """

    def note_unanswered(self, sent: bool) -> None:
        """Note that the connection broke, or the time was up, before the reply came."""

    def takes(self) -> list[tuple[bytes, bytes]]:
        """The keys and tokens that it is about to set: a pending cleanup of them must be sent first."""


class Operation(Exchange, Protocol):
    """An operation as a transport drives it.

    Attributes:
        unsettled: whether a request may have been executed, or may still be, without its outcome being known.
        result: the outcome, once finished; False until then.
    """

    unsettled: bool
    result: bool

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:
        """The keys and tokens that may be set on the server without being held.

        Args:
            failed: whether the caller got an error.
        """


class TokenOperation:
    """The common part of all operations on one token.

    The defaults are class attributes, for speed: an operation assigns only what differs.
    """

    is_pipeline = False
    uses_queue = False
    of_semaphore = False  # an operation on one permit has a token that says so
    at_once = ""  # the code of an error that is raised at once, although it means "later"
    claim: Claim | None = None
    first_outcome: FirstOutcome | None = None
    unsettled = False
    result = False
    with_text = False

    def __init__(self, key: bytes, token: bytes) -> None:
        self.key = key
        self.token = token

    @abstractmethod
    def request(self, capabilities: Capabilities, now: float) -> Any: ...

    def begin(self, request: Args, capabilities: Capabilities, now: float, first_outcome: FirstOutcome) -> None:
        """Take over a first request that was sent before the operation was made.

        Args:
            request: the request.
            capabilities: of its connection, as it is now.
            now: when the request left, in the clock's seconds.
            first_outcome: its outcome.
        """
        connection, _, interruption = first_outcome
        if (
            self.request(capabilities, now) != request
        ):  # the capabilities have fallen since: the reply is to another form
            self.note_unanswered(True)
            first_outcome = (connection, NOT_ASKED, interruption)
        self.first_outcome = first_outcome

    def note_unanswered(self, sent: bool) -> None:
        self.unsettled = self.unsettled or sent

    def takes(self) -> list[tuple[bytes, bytes]]:
        return []

    def to_clean_up(self, failed: bool) -> list[tuple[bytes, bytes]]:  # noqa: ARG002  # an acquire alone sets a key
        return []

    def script(self, script: Script, *args: bytes | int) -> Args:
        if is_permit(self.token):
            script = FOR_PERMITS[script.sha]
        if self.with_text:
            return (b"EVAL", script.text, 1, self.key, self.token, *args)
        return (b"EVALSHA", script.sha, 1, self.key, self.token, *args)

    def queue_script(self, script: Script, *args: bytes | int) -> Args:
        keys: tuple[bytes, ...] = queue_keys(self.key)
        if is_permit(self.token):
            script, keys = FOR_PERMITS.get(script.sha, script), permit_keys(self.key)
        name, body = (b"EVAL", script.text) if self.with_text else (b"EVALSHA", script.sha)
        return (name, body, 1 + len(keys), self.key, *keys, self.token, *args)

    def error_code(self, reply: hiredis.ReplyError) -> str:
        """The code of an error that the operation itself handles; raises for the others."""
        text = str(reply)
        code = text.split(" ", 1)[0]
        later = later_code(text)
        if code == "NOSCRIPT":
            self.with_text = True
        elif code in ("MOVED", "ASK"):
            raise Redirected(text)
        elif later:
            if later == self.at_once:
                return later
            raise NotExecuted(later, text)
        elif code == "ERR":
            if SUBSCRIBED in text:
                raise NotExecuted(SUBSCRIBED, text)
            if "WRONGTYPE" in text or _DELEX_WRONGTYPE in text:
                return "WRONGTYPE"
        return code

    def go_on_with_text(self, reply: Reply) -> None:
        """Go on with the script's text after a reply that is no answer of the script: it must ask for that.

        Raises:
            Malformed: it is no error.
            Refused: another error, which is not to be tried again.
        """
        if not isinstance(reply, hiredis.ReplyError):
            raise Malformed(reply)
        if self.error_code(reply) != "NOSCRIPT":
            raise Refused(str(reply))

    def queue_error_code(self, reply: hiredis.ReplyError) -> str:
        """`error_code` for a script with several keys, which a server refuses (TRYAGAIN) while their slot moves."""
        try:
            return self.error_code(reply)
        except NotExecuted as later:
            if later.code == "TRYAGAIN":
                return later.code
            raise


def is_verdict(reply: Reply, native: bool) -> bool:
    """Whether it is a reply to SET ... IFEQ, or to a script that answers 1 or 0."""
    return (reply is None or reply == b"OK") if native else type(reply) is int and reply in (0, 1)
