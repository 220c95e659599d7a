"""First requests that leave without an operation: it takes over whatever has come of one.

Rules: those of `test_protocol.py`.
"""

from __future__ import annotations

import pytest

from redislock_fast._pipe.base import NOT_ASKED, Args, Reply
from redislock_fast._protocol.capabilities import PROBE, Capabilities
from redislock_fast._protocol.commands import Acquire, Release, acquire_request, release_request
from redislock_fast._util.tokens import MARKER
from tests.simulation.model import SERVERS, Model

KEY = b"name"
TOKEN = MARKER + b"0123456789abcdef" * 2
SENT_AT = 50.0


def capabilities_of(server: str) -> Capabilities:
    return Capabilities(Model(SERVERS[server]).execute(PROBE))


def first_requests(capabilities: Capabilities) -> list[tuple[Acquire | Release, tuple[Args, Reply]]]:
    """Each operation, with the request that leaves without it and the reply that settles that."""
    return [
        (Acquire(KEY, TOKEN, 1500), acquire_request(capabilities, KEY, TOKEN, 1500)),
        (Acquire(KEY, TOKEN, None), acquire_request(capabilities, KEY, TOKEN, None)),
        (Release(KEY, TOKEN, None), release_request(capabilities, KEY, TOKEN, contended=False)),
        (Release(KEY, TOKEN, None, contended=True), release_request(capabilities, KEY, TOKEN, contended=True)),
    ]


@pytest.mark.parametrize("server", SERVERS)
def test_usual_reply_is_the_one_that_a_machine_takes_for_success(server: str) -> None:
    capabilities = capabilities_of(server)
    for operation, (request, ours) in first_requests(capabilities):
        operation.begin(request, capabilities, SENT_AT, ("link", ours, None))
        assert ("link", ours, None) == operation.first_outcome
        assert (True, True, False) == (operation.feed(ours, capabilities), operation.result, operation.unsettled)


def test_acquire_counts_its_lease_from_the_first_request() -> None:
    capabilities = capabilities_of("Valkey 9")
    attempt = Acquire(KEY, TOKEN, 1500)
    attempt.begin(acquire_request(capabilities, KEY, TOKEN, 1500)[0], capabilities, SENT_AT, (None, NOT_ASKED, None))
    attempt.request(capabilities, SENT_AT + 1)
    assert attempt.sent_at == SENT_AT


def test_reply_to_another_form_of_the_request_counts_as_none() -> None:
    capabilities = capabilities_of("Valkey 9")
    began = first_requests(capabilities)
    capabilities.set_get = False  # another caller has learnt that these commands are not allowed
    capabilities.release = None
    error = ConnectionError()
    for operation, (request, ours) in began[:3]:
        operation.begin(request, capabilities, SENT_AT, ("link", ours, error))
        assert ("link", NOT_ASKED, error) == operation.first_outcome
        assert operation.unsettled
