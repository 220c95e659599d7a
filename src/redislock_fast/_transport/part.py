"""`Part`: what the parts of a server transport have in common."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from redislock_fast._transport.base import ServerTransport

__all__ = ["Part", "ServerType"]

ServerType = TypeVar("ServerType", bound="ServerTransport[Any]")


class Part(Generic[ServerType]):
    """A part of a server transport. It does not keep the transport alive, which ends as soon as its last client does.

    Who calls a method of a part refers to the transport. So does what the method has called later: by a thread, a timer
    or a callback that gets the transport and not the part.

    Args:
        server: the transport that has the part.
    """

    def __init__(self, server: ServerType) -> None:
        self._server = weakref.ref(server)

    @property
    def server(self) -> ServerType:
        """The transport."""
        server = self._server()
        assert server is not None
        return server
