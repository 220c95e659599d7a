"""The name of a connection says which process owns it: a text that `CLIENT LIST` shows for as long as it is connected.

    redislock_fast(<identifier>;<host>;<pid>;<program>)

It is the name of the connection's library (`CLIENT SETINFO LIB-NAME`, Redis 7.2 and Valkey), or the name of the
connection on an older server. Both consist of the characters from "!" to "~" alone.
"""

from __future__ import annotations

import re

_MOST = 30
"""The most characters of a host and of a program: `CLIENT LIST` gets longer by about 100 for each connection."""

_TEXT = r"redislock_fast\(([0-9a-f]{11});([^;()]*);([0-9]{1,10});([^;()]*)\)"  # compiled when it is first used


def introduction(identifier: bytes, host: str, pid: int, program: str) -> bytes:
    """The text of a connection; a long host and program are shortened.

    Args:
        identifier: the connection's; see `_util/tokens.py`.
        host: the host's name.
        pid: the process.
        program: the program's name.
    """
    return f"redislock_fast({identifier.decode()};{_plain(host)};{pid};{_plain(program)})".encode()


def read_introduction(text: bytes) -> tuple[bytes, str, int, str] | None:
    """Identifier, host, pid and program in such a text; None for any other name."""
    found = re.fullmatch(_TEXT, text.decode(errors="replace"))
    return None if found is None else (found[1].encode(), found[2], int(found[3]), found[4])


def _plain(word: str) -> str:
    """The word in characters that the server takes, without those that divide the text."""
    return "".join(one if "!" <= one <= "~" and one not in "();" else "_" for one in word[:_MOST])
