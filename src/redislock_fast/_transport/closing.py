"""Closing: when a client of redis-py is closed, the keys that linger on its server are given back.

`close` and `aclose` of a client have its connection pool disconnect. So the pool's `disconnect` is extended, on that
one pool object and once a key lingers, as `reauth.py` extends `re_auth_callback`. A client that keeps its pool open,
since others share that, does not call it: then keys are given back when they have lingered for long enough.

Thread safety: any thread uses `_Disconnect.servers`, by atomic methods of list alone.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

__all__ = ["notice_closing"]


class _Lingering(Protocol):
    def give_up_keys(self) -> None: ...


class _Disconnect:
    """The `disconnect` of one pool. It keeps neither the pool nor a transport alive.

    Args:
        pool: a connection pool of redis-py.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = weakref.ref(pool)
        self.servers: list[weakref.ref[_Lingering]] = []

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Give up what lingers. Returns the result of the pool's own method."""
        for server_ref in self.servers.copy():
            server = server_ref()
            if server is not None:
                server.give_up_keys()
        pool: Any = self._pool()
        return type(pool).disconnect(pool, *args, **settings)


def notice_closing(owner: Any, server: _Lingering) -> None:
    """Have a transport give up what lingers when its connection pool is disconnected. May be called again.

    Args:
        owner: of the transport; nothing is done for an owner that is no pool of redis-py.
        server: the transport. It is not kept alive.
    """
    if hasattr(type(owner), "disconnect"):
        disconnect = vars(owner).setdefault("disconnect", _Disconnect(owner))
        if isinstance(disconnect, _Disconnect):  # else it belongs to other code, which may not expect another one
            reference = weakref.ref(server, disconnect.servers.remove)
            if reference not in disconnect.servers:
                disconnect.servers.append(reference)
