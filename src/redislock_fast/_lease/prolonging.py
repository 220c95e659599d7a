"""Until when a lease is certainly valid while several requests prolong it at once.

The times and the order in which the server executes the requests are not known. These facts are certain:

- The request that was executed last was executed after each of the others was sent. So a lease that it set ends no
  earlier than its ttl after the latest of these times.
- A request that ended before another one began was executed before that one: it cannot be the last.
- A request that adds to the ttl makes no lease shorter. The addition counts if no ttl was set while it was under way.
- A request that adds and is sent again because its reply did not come may cut the lease to the end that it computed
  first. So may a request without scripts, which sets the end that it has computed.

Thread safety: all callers that share an owner begin and end requests, under the owner's mutex.

`mutex` is for the few fields of leases that their owners and the renewer change, and for numbers of metrics. No call is
made under it: so no signal handler, finalizer or other thread runs Python code while a thread has it (CPython looks for
them in calls and loops alone), and none can wait for it. A forked child has another one.
"""

from __future__ import annotations

import math
import threading

from redislock_fast._util import fork, patching


class _Mutex:
    """Held for a few assignments; another one in a forked child, and after a patch of `threading`."""

    def __init__(self) -> None:
        self.new()
        fork.on_fork(self.new)
        patching.on_patch(self.new)

    def new(self) -> None:
        self.lock = threading.RLock()


mutex = _Mutex()


class Prolonging:
    """A request under way. Times are in the clock's seconds.

    Args:
        now: the clock's time.
        ttl_s: the ttl that it sets, in seconds; None: it adds to the ttl.
        ends_at: when the lease ends after the addition; `math.inf` where that is not known.

    Attributes:
        shortest_s: the shortest ttl that another request has set meanwhile, in seconds.
        cut_to: the earliest end to which something else has cut the lease meanwhile.
    """

    __slots__ = ("began_at", "cut_to", "ends_at", "shortest_s", "ttl_s")

    def __init__(self, now: float, ttl_s: float | None, ends_at: float) -> None:
        self.began_at = now
        self.ttl_s = ttl_s
        self.ends_at = ends_at
        self.shortest_s = math.inf
        self.cut_to = math.inf

    def leaves(self, asked_at: float) -> float:
        """The earliest end of the lease if this request is executed last."""
        return self.ends_at if self.ttl_s is None else max(self.began_at, asked_at) + self.ttl_s


class Prolongings:
    """The requests under way that prolong one lease. To be used under the mutex of the owner.

    Args:
        token: the lease's token.
        ends_at: until when it is certainly valid, in the clock's seconds; None where that is not known.

    Attributes:
        under_way: the requests.
    """

    def __init__(self, token: bytes, ends_at: float | None) -> None:
        self.token = token
        self.under_way: list[Prolonging] = []
        self._ends_at = ends_at
        self._asked_at = -math.inf  # when the latest of the requests that have set a ttl was sent

    def begin(self, now: float, ttl_s: float | None, added_s: float) -> Prolonging:
        """Add a request that begins: it sets a ttl, or adds to it."""
        so_far = self.ends_at
        one = Prolonging(now, ttl_s, math.inf if so_far is None else so_far + added_s)
        self.under_way.append(one)
        return one

    def set(self, one: Prolonging, sent_at: float, is_certain: bool) -> None:
        """Note that a request that sets a ttl was executed, certainly or perhaps."""
        assert one.ttl_s is not None
        ttl_s = one.ttl_s
        for other in self.under_way:
            other.shortest_s = min(other.shortest_s, ttl_s)
        if is_certain:
            self._asked_at = max(self._asked_at, sent_at)
            self._ends_at = min(self._asked_at + min(ttl_s, one.shortest_s), one.cut_to)
        elif self._ends_at is not None:
            self._ends_at = min(self._ends_at, max(self._asked_at, sent_at) + ttl_s)

    def add(self, one: Prolonging, added_s: float, ends_at: float | None, may_cut: bool) -> None:
        """Note that a request that adds to the ttl was executed, and when the lease ends by its reply."""
        if self._ends_at is None:
            self._ends_at = ends_at
        elif one.shortest_s == one.cut_to == math.inf:
            self._ends_at += added_s
        if may_cut and ends_at is not None:
            self.cut(ends_at)

    def cut(self, ends_at: float) -> None:
        """Note that something else has set or cut the end of the lease."""
        self._ends_at = ends_at if self._ends_at is None else min(self._ends_at, ends_at)
        for other in self.under_way:
            other.cut_to = min(other.cut_to, ends_at)

    @property
    def ends_at(self) -> float | None:
        """Until when the lease is certainly valid, whichever of the requests under way were executed."""
        if self._ends_at is None or not self.under_way:
            return self._ends_at
        return min([self._ends_at, *(one.leaves(self._asked_at) for one in self.under_way)])
