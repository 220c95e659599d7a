"""The columns of the tables of `python -m bench contention`."""

from __future__ import annotations

from bench.measuring.report import Column, three_digits


def _ratio(figure: str, is_wide: bool = False) -> Column:
    return Column(":\nredis\n-py", three_digits, (f"{figure}_to_redis_py",), is_wide=is_wide)


_WHO = (Column("contestant", str, ("title",)), Column("workload,\nhold/think ms", str, ("workload",)))
SPEED = (
    *_WHO,
    Column("acquis.\n/s", "{:,.0f}".format, ("acquisitions_per_s",)),
    _ratio("acquisitions_per_s"),
    Column("gap ms\np50", three_digits, ("gap_p50_ms",)),
    _ratio("gap_p50_ms", is_wide=True),
    Column("\np99", three_digits, ("gap_p99_ms",), is_wide=True),
    Column("\np99.9", three_digits, ("gap_p999_ms",), is_wide=True),
    Column("wait ms\np50", three_digits, ("wait_p50_ms",), is_wide=True),
    Column("wait ms\np99", three_digits, ("wait_p99_ms",)),
    _ratio("wait_p99_ms", is_wide=True),
    Column("\np99.9", three_digits, ("wait_p999_ms",), is_wide=True),
    Column("\nmax", three_digits, ("wait_max_ms",), is_wide=True),
    Column("Jain", "{:.4f}".format, ("jain",)),
)
COSTS = (
    *_WHO,
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
