"""The names of what stands beside a lock on the server: its queue, and the channels on which its waiters listen.

The queue is in the hash slot of its lock, as a cluster wants it. The rules for slots are the cluster specification's:
what stands between the first "{" and the next "}", if anything does, is hashed alone.

Must not know: connections, locks.
"""

from __future__ import annotations

from binascii import crc_hqx
from functools import lru_cache
from itertools import count

__all__ = ["channel_beside", "queue_keys"]

_SLOTS = 16384


def queue_keys(key: bytes) -> tuple[bytes, bytes]:
    """The keys of a lock's queue and of its waiters."""
    base = _in_the_same_slot(key)
    return base + b":rlf:queue", base + b":rlf:waiters"


def channel_beside(key: bytes, listener: bytes) -> bytes:
    """A channel for a listener in the lock's slot: one for all locks of a slot, so that they are bounded in number."""
    return b"{%d}:rlf:%b" % (_number_in(_slot_of(key)), listener)


def _tag_of(key: bytes) -> bytes:
    """What of a key is hashed."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1)
    return key[begin + 1 : end] if begin >= 0 and end > begin + 1 else key


def _slot_of(key: bytes) -> int:
    return crc_hqx(_tag_of(key), 0) % _SLOTS


def _in_the_same_slot(key: bytes) -> bytes:
    """The key, so changed that it may be prolonged without leaving its slot."""
    if _tag_of(key) is not key:
        return key
    if key and b"}" not in key:
        return b"{%b}" % key
    return b"{%d}%b" % (_number_in(_slot_of(key)), key)


@lru_cache(_SLOTS)
def _number_in(slot: int) -> int:
    """The lowest number whose digits hash to this slot."""
    return next(number for number in count() if crc_hqx(b"%d" % number, 0) % _SLOTS == slot)
