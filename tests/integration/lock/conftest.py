"""Fixtures of the tests of one lock."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator

import pytest

from tests.support.transports import noted_cleanups


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tokens that were given to be undone."""
    return noted_cleanups(monkeypatch)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test ends without a warning and without a complaint of a loop."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("ignore")
        gc.collect()  # what another test has left
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [] == [str(warning.message) for warning in warned]
    assert [] == [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
