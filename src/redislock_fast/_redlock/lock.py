"""`RedlockBase`: the servers and settings of a Redlock, and what its callers hold.

Its operations are the functions of `procedures.py`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from redis.exceptions import LockNotOwnedError

from redislock_fast._lease import owner as owners
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.options import Options, refuse_unknown, spelled_out
from redislock_fast._lease.owner import Owner, SharedOwner, twin_of
from redislock_fast._lease.prolonging import mutex
from redislock_fast._lease.task_owner import TaskOwners
from redislock_fast._procedures.lease import (
    describe,
)
from redislock_fast._procedures.lock import observe_by_otel
from redislock_fast._protocol.steps import Steps
from redislock_fast._redlock.lease import majority_of, reason_of_round, standing_of
from redislock_fast._redlock.quorum import Quorum, ask_servers
from redislock_fast._redlock.rounds import (
    TakenRound,
    valid_s,
)
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.times import blocks, clock, poll_seconds, positive_ms, wait_seconds

if TYPE_CHECKING:
    from typing_extensions import Never

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.breaker import Breaker
    from redislock_fast._lease.metrics import Metrics

_FEWEST = 3


class RedlockBase:
    """A Redlock without its operations: its servers and settings, and what its callers hold. Sends nothing.

    The public classes describe the parameters.

    Thread safety: `local` is replaced only in a forked child, and after a patch of `threading`. For its own rules, see
    `_lease/owner.py`.
    """

    _options: Options | None = None
    _is_for_tasks = False
    _quorum_class: type[Quorum]

    @spelled_out("Redlock")
    def __init__(
        self,
        servers: Iterable[Any],
        name: Any,
        timeout: float | AdaptiveTTL,
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
        reentrant: bool = False,
        breaker: Breaker | None = None,
        metrics: Metrics | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, RedlockBase.__init__)
        poll_seconds(sleep)
        blocks(blocking)
        if blocking_timeout is not None:
            wait_seconds(blocking_timeout, "blocking_timeout")
        if not isinstance(servers, Iterable):  # tuple() of a client would send GET 0, GET 1 and so on
            raise TypeError(f"servers is a list of clients, one for each server, not {type(servers).__name__}")
        self._servers = tuple(servers)
        self._name = name
        transports = [self._transport_of(client) for client in self._servers]
        _check(self._servers)
        self._ask_at(transports)
        adaptive: Any = timeout if hasattr(timeout, "observe") else None
        seconds: Any = timeout
        self._wanted_limit_s = positive_ms(limit, "limit") / 1000
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        observe_by_otel()
        options = Options(
            adaptive=adaptive,
            auto_renew=auto_renew,
            max_hold=max_hold,
            on_lost=on_lost,
            cancel_on_lost=cancel_on_lost,
            reentrant=reentrant,
            breaker=breaker,
            metrics=metrics,
        )
        self._set_ttl(positive_ms(seconds, "timeout") if adaptive is None else options.adapted_ms(name))
        if adaptive is None:
            self._timeout: float = seconds
        options.check(self._ttl_ms, self.thread_local, self._is_for_tasks)
        if options.are_used:
            self._options = options
        self._own_nothing()

    _pools: list[Any] | None = None
    _former: Any = None
    """The pools before: a lock may be renewed at their servers."""

    def _ask_at(self, transports: list[Any]) -> None:
        self._former = self._pools
        self._pools = [client.connection_pool for client in self._servers]
        self._quorum: Any = self._quorum_class.of(transports)
        self._keys: list[bytes] = [transport.encoding.key_of(self._name) for transport in transports]

    def _follow_pools(self) -> None:
        """Lock where the clients' own commands go by now: their pools may have been replaced."""
        if [client.connection_pool for client in self._servers] != self._pools:
            self._ask_at([self._transport_of(client) for client in self._servers])

    def _set_ttl(self, ttl_ms: int) -> None:
        """Set the ttl of the next acquire.

        Raises:
            ValueError: too short.
        """
        self._ttl_ms = ttl_ms
        self._timeout = ttl_ms / 1000
        self._limit_s = min(self._wanted_limit_s, valid_s(ttl_ms))
        if self._limit_s <= 0:
            raise ValueError(f"a timeout of {self._timeout!r} s is too short: clock drift takes 1 % and 2 ms of it")

    @staticmethod
    @abstractmethod
    def _transport_of(client: Any) -> Any:
        """The server transport of this client."""

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
        """The clients, in the order of `votes`."""
        return self._servers

    # ---- owners ----

    def _own_nothing(self) -> None:
        self._generation = fork.generation()
        self._local = patching.in_force
        self.local: Any = self._new_owners()

    def _new_owners(self) -> Any:
        own: type[Any] = TaskOwners if self._is_for_tasks else owners.of_threads
        return own() if self.thread_local else SharedOwner()

    def _own_anew(self) -> None:
        """Go on after a fork, or a patch of `threading`. Threads of a child may do so at the same time."""
        if self._local is not threading.local:
            self._adapt_to_patch()
        generation = fork.generation()
        if self._generation != generation:
            fresh = self._new_owners()
            with mutex.lock:
                if self._generation != generation:  # else another thread was faster, and may hold the lock by now
                    self.local = fresh
                    self._generation = generation  # last: others go on once they see it

    def _adapt_to_patch(self) -> None:
        """Go on after a patch of `threading`: each greenlet is an owner of its own from now on."""
        patching.adapt()
        if self._local is not patching.in_force:  # else another greenlet was faster, or this thread must not adapt
            self._local = patching.in_force
            if self.thread_local and not self._is_for_tasks:
                self.local = owners.heirs_of(self.local)

    @property
    def _owners(self) -> Any:
        return self.local

    def _held(self) -> Owner:
        """The owner whose lock the caller may use."""
        owner: Owner = self._present_owners().held()
        return owner

    def _mine(self) -> Owner:
        """The owner in which the caller's acquire is noted."""
        owner: Owner = self._present_owners().mine()
        return owner

    def _present_owners(self) -> Any:
        """The owners after a patch, or in a forked child, which holds nothing of its parent's."""
        self._own_anew()
        self._follow_pools()
        return self.local

    # ---- copying ----

    def __copy__(self) -> Any:
        """A second lock object: same clients, same token."""
        return twin_of(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            TypeError: always. Another process must make a lock object of its own, with clients of its own.
        """
        raise TypeError(f"the lock {shown(self._name)} cannot be pickled: make it anew in the other process")

    # ---- the background ----

    @abstractmethod
    def _renewer(self) -> Any:
        """The renewer of the leases on these servers."""

    def _report_loss(self, lease: Lease, reason: LossReason) -> None:
        """Call `on_lost` for a loss, and cancel the owner's task, as the options say."""
        self._renewer().report_loss(lease, reason)

    def _report_former_loss(self, lease: Lease, reason: LossReason) -> None:
        """Report the loss of an earlier lease, which the next acquire has found out.

        The callback may wait for the lock, which the caller has acquired.
        """
        self._renewer().report_loss_elsewhere(lease, reason)

    def _keep(self, lease: Lease) -> None:
        """Have the renewer renew the lease and watch for its loss, as its options say."""
        if lease.is_watched:
            self._renewer().keep(lease)

    def _let_go(self, lease: Lease) -> None:
        """Have the renewer drop the lease."""
        if lease.is_watched:
            self._renewer().let_go(lease)

    # ---- what the caller holds ----

    def _is_meant(self, token: Any, held: bytes) -> bool:  # noqa: ARG002  # a Redlock's acquire takes no token
        """Whether an acquire may mean the held lock."""
        return True

    def __repr__(self) -> str:
        """The name and, for the caller, whether the lock is held and for how long. Never the token. Sends nothing."""
        return describe(self)

    @property
    def votes(self) -> tuple[bool | None, ...]:
        """The servers' votes in the caller's last operation on this lock.

        By server: True for agreed, False for refused, None for no reply or an error. Votes that come after the outcome
        was certain are added.
        """
        round_ = standing_of(self._held()).round
        return (None,) * len(self._servers) if round_ is None else tuple(round_.votes)

    @property
    def valid(self) -> bool:
        """Whether the caller's lease is certainly valid now, by the clock. Asks no server."""
        return self.remaining() > 0

    def remaining(self) -> float:
        """How long the caller's lease is certainly still valid, in seconds. Asks no server.

        0.0 where the lock is lost or not held, or a release has an unknown outcome.
        """
        held = self._held()
        return 0.0 if self._is_released(held) else max(self._valid_until(held) - clock(), 0.0)

    @property
    def lost(self) -> bool:
        """Whether the lock was lost before it was released, as far as is known without asking the servers."""
        held = self._held()
        return held.token is not None and clock() >= self._valid_until(held)

    def _valid_until(self, owner: Owner) -> float:
        """Until when the lock is certainly held, in the clock's seconds."""
        lease = owner.held_lease
        if lease is not None:
            return -math.inf if lease.loss is not None else lease.deadline
        majority = majority_of(owner)
        return -math.inf if majority is None else majority.valid_until

    def _is_released(self, owner: Owner) -> bool:
        """Whether a release was called and has failed, but may have been executed."""
        majority = majority_of(owner)
        return majority is not None and majority.releasing is not None

    # ---- loss ----

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self._name)

    def _find_out_why(self, lease: Lease) -> Steps:
        """Returns why the lock was lost. Sends `GET name` where the lease has not ended."""
        if clock() >= lease.deadline:
            return LossReason.EXPIRED
        round_ = TakenRound(self._keys, lease.token, self._limit_s)
        with contextlib.suppress(Exception):  # then the reason is not known
            yield ask_servers(self._quorum, round_)
        return reason_of_round(round_)


def _check(servers: tuple[Any, ...]) -> None:
    """Check that these servers can form a majority.

    Raises:
        TypeError: a cluster is among them.
        ValueError: they are too few, of even number, or not independent.
    """
    count = len(servers)
    if count < _FEWEST:
        raise ValueError(f"a Redlock needs 3 servers at least, not {count}: fewer tolerate no failure")
    if count % 2 == 0:
        raise ValueError(f"a Redlock needs an odd number of servers: {count} tolerate as few failures as {count - 1}")
    seen: set[Any] = set()
    for server in servers:
        pool = getattr(server, "connection_pool", None)
        if pool is None:
            raise TypeError("a server of a Redlock must be a single server, not a cluster")
        address = _address(pool)
        if address in seen:
            raise ValueError(f"{address} is among the servers more than once: it would have two votes")
        seen.add(address)


def _address(pool: Any) -> Any:
    """The address of a pool's server, by the settings alone. Databases of one server have the same address."""
    settings = pool.connection_kwargs
    if settings.get("path"):
        return settings["path"]
    if "host" not in settings:  # a sentinel's pool, which finds its server when it connects
        return pool.service_name, frozenset(_address(one.connection_pool) for one in pool.sentinel_manager.sentinels)
    host = "127.0.0.1" if settings["host"] == "localhost" else settings["host"]
    return f"{host}:{settings.get('port', 6379)}"
