"""The alert rules, by Prometheus's own `promtool`: which of them fire for what a process exposes, scrape by scrape.

Rules: promtool has a clock of its own, by which the process is scraped each minute. The values are those of real locks.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import LockNotOwnedError

from redislock_fast import Handle, LossReason, Skipped
from redislock_fast.server import Server
from tests.conftest import Connect, absent
from tests.integration.metrics.conftest import Exposed
from tests.support.helpers import PATIENCE_S, ROOT
from tests.support.holding import Holders
from tests.support.waiting import FAR_S, LATE, until_queued
from tests.support.worlds import Blocking, World, awaitable, waited

RULES = next(ROOT.glob("docs/**/grafana")) / "alerts.yaml"
LOST = {"name": "name", "severity": "critical"}
IN_VAIN = {"name": "name", "severity": "warning"}


def promtool(*words: str) -> str:
    """What is wrong, by promtool."""
    path = shutil.which("promtool") or absent("no promtool here")
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def series(name: str, labels: Mapping[str, str]) -> str:
    """A series in PromQL."""
    return f"{name}{{{', '.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"


class Scrapes:
    """What Prometheus has scraped of a process, for promtool.

    Args:
        exposed: the metrics of the process.
        folder: where the file for promtool is put.
    """

    def __init__(self, exposed: Exposed, folder: Path) -> None:
        self._exposed = exposed
        self._folder = folder
        self._scrapes: list[dict[str, float]] = []

    def scrape(self, minutes: int = 1) -> None:
        """Scrape what is exposed now, for so many minutes."""
        families = self._exposed.registry.collect()
        samples = (sample for family in families for sample in family.samples)
        self._scrapes += [{series(sample.name, sample.labels): sample.value for sample in samples}] * minutes

    def problems(self, alert: str, *firing: dict[str, str]) -> str:
        """What promtool says unless, at the last scrape, the alert fires with these labels alone."""
        found = [
            {"labels": series("ALERTS", {"alertname": alert, "alertstate": "firing", **of}), "value": 1}
            for of in firing
        ]
        query = series("ALERTS", {"alertname": alert, "alertstate": "firing"})
        names = dict.fromkeys(name for scrape in self._scrapes for name in scrape)
        test = {
            "interval": "1m",
            "input_series": [
                {"series": name, "values": " ".join(map(self._of(name), self._scrapes))} for name in names
            ],
            "promql_expr_test": [{"expr": query, "eval_time": f"{len(self._scrapes) - 1}m", "exp_samples": found}],
        }
        file = self._folder / "test.json"  # JSON is YAML, too
        file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
        return promtool("test", "rules", str(file))

    @staticmethod
    def _of(name: str) -> Callable[[Mapping[str, float]], str]:
        return lambda scrape: f"{scrape[name]:.9f}" if name in scrape else "_"


@pytest.fixture
def scrapes(exposed: Exposed, tmp_path: Path) -> Scrapes:
    """Scrapes this process."""
    return Scrapes(exposed, tmp_path)


def test_the_rules_are_well_formed() -> None:
    assert promtool("check", "rules", str(RULES)) == ""


def test_counters_whose_increase_is_looked_at_begin_at_0(exposed: Exposed, holders: Holders, valkey: Server) -> None:
    increases = set(re.findall(r"increase\(redislock_(\w+)", RULES.read_text()))
    assert increases == {"lost_total", "renewal_failures_total"}
    holders.hold(valkey.port, timeout=FAR_S).release()
    value: Any = exposed.registry.get_sample_value
    reasons = [{"reason": reason.name.lower()} for reason in LossReason]
    assert [value("redislock_lost_total", {"name": "name", "kind": "lock", **reason}) for reason in reasons] == [
        0
    ] * len(reasons)
    assert value("redislock_renewal_failures_total", {"name": "name", "kind": "lock"}) == 0


def test_a_first_loss_fires(scrapes: Scrapes, holders: Holders, valkey: Server, connect: Connect) -> None:
    lock = holders.hold(valkey.port, timeout=FAR_S)
    scrapes.scrape(20)
    assert scrapes.problems("LockLost") == ""
    connect(valkey.port).delete("name")
    with pytest.raises(LockNotOwnedError):
        lock.call("release")
    scrapes.scrape()
    assert scrapes.problems("LockLost", {**LOST, "reason": "deleted"}) == ""
    scrapes.scrape(15)
    assert scrapes.problems("LockLost") == ""


def test_a_first_loss_of_a_lock_that_was_only_attached_fires(
    scrapes: Scrapes, exposed: Exposed, holders: Holders, valkey: Server, connect: Connect
) -> None:
    import redislock_fast.prometheus

    redislock_fast.prometheus.uninstall()
    handle: Handle = holders.hold(valkey.port, timeout=FAR_S).lock.detach()
    redislock_fast.prometheus.install(exposed.registry)
    lock = holders.attach(valkey.port, handle)
    scrapes.scrape()
    connect(valkey.port).delete("name")
    with pytest.raises(LockNotOwnedError):
        lock.call("release")
    scrapes.scrape()
    assert scrapes.problems("LockLost", {**LOST, "reason": "deleted"}) == ""


def test_callers_whose_first_wait_does_not_end_fire(
    scrapes: Scrapes, holders: Holders, valkey: Server, connect: Connect
) -> None:
    holder = holders.hold(valkey.port, **LATE)
    answer = holders.make(valkey.port, **LATE).acquire()
    until_queued(connect(valkey.port), "name", 1)
    scrapes.scrape(21)
    assert scrapes.problems("LockWaitersStuck", {"name": "name", "severity": "critical"}) == ""
    holder.release()
    assert answer.result(PATIENCE_S) is True
    scrapes.scrape()
    assert scrapes.problems("LockWaitersStuck") == ""


def run_or_skip(world: World, client: Any, is_block: bool) -> Callable[[], Any]:
    """A call of a job which is run once, decorated or as a block. It returns None where it was skipped."""
    made = world.ours.once(client, "name", timeout=FAR_S, at_least=FAR_S)
    if not is_block:
        decorated = made((lambda: True) if world.in_threads else awaitable(lambda: True))
        return lambda: waited(decorated())
    block = made if world.in_threads else Blocking(made, world._clients)

    def run() -> bool | None:
        try:
            with block:
                return True
        except Skipped:
            return None

    return run


@pytest.mark.parametrize("is_block", [False, True], ids=["decorator", "block"])
def test_a_job_that_is_skipped_on_two_of_three_hosts_does_not_fire(
    scrapes: Scrapes, exposed: Exposed, world: World, valkey: Server, connect: Connect, is_block: bool
) -> None:
    hosts = [run_or_skip(world, world.connect(valkey.port), is_block) for _ in range(3)]
    for _ in range(40):
        assert [run() for run in hosts] == [True, None, None]
        connect(valkey.port).delete("name")  # `at_least` is over
        scrapes.scrape()
    assert (exposed.acquired(), exposed.acquired("skipped"), exposed.acquired("not_acquired")) == (40, 80, 0)
    assert scrapes.problems("LockNotAcquired") == ""


def test_acquires_in_vain_fire(scrapes: Scrapes, world: World, valkey: Server) -> None:
    locks = [world.lock(world.connect(valkey.port), timeout=FAR_S) for _ in range(3)]
    for _ in range(40):
        assert [lock.acquire(blocking=False) for lock in locks] == [True, False, False]
        locks[0].release()
        scrapes.scrape()
    assert scrapes.problems("LockNotAcquired", IN_VAIN) == ""
