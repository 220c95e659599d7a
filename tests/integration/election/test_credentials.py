"""Credentials that the server refuses are an error of whoever campaigns, leads or observes, and no outage.

Rules: real servers; threads and tasks alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError

from redislock_fast.server import Server
from tests.conftest import AclUser, MakeUser
from tests.support.electing import Candidate
from tests.support.helpers import PATIENCE_S
from tests.support.waiting import FAR_S, Callers, until_queued

BRIEF_S = 3.0
"""The ttl of a leader that is to lose its term."""


@pytest.fixture
def user(valkey: Server, acl_user: MakeUser) -> AclUser:
    """Its password may be changed."""
    return acl_user(valkey)


@pytest.fixture
def candidate(callers: Callers, valkey: Server, user: AclUser) -> Iterator[Candidate]:
    """One that is this user."""
    made = Candidate(callers, callers.client(valkey.port, **user.options()), timeout=BRIEF_S)
    yield made
    callers.run(made.election.stop)


def refuse(admin: redis.Redis, user: AclUser) -> None:
    """Give the user another password, and end its connections."""
    admin.acl_setuser(user.username, enabled=True, reset_passwords=True, passwords=["+another"])
    admin.client_kill_filter(user=user.username)


def test_candidate_whose_password_is_wrong_does_not_wait(
    candidate: Candidate, valkey_client: redis.Redis, user: AclUser
) -> None:
    refuse(valkey_client, user)
    for _ in range(2):
        candidate.run()
        assert isinstance(candidate.running.exception(PATIENCE_S), AuthenticationError)
    assert (candidate.terms, candidate.election.is_leader) == ([], False)


def test_candidate_whose_server_wants_a_password_does_not_wait(callers: Callers, spare_server: Any) -> None:
    server = spare_server("valkey", {"requirepass": "canary-password"})
    candidate = Candidate(callers, callers.client(server.port)).run()
    assert isinstance(candidate.running.exception(PATIENCE_S), AuthenticationError)


def test_candidate_in_line_whose_password_becomes_wrong_waits_no_more(
    candidate: Candidate, valkey_client: redis.Redis, user: AclUser, callers: Callers, valkey: Server
) -> None:
    leader = Candidate(callers, callers.client(valkey.port)).run()
    leader.until_leads()
    candidate.run()
    until_queued(valkey_client, "beat", 1)
    refuse(valkey_client, user)
    assert isinstance(candidate.running.exception(PATIENCE_S), AuthenticationError)
    callers.run(leader.election.stop)
    assert leader.running.result(PATIENCE_S) is None


def test_observer_whose_password_is_wrong_does_not_wait(
    candidate: Candidate, valkey_client: redis.Redis, user: AclUser, callers: Callers
) -> None:
    refuse(valkey_client, user)

    async def observe() -> list[Any]:
        return [leader async for leader in candidate.election.observe()]

    def observe_here() -> list[Any]:
        return list(candidate.election.observe())

    with pytest.raises(AuthenticationError):
        callers.run(observe if callers.kind == "tasks" else observe_here)


@pytest.mark.slow
def test_leader_whose_password_becomes_wrong_ends_its_term_in_time_and_campaigns_no_more(
    candidate: Candidate, valkey_client: redis.Redis, user: AclUser
) -> None:
    """Until the lease is in danger, it leads: the password may be right again by then."""
    candidate.run().until_leads()
    refuse(valkey_client, user)
    assert isinstance(candidate.running.exception(FAR_S), AuthenticationError)
    assert [0 < left_s <= BRIEF_S / 3 for left_s in candidate.left_s] == [True]
    assert [what for what, _ in candidate.told] == ["started", "stopped"]


def test_leader_that_resigns_and_whose_password_has_become_wrong_says_so(
    candidate: Candidate, valkey_client: redis.Redis, user: AclUser, callers: Callers
) -> None:
    candidate.run().until_leads()
    refuse(valkey_client, user)
    callers.run(candidate.election.stop)
    assert isinstance(candidate.running.exception(PATIENCE_S), AuthenticationError)
    assert [what for what, _ in candidate.told] == ["started", "stopped"]
    assert candidate.election.is_leader is False
