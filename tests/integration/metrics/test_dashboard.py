"""The dashboard and the alert rules: each metric and label of their queries is one that a real process exposes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import LockNotOwnedError

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.metrics.conftest import Exposed
from tests.support.helpers import PATIENCE_S, ROOT
from tests.support.holding import RENEWED, Holders
from tests.support.waiting import FAR_S, HEARD_S, LATE, until_queued

FOLDER = next(ROOT.glob("docs/**/grafana"))

_WORD = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SELECTOR = re.compile(r"(redislock_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_BY = re.compile(r"\bby \(([^)]*)\)")
_FUNCTIONS = {"sum", "rate", "increase", "histogram_quantile", "label_values", "by", "unless"}


def queries_of_the_dashboard() -> Iterator[str]:
    """All queries, also that of the variable."""
    dashboard = json.loads((FOLDER / "redislock.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def queries_of_the_alerts() -> Iterator[str]:
    """The expressions of the rules: on the line of `expr:`, or in the block under it."""
    text = (FOLDER / "alerts.yaml").read_text()
    for match in re.finditer(r"^( +)expr: (?:\|\n((?:\1  .*\n)+)|(.*)\n)", text, re.MULTILINE):
        yield match[2] or match[3]


QUERIES = [*queries_of_the_dashboard(), *queries_of_the_alerts()]


@pytest.fixture
def samples(
    exposed: Exposed, holders: Holders, valkey: Server, connect: Connect, spare_server: Callable[..., Server]
) -> dict[str, list[dict[str, str]]]:
    """The labels of each metric that a process exposes which took, waited for, and lost locks."""
    holder, waiter = holders.hold(valkey.port, **LATE), holders.make(valkey.port, **LATE)
    answer = waiter.acquire()
    until_queued(connect(valkey.port), "name", 1)
    holder.release()
    assert answer.result(PATIENCE_S) is True
    assert holder.call("acquire", blocking_timeout=0.01) is False
    connect(valkey.port).delete("name")
    with pytest.raises(LockNotOwnedError):
        waiter.release()
    for mode in ({"wait": "poll", "sleep": 0.01}, {"linger": FAR_S}):
        holders.hold(valkey.port, "other", **LATE)
        silent = holders.make(valkey.port, "other", timeout=FAR_S, **mode)
        assert silent.call("acquire", blocking_timeout=HEARD_S) is False
        connect(valkey.port).flushdb()
    connect(valkey.port).rpush("no lock", 1)
    with pytest.raises(redis.ResponseError):
        holders.make(valkey.port, "no lock").call("acquire")
    server = spare_server()
    holders.hold(server.port, "gone", **RENEWED)
    server.signal(signal.SIGSTOP)
    exposed.until("lost_total", 1, "gone", reason="server_gone")
    server.signal(signal.SIGCONT)
    found: dict[str, list[dict[str, str]]] = {}
    for family in exposed.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def values(samples: list[dict[str, str]], label: str) -> set[str]:
    """The values of a label."""
    return {labels[label] for labels in samples if label in labels}


def problems(query: str, samples: dict[str, list[dict[str, str]]]) -> Iterator[str]:
    """What in a query no process exposes."""
    known: set[str] = set(_FUNCTIONS)
    labels: set[str] = set()
    for metric, matchers in _SELECTOR.findall(query):
        if metric not in samples:
            yield f"no metric {metric}"
            continue
        known.add(metric)
        of_metric = {label for one in samples[metric] for label in one}
        labels |= of_metric
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in of_metric:
                yield f"{metric} has no label {label}"
            elif "$" not in value:
                wanted = set(value.split("|")) if "~" in operator else {value}
                yield from (f"{metric} has no {label} {one}" for one in wanted - values(samples[metric], label))
    for grouping in _BY.findall(query):
        yield from (f"no label {label} to group by" for label in _WORD.findall(grouping) if label not in labels)
    rest = re.sub(r"\[[^\]]*\]|\"[^\"]*\"", "", query)
    yield from (f"unknown word {word}" for word in _WORD.findall(rest) if word not in known | labels)


def test_all_queries_are_found() -> None:
    assert (len([*queries_of_the_dashboard()]), len([*queries_of_the_alerts()])) == (12, 6)
    assert (FOLDER / "alerts.yaml").read_text().count("expr:") == 6


@pytest.mark.parametrize("callers", ["threads"], indirect=True)
def test_queries_ask_only_for_what_a_process_exposes(samples: dict[str, list[dict[str, str]]]) -> None:
    samples["redislock_waits_total"].append({"name": "name", "mode": "tracking"})  # see test_waits
    assert {query: found for query in QUERIES if (found := [*problems(query, samples)])} == {}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(redislock_hold)", "no metric redislock_hold"),
        ('redislock_held{nam="x"}', "redislock_held has no label nam"),
        ("sum by (nam) (redislock_held)", "no label nam to group by"),
        ("summe(redislock_held)", "unknown word summe"),
        ('redislock_held{name=~"name|x"}', "redislock_held has no name x"),
    ],
)
def test_a_wrong_query_is_found(query: str, problem: str) -> None:
    assert problem in [*problems(query, {"redislock_held": [{"name": "name"}]})]


def test_every_metric_is_on_the_dashboard(exposed: Exposed) -> None:
    shown: Any = " ".join(queries_of_the_dashboard())
    families = [family.name for family in exposed.registry.collect()]
    assert [name for name in families if name not in shown] == []
    assert len(families) == 8
