"""The options with which a lock is held, beyond redis-py's.

Rules: options that do not go together are refused when the lock is made, before anything is sent. They never change.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from redislock_fast._lease.logs import CALL_LOG, logs_calls
from redislock_fast._lease.metrics import Reports, installed
from redislock_fast._util.errors import LossReason
from redislock_fast._util.times import positive_ms

if TYPE_CHECKING:
    from typing import TypedDict

    from redislock_fast._lease.adaptive import AdaptiveTTL
    from redislock_fast._lease.breaker import Breaker
    from redislock_fast._lease.metrics import Metrics

_Method = TypeVar("_Method", bound=Callable[..., Any])

_NOT_SHOWN = ("adaptive", "unknown")  # an adaptive ttl is the `timeout`

_MEANT = {
    **dict.fromkeys(("ttl", "expire", "expires", "expires_in", "expiry", "ex", "lease", "lock_timeout"), "timeout"),
    **dict.fromkeys(("acquire_timeout", "wait_for", "max_wait"), "blocking_timeout"),
    **dict.fromkeys(("renew", "auto_renewal", "auto_extend"), "auto_renew"),
}
"""What other libraries of locks call a parameter, and its name here."""


if TYPE_CHECKING:  # at run time, it would only add to the import time
    Lock = TypeVar("Lock")

    class OptionSettings(TypedDict, Generic[Lock], total=False):
        """The parameters of `Options`, as a lock takes them."""

        auto_renew: bool | Literal["loop"]
        max_stall: float | None
        max_hold: float | None
        on_lost: Callable[[Lock, LossReason], object] | None
        cancel_on_lost: bool
        fencing: bool
        reentrant: bool
        wait_replicas: int
        wait_timeout: float | None
        breaker: Breaker | None
        metrics: Metrics | None
        linger: float | None
        on_wanted: Callable[[Lock], object] | None
        on_danger: Callable[[Lock], object] | None


def refuse_unknown(public_name: str, options: Iterable[str], method: Any) -> None:
    """Check that these are parameters of the method or, where it takes options, of `Options`.

    Raises:
        TypeError: for another name. It tells the public name, and the parameter that may be meant.
    """
    known = parameters_of(method)
    for name in options:
        if name not in known:
            import difflib  # noqa: PLC0415  # for this error alone

            meant = _MEANT.get(name)
            near = [meant] if meant in known else difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{public_name}() got an unexpected keyword argument {name!r}{hint}")


@lru_cache
def parameters_of(init: Any) -> dict[str, inspect.Parameter]:
    """The parameters by which a public method takes settings, with each option in the place of `**options`."""
    parameters = dict(inspect.signature(init).parameters)
    if parameters.pop("options", None) is not None:
        parameters.update(inspect.signature(Options.__init__).parameters)
    return {name: parameter for name, parameter in parameters.items() if name not in _NOT_SHOWN}


def spelled_out(public_name: str | None = None) -> Callable[[_Method], _Method]:
    """Have `help` and editors show what a method takes by `**options` or refuses by `**unknown`, and errors its class.

    The method itself keeps `**options`: a lock is often made for one use, and each parameter costs 10 ns.

    Args:
        public_name: of the class; None for a function.
    """

    def spell_out(method: _Method) -> _Method:
        vars(method)["__signature__"] = inspect.Signature(list(parameters_of(method).values()))
        if public_name is not None:
            method.__qualname__ = f"{public_name}.{method.__name__}"  # Python's errors for wrong arguments have it
        return method

    return spell_out


def takes_no_timeout(acquire: _Method) -> _Method:
    """Have `help` and mocks not show the parameter `timeout` of an `acquire`, which is there to be refused."""
    signature = inspect.signature(acquire)
    shown = [parameter for parameter in signature.parameters.values() if parameter.name != "timeout"]
    vars(acquire)["__signature__"] = signature.replace(parameters=shown)
    return acquire


def wrong_timeout(lock: Any) -> TypeError:
    """The error for an `acquire` with a `timeout`, as locks of threads have it."""
    where = f"{type(lock).__name__}.acquire()"
    return TypeError(f"{where} got an unexpected keyword argument 'timeout': did you mean 'blocking_timeout'?")


def check_callback(name: str, callback: object) -> None:
    """Check that the callback of this name is None or can be called.

    Raises:
        TypeError: it cannot.
    """
    if not (callback is None or callable(callback)):
        raise TypeError(f"{name} is not callable: {callback!r}")


def linger_ms_of(linger: float | None, ttl_ms: int | None) -> int | None:
    """For how many milliseconds a released key lingers; None for None and 0: it is released at once.

    Args:
        linger: the same in seconds.
        ttl_ms: of the lock, in milliseconds; None: it does not expire.

    Raises:
        TypeError: for a value that is not a number.
        ValueError: for a number that is negative or not finite, or a lock that does not expire.
    """
    if linger is None or linger == 0:
        return None
    if ttl_ms is None:
        raise ValueError("linger needs a timeout: a key that lingers in a process that dies must expire")
    return positive_ms(linger, "linger")


def _check_renewal(auto_renew: object, max_stall: object, max_hold: object, on_danger: object) -> None:
    """Check that the options of renewal go together.

    Raises:
        ValueError: they do not.
    """
    if isinstance(auto_renew, str) and auto_renew != "loop":
        raise ValueError(f"auto_renew must be True, False or 'loop', not {auto_renew!r}")
    if max_stall is not None and (not auto_renew or auto_renew == "loop"):
        raise ValueError("max_stall limits how long a thread renews for a stalled loop: it needs auto_renew=True")
    if max_hold is not None and not auto_renew:
        raise ValueError("max_hold limits how long a lock is renewed: it needs auto_renew=True")
    if on_danger is not None and not auto_renew:
        raise ValueError("on_danger tells that renewals fail: it needs auto_renew=True")


def _is_given(option: object) -> bool:
    return option is not None


class Options:
    """The options of one lock.

    The parameters are those of `redislock_fast.Lock`.

    Attributes:
        is_off_loop: whether a thread is to renew the locks of tasks, unless none can connect as the client does.
        max_stall_s: for how many seconds their loop may not run then; None: for three ttls.
        max_hold_s: after how many seconds at most the lock ends; None: it is renewed as long as it is held.
        wait_ms: how many milliseconds to wait for the replicas.
        watches: whether a loss must be prevented or reported.
        linger: as given; `linger_ms_of` checks it.
        logs_calls: whether the lock's calls are logged.
        observers: what gets the lock's reports: its own `metrics`, and what was installed when it was made.

    Raises:
        TypeError: for an unknown parameter, or one of the wrong kind.
        ValueError: for options that do not go together, or an impossible time.
    """

    def __init__(
        self,
        *,
        adaptive: AdaptiveTTL | None = None,
        auto_renew: bool | Literal["loop"] = False,
        max_stall: float | None = None,
        max_hold: float | None = None,
        on_lost: Callable[[Any, LossReason], Any] | None = None,
        cancel_on_lost: bool = False,
        fencing: bool = False,
        reentrant: bool = False,
        wait_replicas: int = 0,
        wait_timeout: float | None = None,
        breaker: Breaker | None = None,
        metrics: Metrics | None = None,
        linger: float | None = None,
        on_wanted: Callable[[Any], Any] | None = None,
        on_danger: Callable[[Any], Any] | None = None,
    ) -> None:
        _check_renewal(auto_renew, max_stall, max_hold, on_danger)
        check_callback("on_lost", on_lost)
        check_callback("on_wanted", on_wanted)
        check_callback("on_danger", on_danger)
        replicas = operator.index(wait_replicas)
        if replicas < 0:
            raise ValueError(f"wait_replicas must be 0 or more, not {wait_replicas!r}")
        if bool(replicas) != (wait_timeout is not None):
            raise ValueError("wait_replicas and wait_timeout (in seconds) go together")
        if breaker is not None and not hasattr(breaker, "calling"):
            raise TypeError(f"breaker needs pybreaker's calling(), which {type(breaker).__name__} does not have")
        for method in () if metrics is None else ("record_acquisition", "record_release"):
            if not callable(getattr(metrics, method, None)):
                raise TypeError(f"metrics needs {method}(), which {type(metrics).__name__} does not have")
        self.adaptive = adaptive
        self.auto_renew = bool(auto_renew)
        self.is_off_loop = self.auto_renew and auto_renew != "loop"
        self.max_stall_s = None if max_stall is None else positive_ms(max_stall, "max_stall") / 1000
        self.max_hold_s = None if max_hold is None else positive_ms(max_hold, "max_hold") / 1000
        self.on_lost = on_lost
        self.cancel_on_lost = bool(cancel_on_lost)
        self.fencing = bool(fencing)
        self.reentrant = bool(reentrant)
        self.wait_replicas = replicas
        self.wait_ms = 0 if wait_timeout is None else positive_ms(wait_timeout, "wait_timeout")
        self.breaker = breaker
        self.metrics = metrics
        self.logs_calls = logs_calls()
        log = (CALL_LOG,) if self.logs_calls else ()
        self.observers = (*(() if metrics is None else (metrics,)), *installed, *log)
        self._reports: Reports | None = None
        self.linger = linger
        self.on_wanted = on_wanted
        self.on_danger = on_danger
        self.watches = (
            self.auto_renew
            or on_lost is not None
            or self.cancel_on_lost
            or (metrics is not None and hasattr(metrics, "record_loss"))
        )

    @property
    def need_reply_alone(self) -> bool:
        """Whether an acquire on them is complete once its reply has come."""
        more = (self.adaptive, self.breaker, self.linger, self.on_wanted)
        return not (self.wait_replicas or self.cancel_on_lost or any(map(_is_given, more)))

    @property
    def are_used(self) -> bool:
        """Whether any of them makes a difference."""
        is_seen = self.observers != ()
        return self.watches or self.reentrant or is_seen or any(map(_is_given, (self.adaptive, self.breaker)))

    def adapted_ms(self, name: str | bytes) -> int:
        """The ttl that the hold times ask for, in milliseconds, as far as the other options allow it."""
        assert self.adaptive is not None
        ttl_ms = max(self.adaptive.ttl_ms(name), 2 * self.wait_ms)  # half of it is left after the wait for the replicas
        longest = [round(most_s * 1000) for most_s in (self.max_hold_s, self.max_stall_s) if most_s is not None]
        return min([ttl_ms, *longest])

    def reports_of(self, name: str | bytes) -> Reports:
        """The reports of the lock's holdings, under the name that it has now: mostly that of the last call."""
        reports = self._reports
        if reports is None or reports.name is not name:
            reports = Reports(self.observers, name)
            self._reports = reports if reports.is_whole else None
        return reports

    def guarded(self) -> AbstractContextManager[None]:
        """The context of an acquire, in which a circuit breaker gets connection errors and timeouts alone."""
        if self.breaker is None:
            return nullcontext()
        from redislock_fast._lease.breaker import guarded  # noqa: PLC0415  # few have one

        return guarded(self.breaker)

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
        if not for_tasks and (self.max_stall_s is not None or (self.auto_renew and not self.is_off_loop)):
            raise ValueError("max_stall and auto_renew='loop' are for asyncio locks, semaphores and elections")
        if self.auto_renew and ttl_ms is None:
            raise ValueError("auto_renew needs a timeout: a lock that does not expire is not renewed")
        if self.max_hold_s is not None and ttl_ms is not None and self.max_hold_s < ttl_ms / 1000:
            raise ValueError("max_hold is shorter than the timeout")
        if self.max_stall_s is not None and ttl_ms is not None and self.max_stall_s < ttl_ms / 1000:
            raise ValueError("max_stall is shorter than the timeout")
        linger_ms_of(self.linger, ttl_ms)
        if self.wait_replicas and ttl_ms is None:
            raise ValueError("wait_replicas needs a timeout: a lock that is not replicated must expire")
        if ttl_ms is not None and self.wait_ms >= ttl_ms:
            raise ValueError("wait_timeout must be shorter than the timeout, or the lock ends while it is replicated")
        if self.reentrant and not thread_local:
            raise ValueError("a reentrant lock belongs to one thread or task: it needs thread_local=True")
