"""`Election` for asyncio: one leader among many processes, and who it is.

See https://redislock-fast.github.io/redislock_fast/how-to/election.html
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from redis.exceptions import LockError

from redislock_fast._election.loop import Body, Stop, beside, new_event, new_stop
from redislock_fast._election.observing import Observing
from redislock_fast._election.record import (
    Outage,
    check_callbacks,
    encoded,
    give_up,
    lost,
    no_term,
    read_leader,
    record_leader,
)
from redislock_fast._protocol.leading import Leader
from redislock_fast._util import fork
from redislock_fast._util.coroutines import awaited
from redislock_fast._util.errors import LockLostError, LossReason, shown
from redislock_fast.asyncio.lock import Lock

if TYPE_CHECKING:
    from typing import TypeAlias

    import redis.asyncio

    Client: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"

__all__ = ["Election", "Leader", "Term"]

logger = logging.getLogger("redislock_fast.election")

_CAMPAIGN_S = 1.0
"""How long a candidate waits in the lock's queue before it looks whether it was stopped, and joins it again."""

_PAUSE_S = 1.0
"""How long a candidate waits where the server is away."""


class Term:
    """One term of a leader: `Election.run` passes it to its function, `async with election.term()` gives it.

    Any task may ask about it.

    Attributes:
        number: of the term, higher than those of all earlier leaders: a fencing token; 0 before it has begun.
        stopping: an event that is set when the work must stop: the lease is in danger or lost, or the leader is to
            resign or stop. While the server answers, no other leader begins before the work has ended.
    """

    def __init__(self, election: Election) -> None:
        self._generation = fork.generation()
        self._election = election
        self.number = 0
        self.stopping = new_event()
        self._body = Body()
        self._lock = election._new_lock(on_danger=self._end_in_danger, on_lost=self._note_loss)  # noqa: SLF001  # of this very module
        self._reason: LossReason | None = None  # why it ends against the leader's will
        self._gives_up = False  # whether the lock is let go in the background, since its server may not answer
        self._has_started = False
        self._is_over = False

    @property
    def valid(self) -> bool:
        """Whether this is the present term, by the clock. Sends nothing."""
        return self.number > 0 and self._lock.valid

    def remaining(self) -> float:
        """How long the term certainly lasts unless it is renewed, in seconds. Sends nothing."""
        return self._lock.remaining()

    def ensure_held(self) -> None:
        """Return if this is the present term: where `valid` is true. Sends nothing.

        Raises:
            LockLostError: the term was lost.
            redis.exceptions.LockError: it has not begun, or has ended.
        """
        self._lock.ensure_held()

    def resign(self) -> None:
        """Set `stopping`. The next candidate leads as soon as the work has ended. Sends nothing."""
        self.stopping.set()

    def _end_in_danger(self, lock: Lock) -> object:
        """End the body while the lease still holds: at once, or by force when half of what is left has passed."""
        self._reason, self._gives_up = LossReason.SERVER_GONE, True
        self.stopping.set()
        self._body.end_within(lock.remaining() / 2)
        on_danger = self._election._on_danger  # noqa: SLF001  # of this very module
        return None if on_danger is None else on_danger(self)

    def _note_loss(self, lock: Lock, reason: LossReason) -> None:  # noqa: ARG002  # as `on_lost` is called
        self._reason = reason
        self.stopping.set()
        self._body.end()

    async def _begin(self) -> None:
        """Begin the term of a lock that was just acquired."""
        self._body.begin()
        self.number = self._lock.fence or 0  # first: a reader of the record may have it resign
        try:
            await self._lock._drive(record_leader(self._lock, self._election._value))  # noqa: SLF001  # of this package
        except BaseException as error:
            self._gives_up = True
            await self._leave(error)
            raise

    async def _leave(self, error: BaseException | None) -> None:
        """End the term, whose body has ended with this error.

        Raises:
            LockLostError: it was lost, and no other error has ended the body.
        """
        election = self._election
        was_cancelled = self._body.leave(error)
        self._is_over = True
        self.stopping.set()
        try:
            if self._has_started and election._on_stopped is not None:  # noqa: SLF001  # of this very module
                await awaited(election._on_stopped(self))  # noqa: SLF001  # as above
        except BaseException as failure:
            error = failure  # which the loss of the term must not replace: it may be a cancel
            raise
        finally:
            election._term = None  # noqa: SLF001  # as above
            await self._let_go(error)
        if was_cancelled:
            raise lost(election.name, self._reason or LossReason.EXPIRED) from error

    async def _let_go(self, error: BaseException | None) -> None:
        """Release the lock, in the background where its server is away.

        An error of that is only logged where the body has ended with another one.
        """
        if not self._gives_up:
            with Outage(self._election.name).survived():
                await self._lock.__aexit__(None if error is None else type(error), error, None)
                return
        try:
            give_up(self._lock)
        except LockLostError:
            if error is None:
                raise
            logger.warning("A term of the election %s was lost before its work had ended.", shown(self._lock.name))

    def _drop(self) -> None:
        """Have the lock be released in the background, if it is still held: nobody will do it."""
        if self._election._term is self:  # noqa: SLF001  # as above
            self._election._term = None  # noqa: SLF001  # as above
        with contextlib.suppress(LockError):  # mostly, it is not
            give_up(self._lock)

    async def __aenter__(self) -> Term:
        """Campaign, until this object leads.

        Raises:
            redis.exceptions.LockError: the election was stopped, or this object campaigns or leads already.
            LockLostError: the term was lost before it had begun.
            redis.exceptions.AuthenticationError: the server does not accept the client's user and password.
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
        """
        election = self._election
        if self._is_over:
            raise no_term(election.name, "this one has ended")
        if self._has_started:
            raise no_term(election.name, "this one has begun already")
        if not self.number and not await election._campaign(self):  # noqa: SLF001  # of this very module
            raise no_term(election.name, "it was stopped")
        try:
            self._has_started = True  # first: `on_stopped` is to be called also where `on_started` raises
            if election._on_started is not None:  # noqa: SLF001  # as above
                await awaited(election._on_started(self))  # noqa: SLF001  # as above
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the term: the next candidate leads. Sends what `Lock.release` sends.

        Raises:
            LockLostError: the term was lost, and no other error has ended the block.
            redis.exceptions.AuthenticationError: the server does not accept the client's user and password any more,
                and no other error has ended the block. The next candidate leads when the lease has ended.
        """
        await self._leave(exc_value)


class Election:
    """Has one process lead among all that campaign with this name: one scheduler, one consumer, a hot standby.

        election = Election(client, "beat", value="http://10.0.0.7:8000")
        await election.run(lead)  # calls lead(term) while this process leads, and campaigns again

    At most one leads at any time, as at most one holds a lock, by the same
    [guarantees](https://redislock-fast.github.io/redislock_fast/explanation/guarantees.html). Candidates wait in line.
    A leader that resigns is followed at once, one that was killed within `timeout`.

    Args:
        client: a `redis.asyncio.Redis` or `RedisCluster`; its settings are used, its connections are not.
        name: the key of the election's lock, bytes or str.
        timeout: for how long others wait at most after the leader's process has died, in seconds. The lease is renewed.
        value: what others may know of this process when it leads, such as its address: a str of 1024 bytes at most.
        sleep: how long a candidate sleeps between two health checks, and an observer between two looks where its server
            does not tell of new leaders, in seconds.
        max_stall: for how many seconds the event loop of a leader may not run until its term is renewed no more. None:
            three times `timeout`. As for `redislock_fast.asyncio.Lock`.
        on_started: called with the `Term` when it has begun, before its work.
        on_stopped: called with the `Term` when its work has ended, for each for which `on_started` was called, before
            another leader begins unless the term was lost.
        on_danger: called with the `Term` once, when `term.stopping` is set since its renewals keep failing: a third of
            `timeout` before the lease ends, as for `redislock_fast.asyncio.Lock`.
        on_new_leader: called with each new `Leader`, this process among them, while `run` runs: in the background.

    What these return is awaited where it is an awaitable.

    Raises:
        TypeError: for a pipeline or a client that blocks, or a wrong type.
        ValueError: for a `timeout` that is not above 0, or a `value` that is too long.
        redis.exceptions.DataError: for a `name` that redis-py cannot encode.
    """

    def __init__(
        self,
        client: Client,
        name: str | bytes,
        timeout: float = 15,
        value: str | None = None,
        *,
        sleep: float = 0.5,
        max_stall: float | None = None,
        on_started: Callable[[Term], object] | None = None,
        on_stopped: Callable[[Term], object] | None = None,
        on_danger: Callable[[Term], object] | None = None,
        on_new_leader: Callable[[Leader], object] | None = None,
    ) -> None:
        check_callbacks(on_started=on_started, on_stopped=on_stopped, on_danger=on_danger, on_new_leader=on_new_leader)
        self._value = encoded(value)
        self._new_lock = partial(
            Lock,
            client,
            name,
            timeout,
            sleep=sleep,
            thread_local=False,
            fencing=True,
            auto_renew=True,
            max_stall=max_stall,
        )
        self._sleep = sleep
        self._on_started = on_started
        self._on_stopped = on_stopped
        self._on_danger = on_danger
        self._on_new_leader = on_new_leader
        self._stopped = new_stop()
        self._term: Term | None = None  # the one for which this object campaigns, or which it leads
        self._lock: Lock = self._new_lock()  # by which it looks; it is never acquired

    @property
    def name(self) -> Any:
        """The key of the election's lock."""
        return self._lock.name

    # ---- lead ----

    async def run(self, lead: Callable[[Term], Awaitable[object]]) -> None:
        """Campaign, call `lead(term)` while this process leads, and campaign again, until `stop`.

        A term ends when `lead` returns. It must return soon after `term.stopping` was set.
        Where it does not while the lease is in danger, it is cancelled before the lease ends.

        Where the server is away, the campaign goes on, and that is logged once; so is each lost term.

        Raises:
            redis.exceptions.AuthenticationError: the server does not accept the client's user and password, or does so
                no more: that is no outage.
            redis.exceptions.ResponseError: the server's error, such as for a user who may not do this.
            Exception: what `lead`, `on_started` or `on_stopped` raises. The term ends before.
        """
        ended, outage = new_stop(), Outage(self.name)
        follows = self._on_new_leader is not None
        try:
            async with beside(partial(self._follow, ended)) if follows else contextlib.nullcontext():
                while not self._stopped.is_set():
                    await self._lead_once(lead, outage)
        finally:
            ended.set()

    async def _lead_once(self, lead: Callable[[Term], Awaitable[object]], outage: Outage) -> None:
        """Campaign once, and lead where this process was elected."""
        term = self.term()
        try:
            is_elected = False
            with outage.survived():
                is_elected = await self._campaign(term)
            if is_elected:
                async with term:
                    await awaited(lead(term))
        except LockLostError as error:
            if error.lock_name != self.name:  # of a lock that the work uses
                raise
            logger.warning("The election %s goes on: %s", shown(self.name), error)
        except GeneratorExit:  # the task was dropped: this may be any thread
            raise
        except BaseException:  # an interrupt may come before the block is entered, or as its end begins
            term._drop()  # noqa: SLF001  # of this very module
            raise
        if outage.is_met:
            await self._stopped.wait(_PAUSE_S)

    async def _campaign(self, term: Term) -> bool:
        """Wait in line until the lock is held, and begin the term. Returns False where the election was stopped."""
        if self._term is not None and self._term._generation == fork.generation():  # noqa: SLF001  # of this very module
            raise no_term(self.name, "this object campaigns or leads already")
        self._term = term
        try:
            while not self._stopped.is_set():
                if await term._lock.acquire(blocking_timeout=_CAMPAIGN_S):  # noqa: SLF001  # of this very module
                    await term._begin()  # noqa: SLF001  # as above
                    return True
        except BaseException:
            self._term = None
            raise
        self._term = None
        return False

    def term(self) -> Term:
        """One term, for an `async with` block: `async with election.term() as term: ...`.

        The block begins when this process leads, and its end hands over. It must end soon after `term.stopping` was
        set.
        Where it does not while the lease is in danger, it is cancelled before the lease ends.

        A block whose term was lost, or that was cancelled so, raises LockLostError, unless another error has ended it.
        """
        return Term(self)

    def resign(self) -> None:
        """Have the leader's work end, by `term.stopping`, if this object leads: then the next candidate leads.

        `run` campaigns again: this process stands in line last. Sends nothing.
        """
        term = self._term
        if term is not None and term.number:
            term.resign()

    def stop(self) -> None:
        """End `run` and `observe`: resign if this object leads, and campaign no more, forever. Sends nothing.

        A campaign ends within a second.
        """
        self._stopped.set()
        term = self._term
        if term is not None:
            term.stopping.set()

    # ---- look ----

    @property
    def is_leader(self) -> bool:
        """Whether this object leads, by the clock: at most one in all processes does. Sends nothing."""
        term = self._term
        return term is not None and term.valid

    async def leader(self) -> Leader | None:
        """Tell who leads. Sends `HMGET`, `GET`, `TIME` and `CLIENT LIST` in one piece.

        Returns:
            The leader; None where there is none, or has been none for a moment.

        Raises:
            redis.exceptions.ConnectionError: no connection, after the client's retries.
            redis.exceptions.TimeoutError: no reply in time.
            redis.exceptions.ResponseError: the server's error.
        """
        leader: Leader | None = await self._lock._drive(read_leader(self._lock._key, with_process=True))  # noqa: SLF001  # of this package
        return leader

    def observe(self) -> AsyncIterator[Leader]:
        """Yield the present leader and each new one, until `stop`, within a second of that. The terms strictly rise.

        The server tells of each new leader, by client tracking. Where it does not, this looks every `sleep` seconds. A
        leader of a very short time may not be seen. Where the server is away, it waits until that is there again.

        Sends `HMGET` and `GET`, after `CLIENT TRACKING` and `CLIENT CACHING`, once in 15 seconds and for each new
        leader, and then what `leader` sends.

        Raises:
            redis.exceptions.ResponseError: the server's error.
        """
        return self._observed(self._stopped)

    async def _observed(self, until: Stop) -> AsyncIterator[Leader]:
        outage, observing = Outage(self.name), Observing(self._lock, until)
        while not until.is_set():
            leader = None
            with outage.survived():
                leader = await self._lock._drive(observing.steps())  # noqa: SLF001  # of this package
            if leader is None:
                await until.wait(self._sleep)
            else:
                yield leader

    async def _follow(self, ended: Stop) -> None:
        """Call `on_new_leader` for each new leader."""
        assert self._on_new_leader is not None
        try:
            async for leader in self._observed(ended):
                try:
                    await awaited(self._on_new_leader(leader))
                except Exception:
                    logger.exception("on_new_leader failed for the election %s.", shown(self.name))
        except Exception:
            logger.exception("The leaders of the election %s are not observed any more.", shown(self.name))

    def __repr__(self) -> str:
        """The name, and whether this object leads. Sends nothing."""
        term = self._term
        return f"<Election {self.name!r}: {f'leads, term {term.number}' if term and term.valid else 'does not lead'}>"
