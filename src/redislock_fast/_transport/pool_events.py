"""Transports are told when their connection pool of redis-py gets new credentials, or is disconnected.

redis-py calls a method of the pool in both cases. That method is extended, on that one pool object:

- `re_auth_callback`: a `StreamingCredentialProvider` of redis-py (5.3 and later) announces each new token to the event
  listeners of redis-py, which call it. A provider may keep only one callback, so none is registered with it. Older
  versions of redis-py have no such method, nor do the nodes of its asyncio cluster client: there, a connection with
  expired credentials is replaced when the server says so.
- `disconnect`: `close` and `aclose` of a client call it. A client that keeps its pool open, since others share that,
  does not: then keys that linger are given back when they have lingered for long enough, and the connection of the
  locks ends with the pool. An asyncio cluster client has no pools, so its own `aclose` is extended.

Thread safety: any thread uses `_Extended.servers`, by atomic methods of list alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from redislock_fast._pipe.base import Args
from redislock_fast._util import fork


class _Authenticating(Protocol):
    def authenticate(self, request: Args) -> None: ...


class _Closing(Protocol):
    def note_closing(self) -> None: ...


class _Extended:
    """A method of one pool that tells the pool's transports first. It keeps neither the pool nor a transport alive.

    Args:
        pool: a connection pool of redis-py.
        name: of the method.
        tell: called with each transport and the arguments of the method.
    """

    def __init__(self, pool: Any, name: str, report: Callable[..., None]) -> None:
        self._pool = weakref.ref(pool)
        self._name = name
        self._report = report
        self.servers: list[weakref.ref[Any]] = []

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Tell the transports. Returns the result of the pool's own method."""
        fork.generation()  # has them forget in a child
        for server_ref in self.servers.copy():
            server = server_ref()
            if server is not None:
                self._report(server, *args, **settings)
        pool: Any = self._pool()
        if pool is None:  # the garbage collector ends it: a finalizer of redis-py 5.0 calls this
            return None
        return getattr(type(pool), self._name)(pool, *args, **settings)


def _extend(owner: Any, name: str, report: Callable[..., None], server: object) -> None:
    """Have a transport told of the calls of a method of its pool. May be called again."""
    if hasattr(type(owner), name):
        method = vars(owner).setdefault(name, _Extended(owner, name, report))
        if isinstance(method, _Extended):  # else it belongs to other code, which may not expect another one
            reference = weakref.ref(server, method.servers.remove)
            if reference not in method.servers:
                method.servers.append(reference)


def notice_credentials(owner: Any, server: _Authenticating) -> None:
    """Have a transport authenticate again whenever its connection pool does.

    Args:
        owner: of the transport; nothing is done for an owner that is no pool, or does not support re-authentication.
        server: the transport. It is not kept alive.
    """
    _extend(owner, "re_auth_callback", _send_token, server)


def _send_token(server: _Authenticating, token: Any) -> None:
    server.authenticate((b"AUTH", *filter(None, (token.try_get("oid"), token.get_value()))))


def notice_closing(owner: Any, server: _Closing, method: str = "disconnect") -> None:
    """Tell a transport when its connection pool is disconnected, or its client closed. May be called again.

    Args:
        owner: of the transport; nothing is done for an owner without the method.
        server: the transport. It is not kept alive.
        method: which method of the owner says so.
    """
    _extend(owner, method, _note_closing, server)


def _note_closing(server: _Closing, *_args: Any, **_settings: Any) -> None:
    server.note_closing()
