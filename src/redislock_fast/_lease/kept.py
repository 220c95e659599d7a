"""What an owner has of a key that may linger: its lock in this process. The wing of lingering has the class."""

from __future__ import annotations

from typing import Any, Protocol


class KeptKey(Protocol):
    """A key that may linger, whose local lock an owner has.

    Attributes:
        lease: what the server has granted, with the fencing numbers of its holders; None where it is lost.
    """

    lease: Any

    @property
    def holding_id(self) -> object:
        """What names the present holding: the key has one token for many."""

    @property
    def is_here(self) -> bool:
        """Whether the caller may let the key linger: a task may in the event loop of the key only."""

    @property
    def is_wanted(self) -> bool:
        """Whether another caller is known to wait for the lock."""

    @property
    def has_waiters(self) -> bool:
        """Whether callers of this process wait for it."""

    def lose(self, token: bytes) -> None:
        """Have other callers of the process ask the server: the key is lost with this token."""

    def forget(self) -> None:
        """`lose`, and free the local lock."""

    def give_back(self) -> bool:
        """Give the key back to the server, and free the local lock. Returns whether the server has granted it."""
