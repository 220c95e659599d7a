"""Re-authentication: redis-py gives a connection pool new credentials, and the pool's channels send them, too.

A `StreamingCredentialProvider` of redis-py (5.3 and later) announces each new token to the event listeners of redis-py,
which call `re_auth_callback` of the pool. A provider may keep only one callback, so we register none with it: the
pool's `re_auth_callback` is extended, on that one pool object. Older versions of redis-py have no such method, and
neither have the nodes of its asyncio cluster client; then nothing is done here, and a connection whose credentials have
expired is replaced when the server says so.

Who may touch what: `_ReAuth.channels` is used by atomic methods of list alone, by any thread.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from redislock_fast._pipe.base import Args

__all__ = ["take_part"]


class _Channel(Protocol):
    def authenticate(self, request: Args) -> None: ...


class _ReAuth:
    """Stands on a pool as its `re_auth_callback`.

    It keeps neither the pool nor a channel alive.

    Args:
        pool: a connection pool of redis-py.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = weakref.ref(pool)
        self.channels: list[weakref.ref[_Channel]] = []

    def __call__(self, token: Any) -> Any:
        """Send the token on the connections of the channels; return what the pool's own method returns."""
        request = (b"AUTH", *filter(None, (token.try_get("oid"), token.get_value())))
        for channel_ref in self.channels.copy():
            channel = channel_ref()
            if channel is not None:
                channel.authenticate(request)
        pool: Any = self._pool()
        return type(pool).re_auth_callback(pool, token)


def take_part(owner: Any, channel: _Channel) -> None:
    """Have a channel authenticate anew whenever its connection pool does.

    Args:
        owner: of the channel; one that is no pool, or a pool that knows no re-authentication, is left as it is.
        channel: is not kept alive.
    """
    if hasattr(type(owner), "re_auth_callback"):
        callback = vars(owner).setdefault("re_auth_callback", _ReAuth(owner))
        if isinstance(callback, _ReAuth):  # else it is somebody else's, who may not expect another one
            callback.channels.append(weakref.ref(channel, callback.channels.remove))
