"""What fenced locks protect: a number on a server of its own, on which no fault is made.

It knows the highest fence that has come, from a read or a write, and refuses lower ones. So an update, which reads the
number and writes the next one, is lost only where two holders have the same fence, or fences do not rise.
"""

from __future__ import annotations

import redis

__all__ = ["Resource"]

_CHECK = """
if tonumber(redis.call('hget', KEYS[1], 'highest') or '0') > tonumber(ARGV[1]) then
    return false
end
redis.call('hset', KEYS[1], 'highest', ARGV[1])
"""
_READ = _CHECK + "return tonumber(redis.call('hget', KEYS[1], 'value') or '0')"
_WRITE = _CHECK + "return redis.call('hset', KEYS[1], 'value', ARGV[2]) + 1"


class Resource:
    """The numbers, one for each lock.

    Args:
        port: of their server.
    """

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)
        self._read = self._client.register_script(_READ)
        self._write = self._client.register_script(_WRITE)

    def read(self, name: str, fence: int) -> int | None:
        """The number; None where a higher fence has come."""
        value: int | None = self._read([name], [fence])
        return value

    def write(self, name: str, fence: int, read: int) -> bool:
        """Write the number after the one that was read. Returns whether it was written."""
        return self._write([name], [fence, read + 1]) is not None
