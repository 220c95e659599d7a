"""A request as its bytes on the wire."""

from __future__ import annotations

import hiredis


def pack(*words: str | bytes | int) -> bytes:
    """The bytes of a request of these words."""
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its stub: a tuple of one
    return packed
