"""The operations of a `Redlock`, step by step, for threads and for tasks.

Rules:
- Every attempt has a token of its own, so what an earlier attempt has left is never mistaken for it. The tokens lack
  the marker of `_util/tokens.py`: a Redlock has no queue, since no single server can hand it over.
- Where too many servers refuse, the result is negative. Where too many do not reply, that is an error, unless there is
  time for another attempt.
- A lock that is held on options has a `Lease`, which says until when it is held. Without one, its `MajorityLease` does.

Thread safety: see `_lease/owner.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from redis.exceptions import ConnectionError, LockNotOwnedError, TimeoutError

from redislock_fast._lease import owner as owners
from redislock_fast._lease.callbacks import end_callback
from redislock_fast._lease.lease import Lease
from redislock_fast._lease.logs import log_if_long
from redislock_fast._lease.metrics import end_count, report_call, waiting_of
from redislock_fast._lease.options import Options, refuse_unknown, spelled_out
from redislock_fast._lease.owner import Owner, SharedOwner, twin_of
from redislock_fast._lease.prolonging import mutex
from redislock_fast._lease.task_owner import TaskOwners
from redislock_fast._procedures.lease import (
    UNLOCKED,
    describe,
    end_lost,
    leave_once,
    lost_error,
    raise_lost,
    reenter,
    refuse_in_callback,
    report_failure,
    report_release,
    unlocked_error,
    would_wait_for_itself,
)
from redislock_fast._procedures.lock import observe_by_otel
from redislock_fast._protocol.operation import NotExecuted, Redirected, Refused
from redislock_fast._protocol.steps import Do, Steps
from redislock_fast._redlock.lease import MajorityLease, RedlockLease, new_standing_of, reason_of_round, standing_of
from redislock_fast._redlock.quorum import Quorum, asking
from redislock_fast._redlock.rounds import (
    AcquireRound,
    MajorityRound,
    ReacquireRound,
    ReadRound,
    ReleaseRound,
    TakenRound,
    valid_s,
)
from redislock_fast._util import fork, patching
from redislock_fast._util.errors import LossReason, shown
from redislock_fast._util.redis_py import BAD_CREDENTIALS, own_copy, redis_error
from redislock_fast._util.times import Limit, added_ms, blocks, clock, drift_s, poll_seconds, positive_ms, wait_seconds
from redislock_fast._util.tokens import MARKER, new_token

if TYPE_CHECKING:
    from typing_extensions import Never

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.breaker import Breaker
    from redislock_fast._lease.metrics import Metrics

_FEWEST = 3

_SILENT_ATTEMPTS = 3
"""After so many attempts in a row without the votes of a majority, an `acquire` without a deadline raises."""

_random = random.SystemRandom()  # a user may have seeded the module's own alike in all contenders

_PERMANENT = (Refused, Redirected, *BAD_CREDENTIALS)


class RedlockBase:
    """A Redlock without its servers. The public classes describe the parameters.

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
        self._set_ttl(positive_ms(seconds, "timeout") if adaptive is None else adaptive.ttl_ms(name))
        if adaptive is None:
            self._timeout: float = seconds
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
        majority = standing_of(owner).majority
        return -math.inf if majority is None else majority.valid_until

    def _is_released(self, owner: Owner) -> bool:
        """Whether a release was called and has failed, but may have been executed."""
        majority = standing_of(owner).majority
        return majority is not None and majority.releasing is not None

    def _lease(self, owner: Owner, verb: str) -> MajorityLease:
        refuse_in_callback(self, verb, owner)
        majority = standing_of(owner).majority
        if majority is None:
            raise unlocked_error(self, f"Cannot {verb} an unlocked lock")
        return majority

    def _forget(self, owner: Owner, token: bytes) -> None:
        """Note that the lock is not held under this token any more."""
        lease = owner.lease
        if lease is not None and lease.token == token:
            self._let_go(lease)
            lease.end()
            end_count(lease)
            owner.lease = None
        if owner.token == token:  # where the owner is shared, another caller may have acquired meanwhile
            owner.token = new_standing_of(owner).majority = None

    # ---- acquire ----

    def _acquiring(
        self,
        owner: Owner,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        attempts: list[AcquireRound],
        task: asyncio.Task[object] | None = None,
    ) -> Steps:
        """Acquire, and do what the options ask for. Returns whether the lock is held.

        `attempts` gets the attempt that nobody else cleans up, for `_clean_up_unnoticed` after any error: the owner may
        be shared, and an interrupt may be an error like all others. `task` is the task that will hold the lock, None in
        threads. The other parameters are those of `acquire`.
        """
        options = self._options
        attempting = self._attempting(owner, sleep, blocking, blocking_timeout, attempts)
        majority: MajorityLease | None
        if options is None:
            majority = yield from attempting
        elif reenter(self, owner):
            return True
        else:
            majority = yield from self._attempting_on_options(options, owner, attempting, task)
        if majority is None:
            return False
        new_standing_of(owner).majority = majority
        owner.hold(majority.token)
        return True

    def _attempting_on_options(
        self, options: Options, owner: Owner, attempting: Steps, task: asyncio.Task[object] | None
    ) -> Steps:
        """`_attempting`, with the beginning of the lease and a report of the outcome. Returns the lease or None."""
        if options.adaptive is not None:
            self._set_ttl(options.adaptive.ttl_ms(self._name))
        asked_at = clock()
        try:
            with options.guarded():
                majority = yield from attempting
            if majority is not None:
                self._begin(options, owner, majority, asked_at, task)
        except BaseException as error:
            report_failure(self, options, standing_of(owner).retries + 1, asked_at, error)
            raise
        if majority is None:
            report_failure(self, options, standing_of(owner).retries + 1, asked_at, None)
        return majority

    def _attempting(
        self,
        owner: Owner,
        sleep: float | None,
        blocking: bool | None,
        blocking_timeout: float | None,
        attempts: list[AcquireRound],
    ) -> Steps:
        """Attempt until a majority agrees or the time is up. Returns the lease or None; the caller must note it."""
        sleep = poll_seconds(self.sleep if sleep is None else sleep)
        blocking = blocks(self.blocking if blocking is None else blocking)
        blocking_timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        asked_at = clock()
        limit = Limit(None if blocking_timeout is None else wait_seconds(blocking_timeout, "blocking_timeout"))
        standing = new_standing_of(owner)
        silent = standing.retries = 0
        has_waited = False
        with contextlib.ExitStack() as waits:
            while True:
                token = new_token()[len(MARKER) :]
                standing.round = attempt = AcquireRound(self._keys, token, self._ttl_ms, self._limit_s)
                attempts[:] = [attempt]
                yield asking(self._quorum, attempt)
                if not attempt.given_up:
                    return MajorityLease(attempt)
                attempts.clear()  # it was cleaned up
                silent = 0 if attempt.answered else silent + 1
                # Two callers that have split the votes must not meet again: each waits for another time.
                pause_s = _random.uniform(0, sleep)
                is_last = not blocking or not limit.allows(pause_s)
                is_patient = limit.deadline is None
                gives_up = is_last or _is_hopeless(attempt) or (silent >= _SILENT_ATTEMPTS and is_patient)
                if silent and gives_up:
                    raise self._error_of(attempt, asked_at)
                if is_last:
                    return None
                if is_patient:
                    self._refuse_to_wait_for_itself(owner, attempt)
                if not has_waited:
                    waits.enter_context(waiting_of(self._options, self._name, "polling"))
                    has_waited = True
                    limit.begin_wait()
                log_if_long(self._keys[0], limit, "another owner")
                yield Do("sleep", pause_s)
                standing.retries += 1

    def _refuse_to_wait_for_itself(self, owner: Owner, attempt: AcquireRound) -> None:
        lease, token = owner.lease, owner.token
        endless = self.thread_local and lease is not None and lease.is_endless
        if endless and token is not None and attempt.is_held_with(token):
            raise would_wait_for_itself(self._name, "task" if self._is_for_tasks else "thread")

    def _begin(
        self,
        options: Options,
        owner: Owner,
        majority: MajorityLease,
        asked_at: float,
        task: asyncio.Task[object] | None,
    ) -> None:
        """Begin the lease of a lock that is held on options.

        This comes before the token is noted: another caller that shares the owner must not release the lock without it.
        """
        before, owner.lease = owner.lease, None
        end_callback(self)
        if before is not None:
            end_lost(self, before, LossReason.DELETED)
        owner.lease = lease = RedlockLease(self, self._keys, majority, self._ttl_ms, options, self._quorum)
        lease.task = None if task is None else weakref.ref(task)
        self._keep(lease)
        waited_s = lease.acquired_at - asked_at
        lease.report_begin(waited_s, standing_of(owner).retries + 1)
        report_call(options, "acquired {} after", self._name, waited_s, lease.token)

    def _clean_up_unnoticed(self, owner: Owner, attempts: list[AcquireRound]) -> None:
        """Clean up after an acquire that has raised: the lock is not held.

        That may be an interrupt between the outcome and its return to the caller; or no thread can be started.
        """
        for attempt in attempts:
            self._forget(owner, attempt.token)
            self._quorum.clean_up_round(attempt)

    # ---- release ----

    def _releasing(self, owner: Owner) -> Steps:
        """Release the lock at all servers, as `release` does."""
        refuse_in_callback(self, "release", owner)
        majority = standing_of(owner).majority
        if majority is None:
            raise unlocked_error(self, UNLOCKED)
        lease = owner.held_lease
        if lease is not None:
            if leave_once(self, lease):
                return
            self._let_go(lease)
            if not lease.end():
                self._forget(owner, lease.token)
                report_release(self, lease, False)
                raise lost_error(self, "release", lease)
            if lease.expires_at is not None:
                majority.times = (majority.valid_until, min(majority.ends_at, lease.expires_at))
        new_standing_of(owner).round = round_ = self._release_round(majority)
        try:
            yield asking(self._quorum, round_)
        except asyncio.CancelledError:  # the caller has left the release, which goes on
            owner.left = majority.token
            if lease is not None:
                owner.lease = None
                report_release(self, lease, True)
            raise
        if not round_.refused and not round_.answered:
            raise self._error_of(round_)
        self._forget(owner, majority.token)
        if lease is not None:
            report_release(self, lease, not round_.refused)
        if round_.refused:
            if lease is None:
                raise self._not_owned("release")
            yield from raise_lost(self, "release", lease, by_release=True)

    def _release_round(self, majority: MajorityLease) -> ReleaseRound:
        votes = list(majority.refusals)
        before = majority.releasing
        doubtful = [before is not None] * len(votes)
        if before is not None:  # its votes count. Servers without a vote may have executed it, or were cleaned up.
            votes = [refusal if vote is None else vote for vote, refusal in zip(before.votes, votes, strict=True)]
        majority.releasing = ReleaseRound(self._keys, majority.token, majority.ends_at, self._limit_s, votes, doubtful)
        return majority.releasing

    # ---- extend, reacquire ----

    def _extending(self, owner: Owner, additional_time: float, replace_ttl: bool) -> Steps:
        """Add to the lease, or set its ttl."""
        add_ms = added_ms(additional_time, replace_ttl)
        majority = self._lease(owner, "extend")
        left_ms = 0 if replace_ttl else max(math.ceil((majority.ends_at - clock()) * 1000), 0)
        yield from self._prolonging(owner, majority, "extend", left_ms + add_ms)

    def _reacquiring(self, owner: Owner) -> Steps:
        """Set the lease back to its whole ttl."""
        yield from self._prolonging(owner, self._lease(owner, "reacquire"), "reacquire", self._ttl_ms)

    def _prolonging(self, owner: Owner, majority: MajorityLease, verb: str, ttl_ms: int) -> Steps:
        """Set the ttl of the lease. Where the lock was lost, the servers that still hold it are asked to release it."""
        lease = owner.held_lease
        if lease is not None:
            yield from self._prolonging_on_options(owner, lease, majority, verb, ttl_ms)
        elif not (yield from self._setting_lease(owner, majority, ttl_ms)):
            self._forget(owner, majority.token)
            yield asking(self._quorum, self._release_round(majority))
            raise self._not_owned(verb)

    def _prolonging_on_options(
        self, owner: Owner, lease: Lease, majority: MajorityLease, verb: str, ttl_ms: int
    ) -> Steps:
        if lease.loss is not None:
            raise lost_error(self, verb, lease)
        try:
            with lease.prolonged_by_hand(owner, ttl_ms):
                majority.times = (lease.deadline, majority.ends_at)
                try:
                    prolonged = yield from self._setting_lease(owner, majority, ttl_ms)
                finally:  # the drift of the usual ttl is added, which `Lease.deadline` subtracts
                    owner.expiry = (majority.token, majority.valid_until + drift_s(self._ttl_ms / 1000))
        except GeneratorExit:  # the task was dropped: the garbage collector runs this, outside of the loop
            raise
        except BaseException:
            if lease.loss is None:
                self._keep(lease)  # it may have made the lease shorter
            raise
        if not prolonged or lease.loss is not None:  # a loss that was reported meanwhile stands
            self._quorum.clean_up([lease.entry])
            yield from raise_lost(self, verb, lease)
        self._keep(lease)

    def _setting_lease(self, owner: Owner, majority: MajorityLease, ttl_ms: int) -> Steps:
        """Set the ttl of the lease. Returns False where the lock was lost.

        Where a majority agrees after the end of the lease, the lock was lost.
        """
        limit_s = max(min(self._limit_s, valid_s(ttl_ms)), 0.0)
        round_ = ReacquireRound(self._keys, majority.token, ttl_ms, limit_s, list(majority.refusals))
        new_standing_of(owner).round = round_
        if clock() < majority.valid_until:
            before = majority.shorten(ttl_ms)
            yield asking(self._quorum, round_)
            if round_.agreed and clock() < majority.valid_until:
                majority.renew(round_, before)
                return True
            if not round_.refused and clock() < majority.valid_until:
                raise self._error_of(round_)
        return False

    # ---- query ----

    def _reading(self, owner: Owner, token: bytes) -> Steps:
        """Returns whether a majority has the key with this token, or with any value for an empty token."""
        new_standing_of(owner).round = round_ = ReadRound(self._keys, token, self._limit_s)
        yield asking(self._quorum, round_)
        if not round_.decided:
            raise self._error_of(round_)
        return round_.agreed

    def _error_of(self, round_: MajorityRound, asked_at: float | None = None) -> Exception:
        """The error of a round with too few votes: a permanent error of a server, or how many servers have voted.

        `asked_at` is when the caller asked, in the clock's seconds, where the round was not the first.
        """
        errors = [error for error in round_.errors if error is not None]
        for error in errors:
            if isinstance(error, _PERMANENT):
                return redis_error(str(error)) if isinstance(error, Refused | Redirected) else own_copy(error)
        count = len(round_.votes)
        voted = count - round_.votes.count(None)
        took_s = clock() - (round_.began if asked_at is None else asked_at)
        message = (
            f"the lock {shown(self._name)}: only {voted} of {count} servers have voted within {round_.limit_s:g} s, "
            f"and the call took {took_s:.3f} s"
        )
        if not errors:
            return TimeoutError(message)
        if isinstance(errors[0], NotExecuted):
            return redis_error(str(errors[0]))
        return ConnectionError(f"{message}; the error of another one: {errors[0]}")

    # ---- loss ----

    def _not_owned(self, verb: str) -> LockNotOwnedError:
        return LockNotOwnedError(f"Cannot {verb} a lock that's no longer owned", lock_name=self._name)

    def _finding_out(self, lease: Lease) -> Steps:
        """Returns why the lock was lost. Sends `GET name` where the lease has not ended."""
        if clock() >= lease.deadline:
            return LossReason.EXPIRED
        round_ = TakenRound(self._keys, lease.token, self._limit_s)
        with contextlib.suppress(Exception):  # then the reason is not known
            yield asking(self._quorum, round_)
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


def _is_hopeless(round_: MajorityRound) -> bool:
    """Whether no majority can vote because of permanent errors."""
    errors = sum(isinstance(error, _PERMANENT) for error in round_.errors)
    return errors > len(round_.votes) // 2
