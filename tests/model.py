"""A model of a server, for the simulation only: what the lock's requests do, on a dict and a clock set by hand.

It executes the very request tuples of `_protocol` and answers what hiredis makes of the server's bytes. Rules: it does
what the servers do, down to the millisecond at which a key ends; a request that no lock sends is an assertion error,
not an answer. Must not know: operations, dialects, faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import hiredis

from redislock_fast._scripts import EXTEND, REACQUIRE, RELEASE
from redislock_fast._wire import Args, Reply

SERVERS: dict[str, frozenset[str]] = {
    "Valkey 9": frozenset({"DELIFEQ", "LMPOP", "SET IFEQ", "SET NX GET"}),
    "Redis 8.4": frozenset({"DELEX", "LMPOP", "SET IFEQ", "SET NX GET"}),
    "Redis 7.0": frozenset({"LMPOP", "SET NX GET"}),
    "Redis 6.2": frozenset(),
}
"""What each server has beyond the commands that all of them have."""

WRONGTYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
_SYNTAX_ERROR = "ERR syntax error"
_SCRIPTS = {script.sha: script for script in (RELEASE, EXTEND, REACQUIRE)}


@dataclass(frozen=True)
class Entry:
    """What stands at a key.

    Attributes:
        value: its string; None for what is no string.
        ends_at_ms: the last millisecond at which it is there; None where it does not expire.
    """

    value: bytes | None
    ends_at_ms: int | None = None


class Model:
    """One server.

    Args:
        has: the commands and forms of commands that it has, as in `SERVERS`.
        denied: commands, "SET GET" or "SET IFEQ", that the user may not use.

    Attributes:
        now_ms: its clock, set by hand.
        entries: its keys; those that have ended are removed when they are looked at.
    """

    def __init__(self, has: frozenset[str] = SERVERS["Valkey 9"], denied: frozenset[str] = frozenset()) -> None:
        self.has = has
        self.denied = denied
        self.now_ms = 0
        self.entries: dict[bytes, Entry] = {}
        self._cached: set[bytes] = set()
        self._commands: dict[object, Callable[[Args], Reply]] = {
            b"COMMAND": self._command_info,
            b"GET": self._get,
            b"PTTL": self._pttl,
            b"SET": self._set,
            b"DELIFEQ": self._delifeq,
            b"DELEX": self._delex,
            b"EVAL": self._eval,
            b"EVALSHA": self._evalsha,
        }

    def execute(self, args: Args) -> Reply:
        """The reply to one request."""
        command = args[0]
        assert isinstance(command, bytes)
        name = command.decode()
        if name in ("DELIFEQ", "DELEX") and name not in self.has:
            return hiredis.ReplyError(f"ERR unknown command '{name}', with args beginning with: ")
        if name in self.denied:
            return hiredis.ReplyError(f"NOPERM User u has no permissions to run the '{name.lower()}' command")
        return self._commands[command](args)

    def entry(self, key: object) -> Entry | None:
        """What stands at a key now."""
        assert isinstance(key, bytes)
        found = self.entries.get(key)
        if found is not None and found.ends_at_ms is not None and self.now_ms > found.ends_at_ms:
            del self.entries[key]
            return None
        return found

    def put(self, key: bytes, value: bytes | None, ttl_ms: int | None = None) -> None:
        """Let a value stand at a key; None for a value that is no string."""
        self.entries[key] = Entry(value, None if ttl_ms is None else self.now_ms + ttl_ms)

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

    def _get(self, args: Args) -> Reply:
        entry = self.entry(args[1])
        if entry is None:
            return None
        return hiredis.ReplyError(WRONGTYPE) if entry.value is None else entry.value

    def _pttl(self, args: Args) -> Reply:
        entry = self.entry(args[1])
        if entry is None:
            return -2
        return -1 if entry.ends_at_ms is None else entry.ends_at_ms - self.now_ms

    def _set(self, args: Args) -> Reply:
        key, value = args[1], args[2]
        assert isinstance(key, bytes)
        assert isinstance(value, bytes)
        options = list(args[3:])
        ttl_ms = self._take_operand(options, b"PX")
        compare_to = self._take_operand(options, b"IFEQ")
        nx, get = (self._take_flag(options, word) for word in (b"NX", b"GET"))
        assert not options, f"a SET that no lock sends: {args}"
        if (nx and get and "SET NX GET" not in self.has) or (compare_to is not None and "SET IFEQ" not in self.has):
            return hiredis.ReplyError(_SYNTAX_ERROR)
        if (get and "SET GET" in self.denied) or (compare_to is not None and "SET IFEQ" in self.denied):
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
        return self._compare_and_delete(key, token)

    def _delex(self, args: Args) -> Reply:
        _, key, ifeq, token = args
        assert ifeq == b"IFEQ"
        return self._compare_and_delete(key, token)

    def _compare_and_delete(self, key: object, token: object) -> Reply:
        entry = self.entry(key)
        if entry is None:
            return 0
        if entry.value is None:
            return hiredis.ReplyError(WRONGTYPE)
        if entry.value != token:
            return 0
        assert isinstance(key, bytes)
        del self.entries[key]
        return 1

    def _eval(self, args: Args) -> Reply:
        for script in _SCRIPTS.values():
            if script.text == args[1]:
                self._cached.add(script.sha)
                return self._run(script.sha, args)
        raise AssertionError(f"a script that no lock sends: {args[1]!r}")

    def _evalsha(self, args: Args) -> Reply:
        sha = args[1]
        assert isinstance(sha, bytes)
        if sha not in self._cached:
            return hiredis.ReplyError("NOSCRIPT No matching script. Please use EVAL.")
        return self._run(sha, args)

    def _run(self, sha: bytes, args: Args) -> Reply:
        _, _, keys, key, token, *operands = args
        assert keys == 1
        assert isinstance(key, bytes)
        entry = self.entry(key)
        if entry is not None and entry.value is None:
            return hiredis.ReplyError(f"{WRONGTYPE} script: {sha.decode()}, on @user_script:7.")
        if entry is None or entry.value != token:
            return 0
        if sha == RELEASE.sha:
            del self.entries[key]
        elif sha == REACQUIRE.sha:
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

    def _pexpire(self, key: bytes, entry: Entry, ttl_ms: object) -> None:
        assert isinstance(ttl_ms, int)
        if ttl_ms > 0:
            self.entries[key] = Entry(entry.value, self.now_ms + ttl_ms)
        else:
            del self.entries[key]
