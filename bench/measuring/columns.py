"""The columns of the tables of pairs, for rows as `bench.measuring.rounds.summary` makes them."""

from __future__ import annotations

from bench.measuring.report import Column


def _to_limit(limit: str, is_wide: bool = False) -> Column:
    return Column(f":\n{limit}", "{:.2f}".format, ("ratio_to_limit",), is_wide=is_wide)


_WHO = (Column("contestant", str, ("title",)), Column("workload", str, ("workload",)))
_RATE = Column("pairs/s", "{:,.0f}".format, ("median",))
_SPREAD = Column("min - max", "{:,.0f} - {:,.0f}".format, ("min", "max"), is_wide=True)
_TO_REDIS_PY = Column(":\nredis-py", "{:.2f}".format, ("ratio_to_redis_py",))
_CPU = (
    Column("client\nus/pair", "{:.1f}".format, ("client_cpu_us",), is_wide=True),
    Column("server\nus/pair", "{:.1f}".format, ("server_cpu_us",), is_wide=True),
)
_CONNECTIONS = Column("conn.", str, ("connections",), is_wide=True)
_COSTS = (
    Column("p50 ms\nan op", "{:.2f}".format, ("latency_p50_ms",)),
    Column("p99 ms\nan op", "{:.2f}".format, ("latency_p99_ms",)),
    *_CPU,
    _CONNECTIONS,
)

SINGLE = (*_WHO, _RATE, _SPREAD, _TO_REDIS_PY, _to_limit("floor"))
MANY = (*_WHO, _RATE, _SPREAD, _TO_REDIS_PY, *_COSTS)
BATCH = (*_WHO, _RATE, _SPREAD, _TO_REDIS_PY, _to_limit("server", is_wide=True), *_COSTS)
REDLOCK = (*_WHO, _RATE, _SPREAD, _TO_REDIS_PY, _to_limit("bare"))
LATENCY = (
    *_WHO,
    _RATE,
    _TO_REDIS_PY,
    Column("acquire\np50 ms", "{:.2f}".format, ("acquire_p50_ms",)),
    Column(":\nredis-py", "{:.2f}".format, ("acquire_p50_to_redis_py",), is_wide=True),
    Column("acquire\np99 ms", "{:.2f}".format, ("acquire_p99_ms",)),
    Column(":\nredis-py", "{:.2f}".format, ("acquire_p99_to_redis_py",)),
    _CONNECTIONS,
)
MAIN = (*_WHO, _RATE, _TO_REDIS_PY, _to_limit("limit", is_wide=True), *_COSTS)
