"""The columns of the tables of pairs, for rows as `bench.measuring.rounds.summary` makes them, and of contention."""

from __future__ import annotations

from bench.measuring.report import Column, three_digits


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


# ---- of `python -m bench contention` ----


def _to_redis_py(figure: str, is_wide: bool = False) -> Column:
    return Column(":\nredis\n-py", three_digits, (f"{figure}_to_redis_py",), is_wide=is_wide)


_WORKERS = (Column("contestant", str, ("title",)), Column("workload,\nhold/think ms", str, ("workload",)))
SPEED = (
    *_WORKERS,
    Column("acquis.\n/s", "{:,.0f}".format, ("acquisitions_per_s",)),
    _to_redis_py("acquisitions_per_s"),
    Column("gap ms\np50", three_digits, ("gap_p50_ms",)),
    _to_redis_py("gap_p50_ms", is_wide=True),
    Column("\np99", three_digits, ("gap_p99_ms",), is_wide=True),
    Column("\np99.9", three_digits, ("gap_p999_ms",), is_wide=True),
    Column("wait ms\np50", three_digits, ("wait_p50_ms",), is_wide=True),
    Column("wait ms\np99", three_digits, ("wait_p99_ms",)),
    _to_redis_py("wait_p99_ms", is_wide=True),
    Column("\np99.9", three_digits, ("wait_p999_ms",), is_wide=True),
    Column("\nmax", three_digits, ("wait_max_ms",), is_wide=True),
    Column("Jain", "{:.4f}".format, ("jain",)),
)
COSTS = (
    *_WORKERS,
    Column("longest\nwithout\nms", three_digits, ("starvation_ms",)),
    Column("client\ncommands\n/acquis.", "{:.2f}".format, ("commands",)),
    Column("server us\n/acquis.", "{:,.0f}".format, ("server_cpu_us",)),
    Column("client us\n/acquis.", "{:,.0f}".format, ("client_cpu_us",)),
    Column("conn.", "{:,.0f}".format, ("connections",)),
    Column("left\nwaiting", "{:,.0f}".format, ("left_waiting",)),
    Column("acquis.\nin all", "{:,}".format, ("acquisitions",)),
    Column("two\nholders", "{:,}".format, ("violations",)),
)
IDLE = (
    Column("contestant", str, ("title",)),
    Column("waiters", str, ("workload",)),
    Column("client CPU\nms/s", three_digits, ("client_cpu_ms_per_s",)),
    Column("server CPU\nms/s", three_digits, ("server_cpu_ms_per_s",)),
    Column("client commands\n/s", three_digits, ("commands_per_s",)),
    Column("conn.", "{:,}".format, ("connections",)),
)
