"""Whether anything observes redis-py's commands: a tracer in the place of `execute_command`, or redis-py's own metrics.

Both may come and go at any time. Tracers (OpenTelemetry, Sentry, Datadog) replace the method of redis-py's classes.
"""

from __future__ import annotations

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

__all__ = ["OWN", "OWN_ASYNC", "is_observed", "providers"]


def _redis_pys(method: Any) -> Any:
    """A method of redis-py; None where a wrapper is in its place. A wrapper may take over its name, module and code."""
    is_own = type(method) is FunctionType and method.__code__.co_filename.startswith(redis.__path__[0])
    return method if is_own else None


OWN = _redis_pys(redis.Redis.execute_command)
OWN_ASYNC = _redis_pys(redis.asyncio.Redis.execute_command)


def is_observed() -> bool:
    """Whether a command of redis-py would be observed, in a thread or a task."""
    metrics = providers._observability_instance  # noqa: SLF001  # None after its reset
    return (
        redis.Redis.execute_command is not OWN
        or redis.asyncio.Redis.execute_command is not OWN_ASYNC
        or (metrics is not None and metrics._provider_manager is not None)  # noqa: SLF001
    )
