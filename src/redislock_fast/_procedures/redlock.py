"""What `Redlock` for threads and for asyncio share: their settings, what they hold, and their rounds, step by step.

Rules:
- Every attempt has a token of its own, so nothing that an earlier one has left can be taken for it. The tokens lack the
  marker of `_util/tokens.py`: no queue forms behind a Redlock, since no single server can hand it over.
- A quorum that cannot agree because too many refuse is an answer. One that cannot because too many are silent is an
  error, unless it can be tried again in time.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004  # redis-py's, as everywhere in its users' code
    LockError,
    LockNotOwnedError,
    TimeoutError,  # noqa: A004
)

from redislock_fast._lease.majority_lease import QuorumLease
from redislock_fast._lease.options import Terms
from redislock_fast._lease.ownership import Holding, SharedHolding, twin_of
from redislock_fast._procedures.steps import Ask, Sleep, Steps
from redislock_fast._protocol.commands import NotExecuted, Redirected, Refused
from redislock_fast._protocol.majority import (
    AcquireRound,
    LookRound,
    ReacquireRound,
    ReleaseRound,
    Round,
    valid_s,
)
from redislock_fast._util import fork
from redislock_fast._util.errors import LossReason
from redislock_fast._util.redis_py import own_copy, redis_error
from redislock_fast._util.times import added_ms, clock, poll_seconds, positive_ms, wait_seconds
from redislock_fast._util.tokens import MARKER, new_token

__all__ = ["RedlockBase"]

_FEWEST = 3
_SILENT_ATTEMPTS = 3
"""So many attempts in a row without the votes of a quorum end an `acquire` that would wait for ever."""

_dice = random.SystemRandom()  # the module's own is the user's, who may have seeded all contenders alike

_NO_RETRY_MENDS = (Refused, Redirected, AuthenticationError, AuthorizationError)


class RedlockBase:
    """A Redlock without its servers. The parameters stand on the classes that users name."""

    _terms: Terms | None = None
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
        terms = Terms(auto_renew=auto_renew, max_hold=max_hold, on_lost=on_lost, cancel_on_lost=cancel_on_lost)
        terms.check(self._ttl_ms, self.thread_local, self._is_for_tasks)
        if terms.watches:
            self._terms = terms
        self._own_nothing()

    @staticmethod
    @abstractmethod
    def _transport_of(client: Any) -> Any:
        """The transport that serves this client."""

    @staticmethod
    @abstractmethod
    def _quorum_of(transports: list[Any]) -> Any:
        """The servers, to be asked together."""

    @abstractmethod
    def _new_holding(self) -> Any:
        """What `local` is where `thread_local` is true."""

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
        """The clients, in the order in which `votes` has their servers."""
        return self._servers

    # ---- what the caller holds ----

    @property
    def votes(self) -> tuple[bool | None, ...]:
        """How the servers have voted in the caller's last operation on this lock.

        By server: True for agreed, False for refused, None where no reply has come, or an error. A vote that comes
        after the outcome was certain is still noted here.
        """
        round_ = self._held().round
        return (None,) * len(self._servers) if round_ is None else tuple(round_.votes)

    @property
    def valid(self) -> bool:
        """Whether the caller's lease is certainly valid now, by the clock. Asks no server."""
        return self.remaining() > 0

    def remaining(self) -> float:
        """For how long the caller's lease is certainly valid from now, in seconds; 0.0 if it is not. Asks no server.

        0.0 too where a release was called and nobody knows whether it was executed.
        """
        held = self._held()
        return 0.0 if self._is_released(held) else max(self._valid_until(held) - clock(), 0.0)

    @property
    def lost(self) -> bool:
        """Whether the lock was lost before it was released, as far as is known without asking the servers."""
        held = self._held()
        return held.token is not None and clock() >= self._valid_until(held)

    def _valid_until(self, local: Holding) -> float:
        """Until when what is held is certainly held, in the clock's seconds."""
        return -math.inf if local.quorum is None else local.quorum.valid_until

    def _is_released(self, local: Holding) -> bool:
        """Whether its release was called, and may have been executed although that failed."""
        return local.quorum is not None and local.quorum.releasing is not None

    def _own_nothing(self) -> None:
        self._generation = fork.generation
        self.local = self._new_holding() if self.thread_local else SharedHolding()

    def _held(self) -> Holding:
        """What the caller holds and may release. A forked child has nothing of its parent's."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Holding = self.local.held()
        return holding

    def _mine(self) -> Holding:
        """Where what the caller acquires is noted."""
        if self._generation != fork.generation:
            self._own_nothing()
        holding: Holding = self.local.mine()
        return holding

    def _lease(self, local: Holding, verb: str) -> QuorumLease:
        if local.quorum is None:
            raise LockError(f"Cannot {verb} an unlocked lock", lock_name=self._name)
        return local.quorum

    def _lost(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self._name)

    # ---- acquire ----

    def _acquiring(
        self,
        local: Holding,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        attempts: list[AcquireRound],
    ) -> Steps:
        """Attempt until the lock is taken or the time is up. Returns the lease, yet to be noted, or None.

        `attempts` gets the last one, for `_undo_unnoticed`: the holding may be shared.
        """
        sleep = poll_seconds(self.sleep if sleep is None else sleep)
        blocking = self.blocking if blocking is None else blocking
        blocking_timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        deadline = math.inf
        if blocking_timeout is not None:
            deadline = clock() + wait_seconds(blocking_timeout, "blocking_timeout")
        silent = 0
        while True:
            token = new_token()[len(MARKER) :]
            local.round = attempt = AcquireRound(self._keys, token, self._ttl_ms, self._limit_s)
            attempts[:] = [attempt]
            yield Ask(attempt)
            if not attempt.undone:
                return QuorumLease(attempt)
            silent = 0 if attempt.answered else silent + 1
            # Two that have split the votes must not meet again: each waits for another time.
            pause_s = _dice.uniform(0, sleep)
            is_last = not blocking or clock() + pause_s >= deadline
            if silent and (
                is_last or self._is_hopeless(attempt) or (silent >= _SILENT_ATTEMPTS and deadline == math.inf)
            ):
                raise self._trouble(attempt)
            if is_last:
                return None
            if deadline == math.inf:
                self._refuse_to_wait_for_itself(local, attempt)
            yield Sleep(pause_s)

    def _refuse_to_wait_for_itself(self, local: Holding, attempt: AcquireRound) -> None:
        tenure, token = local.tenure, local.token
        endless = self.thread_local and tenure is not None and tenure.is_endless
        if endless and token is not None and attempt.is_held_with(token):
            raise LockError("Cannot acquire a lock that its owner holds: it is renewed", lock_name=self._name)

    def _forget(self, local: Holding, token: bytes) -> None:
        if local.token == token:  # where the token is shared, another may have acquired meanwhile
            local.token = local.quorum = None

    def _undo_unnoticed(self, local: Holding, attempts: list[AcquireRound]) -> None:
        """An interrupt came between the outcome and the caller's learning of it."""
        for attempt in attempts:
            self._forget(local, attempt.token)
            self._quorum.undo_round(attempt)

    # ---- release, extend, reacquire ----

    def _releasing(self, local: Holding) -> Steps:
        """Release everywhere.

        Raises:
            redis.exceptions.LockNotOwnedError: so many servers do not hold the token that no quorum can have done so.
        """
        lease = local.quorum
        if lease is None:
            raise LockError("Cannot release a lock that's not owned or is already unlocked.", lock_name=self._name)
        local.round = round_ = self._release_round(lease)
        yield Ask(round_)
        if not round_.refused and not round_.answered:
            raise self._trouble(round_)
        self._forget(local, lease.token)
        if round_.refused:
            raise self._lost("release")

    def _release_round(self, lease: QuorumLease) -> ReleaseRound:
        votes = list(lease.refusals)
        doubtful = [False] * len(votes)
        before = lease.releasing
        if before is not None:  # what it has achieved counts, and what it may have achieved
            votes = [refusal if vote is None else vote for vote, refusal in zip(before.votes, votes, strict=True)]
            doubtful = list(before.sent)
        lease.releasing = ReleaseRound(self._keys, lease.token, lease.ends_at, self._limit_s, votes, doubtful)
        return lease.releasing

    def _extending(self, local: Holding, additional_time: float, replace_ttl: bool) -> Steps:
        add_ms = added_ms(additional_time, replace_ttl)
        lease = self._lease(local, "extend")
        left_ms = 0 if replace_ttl else max(math.ceil((lease.ends_at - clock()) * 1000), 0)
        yield from self._prolonging(local, lease, "extend", left_ms + add_ms)

    def _reacquiring(self, local: Holding) -> Steps:
        yield from self._prolonging(local, self._lease(local, "reacquire"), "reacquire", self._ttl_ms)

    def _prolonging(self, local: Holding, lease: QuorumLease, verb: str, ttl_ms: int) -> Steps:
        """Set the lease anew. What is left of one that was lost is given back."""
        if not (yield from self._setting_lease(local, lease, ttl_ms)):
            self._forget(local, lease.token)
            yield Ask(self._release_round(lease))
            raise self._lost(verb)

    def _setting_lease(self, local: Holding, lease: QuorumLease, ttl_ms: int) -> Steps:
        """Set the lease anew. Returns False where it was lost.

        A quorum that agrees when the lease was over prolongs nothing.
        """
        limit_s = max(min(self._limit_s, valid_s(ttl_ms)), 0.0)
        local.round = round_ = ReacquireRound(self._keys, lease.token, ttl_ms, limit_s, list(lease.refusals))
        if clock() < lease.valid_until:
            before = lease.shorten(ttl_ms)
            yield Ask(round_)
            if round_.agreed and clock() < lease.valid_until:
                lease.renew(round_, before)
                return True
            if not round_.refused and clock() < lease.valid_until:
                raise self._trouble(round_)
        return False

    # ---- look ----

    def _looking(self, local: Holding, token: bytes) -> Steps:
        """Whether a quorum holds the token; any value, for an empty one."""
        local.round = round_ = LookRound(self._keys, token, self._limit_s)
        yield Ask(round_)
        if not round_.decided:
            raise self._trouble(round_)
        return round_.agreed

    # ---- copying ----

    def __copy__(self) -> Any:
        """A second handle: same clients, same token."""
        return twin_of(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"the Redlock {self._name!r} cannot be pickled: make it anew in the other process")

    # ---- errors ----

    def _is_hopeless(self, round_: Round) -> bool:
        """Whether no quorum can vote because of errors that no retry mends."""
        errors = sum(isinstance(error, _NO_RETRY_MENDS) for error in round_.errors)
        return errors > len(self._keys) // 2

    def _trouble(self, round_: Round) -> Exception:
        """What to raise where too few have voted: the gravest of the errors, with how many these are."""
        errors = [error for error in round_.errors if error is not None]
        for error in errors:
            if isinstance(error, _NO_RETRY_MENDS):
                return redis_error(str(error)) if isinstance(error, Refused | Redirected) else own_copy(error)
        count = len(round_.votes)
        voted = count - round_.votes.count(None)
        message = f"only {voted} of {count} servers have voted within {round_.limit_s:g} s"
        if not errors:
            return TimeoutError(message)
        if isinstance(errors[0], NotExecuted):
            return redis_error(str(errors[0]))
        return ConnectionError(f"{message}; one of the others: {errors[0]}")


def _check(servers: tuple[Any, ...]) -> None:
    """See that a majority of these servers means something.

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
    """What tells a pool's server from others, as far as the settings say: another database is no other server."""
    settings = pool.connection_kwargs
    if settings.get("path"):
        return settings["path"]
    if "host" not in settings:  # a sentinel's, which finds its server when it connects
        return pool.service_name, frozenset(_address(one.connection_pool) for one in pool.sentinel_manager.sentinels)
    host = "127.0.0.1" if settings["host"] == "localhost" else settings["host"]
    return f"{host}:{settings.get('port', 6379)}"
