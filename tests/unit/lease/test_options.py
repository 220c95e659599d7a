"""Options that go together, and those that do not. No server."""

from __future__ import annotations

import pytest

from redislock_fast._lease.options import Options
from redislock_fast._util.times import ttl_ms_of


@pytest.mark.parametrize("option", ["max_hold", "max_stall"])
@pytest.mark.parametrize("timeout", [1, 1.001, 1.005, 4.1])
def test_limit_may_be_as_long_as_the_timeout(option: str, timeout: float) -> None:
    options = Options(auto_renew=True, **{option: timeout})  # type: ignore[arg-type]  # the name is not known
    options.check(ttl_ms_of(timeout), thread_local=True, for_tasks=True)
