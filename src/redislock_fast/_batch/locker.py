"""The base of both `Locker` classes: one client, for which they make locks and acquire many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from redislock_fast._lease.options import spelled_out
from redislock_fast._procedures.lock import LockBase, WaitBy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.options import OptionSettings

_AnyLock = TypeVar("_AnyLock", bound=LockBase)


class LockerBase(Generic[_AnyLock]):
    """The base of both `Locker` classes, which describe its parameters."""

    _lock_class: type[_AnyLock]

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock_class._transport_of(client)  # noqa: SLF001  # of a class of ours; refuses what is no client

    @property
    def _transport(self) -> Any:
        """The transport of the client, whose pool may be replaced."""
        return self._lock_class._transport_of(self._client)  # noqa: SLF001  # of a class of ours

    @spelled_out("Locker")
    def lock(
        self,
        name: str | bytes,
        timeout: float | AdaptiveTTL | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        wait: WaitBy = "push",
        **options: Unpack[OptionSettings[_AnyLock]],
    ) -> _AnyLock:
        """Make a lock with this client. Takes and raises what `Lock` does."""
        return self._lock_class(
            self._client,
            name,
            timeout=timeout,
            sleep=sleep,
            blocking=blocking,
            blocking_timeout=blocking_timeout,
            thread_local=thread_local,
            raise_on_release_error=raise_on_release_error,
            wait=wait,
            **options,
        )
