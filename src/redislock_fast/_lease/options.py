"""The options with which a lock is held, beyond redis-py's.

Rules: options that do not go together are refused when the lock is made, before anything is sent. They never change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import positive_ms

if TYPE_CHECKING:
    from typing import TypedDict

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.metrics import Metrics

__all__ = ["Breaker", "Options", "refuse_unknown"]


class Breaker(Protocol):
    """The part of a circuit breaker that is used; pybreaker's `CircuitBreaker` has it."""

    def calling(self) -> AbstractContextManager[Any]:
        """A context manager: entered to make a call, left with the call's error or without one."""


if TYPE_CHECKING:  # at run time, it would only add to the import time

    class OptionSettings(TypedDict, total=False):
        """The parameters of `Options`, as a lock takes them."""

        auto_renew: bool
        max_hold: float | None
        on_lost: Callable[[Any, LossReason], Any] | None
        cancel_on_lost: bool
        fencing: bool
        reentrant: bool
        wait_replicas: int
        wait_timeout: float | None
        breaker: Breaker | None
        metrics: Metrics | None


_OTHERS = ("timeout", "sleep", "blocking", "blocking_timeout", "thread_local", "raise_on_release_error", "wait")
"""The parameters of a lock that are no options, but may be meant by a name that is none."""


def refuse_unknown(lock_class: type, options: Iterable[str]) -> None:
    """Check that these are names of options.

    Raises:
        TypeError: for another name. It tells the public class, and the parameter that may be meant.
    """
    known = [name for name in Options.__init__.__kwdefaults__ or () if name != "adaptive"]
    for name in options:
        if name not in known:
            import difflib  # noqa: PLC0415  # for this error alone

            near = difflib.get_close_matches(name, [*known, *_OTHERS], 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{lock_class.__name__}() got an unexpected keyword argument {name!r}{hint}")


class Options:
    """The options of one lock.

    The parameters are those of `redislock_fast.Lock`.

    Attributes:
        max_hold_s: after how many seconds at most the lock ends; None: it is renewed as long as it is held.
        wait_ms: how many milliseconds to wait for the replicas.

    Raises:
        TypeError: for an unknown parameter, or one of the wrong kind.
        ValueError: for options that do not go together, or an impossible time.
    """

    def __init__(
        self,
        *,
        adaptive: AdaptiveTTL | None = None,
        auto_renew: bool = False,
        max_hold: float | None = None,
        on_lost: Callable[[Any, LossReason], Any] | None = None,
        cancel_on_lost: bool = False,
        fencing: bool = False,
        reentrant: bool = False,
        wait_replicas: int = 0,
        wait_timeout: float | None = None,
        breaker: Breaker | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        if max_hold is not None and not auto_renew:
            raise ValueError("max_hold limits how long a lock is renewed: it needs auto_renew=True")
        if not (on_lost is None or callable(on_lost)):
            raise TypeError(f"on_lost is not callable: {on_lost!r}")
        if operator.index(wait_replicas) < 0:
            raise ValueError(f"wait_replicas must be 0 or more, not {wait_replicas!r}")
        if bool(wait_replicas) != (wait_timeout is not None):
            raise ValueError("wait_replicas and wait_timeout (in seconds) go together")
        if breaker is not None and not hasattr(breaker, "calling"):
            raise TypeError(f"breaker needs pybreaker's calling(), which {type(breaker).__name__} does not have")
        for method in () if metrics is None else ("record_acquisition", "record_release"):
            if not callable(getattr(metrics, method, None)):
                raise TypeError(f"metrics needs {method}(), which {type(metrics).__name__} does not have")
        self.adaptive = adaptive
        self.auto_renew = bool(auto_renew)
        self.max_hold_s = None if max_hold is None else positive_ms(max_hold, "max_hold") / 1000
        self.on_lost = on_lost
        self.cancel_on_lost = bool(cancel_on_lost)
        self.fencing = bool(fencing)
        self.reentrant = bool(reentrant)
        self.wait_replicas = wait_replicas
        self.wait_ms = 0 if wait_timeout is None else positive_ms(wait_timeout, "wait_timeout")
        self.breaker = breaker
        self.metrics = metrics

    @property
    def watches(self) -> bool:
        """Whether a loss must be prevented or reported."""
        return self.auto_renew or self.on_lost is not None or self.cancel_on_lost

    def check(self, ttl_ms: int | None, thread_local: bool, for_tasks: bool) -> None:
        """Check that a lock can be held with these options.

        Args:
            ttl_ms: its ttl in milliseconds; None: it does not expire.
            thread_local: whether it belongs to one thread or task.
            for_tasks: whether it is an asyncio lock.

        Raises:
            ValueError: it cannot.
        """
        if self.cancel_on_lost and not for_tasks:
            raise ValueError("cancel_on_lost cancels a task, and this lock is not an asyncio lock: use on_lost")
        if self.auto_renew and ttl_ms is None:
            raise ValueError("auto_renew needs a timeout: a lock that does not expire is not renewed")
        if self.max_hold_s is not None and ttl_ms is not None and self.max_hold_s * 1000 < ttl_ms:
            raise ValueError("max_hold is shorter than the timeout")
        if self.wait_replicas and ttl_ms is None:
            raise ValueError("wait_replicas needs a timeout: a lock that is not replicated must expire")
        if ttl_ms is not None and self.wait_ms >= ttl_ms:
            raise ValueError("wait_timeout must be shorter than the timeout, or the lock ends while it is replicated")
        if self.reentrant and not thread_local:
            raise ValueError("a reentrant lock belongs to one thread or task: it needs thread_local=True")
