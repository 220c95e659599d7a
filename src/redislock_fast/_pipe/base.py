"""The common part of all pipes: their contract, their exceptions and the shape of a request."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeAlias

import hiredis

Args: TypeAlias = tuple["bytes | str | int", ...]
"""One command: its words in order. A str goes out as UTF-8, an int in decimal."""


class Bulk(NamedTuple):
    """Many commands that differ in one word: cheaper to encode than one by one."""

    before: Args
    words: list[bytes]
    after: Args

    def requests(self) -> list[Args]:
        """The commands one by one."""
        return [(*self.before, word, *self.after) for word in self.words]


NOT_ASKED: Final = object()
"""`Pipe.ask` returns it where nothing was sent."""

Reply: TypeAlias = "bytes | int | float | str | bool | hiredis.ReplyError | list[Reply] | dict[bytes, Reply] | None"
"""One reply as hiredis parses it, undecoded. An error reply is returned, not raised."""

OnPush: TypeAlias = Callable[[list[Reply]], None]
"""Called with each push that answers no request."""

OnReply: TypeAlias = Callable[[Reply], None]
"""Called with the reply to a posted request, or with the list of replies to many."""

_usable_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

SPIN_US = 100 if _usable_cpus > 1 else 0
"""How many microseconds a reader spins before it blocks: a near server replies within that. With one CPU it does not
spin, since the server needs that CPU."""

UNSENT_LIMIT_BYTES: Final = 8 << 20
"""How many bytes of requests may wait to be sent while the server is silent.

A pipe breaks instead of queueing a request while more bytes wait and none has come for `UNSENT_SILENCE_S`. Nothing else
bounds the queue of a frozen server: a caller without a time limit keeps the connection, and other callers that give up
leave their requests in it.
"""

UNSENT_SILENCE_S: Final = 5.0
"""How long a server must be silent before `UNSENT_LIMIT_BYTES` counts, in seconds. One that reads may get a larger
batch."""

READER_HAS_ENDED: Final = "the thread that reads has ended with the interpreter"
"""Why a pipe of threads fails a caller that waits for another thread while the interpreter ends: none goes on then."""

NOT_ENOUGH = object()
"""The parser returns it when its buffer ends within a reply."""


class ConnectionBroken(Exception):
    """The connection broke before the reply came.

    Attributes:
        sent: whether a byte of the request may have left. False: the server has not executed it.
    """

    def __init__(self, sent: bool, cause: str) -> None:
        super().__init__(cause)
        self.sent = sent


class Malformed(ConnectionBroken, hiredis.ProtocolError):
    """A reply or a push is of a type or shape that its request cannot have.

    Replies may belong to other requests then, so the connection must be given up. Raised to the caller that got the
    reply, it is a `ConnectionBroken`; raised by `on_push` or `on_reply`, it is a protocol error, which breaks the pipe
    for all callers.
    """

    def __init__(self, reply: object) -> None:
        super().__init__(True, f"the server broke the protocol: an unexpected {type(reply).__name__}")


class NoReply(Exception):
    """The caller's time is up without a reply. The request may still be executed; the pipe stays open."""


class Forked(RuntimeError):
    """Raised in a child that a signal handler forked in the middle of a call: the call goes on in the parent alone."""

    def __init__(self) -> None:
        super().__init__("a signal handler has forked: the call goes on in the parent process alone")


class Mailbox(Protocol):
    """Where one thread waits for messages from other threads and for what the server pushes."""

    def put(self, message: object) -> None:
        """Put a message in, from any thread. It never blocks, and ignores a broken pipe.

        The waiting thread is woken at once, unless it is the reader of the socket and another thread puts it in: then
        it sees the message within a tenth of a second. A message from `on_push` is seen at once.
        """

    def wait(self, timeout_s: float, soon: bool = False) -> object:
        """Take out the oldest message, waiting for it if there is none. One thread at a time.

        Args:
            timeout_s: how long to wait, in seconds; below 0 forever.
            soon: whether the message is about to come, so that spinning for it may pay.

        Raises:
            NoReply: the time is up.
            ConnectionBroken: the connection broke, and no message is there.
            RuntimeError: another thread waits already.
            Forked: a signal handler forked, and this is the child.
            KeyboardInterrupt: or any other exception of a signal handler. The messages stay.
        """


class Pipe(Protocol):
    """One connection that many threads call at once.

    Attributes:
        on_push: called for every push that answers no request, by the thread that reads, in the order of the stream;
            None drops them. Set it before the pipe is shared. It may put messages in mailboxes, and post. It must not
            block, since every caller waits for it. For a malformed push it raises hiredis.ProtocolError, as `on_reply`
            does for a malformed reply: that breaks the pipe. Any other exception breaks the pipe too, and is raised to
            the caller that reads.

    A protocol error breaks the pipe, so that no caller gets the reply of another: malformed RESP, a reply that came
    before its request had left, or a push that answers a subscription that is not the oldest request under way.

    (S)SUBSCRIBE may be called, not posted, with one channel, both words bytes: RESP3 answers it by a push, and `call`
    returns that. (S)UNSUBSCRIBE must not be sent: its answer cannot be told from pushes that answer no request.
    """

    on_push: OnPush | None

    @property
    def broken(self) -> bool:
        """True once the connection is broken: every further call raises `ConnectionBroken(sent=False)`."""

    @property
    def closed_by_peer(self) -> bool:
        """Whether the server or the network ended a broken connection, not an interrupt or a strange reply.

        A `close` beside a call under way looks as if the server had ended it.
        """

    @property
    def silence_s(self) -> float:
        """How long requests have been under way without a byte coming back, in seconds."""

    def call(self, args: Args, timeout_s: float) -> Reply:
        """Send one request and wait for its reply.

        Args:
            args: the command's words.
            timeout_s: how long to wait for the reply, in seconds; below 0 forever.

        Raises:
            ConnectionBroken: the connection broke.
            NoReply: the time is up; the reply will be read and dropped when it comes.
            Forked: a signal handler forked, and this is the child.
            TypeError: a word that is not bytes, str or int. Nothing was sent.
            KeyboardInterrupt: or any other exception of a signal handler; the reply is dropped as for `NoReply`.
        """

    def ask(self, args: Args, timeout_s: float, inside: set[int]) -> object:
        """`call`, noting the thread in `inside` until it returns: a nested `ask` of that thread is refused.

        Args:
            args: as for `call`.
            timeout_s: as for `call`.
            inside: identifiers of the threads that are in an `ask`; the pipe adds and removes the caller's.

        Returns:
            The reply; NOT_ASKED where the thread is in `inside` already: it is in a signal handler or a finalizer.
        """

    def call_many(self, requests: list[Args] | Bulk, timeout_s: float) -> list[Reply]:
        """Send requests in one piece and wait for all their replies, which come in the same order.

        All requests and all replies are held in memory; the caller bounds their number. An empty list is a ValueError.
        As `call` otherwise; if it raises, each of the requests may have been executed.
        """

    def post(self, args: Args, on_reply: OnReply | None = None) -> None:
        """Send one request after all that were sent before. Never blocks.

        Args:
            args: the command's words.
            on_reply: called with the reply by the thread that reads, in the order of the stream, as `on_push` is; not
                called when the connection breaks before. None drops the reply.
        """

    def post_many(self, requests: list[Args] | Bulk, on_replies: OnReply) -> None:
        """Send requests in one piece, as `post` sends one.

        Args:
            requests: as for `call_many`.
            on_replies: called with the list of all replies when the last one has come, as `on_reply` is.
        """

    def mailbox(self) -> Mailbox:
        """A new mailbox, on which a thread can wait while others call."""

    def close(self) -> None:
        """Break the pipe: callers that still wait get `ConnectionBroken`."""

    def close_idle(self) -> bool:
        """`close` where no reply is to come and no thread reads or waits for a mailbox. Returns whether it was so."""

    def forget(self) -> None:
        """In a forked child: refuse every call. The pipe registers itself for that."""


def is_answer(push: list[Reply]) -> bool:
    """Whether a push claims to be the reply to the oldest request under way, as RESP3 answers (S)SUBSCRIBE."""
    return push[:1] in ([b"subscribe"], [b"ssubscribe"])


def is_answer_to(push: list[Reply], request: Args | None) -> bool:
    """Whether a push for which `is_answer` holds is the reply to this request: a (S)SUBSCRIBE to the same channel."""
    if request is None or len(request) != 2 or len(push) != 3:
        return False
    command, channel = request
    return type(command) is bytes and push[:2] == [command.lower(), channel]


def is_unauthenticated(reply: Reply) -> bool:
    """Whether a reply says that the server does not accept requests on this connection: nothing was executed."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOAUTH")


def new_reader() -> hiredis.Reader:
    """A parser of replies that decodes nothing and answers `NOT_ENOUGH` at the end of its buffer."""
    return hiredis.Reader(notEnoughData=NOT_ENOUGH)
