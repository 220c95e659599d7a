"""Elections while the network is cut between a leader and its server, and after the server has lost the last writes.

Rules: real servers; threads and tasks alike. Leases that are to end are short, and nothing is to happen before they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from redislock_fast.server import Server
from tests.conftest import Connect
from tests.integration.election.test_election import Stand, stand  # noqa: F401
from tests.support.helpers import wait_until
from tests.support.holding import renewed
from tests.support.proxy import Proxy
from tests.support.waiting import Callers, until_queued

LEASE_S = 6.0
"""The ttl of a leader that is to lose its term: two seconds of it are left when it is told to stop."""

FENCE = "{beat}:rlf:fence"

pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(valkey: Server) -> Iterator[Proxy]:
    """Stands between the first leader and its server."""
    with Proxy(valkey.port) as running:
        yield running


@pytest.mark.parametrize("cut", ["stall", "hold"])
def test_leader_that_is_cut_off_stops_before_another_one_leads(
    cut: str,
    stand: Stand,  # noqa: F811
    proxy: Proxy,
    valkey: Server,
    valkey_client: redis.Redis,
) -> None:
    first = stand(proxy.port, timeout=LEASE_S).run()
    first.until_leads()
    second = stand(valkey.port, timeout=LEASE_S)
    second.run()
    until_queued(valkey_client, "beat", 1)
    wait_until(renewed(lambda: int(valkey_client.pttl("beat"))), "it is renewed")  # by a connection that is cut, too
    getattr(proxy, cut)()
    wait_until(lambda: first.left_s, "it is told to stop")
    assert 0 < first.left_s[0] <= LEASE_S / 3
    second.until_leads()
    assert not first.election.is_leader
    assert first.told == [("started", first.terms[0].number), ("stopped", first.terms[0].number)]
    assert second.terms[0].number > first.terms[0].number
    proxy.thaw() if cut == "stall" else proxy.resume()
    until_queued(valkey_client, "beat", 1)  # the first one campaigns again
    assert second.election.is_leader


def test_numbers_rise_where_the_lock_was_lost_and_the_counter_was_not(
    stand: Stand,  # noqa: F811
    callers: Callers,
    spare_server: Callable[..., Server],
    connect: Connect,
) -> None:
    server = spare_server()
    client: Any = connect(server.port)
    first = stand(server.port, timeout=LEASE_S).run()
    first.until_leads()
    number = first.terms[0].number
    counter = client.dump(FENCE)
    server.kill()
    server.start()  # as a replica that takes over without the last writes
    client.restore(FENCE, 0, counter)
    second = stand(server.port, timeout=LEASE_S).run()
    wait_until(lambda: second.terms or len(first.terms) > 1, "somebody leads again")
    wait_until(lambda: first.terms[0].stopping.is_set() and not first.terms[0].valid, "the first one knows")
    leads, other = (second, first) if second.election.is_leader else (first, second)
    assert leads.election.is_leader
    assert not other.election.is_leader
    assert leads.terms[-1].number > number
    callers.run(leads.election.resign)
    wait_until(lambda: len(first.terms) + len(second.terms) > 2, "the next one leads")
    numbers = [term.number for one in (first, second) for term in one.terms]
    assert len(set(numbers)) == len(numbers)
