"""A model of a server, for the simulation only: what the lock's requests do, on a dict and a clock set by hand.

It executes the request tuples of the protocol, and answers as hiredis parses a server's reply. It does what the servers
do, down to the millisecond at which a key ends; a request that no lock sends is an assertion error. The scripts of
`lua/` are written a second time here, in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import hiredis

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.scripts import (
    ACQUIRE_FENCED,
    ACQUIRE_PERMIT,
    EXTEND,
    FOR_PERMITS,
    LEAD,
    LEAVE,
    PASS_ON,
    REACQUIRE,
    REDEEM,
    RELEASE,
    RESIZE,
    WAIT,
)
from redislock_fast._util.tokens import is_held_with, is_ours
from tests.simulation.keyspace import Connection, Entry, Keys
from tests.simulation.policies import LockPolicy, PermitPolicy, Policy, WrongType

SERVERS: dict[str, frozenset[str]] = {
    "Valkey 9": frozenset({"DELIFEQ", "LMPOP", "SET IFEQ", "SET NX GET"}),
    "Redis 8.4": frozenset({"DELEX", "LMPOP", "SET IFEQ", "SET NX GET"}),
    "Redis 7.0": frozenset({"LMPOP", "SET NX GET"}),
    "Redis 6.2": frozenset(),
}
"""The commands of each server that not all servers have."""

WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
DELEX_WRONGTYPE = "ERR Key should be of string type if conditions are specified"
_SYNTAX_ERROR = "ERR syntax error"
_OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."
_SCRIPTS = {
    script.sha: script
    for script in (
        *(RELEASE, EXTEND, REACQUIRE, REDEEM, ACQUIRE_FENCED, WAIT, PASS_ON, LEAVE),
        *(ACQUIRE_PERMIT, RESIZE, LEAD, *FOR_PERMITS.values()),
    )
}
_SCRIPTS_BY_TEXT = {script.text: script for script in _SCRIPTS.values()}
_MOST_PASSES = 50

Given: TypeAlias = "tuple[bytes | Literal[False] | None, bytes | None]"
"""What a hand-over gave to the last waiter (False: to none; None: it is to go on), and to the one that asks."""


def _first(waiting: dict[bytes, int]) -> bytes:
    return min(waiting, key=lambda token: (waiting[token], token))


class Model(Keys):
    """One server.

    Args:
        has: the commands and forms of commands that it has, as in `SERVERS`.
        denied: commands, "SET GET" or "SET IFEQ", that the user may not use.
        cluster: whether it is a node of a cluster.

    Attributes:
        connections: those that may get pushes.
        full: whether it has no memory left for new values.
        passes_left: over how many more waiters the last script of the queue might have passed.
    """

    def __init__(
        self,
        has: frozenset[str] = SERVERS["Valkey 9"],
        denied: frozenset[str] = frozenset(),
        cluster: bool = False,
    ) -> None:
        super().__init__()
        self.has = has
        self.denied = denied
        self.connections: list[Connection] = []
        self.full = False
        self._cluster = cluster
        self._connected = 0  # how many ever were
        self._nobody = Connection(denied)
        self.passes_left = 0
        self._client = self._nobody  # whose request is being executed
        self._cached: set[bytes] = set()
        self._queue_scripts: dict[bytes, Callable[..., Reply]] = {
            WAIT.sha: self._wait,
            PASS_ON.sha: self._pass_on,
            LEAVE.sha: self._leave,
        }
        self._permit_scripts: dict[bytes, Callable[..., Reply]] = {
            ACQUIRE_PERMIT.sha: self._acquire_permit,
            RESIZE.sha: self._resize,
            FOR_PERMITS[RELEASE.sha].sha: self._release_permit,
            FOR_PERMITS[REACQUIRE.sha].sha: self._renew_permit,
            FOR_PERMITS[WAIT.sha].sha: self._wait,
            FOR_PERMITS[LEAVE.sha].sha: self._leave,
        }
        self._commands: dict[object, Callable[[Args], Reply]] = {
            b"COMMAND": self._command_info,
            b"HELLO": self._hello,
            b"CLIENT": self._client_itself,
            b"SUBSCRIBE": self._subscribe,
            b"SSUBSCRIBE": self._subscribe,
            b"GET": self._get,
            b"HMGET": self._hmget,
            b"TIME": self._time,
            b"PTTL": self._pttl,
            b"SET": self._set,
            b"DELIFEQ": self._delifeq,
            b"DELEX": self._delex,
            b"EVAL": self._eval,
            b"EVALSHA": self._evalsha,
        }

    def connect(self, denied: frozenset[str] = frozenset()) -> Connection:
        """A new connection, which may get pushes."""
        self._connected += 1
        connection = Connection(denied, self._connected)
        self.connections.append(connection)
        return connection

    def disconnect(self, connection: Connection) -> None:
        """Note that a connection is gone."""
        if connection in self.connections:
            self.connections.remove(connection)
            for listeners in self._tracked.values():
                if connection in listeners:
                    listeners.remove(connection)

    def execute(self, args: Args, connection: Connection | None = None) -> Reply:
        """The reply to one request."""
        client = self._client = connection or self._nobody
        command = args[0]
        assert isinstance(command, bytes)
        name = command.decode()
        if name in ("DELIFEQ", "DELEX") and name not in self.has:
            return hiredis.ReplyError(f"ERR unknown command '{name}', with args beginning with: ")
        if name in client.denied:
            return hiredis.ReplyError(f"NOPERM User u has no permissions to run the '{name.lower()}' command")
        if client.channels and not client.resp3:
            return hiredis.ReplyError(f"ERR Can't execute '{name.lower()}': only (P|S)SUBSCRIBE / ... are allowed")
        reply = self._commands[command](args)
        if name != "CLIENT":
            client.caching = False
        return reply

    def flush(self) -> None:
        """Delete all keys."""
        self.entries.clear()
        self._tracked.clear()
        for connection in self.connections:
            if connection.tracking:
                connection.push([b"invalidate", None])

    def flush_scripts(self) -> None:
        """Forget all scripts."""
        self._cached.clear()

    def _command_info(self, args: Args) -> Reply:
        assert args[1] == b"INFO"
        known: list[Reply] = []
        for name in args[2:]:
            assert isinstance(name, bytes)
            known.append([name.lower()] if name.decode() in self.has else None)
        return known

    def _hello(self, args: Args) -> Reply:
        assert args == (b"HELLO", 3)
        self._client.resp3 = True
        return {b"proto": 3, b"mode": b"cluster" if self._cluster else b"standalone"}

    def _client_itself(self, args: Args) -> Reply:
        if args[1] == b"INFO":
            return b"id=%d addr=127.0.0.1:%d name=" % (self._client.number, self._client.number)
        if args[1:3] == (b"KILL", b"ID"):
            killed = [connection for connection in self.connections if args[3] == b"%d" % connection.number]
            for connection in killed:
                self.disconnect(connection)
            return len(killed)
        if args[1] == b"LIST":
            return b""
        if args[1:] == (b"TRACKING", b"ON", b"OPTIN"):
            self._client.tracking = True
        else:
            assert args[1:] == (b"CACHING", b"YES")
            if not self._client.tracking:
                return hiredis.ReplyError("ERR CLIENT CACHING can be called only when the client is in tracking mode")
            self._client.caching = True
        return b"OK"

    def _subscribe(self, args: Args) -> Reply:
        command, channel = args
        assert isinstance(command, bytes)
        assert isinstance(channel, bytes)
        self._client.channels.add((command, channel))
        return [command.lower(), channel, len(self._client.channels)]

    def _publish(self, command: bytes, channel: bytes, message: bytes) -> None:
        for listener in self._listeners(command, channel):
            listener.push([b"smessage" if command == b"spublish" else b"message", channel, message])

    def _is_heard(self, publish: bytes, channel: bytes) -> bool:
        return bool(self._listeners(publish, channel))

    def _listeners(self, publish: bytes, channel: bytes) -> list[Connection]:
        subscription = (b"SSUBSCRIBE" if publish == b"spublish" else b"SUBSCRIBE", channel)
        return [connection for connection in self.connections if subscription in connection.channels]

    def _get(self, args: Args) -> Reply:
        entry = self._read(args[1])
        if entry is None:
            return None
        return hiredis.ReplyError(WRONGTYPE) if entry.value is None else entry.value

    def _hmget(self, args: Args) -> Reply:
        entry = self._read(args[1])
        items: dict[Any, Any] = {} if entry is None else entry.items
        return [items.get(field) for field in args[2:]]

    def _time(self, _args: Args) -> Reply:
        return [b"%d" % part for part in divmod(self.now_us, 1_000_000)]

    def _read(self, key: object) -> Entry | None:
        """The entry at a key, of whose next change the client is told where it asks for that."""
        entry = self.entry(key)
        if self._client.caching:
            assert isinstance(key, bytes)
            listeners = self._tracked.setdefault(key, [])
            if self._client not in listeners:
                listeners.append(self._client)
        return entry

    def _pttl(self, args: Args) -> Reply:
        entry = self.entry(args[1])
        if entry is None:
            return -2
        return -1 if entry.ends_at_ms is None else entry.ends_at_ms - self.now_ms

    def _set(self, args: Args) -> Reply:
        key, value = args[1], args[2]
        assert isinstance(key, bytes)
        assert isinstance(value, bytes)
        if self.full:
            return hiredis.ReplyError(_OUT_OF_MEMORY)
        options = list(args[3:])
        ttl_ms = self._take_operand(options, b"PX")
        compare_to = self._take_operand(options, b"IFEQ")
        nx, get = (self._take_flag(options, word) for word in (b"NX", b"GET"))
        assert not options, f"a SET that no lock sends: {args}"
        if (nx and get and "SET NX GET" not in self.has) or (compare_to is not None and "SET IFEQ" not in self.has):
            return hiredis.ReplyError(_SYNTAX_ERROR)
        if (get and "SET GET" in self._client.denied) or (compare_to is not None and "SET IFEQ" in self._client.denied):
            return hiredis.ReplyError("NOPERM No permissions to access a key")
        if isinstance(ttl_ms, int) and ttl_ms <= 0:
            return hiredis.ReplyError("ERR invalid expire time in 'set' command")
        entry = self.entry(key)
        if entry is not None and entry.value is None and (get or compare_to is not None):
            return hiredis.ReplyError(WRONGTYPE)
        old = None if entry is None else entry.value
        if (nx and entry is not None) or (compare_to is not None and old != compare_to):
            return old if get else None
        self.put(key, value, ttl_ms if isinstance(ttl_ms, int) else None)
        return old if get else b"OK"

    @staticmethod
    def _take_operand(options: list[bytes | str | int], word: bytes) -> bytes | str | int | None:
        if word not in options:
            return None
        at = options.index(word)
        operand = options[at + 1]
        del options[at : at + 2]
        return operand

    @staticmethod
    def _take_flag(options: list[bytes | str | int], word: bytes) -> bool:
        found = word in options
        if found:
            options.remove(word)
        return found

    def _delifeq(self, args: Args) -> Reply:
        _, key, token = args
        return self._compare_and_delete(key, token, WRONGTYPE)

    def _delex(self, args: Args) -> Reply:
        _, key, ifeq, token = args
        assert ifeq == b"IFEQ"
        return self._compare_and_delete(key, token, DELEX_WRONGTYPE)

    def _compare_and_delete(self, key: object, token: object, wrong_type: str) -> Reply:
        entry = self.entry(key)
        if entry is None:
            return 0
        if entry.value is None:
            return hiredis.ReplyError(wrong_type)
        if entry.value != token:
            return 0
        assert isinstance(key, bytes)
        self.remove(key)
        return 1

    def _eval(self, args: Args) -> Reply:
        text = args[1]
        assert text in _SCRIPTS_BY_TEXT, f"a script that no lock sends: {text!r}"
        assert isinstance(text, bytes)
        script = _SCRIPTS_BY_TEXT[text]
        self._cached.add(script.sha)
        return self._run(script.sha, args)

    def _evalsha(self, args: Args) -> Reply:
        sha = args[1]
        assert isinstance(sha, bytes)
        if sha not in self._cached:
            return hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")
        return self._run(sha, args)

    def _run(self, sha: bytes, args: Args) -> Reply:
        key = args[3]
        assert isinstance(key, bytes)
        if sha in self._permit_scripts:
            return self._run_on_permits(sha, *args[2:])
        entry = self.entry(key)
        if entry is not None and entry.value is None:
            return hiredis.ReplyError(f"{WRONGTYPE} script: {sha.decode()}, on @user_script:7.")
        value = None if entry is None else entry.value
        if sha == ACQUIRE_FENCED.sha:
            assert args[2] == 2
            return self._acquire_fenced(value, *args[3:])
        if sha == LEAD.sha:
            assert args[2] == 2
            return self._lead(value, *args[4:])
        if sha in self._queue_scripts:
            assert args[2] == 3
            self.passes_left = _MOST_PASSES
            return self._queue_scripts[sha](LockPolicy(self, key, value), *args[4:])
        if sha == REDEEM.sha:
            fence = args[4] if args[2] == 2 else None
            return self._redeem(key, b"" if value is None else value, fence, *args[-3:])
        assert args[2] == 1
        return self._run_on_one(sha, key, entry, args[4], args[5:])

    def _run_on_one(self, sha: bytes, key: bytes, entry: Entry | None, token: Any, operands: Args) -> Reply:
        if entry is None or not is_held_with(entry.value, token):
            return 0
        if sha == RELEASE.sha:
            if entry.value != token and operands == (b"1",):
                return 2
            self.remove(key)
        elif sha == REACQUIRE.sha:
            if operands[0] == 0:
                self._write(key, replace(entry, ends_at_ms=None))
            else:
                self._pexpire(key, entry, operands[0])
        else:
            if entry.ends_at_ms is None:
                return 0
            new_ttl_ms = operands[0]
            assert isinstance(new_ttl_ms, int)
            if operands[1] == b"0":
                new_ttl_ms += entry.ends_at_ms - self.now_ms
            if len(operands) > 2:
                assert isinstance(operands[2], int)
                new_ttl_ms = min(new_ttl_ms, operands[2])
            self._pexpire(key, entry, new_ttl_ms)
        return 1

    def _acquire_fenced(
        self, value: bytes | None, lock: Any, fence: Any, token: Any, ttl_ms: Any, count: Any = 1
    ) -> Reply:
        is_held = is_held_with(value, token)
        if not is_held and (value is not None or ttl_ms == b""):
            return [0, value]
        numbers = self._items_to_fill(fence)
        if not is_held or numbers.get(b"token") != token:
            numbers[b"number"] = numbers.get(b"number", 0) + count
            numbers[b"token"] = token
        first = numbers[b"number"] - count + 1
        if is_held:
            return [2, value, first]
        self.put(lock, token, ttl_ms or None)
        return [1, None, first]

    def _redeem(self, key: bytes, value: bytes, fence: Any, token: Any, ticket: Any, ttl_ms: Any) -> Reply:
        is_ticket = is_held_with(value, ticket)
        if not is_ticket and not is_held_with(value, token):
            return [0]
        if self.full:
            return hiredis.ReplyError(f"{_OUT_OF_MEMORY} script: {REDEEM.sha.decode()}, on @user_script:25.")
        if is_ticket:
            value = token + b"+" if value != ticket and is_ours(token) else token
        answer: list[Reply] = [1 if is_ticket else 2]
        if fence is not None:
            numbers = self._items_to_fill(fence)
            if is_ticket or numbers.get(b"token") != token:
                numbers[b"number"] = numbers.get(b"number", 0) + 1
                numbers[b"token"] = token
            answer.append(numbers[b"number"])
        self.put(key, value, ttl_ms or None)
        return answer

    def _lead(self, value: bytes | None, leader: Any, token: Any, id_: Any, term: Any, text: Any) -> Reply:
        if not is_held_with(value, token):
            return 0
        if self._items(leader).get(b"id") != id_:
            record = {b"id": id_, b"term": b"%d" % term, b"value": text, b"since": b"%d" % self.now_us}
            self._write(leader, Entry(None, items=record))
        return 1

    # ---- the scripts of the queue ----

    def _hand_over(self, policy: Policy, queue: bytes, waiters: bytes, asking: bytes | None = None) -> Given:
        last: bytes | Literal[False] = False
        own: bytes | None = None
        while policy.room > 0:
            if self.passes_left == 0:
                return None, own
            waiting = self._items(queue)
            if not waiting:
                policy.set_free()
                self.remove(waiters)
                return last, own
            token = _first(waiting)
            arrival = waiting[token]
            self._remove_item(queue, token)
            entry = self._items(waiters).get(b"t" + token)
            if entry is not None:
                terms, publish, channel = entry
                is_there = token == asking
                if not is_there:
                    if "PUBSUB" in self._client.denied:
                        self._leave_to_health_check(policy, queue, token, arrival)
                        return last, own
                    is_there = self._is_heard(publish, channel)
                given = policy.admit(token, terms) if is_there else None
                if is_there and given is None:
                    self._put_back(queue, token, arrival)
                    return last, own
                if given is not None and token != asking:
                    if "PUBLISH" in self._client.denied:
                        self._leave_to_health_check(policy, queue, token, arrival)
                        return last, own
                    self._publish(publish, channel, b"%b%d" % (given, arrival))
                self._remove_item(waiters, b"t" + token)
                last = given or last
                own = given if token == asking else own
            self.passes_left -= 1
        return last, own

    def _put_back(self, queue: bytes, token: bytes, arrival: int) -> None:
        self._items_to_fill(queue)[token] = arrival
        self._keep(queue, 3_600_000)

    def _leave_to_health_check(self, policy: Policy, queue: bytes, token: bytes, arrival: int) -> None:
        self._put_back(queue, token, arrival)
        policy.remove(token)

    def _pass_over_sleepers(self, queue: bytes, waiters: bytes, token: bytes) -> Any:
        """Returns the terms of the first waiter where that is another one."""
        waiting, fields = self._items(queue), self._items(waiters)
        while self.passes_left > 0 and waiting and (first := _first(waiting)) != token:
            entry = fields.get(b"t" + first)
            if entry is not None and fields.get(b"c" + entry[2], -1) >= self.now_ms:
                return entry[0]
            del waiting[first]
            fields.pop(b"t" + first, None)
            self.passes_left -= 1
        return None

    def _clean(self, queue: bytes, waiters: bytes) -> None:  # of all fields, where the script looks at some
        waiting, fields = self._items(queue), self._items(waiters)
        if len(fields) > 3 * len(waiting) + 100:
            for name, value in list(fields.items()):
                if name[:1] == b"c" and value < self.now_ms:
                    del fields[name]

    def _wait(self, policy: Policy, queue: Any, waiters: Any, token: Any, *words: Any) -> Reply:
        terms, publish, channel, awake_ms, kept_ms, look_for = words
        held = policy.held(token)
        if held is not None:
            return [1, held]
        if self.full:
            return hiredis.ReplyError(f"{_OUT_OF_MEMORY} script: {WAIT.sha.decode()}, on @user_script:90.")
        waiting = self._items_to_fill(queue)
        is_there = 1 if not look_for or look_for in waiting else 2 * policy.holds_beside(look_for)
        arrival = 0 if token in waiting else max([self.now_us, *(last + 1 for last in waiting.values())])
        waiting.setdefault(token, arrival)
        self._keep(queue, kept_ms)
        fields = self._items_to_fill(waiters)
        known = len(fields)
        fields[b"t" + token] = (terms, publish, channel)
        fields[b"c" + channel] = self.now_ms + awake_ms
        if len(fields) == known + 2 or look_for or self.now_us % 1_000_000 % 64 == 0:
            self._clean(queue, waiters)
            self._keep(waiters, kept_ms)
        first_terms = self._pass_over_sleepers(queue, waiters, token) if look_for else None
        if policy.is_free(first_terms or terms):
            last, own = self._hand_over(policy, queue, waiters, token)
            if last is False and policy.room > 0:
                self._remove_item(queue, token)
                self._remove_item(waiters, b"t" + token)
                own = policy.admit(token, terms)
            if own is not None:
                return [1, own]
            if last is None:
                return [3]
            if look_for:
                self._pass_over_sleepers(queue, waiters, token)
        is_first = arrival and len(self._items(queue)) == 1
        verdict, value = policy.refuse(publish, channel, bool(look_for or is_first))
        return [verdict, value, policy.next_end_ms(), arrival, is_there]

    def _pass_on(self, policy: Policy, queue: Any, waiters: Any, token: Any) -> Reply:
        if not policy.held(token):
            return 0
        given, _ = self._hand_over(policy, queue, waiters)
        if given is None:
            return 3
        return 2 if given else 1

    def _leave(self, policy: Policy, queue: Any, waiters: Any, token: Any, what: Any, terms: Any = 0) -> Reply:
        assert what in (b"keep", b"pass on")
        if what == b"keep" and policy.has_ended(terms):
            given, _ = self._hand_over(policy, queue, waiters, token)
            if given is False and policy.room > 0:
                policy.admit(token, terms)
        self._remove_item(queue, token)
        self._remove_item(waiters, b"t" + token)
        if not self._items(queue):
            self.remove(waiters)
        held = policy.held(token)
        if held is not None:
            if what == b"keep":
                return held
            policy.begin_release(token)
            if self._hand_over(policy, queue, waiters)[0] is None:
                policy.remove(token)
        return None

    # ---- the scripts of a semaphore ----

    def _run_on_permits(self, sha: bytes, keys: Any, *rest: Any) -> Reply:
        assert keys == (1 if sha == FOR_PERMITS[REACQUIRE.sha].sha else 4)
        key, queue, waiters, limit = (*rest[:keys], None, None, None)[:4]
        rest = rest[keys:]
        self.passes_left = _MOST_PASSES
        try:
            return self._permit_scripts[sha](PermitPolicy(self, key, limit), queue, waiters, *rest)
        except WrongType:
            return hiredis.ReplyError(f"{WRONGTYPE} script: {sha.decode()}, on @user_script:22.")

    def _acquire_permit(
        self, policy: PermitPolicy, queue: Any, waiters: Any, token: Any, ttl_ms: Any, own: Any
    ) -> Reply:
        most = policy.limit_for(own)
        policy.room = policy.count_room(most)
        if self._items(queue) or policy.is_resized:
            self._hand_over(policy, queue, waiters)
        is_free = policy.room > 0 and not self._items(queue)
        if is_free and self.full:
            return hiredis.ReplyError(f"{_OUT_OF_MEMORY} script: {ACQUIRE_PERMIT.sha.decode()}, on @user_script:40.")
        if is_free:
            policy.set_end(token, ttl_ms)
        answer = int(is_free or policy.held(token) is not None)
        return answer if most == own else [answer, most]

    def _release_permit(self, policy: PermitPolicy, queue: Any, waiters: Any, token: Any) -> Reply:
        removed = policy.remove(token)
        self._remove_item(queue, token)
        self._remove_item(waiters, b"t" + token)
        if not removed:
            return 0
        given, _ = self._hand_over(policy, queue, waiters)
        return 2 if given else 1

    def _renew_permit(self, policy: PermitPolicy, _queue: Any, _waiters: Any, token: Any, ttl_ms: Any) -> Reply:
        if policy.held(token) is None:
            return 0
        policy.set_end(token, ttl_ms)
        return 1

    def _resize(self, policy: PermitPolicy, queue: Any, waiters: Any, limit: Any) -> Reply:
        policy.check_kind()
        policy.set_limit(None if limit == b"" else limit)
        policy.make_room()
        given, _ = self._hand_over(policy, queue, waiters)
        if given is None:
            return 3
        return 2 if given else 1
