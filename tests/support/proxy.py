"""A TCP proxy between a client and a server that loses or delays chosen requests and replies, or answers them itself.

It understands enough RESP to cut both directions into messages, and matches replies to requests first in, first out.
It is for loopback only, and never changes bytes that pass. In place of a request that the proxy answers, the server
gets a PING, so that replies stay in order. A test arms a fault first and awaits it on an event afterwards.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_WAIT_S = 10.0
_READ_SIZE = 65536
_MESSAGE = "message"  # commands are in capitals
_PING = b"*1\r\n$4\r\nPING\r\n"
_RESET = b"*1\r\n$5\r\nRESET\r\n"
_BY_PROXY = "request of the proxy's own"


def message_end(buffer: bytes | bytearray, start: int = 0) -> int | None:
    """The end of the RESP2 or RESP3 message that begins at `start`; None while it is incomplete."""
    line_end = buffer.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind = buffer[start : start + 1]
    end = line_end + 2
    if kind in b"+-:_#,(":
        return end
    size = int(buffer[start + 1 : line_end])
    if kind in b"$!=":
        end += size + 2 if size >= 0 else 0
        return end if end <= len(buffer) else None
    # An attribute is followed by the message that it belongs to.
    parts = {b"%": 2 * size, b"|": 2 * size + 1}.get(bytes(kind), size)
    for _ in range(parts):
        part_end = message_end(buffer, end)
        if part_end is None:
            return None
        end = part_end
    return end


def command_name(request: bytes) -> str:
    """The name of the command in a request, in capitals."""
    return request.split(b"\r\n", 3)[2].decode("ascii", "replace").upper()


def command_form(request: bytes) -> str:
    """The name of the command in a request; that of a script with the number of its keys, as in "EVALSHA 3".

    That of a SET with a condition or an answer beyond NX is as in "SET IFEQ" or "SET GET".
    """
    name, words = command_name(request), request.split(b"\r\n")[4::2]
    if name in ("EVAL", "EVALSHA"):
        return f"{name} {words[1].decode()}"
    if name == "SET":
        return " ".join(["SET", *(option for option in ("IFEQ", "GET") if option.encode() in words[2:])])
    return name


def is_message(reply: bytes) -> bool:
    """Whether this is a push that answers no request. A subscription is answered by a push, too."""
    return reply.startswith(b">") and not command_name(reply).endswith("SUBSCRIBE")


@dataclass
class _Rule:
    """One armed fault: what happens to the n-th of these commands from now on.

    Attributes:
        commands: which; empty for all.
        left: how many more of them until it strikes.
        drops_request: whether the request is lost; else its reply.
        share: how much of what is lost is passed on nevertheless, from 0 to 1.
        answer: the reply, where the proxy gives it; such a rule stands for good.
        holds: whether the reply is kept back instead, with all that follow it.
    """

    commands: frozenset[str]
    left: int
    drops_request: bool
    share: float
    answer: bytes = b""
    holds: bool = False

    def part_of(self, message: bytes) -> bytes:
        """The part of a dropped message that is passed on."""
        return message[: int(self.share * len(message))]


class _Late:
    """Sends to a socket in a thread of its own, each piece at its time and in order."""

    def __init__(self, target: socket.socket) -> None:
        self._pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        self._target = target
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, piece: bytes, delay_s: float) -> None:
        """Send it so much later; an empty piece ends the thread."""
        self._pieces.put((time.monotonic() + delay_s, piece))

    def _send_all(self) -> None:
        while True:
            due_at, piece = self._pieces.get()
            if not piece:
                return
            time.sleep(max(due_at - time.monotonic(), 0.0))
            with contextlib.suppress(OSError):
                self._target.sendall(piece)


class _Connection:
    """One client connection and its twin to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        # Per request in flight: its command, and by which fault its reply is to be lost.
        self.in_flight: deque[tuple[str, _Rule | None]] = deque()
        self.threads: list[threading.Thread] = []
        self.stalled = False
        self.forgets = False

    def cut(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Forwards a loopback port to `server_port`: `with Proxy(server.port) as proxy: redis.Redis(port=proxy.port)`.

    Attributes:
        port: where it listens.
        requests: how many requests arrived, by command.
        replies: how many replies were passed on, by command.
        dropped: set when an armed fault has struck.
        lost: how many messages were dropped.
        delay_s: the delay of all that the server sends, as over a network with that round trip. Once it is above 0, it
            may only be made longer.
        dribbles: whether all that is not delayed passes byte by byte.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._state = threading.Condition()
        self._connections: list[_Connection] = []
        self._rules: list[_Rule] = []
        self._unknown: frozenset[str] = frozenset()
        self._holding = False
        self._closed = False
        self.requests: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()
        self.dropped = threading.Event()
        self.lost = 0
        self._losing = False
        self._messages_pass = self._answers_pass = False
        self.delay_s = 0.0
        self.dribbles = False
        self.port = 0
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.accept()

    def drop_reply(self, *commands: str, nth: int = 1, share: float = 0) -> None:
        """The n-th of these commands from now on is executed, its reply lost, its connection closed.

        Args:
            commands: which; none for all.
            nth: which of them.
            share: how much of the reply is passed on nevertheless, from 0 to 1.
        """
        self._arm(_Rule(frozenset(commands), nth, drops_request=False, share=share))

    def drop_request(self, *commands: str, nth: int = 1, share: float = 0) -> None:
        """The n-th of these commands never reaches the server, its connection is closed; else as `drop_reply`."""
        self._arm(_Rule(frozenset(commands), nth, drops_request=True, share=share))

    def drop_message(self, nth: int = 1, share: float = 0) -> None:
        """The n-th message that answers no request is lost, its connection closed; else as `drop_reply`."""
        self._arm(_Rule(frozenset({_MESSAGE}), nth, drops_request=False, share=share))

    def answer(self, reply: bytes, *commands: str) -> None:
        """These commands never reach the server from now on, or these forms of theirs: they get this reply."""
        self._arm(_Rule(frozenset(commands), 1, drops_request=False, share=1, answer=reply))

    def close_on(self, *commands: str) -> None:
        """From now on, close every connection on which one of these commands comes: none of them reaches the server.

        Args:
            commands: which; a script by the number of its keys, too: "EVALSHA 3".
        """
        with self._state:
            self._unknown = frozenset(commands)

    def forget(self) -> None:
        """Have the server forget the user of the connections that are open now: a RESET precedes the next request."""
        with self._state:
            for connection in self._connections:
                connection.forgets = True

    def _arm(self, rule: _Rule) -> None:
        with self._state:
            self.dropped.clear()
            self._rules.append(rule)

    def disarm(self) -> None:
        """Forget the faults that were armed and have not struck."""
        with self._state:
            self._rules.clear()

    def lose_messages(self, losing: bool = True) -> None:
        """Lose every message that answers no request, and close nothing, until told otherwise."""
        with self._state:
            self._losing = losing

    def hold(self, messages_pass: bool = False, answers_pass: bool = False) -> None:
        """Keep all replies back until `resume`.

        Args:
            messages_pass: whether messages that answer no request pass, as long as no reply in front of them is held.
            answers_pass: whether what the proxy answers passes, in the same way.
        """
        with self._state:
            self._holding = True
            self._messages_pass, self._answers_pass = messages_pass, answers_pass

    def hold_from(self, *commands: str, nth: int = 1) -> None:
        """Keep the reply to the n-th of these commands from now on back until `resume`, and all replies after it."""
        self._arm(_Rule(frozenset(commands), nth, drops_request=False, share=1, holds=True))

    def resume(self) -> None:
        """Pass on what was held back, and everything after it."""
        with self._state:
            self._holding = False
            self._state.notify_all()

    def stall(self) -> None:
        """Let the requests of the connections that are open now wait until `thaw`; new connections are served."""
        with self._state:
            for connection in self._connections:
                connection.stalled = True

    def thaw(self) -> None:
        """Pass on what was stalled, and close those connections. Returns when it has left for the server."""
        with self._state:
            stalled = [connection for connection in self._connections if connection.stalled]
            for connection in stalled:
                connection.stalled = False
            self._state.notify_all()
        for connection in stalled:
            with contextlib.suppress(OSError):
                connection.client.shutdown(socket.SHUT_RD)  # what has come is read to its end
            connection.threads[0].join(_WAIT_S)

    def cut(self) -> None:
        """Close every connection now."""
        with self._state:
            connections, self._connections = self._connections, []
            self._state.notify_all()
        for connection in connections:
            connection.cut()

    def redirect(self, server_port: int) -> None:
        """Lead to another server from now on, and close every connection to this one: an address that moves."""
        self._server_port = server_port
        self.cut()

    def refuse(self) -> None:
        """Accept no further connections until `accept`."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        if self._acceptor is not None:
            self._acceptor.join(_WAIT_S)
        listener.close()

    def accept(self) -> None:
        """Accept connections, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept_all, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def wait_for_request(self, command: str, count: int = 1) -> None:
        """Return once this many requests of a command have arrived in all."""
        self._wait(lambda: self.requests[command] >= count, f"{count} requests {command}")

    def wait_for_reply(self, command: str, count: int = 1) -> None:
        """Return once this many replies to a command have been passed on in all."""
        self._wait(lambda: self.replies[command] >= count, f"{count} replies to {command}")

    def wait_for_quiet(self) -> None:
        """Return once every request has been replied to."""
        self._wait(lambda: not any(connection.in_flight for connection in self._connections), "no request is in flight")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._state:
            if not self._state.wait_for(condition, _WAIT_S):
                raise AssertionError(f"did not happen: {what}")

    def close(self) -> None:
        """Stop listening, close every connection, wait for the threads."""
        self.refuse()
        with self._state:
            self._closed = True
            threads = [thread for connection in self._connections for thread in connection.threads]
        self.cut()
        give_up = time.monotonic() + _WAIT_S
        for thread in threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def __enter__(self) -> Proxy:
        """The running proxy."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                client.close()
                continue
            connection = _Connection(client, server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.threads = [
                threading.Thread(target=self._serve_connection, args=(connection,), daemon=True),
                threading.Thread(target=self._forward, args=(connection, server, client, self._on_reply), daemon=True),
            ]
            with self._state:
                self._connections.append(connection)
            for thread in reversed(connection.threads):  # the first one joins the second, perhaps at once
                thread.start()

    def _serve_connection(self, connection: _Connection) -> None:
        """Forward the requests; when both directions have ended, close both sockets."""
        self._forward(connection, connection.client, connection.server, self._on_request)
        connection.threads[1].join()
        with self._state:
            if connection in self._connections:
                self._connections.remove(connection)
        connection.client.close()
        connection.server.close()

    def _forward(
        self,
        connection: _Connection,
        source: socket.socket,
        target: socket.socket,
        on_message: Callable[[_Connection, bytes], tuple[bytes, bool]],
    ) -> None:
        buffer = bytearray()
        late: _Late | None = None
        try:
            while data := source.recv(_READ_SIZE):
                buffer += data
                while buffer and (end := message_end(buffer)) is not None:
                    message = bytes(buffer[:end])
                    del buffer[:end]
                    passed, goes_on = on_message(connection, message)
                    if self.delay_s and source is connection.server:
                        late = late or _Late(target)
                        late.send(passed, self.delay_s)
                    else:
                        size = 1 if self.dribbles else len(passed)
                        for at in range(0, len(passed), size or 1):
                            target.sendall(passed[at : at + size])
                    if not goes_on:
                        return
        except OSError:
            return
        finally:
            connection.cut()
            if late is not None:
                late.send(b"", 0.0)
            with self._state:
                if connection in self._connections:
                    self._connections.remove(connection)
                self._state.notify_all()

    def _on_request(self, connection: _Connection, message: bytes) -> tuple[bytes, bool]:
        """The bytes to pass on, and whether the connection stays open."""
        name = command_name(message)
        with self._state:
            self._state.wait_for(lambda: not connection.stalled or connection not in self._connections)
            if connection not in self._connections:  # cut
                return b"", False
            rule = self._strike(name, command_form(message))
            self.requests[name] += 1
            self._state.notify_all()
            if not self._unknown.isdisjoint((name, command_form(message))):
                return b"", False
            if rule is not None and rule.drops_request:
                self.dropped.set()
                return rule.part_of(message), False
            passed = _PING if rule is not None and rule.answer else message
            if connection.forgets:
                connection.forgets = False
                connection.in_flight.append((_BY_PROXY, None))
                passed = _RESET + passed
            connection.in_flight.append((name, rule))
            return passed, True

    def _on_reply(self, connection: _Connection, message: bytes) -> tuple[bytes, bool]:
        """As `_on_request`."""
        with self._state:
            pushed = is_message(message)
            if pushed and self._losing:
                self.lost += 1
                self._state.notify_all()
                return b"", True
            name, rule = "", None
            if pushed:
                rule = self._strike(_MESSAGE)
            elif connection.in_flight:
                name, rule = connection.in_flight.popleft()
            if rule is not None and rule.holds:
                self._holding, rule = True, None
            passes = (pushed and self._messages_pass) or (self._answers_pass and rule is not None and bool(rule.answer))
            self._state.wait_for(lambda: passes or not self._holding or connection not in self._connections)
            if connection not in self._connections:  # cut
                return b"", False
            if name == _BY_PROXY:
                return b"", True
            if rule is not None and not rule.answer:
                self.dropped.set()
                return rule.part_of(message), False
            self.replies[name] += 1
            self._state.notify_all()
            return message if rule is None else rule.answer, True

    def _strike(self, name: str, form: str = "") -> _Rule | None:
        """The fault that this request, or message, triggers."""
        for rule in self._rules:
            if name in rule.commands or form in rule.commands or (not rule.commands and name != _MESSAGE):
                rule.left -= 1
                if rule.left <= 0:
                    if not rule.answer:
                        self._rules.remove(rule)
                    return rule
        return None
