"""Elections while a replica takes over from a primary that has died, that stands still, or that is cut off.

Rules: real servers; threads and tasks alike. Candidates and observers reach the servers by addresses, which a test
directs to another server, as a provider does. A primary stops writing until all is replicated before anything happens
to it, unless a test is about what is not. Leases that are to end are short, and nothing is to happen before they do.
Tests name `service` first: it goes on until the candidates have been stopped.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from redislock_fast.server import Server
from tests.integration.election.test_election import Stand, enter, stand  # noqa: F401
from tests.integration.election.test_observing import Observe, observe  # noqa: F401
from tests.support.electing import leaders_at_once
from tests.support.helpers import PATIENCE_S, wait_until
from tests.support.proxy import Proxy
from tests.support.waiting import Callers, queue_of, until_queued

LEASE_S = 4.5
"""The ttl of a leader that is to lose its term: 1.5 s of it are left when it is told to stop."""

SLEEP_S = 0.05
"""How long an observer waits whose server is away."""

pytestmark = pytest.mark.slow


class Service:
    """A primary, its replica, and two addresses of the primary.

    Attributes:
        addresses: of the primary; a test moves them.
        old: a client of the primary.
        new: a client of the replica.
    """

    def __init__(self, spare_server: Callable[..., Server], opened: ExitStack) -> None:
        at_once = {"repl-diskless-sync-delay": "0"}
        self._primary = spare_server(options=at_once)
        self._replica = spare_server(options={**at_once, "replicaof": f"127.0.0.1 {self._primary.port}"})
        self.addresses = [opened.enter_context(Proxy(self._primary.port)) for _ in range(2)]
        self.old, self.new = (
            opened.enter_context(redis.Redis(port=server.port)) for server in (self._primary, self._replica)
        )
        wait_until(lambda: self.new.info("replication")["master_link_status"] == "up", "the replica is in sync")

    def until_replicated(self) -> None:
        """Return once the replica has all that the primary has."""
        offset = self.old.info("replication")["master_repl_offset"]
        wait_until(lambda: self.new.info("replication")["slave_repl_offset"] >= offset, "all is replicated")

    def pause(self) -> None:
        """Let the primary write nothing more, once all is replicated."""
        self.old.execute_command("CLIENT", "PAUSE", int(1000 * PATIENCE_S), "WRITE")
        self.until_replicated()

    def promote(self) -> None:
        """Make the replica a primary: it gets nothing more from the old one."""
        self.new.replicaof("NO", "ONE")

    def die(self) -> None:
        """End the old primary, as a crash would."""
        self._primary.kill()

    def stand_still(self) -> None:
        """Stop the old primary, as a machine does that is moved."""
        self._primary.signal(signal.SIGSTOP)

    def be_cut_off(self) -> None:
        """Let the old primary go on, which writes only while it has a replica."""
        self.old.config_set("min-replicas-to-write", 1)
        wait_until(lambda: self.old.info("replication")["connected_slaves"] == 0, "it has none")
        self.old.execute_command("CLIENT", "UNPAUSE")

    def move(self, *addresses: Proxy) -> None:
        """Have these addresses lead to the new primary."""
        for address in addresses:
            address.redirect(self._replica.port)


@pytest.fixture
def service(spare_server: Callable[..., Server]) -> Iterator[Service]:
    """A service of this test's own."""
    with ExitStack() as opened:
        yield Service(spare_server, opened)


def test_leader_leads_on_where_its_term_was_replicated_and_is_followed(
    service: Service,
    stand: Stand,  # noqa: F811
    observe: Observe,  # noqa: F811
    callers: Callers,
) -> None:
    address, told = service.addresses[0], list[Any]()
    first, second = (stand(address.port, told=told) for _ in range(2))
    first.run().until_leads()
    number = first.terms[0].number
    observer = observe(address.port, SLEEP_S)
    observer.until_seen(number)
    second.run()
    until_queued(service.old, "beat", 1)
    with leaders_at_once(first, second) as pairs:
        service.pause()
        before = service.new.zrange(queue_of("beat"), 0, -1)
        service.promote()
        service.die()
        service.move(address)
        wait_until(lambda: service.new.zrange(queue_of("beat"), 0, -1) != before, "the second one comes anew")
        until_queued(service.new, "beat", 1)
        assert first.call("leader").term == number
        assert (first.election.is_leader, first.terms[0].stopping.is_set()) == (True, False)
        callers.run(first.election.resign)
        second.until_leads()
        observer.until_seen(number, second.terms[0].number)
        until_queued(service.new, "beat", 1)
        callers.run(second.election.resign)
        first.until_leads(2)
    assert pairs == []
    numbers = [number, second.terms[0].number, first.terms[1].number]
    assert numbers == sorted(set(numbers))
    assert told == [(what, each) for each in numbers for what in ("started", "stopped")][:-1]
    observer.until_seen(*numbers)


@pytest.mark.parametrize(
    ("callers", "happen"), [("threads", Service.stand_still), ("tasks", Service.be_cut_off)], indirect=["callers"]
)
def test_leader_on_the_old_primary_stops_before_another_one_leads_on_the_new_one(
    happen: Callable[[Service], None],
    service: Service,
    stand: Stand,  # noqa: F811
    observe: Observe,  # noqa: F811
) -> None:
    theirs, others = service.addresses
    told: list[Any] = []
    first, second = (stand(address.port, timeout=LEASE_S, told=told) for address in (theirs, others))
    first.run().until_leads()
    number = first.terms[0].number
    observer = observe(others.port, SLEEP_S)
    observer.until_seen(number)
    second.run()
    until_queued(service.old, "beat", 1)
    with leaders_at_once(first, second) as pairs:
        service.pause()
        service.promote()
        happen(service)
        service.move(others)
        wait_until(lambda: first.left_s, "it is told to stop")
        assert 0 < first.left_s[0] <= LEASE_S / 3
        second.until_leads()
        service.move(theirs)
        until_queued(service.new, "beat", 1)  # the first one campaigns again
        assert (first.election.is_leader, second.election.is_leader) == (False, True)
    assert pairs == []
    higher = second.terms[0].number
    assert higher > number
    assert told == [("started", number), ("stopped", number), ("started", higher)]
    observer.until_seen(number, higher)


def test_leader_whose_term_was_not_replicated_is_told_and_its_number_is_given_again(
    service: Service,
    stand: Stand,  # noqa: F811
    observe: Observe,  # noqa: F811
    callers: Callers,
) -> None:
    theirs, others = service.addresses
    first, second = (stand(address.port, timeout=LEASE_S) for address in (theirs, others))
    earlier = enter(callers, first.election).number
    service.until_replicated()
    service.promote()  # and nobody knows so far
    first.run().until_leads(1)
    lost = first.terms[0]
    observer = observe(others.port, SLEEP_S)
    observer.until_seen(lost.number)
    service.die()
    service.move(theirs, others)
    second.run().until_leads()
    assert second.terms[0].number == lost.number == earlier + 1
    wait_until(lambda: lost.stopping.is_set() and not lost.valid, "the first one is told")
    until_queued(service.new, "beat", 1)  # the first one campaigns again
    assert (first.election.is_leader, second.election.is_leader) == (False, True)
    callers.run(second.election.resign)
    first.until_leads(2)
    assert first.terms[1].number == lost.number + 1
    assert [what for what, _ in first.told] == ["started", "stopped"] * 2 + ["started"]
    observer.until_seen(lost.number, lost.number + 1)
