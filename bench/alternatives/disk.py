"""The yardstick of whatever writes to disk: a lock of one process that does nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from itertools import count

from bench.alternatives import places
from bench.alternatives.locks import Alternative, PollingLock, released

_RECORD = bytes(200)  # roughly what a server writes of a lock


class SyncedLock(PollingLock):
    """A name in a table, with every change of it written to a file and to the disk.

    Args:
        file: of this thread alone.
        holders: who holds which name.
        name: the lock's.
    """

    def __init__(self, file: FileIO, holders: dict[str, SyncedLock], name: str) -> None:
        self._file = file
        self._holders = holders
        self._name = name

    def attempt(self) -> bool:
        """Note oneself, unless another is noted."""
        if self._holders.setdefault(self._name, self) is not self:
            return False
        self._write()
        return True

    def release(self) -> None:
        """Strike oneself out."""
        released(self._holders.get(self._name) is self)
        del self._holders[self._name]
        self._write()

    def _write(self) -> None:
        self._file.write(_RECORD)
        os.fsync(self._file.fileno())


@contextmanager
def open_disk() -> Iterator[list[Alternative]]:
    """A folder on the disk that the servers have theirs on.

    Yields:
        The one alternative, as long as the folder is there.
    """
    holders: dict[str, SyncedLock] = {}
    numbers = count()
    with places.folder() as folder, ExitStack() as stack:

        def make(name: str) -> SyncedLock:
            file = stack.enter_context(FileIO(folder / str(next(numbers)), "w"))
            return SyncedLock(file, holders, name)

        yield [Alternative("no server: two fsyncs", "disk", None, lambda: make)]
