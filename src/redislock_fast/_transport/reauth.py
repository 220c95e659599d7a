"""Re-authentication: when redis-py gives a connection pool new credentials, the pool's transports send them, too.

A `StreamingCredentialProvider` of redis-py (5.3 and later) announces each new token to the event listeners of redis-py,
which call `re_auth_callback` of the pool. A provider may keep only one callback, so none is registered with it: the
pool's `re_auth_callback` is extended instead, on that one pool object. Older versions of redis-py have no such method,
nor do the nodes of its asyncio cluster client: there, a connection with expired credentials is replaced when the server
says so.

Thread safety: any thread uses `_ReAuth.servers`, by atomic methods of list alone.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from redislock_fast._pipe.base import Args

__all__ = ["take_part"]


class _ServerTransport(Protocol):
    def authenticate(self, request: Args) -> None: ...


class _ReAuth:
    """The `re_auth_callback` of one pool. It keeps neither the pool nor a transport alive.

    Args:
        pool: a connection pool of redis-py.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = weakref.ref(pool)
        self.servers: list[weakref.ref[_ServerTransport]] = []

    def __call__(self, token: Any) -> Any:
        """Send the token on the connections of the transports. Returns the result of the pool's own method."""
        request = (b"AUTH", *filter(None, (token.try_get("oid"), token.get_value())))
        for server_ref in self.servers.copy():
            server = server_ref()
            if server is not None:
                server.authenticate(request)
        pool: Any = self._pool()
        return type(pool).re_auth_callback(pool, token)


def take_part(owner: Any, server: _ServerTransport) -> None:
    """Have a transport authenticate again whenever its connection pool does.

    Args:
        owner: of the transport; nothing is done for an owner that is no pool, or does not support re-authentication.
        server: the transport. It is not kept alive.
    """
    if hasattr(type(owner), "re_auth_callback"):
        callback = vars(owner).setdefault("re_auth_callback", _ReAuth(owner))
        if isinstance(callback, _ReAuth):  # else it belongs to other code, which may not expect another one
            callback.servers.append(weakref.ref(server, callback.servers.remove))
