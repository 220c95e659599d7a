"""Whether anything observes redis-py's commands: a tracer in the place of `execute_command`, or redis-py's own metrics.

Both may come and go at any time. Tracers (OpenTelemetry, Sentry, Datadog) replace the method of redis-py's classes.
OpenTelemetry can also wrap the method of one client, by a `FunctionWrapper` of the package wrapt.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import redis
import redis.asyncio

providers: Any
"""Has redis-py's own metrics, from redis-py 8.0 on."""

try:
    from redis.observability import providers as _providers
except ImportError:
    providers = SimpleNamespace(_observability_instance=SimpleNamespace(_provider_manager=None))
else:
    _providers.get_observability_instance()  # makes it, as redis-py does with its first command
    providers = _providers


def _redis_pys(method: Any) -> Any:
    """A method of redis-py; None where a wrapper is in its place. A wrapper may take over its name, module and code."""
    is_own = type(method) is FunctionType and method.__code__.co_filename.startswith(redis.__path__[0])
    return method if is_own else None


OWN = _redis_pys(redis.Redis.execute_command)
OWN_ASYNC = _redis_pys(redis.asyncio.Redis.execute_command)


def is_observed(client: Any = None) -> bool:
    """Whether a command of redis-py would be observed, in a thread or a task; with a client, a command of that one."""
    metrics = providers._observability_instance  # noqa: SLF001  # None after its reset
    return (
        redis.Redis.execute_command is not OWN
        or redis.asyncio.Redis.execute_command is not OWN_ASYNC
        or (metrics is not None and metrics._provider_manager is not None)  # noqa: SLF001
        or tracer_of(client) is not None
    )


def tracer_of(client: Any) -> Any:
    """The wrapper around `execute_command` of this one client; None where it has none."""
    method = getattr(client, "__dict__", {}).get("execute_command")
    return method if _is_wrapper(method, "FunctionWrapper") else None


def traced(tracer: Any, send: Callable[..., Any]) -> Any:
    """The wrappers of one client, around another function than its `execute_command`."""
    inner = tracer.__wrapped__
    if _is_wrapper(inner, "FunctionWrapper"):
        send = traced(inner, send)
    return type(tracer)(send, tracer._self_wrapper)  # noqa: SLF001  # the name that wrapt gives it


def has_method_of_its_own(client: Any) -> bool:
    """Whether this one client has another `execute_command` than its class, whether it is wrapped or not.

    A tracer that is removed leaves the bound method of the class.
    """
    method = client.__dict__.get("execute_command")
    if method is None:
        return False
    plain = _unwrapped(method)
    function = _unwrapped(type(client).execute_command)
    return getattr(plain, "__self__", None) is not client or getattr(plain, "__func__", None) is not function


def _unwrapped(method: Any) -> Any:
    while _is_wrapper(method, "FunctionWrapper") or _is_wrapper(method, "BoundFunctionWrapper"):
        method = method.__wrapped__
    return method


def _is_wrapper(method: Any, class_name: str) -> bool:
    wrapt = sys.modules.get("wrapt")  # imported by each tracer that uses it
    return isinstance(method, getattr(wrapt, class_name, ()))
