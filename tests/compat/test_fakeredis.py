"""The tests of `test_parity.py` on fakeredis, which has neither a server nor sockets."""

from __future__ import annotations

from collections.abc import Iterator

import fakeredis
import pytest

from tests.compat import test_parity

pytestmark = pytest.mark.usefixtures("world")

NEED_A_SERVER = {
    "test_signature",
    "test_client_can_be_changed_after_construction",
    "test_locks_of_other_names_and_databases_are_independent",
}

globals().update(
    {name: test for name, test in vars(test_parity).items() if name.startswith("test_") and name not in NEED_A_SERVER}
)


@pytest.fixture
def client() -> Iterator[fakeredis.FakeRedis]:
    """A client of a new fake server."""
    with fakeredis.FakeRedis(server=fakeredis.FakeServer()) as made:
        yield made
