"""The Lua scripts of `lua/`, each with its SHA-1.

A script is sent by EVALSHA and, on NOSCRIPT, by EVAL; never by SCRIPT LOAD, which a server under memory pressure or an
ACL may refuse.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple


class Script(NamedTuple):
    """A script's source and the SHA-1 under which a server caches it."""

    text: bytes
    sha: bytes


def _text(name: str) -> bytes:
    return Path(__file__).with_name("lua").joinpath(f"{name}.lua").read_bytes()


def _script(text: bytes) -> Script:
    # The SHA-1 is the server's name for the script, not a safeguard.
    return Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())


RELEASE = _script(_text("release"))
EXTEND = _script(_text("extend"))
REACQUIRE = _script(_text("reacquire"))
REDEEM = _script(_text("redeem"))
ACQUIRE_FENCED = _script(_text("acquire_fenced"))
LEAD = _script(_text("lead"))
DONE = _script(_text("done"))

_HAND_OVER, _WAIT, _LEAVE = _text("hand_over"), _text("wait"), _text("leave")

_OF_LOCK = _text("lock_policy") + _HAND_OVER
WAIT = _script(_OF_LOCK + _WAIT)
PASS_ON = _script(_OF_LOCK + _text("pass_on"))
LEAVE = _script(_OF_LOCK + _LEAVE)

_PERMITS, _POLICY = _text("permits"), _text("permit_policy") + _HAND_OVER
_OF_PERMIT = _PERMITS + _POLICY
ACQUIRE_PERMIT = _script(_PERMITS + _text("acquire_permit") + _POLICY + _text("acquire_waited_permit"))
RELEASE_PERMIT = _script(_PERMITS + _text("release_permit") + _POLICY + _text("release_waited_permit"))
RESIZE = _script(_OF_PERMIT + _text("resize"))

FOR_PERMITS = {
    WAIT.sha: _script(_OF_PERMIT + _WAIT),
    LEAVE.sha: _script(_OF_PERMIT + _LEAVE),
    RELEASE.sha: RELEASE_PERMIT,
    PASS_ON.sha: RELEASE_PERMIT,
    REACQUIRE.sha: _script(_PERMITS + _text("renew_permit")),
}
"""By a script of locks, the one that does the same for the permits of a semaphore."""

GUARD = _text("guard").decode()
GUARDED_SET = _text("guarded_set").decode()
