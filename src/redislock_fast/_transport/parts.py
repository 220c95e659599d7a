"""What the parts of a server transport have in common, and the simplest part: names and tokens as bytes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from redis.connection import Encoder  # type: ignore[attr-defined]

from redislock_fast._util.redis_py import redis_errors

if TYPE_CHECKING:
    from redislock_fast._transport.base import ServerTransport

__all__ = ["BlockingEncoding", "ClientEncoding", "Encoding", "KeptKeys", "Name", "Part", "ServerType"]

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


class KeptKeys(Protocol):
    """The keys that this process keeps on a server. The wing of lingering has the class."""

    def give_up(self) -> None:
        """Give up what lingers, in the background: the client is closed, or the loop ends."""

    def forget(self) -> None:
        """In a forked child: leave all keys to the parent."""

    def wake(self) -> object:
        """Wake the thread that listens, should it sleep; see `patching.adapt_later`."""

    def resume(self) -> None:
        """After a patch, where the former thread has ended: start another one if it listened."""


class Encoding:
    """Names and tokens as bytes.

    Args:
        encoder: redis-py's, of the client.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._utf8 = (encoder.encoding, encoder.encoding_errors) == ("utf-8", "strict")

    def encode(self, value: object) -> bytes:
        """A name or token as bytes."""
        if type(value) is bytes:
            return value
        if type(value) is str and self._utf8:  # as the encoder does, but faster
            return value.encode()
        with redis_errors():
            return bytes(self._encoder.encode(value))

    def key_of(self, name: object) -> bytes:
        """A lock's name as the key that the client's own commands use for it."""
        return self.encode(name)

    def keys_of(self, names: Sequence[Any]) -> tuple[list[bytes], bool]:
        """Many names as keys, and whether different names certainly have different keys."""
        if self._utf8:
            with contextlib.suppress(TypeError):  # one of them is no str
                return list(map(str.encode, names)), True
        return [self.key_of(name) for name in names], False


class BlockingEncoding(Encoding):
    """The encoding of a blocking client."""

    def key_of(self, name: object) -> bytes:
        """As UTF-8 whatever the client's encoding is: hiredis packs redis-py's own commands so."""
        return name.encode() if isinstance(name, str) else self.encode(name)


class Name(bytes):
    """A lock's name as bytes. `name` is what the user gave: a client may change that before it is encoded."""

    name: Any


class ClientEncoding(Encoding):
    """The encoding of a client whose own methods send the requests.

    Args:
        client: may be a mock, whose encoder encodes nothing.
        kind: the encoding of such a client whose requests leave on connections of ours.
    """

    def __init__(self, client: Any, kind: type[Encoding]) -> None:
        encoder = client.get_encoder() if hasattr(client, "get_encoder") else None
        if isinstance(encoder, Coroutine):  # of an asynchronous mock
            encoder.close()
        if not isinstance(encoder, Encoder):
            encoder = Encoder("utf-8", "strict", False)  # type: ignore[no-untyped-call]
        super().__init__(encoder)
        self._plain = kind(encoder)

    def key_of(self, name: object) -> Name:
        """A lock's name as bytes, with the name itself."""
        if isinstance(name, Name):
            return name
        key = Name(self._plain.key_of(name))
        key.name = name
        return key

    def keys_of(self, names: Sequence[Any]) -> tuple[list[bytes], bool]:
        """Many names as bytes. Only their keys tell whether they differ."""
        return [self.key_of(name) for name in names], False
