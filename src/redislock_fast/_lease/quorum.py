"""Which servers are asked together: one quorum for all Redlocks on them, so that one thread or timer renews all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["QuorumEntry", "quorum_of"]


class QuorumEntry(NamedTuple):
    """What must be undone of a lock.

    Attributes:
        keys: by server.
        token: under which it was held.
        quorum: kept alive, for who drops the lock may drop the last that knows its servers.
    """

    keys: list[bytes]
    token: bytes
    quorum: Any

    def __repr__(self) -> str:
        """Without the token."""
        return object.__repr__(self)


_quorums: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


def quorum_of(transports: list[Any], make: Callable[[list[Any]], Any]) -> Any:
    """What asks these transports together, as long as any Redlock on them lives.

    It keeps its transports alive, so their ids are no others'. Two at once, after a race, do no harm.
    """
    key = tuple(map(id, transports))
    return _quorums.get(key) or _quorums.setdefault(key, make(transports))
