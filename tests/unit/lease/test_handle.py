"""The value that carries a held lock from one process to another.

Rules: no server; where the clocks count, they are set by hand.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from decimal import Decimal
from typing import Any

import pytest

from redislock_fast._lease import handle
from redislock_fast._lease.handle import Handle

HANDLE = Handle("name", b"rlf:canary", 10.0, 1_700_000_000.5, 7)
HANDLES = pytest.mark.parametrize(
    "handle",
    [HANDLE, Handle(b"\xff\x00", b"\xff\x00", None, None), Handle("nämä", b"", 1, 5)],
    ids=["each field", "bytes", "numbers that are whole"],
)


class Clocks:
    """Two clocks that go alike: the one that leases are measured with, and the wall's."""

    def __init__(self) -> None:
        self.lease_s = 50.0
        self.wall_s = 1_700_000_000.0
        self.step_s = 0.0

    def clock(self) -> float:
        self._go_on()
        return self.lease_s

    def time(self) -> float:
        self._go_on()
        return self.wall_s

    def _go_on(self) -> None:
        """Some time passes before any clock is read."""
        self.lease_s += self.step_s
        self.wall_s += self.step_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """The clocks that handles read."""
    clocks = Clocks()
    monkeypatch.setattr(handle, "clock", clocks.clock)
    monkeypatch.setattr(handle, "time", clocks)
    return clocks


# ---- on the way ----


@HANDLES
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_handle_is_the_same(handle: Handle, protocol: int) -> None:
    assert pickle.loads(pickle.dumps(handle, protocol)) == handle


@HANDLES
def test_handle_by_json_is_the_same(handle: Handle) -> None:
    assert Handle.from_dict(json.loads(json.dumps(handle.to_dict()))) == handle


@HANDLES
def test_copied_handle_is_the_same(handle: Handle) -> None:
    assert copy.deepcopy(handle) == copy.copy(handle) == handle


@pytest.mark.parametrize("fields", ["x", None, 3, [("name", "x")]], ids=repr)
def test_fields_that_are_no_dict_are_refused(fields: Any) -> None:
    with pytest.raises(TypeError, match=r"^Handle\.from_dict takes the dict of to_dict\(\), not "):
        Handle.from_dict(fields)


def test_handle_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        HANDLE.fence = 8  # type: ignore[misc]


def test_repr_is_without_the_token() -> None:
    assert repr(HANDLE) == "Handle(name='name', timeout=10.0, expires_at=1700000000.5, fence=7)"


# ---- what is no handle ----


BAD = pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("name", 5, TypeError),
        ("name", None, TypeError),
        ("token", "text", TypeError),
        ("token", None, TypeError),
        ("timeout", "10", TypeError),
        ("timeout", True, TypeError),
        ("timeout", -1, ValueError),
        ("timeout", float("inf"), ValueError),
        ("expires_at", "soon", TypeError),
        ("expires_at", float("nan"), ValueError),
        ("expires_at", float("inf"), ValueError),
        ("fence", 1.0, TypeError),
        ("fence", True, TypeError),
        ("fence", 0, ValueError),
    ],
)


@BAD
def test_bad_value_is_refused(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        dataclasses.replace(HANDLE, **{field: value})


@BAD
def test_bad_value_in_a_pickle_is_refused(field: str, value: Any, error: type[Exception]) -> None:
    tampered = copy.copy(HANDLE)
    object.__setattr__(tampered, field, value)
    pickled = pickle.dumps(tampered)
    with pytest.raises(error, match=field):
        pickle.loads(pickled)


@pytest.mark.parametrize("field", list(HANDLE.to_dict()))
def test_missing_field_is_refused(field: str) -> None:
    fields = HANDLE.to_dict()
    del fields[field]
    with pytest.raises(ValueError, match=field):
        Handle.from_dict(fields)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("token_hex", "no hex", ValueError), ("token_hex", 5, TypeError), ("name_hex", None, TypeError)],
)
def test_field_that_is_no_hex_is_refused(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="fromhex"):
        Handle.from_dict(HANDLE.to_dict() | {field: value})


@pytest.mark.parametrize("fields", [None, "text", 5, ["name"]], ids=repr)
def test_what_has_no_fields_is_refused(fields: Any) -> None:
    with pytest.raises(TypeError):
        Handle.from_dict(fields)


# ---- the lease ----


def test_lease_is_kept_by_the_wall_clock(clocks: Clocks) -> None:
    handle = Handle.of("name", b"token", 10, 58.0, 7)
    assert handle == Handle("name", b"token", 10.0, 1_700_000_008.0, 7)
    clocks.lease_s = 1000.0  # another machine's
    clocks.wall_s += 3.0
    assert handle.lease_end() == 1005.0


def test_lease_that_has_ended_has_ended_on_arrival(clocks: Clocks) -> None:
    handle = Handle.of("name", b"token", 10, 58.0)
    clocks.wall_s += 60.0
    assert handle.lease_end() == -2.0


def test_receiver_whose_clock_is_behind_believes_one_ttl_at_most(clocks: Clocks) -> None:
    handle = Handle.of("name", b"token", 10, 58.0)
    clocks.wall_s -= 3600.0
    assert handle.lease_end() == 60.0


def test_receiver_believes_one_ttl_of_an_extended_lease(clocks: Clocks) -> None:
    assert Handle.of("name", b"token", 10, 150.0).lease_end() == 60.0


@pytest.mark.parametrize("timeout", [None, 0])
def test_lease_of_a_lock_whose_ttl_was_taken_away_is_what_is_left_of_it(clocks: Clocks, timeout: float | None) -> None:
    assert Handle.of("name", b"token", timeout, 58.0).lease_end() == 58.0


@pytest.mark.parametrize("timeout", [None, 10.0])
def test_lease_without_a_known_end_has_none_on_arrival(timeout: float | None) -> None:
    handle = Handle.of("name", b"token", timeout, None)
    assert (handle.expires_at, handle.lease_end()) == (None, None)


def test_time_that_passes_between_two_clocks_is_taken_off(clocks: Clocks) -> None:
    clocks.step_s = 1.0
    handle = Handle.of("name", b"token", 10, 58.0)
    assert handle.expires_at == 1_700_000_007.0
    clocks.lease_s = 50.0
    clocks.wall_s = 1_700_000_000.0
    assert handle.lease_end() == 56.0


def test_ttl_of_any_number_type_is_a_float_in_the_handle() -> None:
    timeout: Any = Decimal("1.5")
    assert Handle.of("name", b"token", timeout, None).timeout == 1.5
