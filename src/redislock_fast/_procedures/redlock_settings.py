"""The settings of a `Redlock`, for threads and for tasks, and where it notes what its callers hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from redislock_fast._lease.options import Options
from redislock_fast._lease.owner import Owner, SharedOwner, twin_of
from redislock_fast._protocol.majority import valid_s
from redislock_fast._util import fork
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import positive_ms

__all__ = ["RedlockSettings"]

_FEWEST = 3


class RedlockSettings:
    """A Redlock without its operations. The parameters stand on the classes that users name.

    Who may touch what: `owner` is replaced in a forked child alone; its own rules stand in `_lease/ownership.py`.
    """

    _options: Options | None = None
    _is_for_tasks = False

    def __init__(
        self,
        servers: Iterable[Any],
        name: Any,
        timeout: float,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        limit: float = 0.25,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Any, LossReason], Any] | None = None,
        cancel_on_lost: bool = False,
    ) -> None:
        self._servers = tuple(servers)
        transports = [self._transport_of(client) for client in self._servers]
        _check(self._servers)
        self._quorum = self._quorum_of(transports)
        self._keys: list[bytes] = [transport.key_of(name) for transport in transports]
        self._name = name
        self._timeout = timeout
        self._ttl_ms = positive_ms(timeout, "timeout")
        self._limit_s = min(positive_ms(limit, "limit") / 1000, valid_s(self._ttl_ms))
        if self._limit_s <= 0:
            raise ValueError(f"a timeout of {timeout!r} s leaves nothing, less 1 % and 2 ms for the clocks")
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        options = Options(auto_renew=auto_renew, max_hold=max_hold, on_lost=on_lost, cancel_on_lost=cancel_on_lost)
        options.check(self._ttl_ms, self.thread_local, self._is_for_tasks)
        if options.watches:
            self._options = options
        self._own_nothing()

    @staticmethod
    @abstractmethod
    def _transport_of(client: Any) -> Any:
        """The server transport of this client."""

    @staticmethod
    @abstractmethod
    def _quorum_of(transports: list[Any]) -> Any:
        """The servers, to be asked together."""

    @abstractmethod
    def _new_owner(self) -> Any:
        """What `owner` is where `thread_local` is true."""

    @property
    def name(self) -> Any:
        """The key, the same on all servers."""
        return self._name

    @property
    def timeout(self) -> float:
        """The ttl in seconds."""
        return self._timeout

    @property
    def servers(self) -> tuple[Any, ...]:
        """The clients, in the order in which `verdicts` has their servers."""
        return self._servers

    # ---- what the caller holds ----

    def _own_nothing(self) -> None:
        self._generation = fork.generation
        self.local = self._new_owner() if self.thread_local else SharedOwner()

    def _held(self) -> Owner:
        """What the caller holds and may release. A forked child holds nothing of its parent's."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Owner = self.local.held()
        return holding

    def _mine(self) -> Owner:
        """Where what the caller acquires is noted."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Owner = self.local.mine()
        return holding

    # ---- copying ----

    def __copy__(self) -> Any:
        """A second lock object: same clients, same token."""
        return twin_of(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            TypeError: always. Another process makes the lock anew, on clients of its own.
        """
        raise TypeError(f"the lock {self._name!r} cannot be pickled: make it anew in the other process")


def _check(servers: tuple[Any, ...]) -> None:
    """Check that a majority of these servers means something.

    Raises:
        TypeError: a cluster is among them.
        ValueError: they are too few, of even number, or not independent.
    """
    count = len(servers)
    if count < _FEWEST:
        raise ValueError(f"a Redlock needs 3 servers at least, not {count}: a majority of fewer survives no failure")
    if count % 2 == 0:
        raise ValueError(f"a Redlock needs an odd number of servers: {count} survive no more failures than {count - 1}")
    seen: set[Any] = set()
    for server in servers:
        pool = getattr(server, "connection_pool", None)
        if pool is None:
            raise TypeError("a server of a Redlock is a single one: a cluster is no independent server")
        address = _address(pool)
        if address in seen:
            raise ValueError(f"{address} is among the servers more than once: its votes would count for two")
        seen.add(address)


def _address(pool: Any) -> Any:
    """What tells a pool's server from others, by the settings alone. Another database is no other server."""
    settings = pool.connection_kwargs
    if settings.get("path"):
        return settings["path"]
    if "host" not in settings:  # a sentinel's, which finds its server when it connects
        return pool.service_name, frozenset(_address(one.connection_pool) for one in pool.sentinel_manager.sentinels)
    host = "127.0.0.1" if settings["host"] == "localhost" else settings["host"]
    return f"{host}:{settings.get('port', 6379)}"
