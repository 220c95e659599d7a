"""The names that belong to a lock: the keys of its queue and its fence, and the channels of its waiters.

All are in the hash slot of their lock, as a cluster requires. Slots follow the cluster specification: where a key has a
"{" with a "}" after it, and anything in between, that part alone is hashed.
"""

from __future__ import annotations

import re
from binascii import crc_hqx
from functools import lru_cache

_SLOTS = 16384

_OPEN, _CLOSE = b"{}"  # numbers: CPython looks for these in bytes 1,400 instructions faster than for bytes

_QUEUE = re.compile(rb"(.*):rlf:tagged:queue|\{\d+\}(.*):rlf:numbered:queue|\{(.*)\}:rlf:queue", re.DOTALL)


class _Numbers:
    """For each slot the lowest number whose digits hash to it. A search keeps what it finds on its way.

    Thread safety: any thread searches, the reader of a connection, too, so there is no mutex. Each number is entered
    after all lower ones: `_next` is assigned only once all numbers below it are in the table, so a stale one causes a
    search that finds the same.
    """

    def __init__(self) -> None:
        self._by_slot: dict[int, int] = {}
        self._next = 0

    def of(self, slot: int) -> int:
        """The slot's number."""
        number = self._next
        while slot not in self._by_slot:
            self._by_slot.setdefault(crc_hqx(b"%d" % number, 0) % _SLOTS, number)
            number += 1
            self._next = number
        return self._by_slot[slot]


_numbers = _Numbers()


@lru_cache(1024)  # each contended acquire and release asks
def queue_keys(key: bytes) -> tuple[bytes, bytes]:
    """The keys of a lock's queue and of its waiters."""
    base = _base_of(key)
    return base + b":queue", base + b":waiters"


def lock_of_queue(queue: bytes) -> bytes | None:
    """The lock whose queue has this key; None for any other key."""
    found = _QUEUE.fullmatch(queue)
    key: bytes | None = None if found is None else found[found.lastindex or 0]
    return key if key is not None and queue_keys(key)[0] == queue else None


@lru_cache(1024)
def permit_keys(key: bytes) -> tuple[bytes, bytes, bytes]:
    """The keys of a semaphore's queue, of its waiters, and of the limit that an operator has set."""
    base = _base_of(key)
    return base + b":queue", base + b":waiters", base + b":limit"


@lru_cache(1024)
def fence_key(key: bytes) -> bytes:
    """The key of a lock's fencing numbers."""
    return _base_of(key) + b":fence"


@lru_cache(1024)
def leader_key(key: bytes) -> bytes:
    """The key of an election's record of its leader."""
    return _base_of(key) + b":leader"


@lru_cache(1024)
def done_key(key: bytes) -> bytes:
    """The key of the mark that a job is done, whose lock this is."""
    return _base_of(key) + b":done"


def guard_key(key: bytes) -> bytes:
    """The key at which a guard keeps the highest fence that has written to this key."""
    return _base_of(key) + b":guard"


def channel_beside(key: bytes, identifier: bytes) -> bytes:
    """A connection's channel in the lock's slot. Locks of one slot share it, which bounds the number of channels."""
    return b"{%d}:rlf:%b" % (_numbers.of(slot_of(key)), identifier)


def _base_of(key: bytes) -> bytes:
    """The common prefix of a lock's other keys. No two locks share it: the three forms end differently."""
    if key and _CLOSE not in key:
        return b"{%b}:rlf" % key
    if _tag_of(key) is not key:
        return key + b":rlf:tagged"
    return b"{%d}%b:rlf:numbered" % (_numbers.of(slot_of(key)), key)


def _tag_of(key: bytes) -> bytes:
    """The part of a key that is hashed."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1)
    return key[begin + 1 : end] if begin >= 0 and end > begin + 1 else key


def slot_of(key: bytes) -> int:
    """The hash slot of a key."""
    return crc_hqx(_tag_of(key) if _OPEN in key else key, 0) % _SLOTS  # a batch asks for each key
