"""A simulation of a semaphore: callers in a few processes, a lossy world between them and the server.

Each caller acquires, holds, renews and releases permits for some rounds, by the library's own machines, and an operator
resizes the semaphore meanwhile. It is the simulation of waiting with other callers and other invariants.

    python -m tests.simulation.semaphores --seeds 100000 --jobs 2
    python -m tests.simulation.semaphores --seed 4711 -v
"""

from __future__ import annotations

import math
from typing import Any

from redislock_fast._pipe.base import Args, Reply
from redislock_fast._protocol.commands import Reacquire
from redislock_fast._protocol.keys import permit_keys
from redislock_fast._protocol.permits import AcquirePermit, ReleasePermit, Resize, acquire_permit
from redislock_fast._protocol.scripts import ACQUIRE_PERMIT, FOR_PERMITS, LEAVE, REACQUIRE, RELEASE, RESIZE, WAIT
from redislock_fast._protocol.steps import Do, Steps
from tests.simulation import model, waiting
from tests.simulation.faults import FAULTS, Faults
from tests.simulation.policies import PermitPolicy
from tests.simulation.process import Cancelled, Process, Trouble
from tests.simulation.seeds import main
from tests.simulation.waiters import KEY, BatchLease, Waiter
from tests.simulation.waiting import QUEUE
from tests.simulation.world import SERVER_STARTED_US

_LIMIT = permit_keys(KEY)[2]
_RENEW = FOR_PERMITS[REACQUIRE.sha]
_GRANTING = (ACQUIRE_PERMIT, FOR_PERMITS[WAIT.sha], FOR_PERMITS[LEAVE.sha], FOR_PERMITS[RELEASE.sha], RESIZE)
_NO_MESSAGES = frozenset({"PUBLISH", "PUBSUB"})
_HANDED_ON_MS = 20
_QUIET_US = 40_000_000
"""How long the cleanups go on after the last caller has ended: their pauses double up to 30 s."""


class Caller(Waiter):
    """Acquires, holds, renews and releases permits.

    Attributes:
        limit: its own.
        ttl_ms: of its permits.
        waits: whether it waits for a permit.
    """

    release_kind = ReleasePermit
    ttl_ms: int

    def __init__(self, simulation: Simulation, process: Process, number: int) -> None:
        super().__init__(simulation, process, number)
        rng = simulation.rng
        self.custom = False
        self.limit = simulation.limit if simulation.one_limit else 1 + int(3 * rng.random())
        if not simulation.one_ttl:
            self.ttl_ms = rng.choice(simulation.ttls_ms)
        self.waits = rng.random() < 0.85

    @property
    def attempt_kind(self) -> type[AcquirePermit]:
        return acquire_permit(self.limit)

    def _acquire(self, token: bytes, ttl_ms: int | None, deadline: float | None) -> Steps:
        if self.waits:
            return (yield from super()._acquire(token, ttl_ms, deadline))
        attempt = self.attempt_kind(KEY, token, ttl_ms)
        yield Do("execute", attempt)
        return attempt.sent_at if attempt.result else None, False

    def _hold(self, hold: BatchLease, queued: bool) -> Steps:
        """Hold for a while, which may be longer than the ttl, and renew meanwhile."""
        simulation, world, rng = self.simulation, self.simulation.world, self.simulation.rng
        ttl_s = self.ttl_ms / 1000
        hold_s = simulation.hold_s * rng.random() ** 3 + (2 * ttl_s * rng.random() if rng.random() < 0.1 else 0.0)
        ends_at, stops = world.clock() + hold_s, rng.random() < 0.07
        while (left_s := ends_at - world.clock()) > 1e-6 and not stops:
            yield Do("sleep", min(left_s, ttl_s / 3))
            stops = left_s > ttl_s / 3 and not (yield from self._renew(hold, queued))
        if not stops:
            return True
        self.state = "lost"  # neither renews nor releases
        yield Do("sleep", ttl_s * 1.5)
        simulation.let_go(self)
        return False

    def _renew(self, hold: BatchLease, queued: bool) -> Steps:
        """Renew. Returns whether the permit may still be held."""
        assert hold.ends_us is not None
        left_s = hold.ends_us / 1e6 - self.simulation.world.clock()
        if left_s > 0:
            renewal = Reacquire(KEY, self.token, self.ttl_ms, queued)
            try:
                yield Do("execute", renewal, left_s)
            except Trouble:
                return self.simulation.world.clock() < hold.ends_us / 1e6
            self.simulation.note_reacquire(hold, renewal)
            return renewal.result
        return False


class Simulation(waiting.Simulation):
    """One seed's story.

    Invariants:
        - Limit: a permit is granted only where, with it, no more permits have an end in the future than its limit: the
          operator's, or else that of the caller. A renewal grants none.
        - Belief: no more callers hold within their leases than the highest limit by which one of them was granted its
          permit. (Not where an operator deleted the key since.)
        - Truth: each caller that holds within its lease has a permit on the server. (With the same exception.)
        - No caller believes in more of a lease than the server grants.
        - Order: no permit is granted while one that can be told has an earlier place in the queue, and none without a
          place while anybody is in the queue.
        - No permit is left behind, no permit is handed to a waiter whose connection is gone, no sleeper is at the head
          of the queue after a health check, no old lease is taken, and no waiter is forgotten: as for locks.
        - The key ends with the last permit, and no waiter is left in the queue.
        - In a calm world in which all callers have one limit, nothing is free after a request while a waiter is in the
          queue, and a permit that ends is handed on within 20 ms if all have one ttl, too.
    """

    ttls_ms = (40, 150, 1000, 10_000)
    _ttls_ms = ttls_ms
    _calm_ttls_ms = (300, 10_000)
    _wait = FOR_PERMITS[WAIT.sha]

    def __init__(self, seed: int, tells: bool = False, **options: Any) -> None:
        self.one_limit = self.one_ttl = True
        self.limit = 1
        self.live: dict[bytes, int] = {}  # by token: the end of its permit by the server, as far as it was looked at
        self._limits: dict[bytes, int] = {}  # by token: the limit by which it was granted
        self._waited: dict[bytes, int] = {}  # the queue when it was last looked at
        self._most = 0  # the limit of its first
        self._free_since_ms: int | None = None
        self._forgotten_since_us = 0
        super().__init__(seed, tells, **options)
        self._operator = operator = Process(self.world, "operator")
        for number in range(int(4 * self.rng.random())):
            operator.start(f"operator {number}", self._resizing())

    def _new_faults(self) -> Faults:
        rng = self.rng
        self.limit = 1 + int(3 * rng.random())
        self.one_limit = rng.random() < 0.7
        self.one_ttl = rng.random() < 0.6
        return Faults(self, FAULTS, has_rival=False)

    def _new_waiter(self, process: Process, number: int) -> Caller:
        return Caller(self, process, number)

    def new_token(self) -> bytes:
        self._tokens += 1
        token = b"rlf:%011x2%020x" % (0, self._tokens)
        running = self.world.running
        if running is not None and isinstance(running.owner, Caller):
            self.owners[token] = [running.owner]
        return token

    def _resizing(self) -> Steps:
        yield Do("sleep", 0.2 * self.rng.random())
        resize = Resize(KEY, self.rng.choice((None, 1, 2, 3, 4)))
        try:
            yield Do("execute", resize)
        except (Trouble, Cancelled) as error:
            self.world.tell("the operator gave up:", str(error))

    # ---- what is noted ----

    def _count(self, args: Args, reply: Reply) -> None:
        if args[1] not in RESIZE and args[1] not in _RENEW:
            super()._count(args, reply)

    def _permits(self) -> dict[bytes, int]:
        """The permits that have not ended, by the server."""
        entry, policy = self.model.entry(KEY), PermitPolicy(self.model, KEY, _LIMIT)
        if entry is None or entry.value is not None:
            return {}
        return {token: ends_at_ms for token, ends_at_ms in entry.items.items() if policy.held(token)}

    def _limit_of(self, token: bytes) -> int:
        """The limit by which this token would be granted a permit now."""
        limit = self.model.entry(_LIMIT)
        if limit is not None and limit.value is not None:
            return int(limit.value)
        owners = self.owners.get(token)
        assert owners, token
        caller = owners[0]
        assert isinstance(caller, Caller)
        return caller.limit

    def _note_served(self, process: Process, args: Args, reply: Reply) -> None:
        known, waited, now_ms = self.live, self._waited, self.model.now_ms
        before = {token: ends_at_ms for token, ends_at_ms in known.items() if ends_at_ms >= now_ms}
        free_since_ms = self._free_since(known)
        self.look()
        granted = self.live.keys() - before.keys()
        if granted:
            self._check_grants(process, args, len(self.live) - len(granted), granted, waited)
        if reply == 1 and (args[1] in _RENEW or args[1] in ACQUIRE_PERMIT):
            self._confirmed_us[self._token_in(args)] = self.model.now_us
        if not (self.calm and self.one_limit):
            return
        if self.one_ttl and free_since_ms is not None and waited.keys() & granted:
            late_ms = now_ms - free_since_ms
            if late_ms > _HANDED_ON_MS:
                self.fail(f"a permit was handed on {late_ms} ms after another had ended")
        is_free = self._is_free()
        if is_free and free_since_ms is None and model._MOST_PASSES > 1:  # else a script hands over one permit
            self.fail("a permit is free, and a waiter is in the queue")
        self._free_since_ms = free_since_ms if is_free else None

    def look(self) -> None:
        """Note which permits there are now, and who waits."""
        now = self._permits()
        for token in now.keys() - self.live.keys():
            self._granted_us[token] = self._confirmed_us[token] = self.model.now_us
        self.live = now
        self._waited = dict(self.model._items(QUEUE))
        self._most = self._limit_of(self._first()) if self._waited else 0

    def _first(self) -> bytes:
        """The first in the queue, which is not empty."""
        return min(self._waited, key=lambda token: (self._waited[token], token))

    def _is_free(self) -> bool:
        """Whether the first in the queue may have a permit."""
        return len(self._waited) > 0 and len(self.live) < self._most

    def _free_since(self, known: dict[bytes, int]) -> int | None:
        """Since when the first in the queue might have a permit, in the server's ms; None: it may not.

        Args:
            known: the permits that there were before this request.
        """
        if self._free_since_ms is not None or not self._waited:
            return self._free_since_ms
        ends_at_ms = sorted(known.values())[max(len(known) - self._most, 0)] if known else self.model.now_ms
        return ends_at_ms if ends_at_ms < self.model.now_ms else None

    def _check_grants(
        self, process: Process, args: Args, held: int, granted: set[bytes], waited: dict[bytes, int]
    ) -> None:
        """Check that these might have permits, after so many others."""
        now_us = self.model.now_us
        if not any(args[1] in script for script in _GRANTING):
            self.fail(f"a permit was granted by {args[1]!r}")
        for token in granted:
            self._granted_us[token] = self._confirmed_us[token] = now_us
            self._limits[token] = self._limit_of(token)
            self._places.pop(token, None)
            self._grants += 1
        for number, limit in enumerate(sorted(self._limits[token] for token in granted), held + 1):
            if number > limit:
                self.fail(f"{number} hold, and {limit} may")
        first_us = min(self._waited.values(), default=now_us)
        for token in granted:
            is_told = token not in args
            is_overtaking = first_us < waited.get(token, now_us) or (args[1] in ACQUIRE_PERMIT and not is_told)
            if is_overtaking and self._waited and not process.denied & _NO_MESSAGES:
                self.fail(f"{token!r} overtook a waiter")
            if is_told and not any(owner.process.connections for owner in self.owners[token]):
                self.fail(f"granted to {token!r}, whose connection is gone")

    # ---- the invariants ----

    def _has(self, token: bytes) -> bool:
        return token in self._permits()

    def check_exclusion(self, new: BatchLease) -> None:
        others = [hold for hold in self.holds.values() if self._is_valid(hold)]
        most = max(self._limits[hold.token] for hold in (*others, new))
        if self._is_valid(new) and len(others) >= most:
            self.fail(f"{new.who} holds, and so do {', '.join(hold.who for hold in others)}")

    def _check_lease(self, hold: BatchLease) -> None:
        ends_at_ms = self._permits().get(hold.token)
        if ends_at_ms is None or not self._is_valid(hold):
            return
        ends_us = ends_at_ms * 1000 + 1000 - SERVER_STARTED_US
        if hold.ends_us is None or hold.ends_us > ends_us:
            self.fail(f"{hold.who} believes in a lease until {hold.ends_us}, and it ends at {ends_us}")

    def note_release(self, hold: BatchLease, release: Any) -> None:
        super().note_release(hold, release)
        if not release.result and self._is_valid(hold):
            self.fail(f"the release of {hold.who} says that it did not hold")

    def _check(self) -> None:
        self.world.set_server_clock()
        permits = self._permits()
        for hold in self.holds.values():
            if hold.token not in permits and self._is_valid(hold):
                self.fail(f"{hold.who} holds, and the server does not say so")
        for token in permits:
            self._check_whether_left(token)
        self._check_whether_forgotten(permits)

    def _check_whether_forgotten(self, permits: dict[bytes, int]) -> None:
        """Check that the first in the queue does not wait for long for what is free."""
        world, now_us = self.world, self.world.now_us
        if not self._waited or len(permits) >= self._most or not self._can_be_told(self._first()):
            self._forgotten_since_us = now_us
        slack_us = 20_000 if self.calm else 1_100_000 + 8 * world.slow_us
        most_us = 5e6 * self.interval_s + 8 * world.latency_us + slack_us
        waits_us = now_us - max(self._forgotten_since_us, self._faults.end_us)
        if waits_us > most_us:
            self.fail(f"{self._first()!r} waits for {waits_us} us for what is free")
        for token in permits:
            since_us = max(self._granted_us[token] - SERVER_STARTED_US, self._faults.end_us)
            if now_us - since_us > most_us * len(self.waiters) and self._can_be_told(token):
                self.fail(f"{token!r} has a permit for {now_us - since_us} us and was not told")

    def _can_be_told(self, token: bytes) -> bool:
        caller = self.owners[token][0]
        process = caller.process
        is_here = not process.dead and process.connection is not None and not process.denied
        return is_here and caller.state == "waiting" and caller.waiting is not None and caller.waiting.token == token

    def _longest_use_s(self) -> float:
        return 4 * max(self.ttls_ms if not self.one_ttl else (self.ttl_ms or 0,)) / 1000 + self.hold_s

    def _check_thrift(self) -> None:
        """Check that the waiters of a calm world do not ask more often than is useful."""
        seconds = self.world.now_us / 1e6
        ends = 3000 * seconds / self.ttl_ms if self.ttl_ms else 0
        looks = len(self.processes) * (1 + seconds / self.interval_s + ends) + self._grants
        if self._looks > looks:
            self.fail(f"{self._looks} looks, and {looks} would have done")

    def _check_end(self) -> None:
        world = self.world
        quiet_us = world.now_us + _QUIET_US
        while world.now_us < quiet_us and world.step():
            if world.changed:
                world.changed = False
                self._check()
        world.set_server_clock()
        entry = self.model.entry(KEY)
        if entry is not None:
            left_ms = math.inf if entry.ends_at_ms is None else entry.ends_at_ms - self.model.now_ms
            if left_ms > max(self.ttls_ms):
                self.fail(f"the key outlives all permits by {left_ms} ms")
            if max(entry.items.values(), default=0) > self.model.now_ms + left_ms:
                self.fail("the key ends before a permit")
        for token in self.model._items(QUEUE):
            self._check_whether_left(token)


if __name__ == "__main__":
    raise SystemExit(main(Simulation, __doc__))
