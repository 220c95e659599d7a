"""The tests of holding on one server again, for locks that an acquire has got by its first reply: see `Holding`.

Rules: the clients are connected before. No two callers use a lock object at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from redislock_fast.server import Server
from tests.integration.holding import test_holding, test_watching
from tests.integration.holding.conftest import Held
from tests.support.helpers import PATIENCE_S
from tests.support.holding import LONG_S, RENEWED, Holders, Losses, until_passed
from tests.support.waiting import Callers, sent_by, until_queued

_MODULES = (test_holding, test_watching)

globals().update({name: test for module in _MODULES for name, test in vars(module).items() if name.startswith("test_")})


@pytest.fixture
def holders(callers: Callers) -> Iterator[Holders]:
    """Makes locks whose acquires are noted."""
    made = Holders(callers, connected=True)
    yield made
    made.close()


@pytest.fixture
def hold(request: pytest.FixtureRequest, holders: Holders, valkey: Server) -> Held:
    """Locks on one server."""
    if getattr(request, "param", "valkey") != "valkey":
        pytest.skip("one server is enough, and no acquire of a Redlock is noted")
    return Held(holders, [valkey])


def test_dropped_lock_is_released(hold: Held, holders: Holders) -> None:
    test_holding.test_dropped_lock_is_released_with_a_warning(hold, holders)


def test_each_holding_is_renewed(hold: Held, valkey_client: redis.Redis, losses: Losses) -> None:
    test_holding.test_each_holding_of_a_lock_is_renewed(hold, valkey_client, losses)


def test_noted_lock_that_was_waited_for_is_renewed_and_handed_over_at_once(
    holders: Holders, callers: Callers, valkey: Server, valkey_client: redis.Redis, losses: Losses
) -> None:
    clients = [callers.client(valkey.port, client_name=name) for name in ("first", "second", "third")]
    first, second, third = (holders.on(client, on_lost=losses, **RENEWED) for client in clients)
    assert first.call("acquire")
    seconds = second.ask("acquire")
    until_queued(valkey_client, "name", 1)
    first.release()
    assert seconds.result(PATIENCE_S)
    until_passed(valkey_client, LONG_S)
    thirds = third.ask("acquire")
    until_queued(valkey_client, "name", 1)
    with sent_by(valkey_client, "second") as sent:
        second.release()
    at_once = [command for command in sent.commands if command != "SET"]  # by which a renewal may come in between
    assert at_once == ["EVALSHA"]
    assert (thirds.result(PATIENCE_S), losses.reasons) == (True, [])
