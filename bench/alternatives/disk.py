"""The yardstick of systems that write to disk: a lock within this process that only writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from itertools import count

from bench.alternatives import places
from bench.alternatives.locks import Alternative, PollingLock, released

_RECORD = bytes(200)  # about as much as a server writes for a lock


class SyncedLock(PollingLock):
    """A name in a table; every change is written to a file and synced to the disk.

    Args:
        file: used by this thread alone.
        holders: the holder of each name.
        name: of the lock.
    """

    def __init__(self, file: FileIO, holders: dict[str, SyncedLock], name: str) -> None:
        self._file = file
        self._holders = holders
        self._name = name

    def attempt(self) -> bool:
        """Enter the lock as the holder, unless there is one."""
        if self._holders.setdefault(self._name, self) is not self:
            return False
        self._write()
        return True

    def release(self) -> None:
        """Remove the lock as the holder."""
        released(self._holders.get(self._name) is self)
        del self._holders[self._name]
        self._write()

    def _write(self) -> None:
        self._file.write(_RECORD)
        os.fsync(self._file.fileno())


@contextmanager
def open_disk() -> Iterator[list[Alternative]]:
    """Open a folder on the disk of the servers.

    Yields:
        The one alternative; the folder is removed at the end.
    """
    holders: dict[str, SyncedLock] = {}
    numbers = count()
    with places.folder() as folder, ExitStack() as stack:

        def make(name: str) -> SyncedLock:
            file = stack.enter_context(FileIO(folder / str(next(numbers)), "w"))
            return SyncedLock(file, holders, name)

        yield [Alternative("no server: two fsyncs", "disk", None, lambda: make)]
