"""The bench of locks with options: each row is compared with the plain lock in the same workload.

Rules: on a real server, for a moment: the figures mean nothing here.
"""

from __future__ import annotations

import pytest

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.contestants import OURS, WITH_OPTION, libraries
from bench.measuring import rounds
from bench.workloads import with_options
from redislock_fast.server import Server


@pytest.mark.slow
def test_each_ratio_is_to_the_plain_lock_in_the_same_workload(valkey: Server) -> None:
    with rounds.open_scene(valkey.url, 100) as scene:
        field = [libraries.find(name) for name in (OURS, *WITH_OPTION)]
        entrants = [entrant for contestant in field for entrant in with_options.entrants_of(contestant, scene)]
        rounds.race(entrants, rounds=1, seconds=0.01)
        rows = [rounds.summary(entrant, entrants) for entrant in entrants]
    plain = {row["workload"]: row["median"] for row in rows if row["contestant"] == OURS}
    assert len(plain) == 3
    assert [row["ratio_to_limit"] for row in rows] == [row["median"] / plain[row["workload"]] for row in rows]
