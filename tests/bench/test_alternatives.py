"""The bench of alternatives: its locks in PostgreSQL and etcd are locks, and what is not installed is named.

Rules: whatever the machine has is started; a missing system is skipped, since only the bench needs it.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator

import pytest
from redis.exceptions import LockError

pytest.importorskip("bench", reason="the bench is no part of the package")
pytest.importorskip("rich", reason="what the bench prints its tables with")

from bench.alternatives import command, places, postgresql
from bench.alternatives.locks import Alternative, check
from bench.alternatives.systems import SYSTEMS
from bench.contestants import AbsentError, AnyLock, CheckFailedError
from redislock_fast.server import find_binary

pytestmark = pytest.mark.skipif(find_binary("valkey") is None, reason="no valkey server here")


@pytest.fixture(params=SYSTEMS, scope="module")
def alternatives(request: pytest.FixtureRequest) -> Iterator[list[Alternative]]:
    try:
        with SYSTEMS[request.param]() as opened:
            yield opened
    except AbsentError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def cluster() -> Iterator[postgresql.Cluster]:
    try:
        with postgresql.open_cluster() as running:
            yield running
    except AbsentError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(postgresql, "_PROGRAMS", "no/such/folder")


def test_locks_of_one_name_exclude_each_other(alternatives: list[Alternative]) -> None:
    for alternative in alternatives:
        check(alternative.new_client()("excluding"), alternative.new_client()("excluding"))


def test_locks_of_two_names_are_held_at_a_time(alternatives: list[Alternative]) -> None:
    for alternative in alternatives:
        make = alternative.new_client()
        locks = [make("one"), make("other")]
        assert [lock.acquire(blocking=False) for lock in locks] == [True, True], alternative.name
        for lock in locks:
            lock.release()


def test_a_lock_that_another_holds_is_not_released(alternatives: list[Alternative]) -> None:
    for alternative in alternatives:
        holder, rival = (alternative.new_client()("released") for _ in range(2))
        holder.acquire(blocking=False)
        with pytest.raises((CheckFailedError, LockError)):
            rival.release()
        assert rival.acquire(blocking=False) is False, alternative.name
        holder.release()


def test_waiter_gets_the_lock_that_is_given_back(alternatives: list[Alternative]) -> None:
    for alternative in alternatives:
        holder, waiter = (alternative.new_client()("waited for") for _ in range(2))
        holder.acquire(blocking=False)
        with_lock = threading.Event()

        def wait(lock: AnyLock = waiter, got: threading.Event = with_lock) -> None:
            with lock:
                got.set()

        thread = threading.Thread(target=wait)
        thread.start()
        holder.release()
        thread.join()
        assert with_lock.is_set(), alternative.name


@pytest.mark.slow
def test_a_row_whose_lease_has_ended_is_taken_over(cluster: postgresql.Cluster) -> None:
    session = cluster.session()
    holder, heir = (postgresql.TableLock(of_each, "expired") for of_each in (session, cluster.session()))
    holder.acquire(blocking=False)
    session.execute("UPDATE distributed_locks SET expires_at = now() - INTERVAL '1 ms'")
    assert heir.acquire(blocking=False) is True
    with pytest.raises(CheckFailedError, match="did not hold"):
        holder.release()


@pytest.mark.slow
def test_a_lock_that_does_not_exclude_is_found_out(cluster: postgresql.Cluster) -> None:
    session = cluster.session()
    # A session may take its advisory lock twice.
    with pytest.raises(CheckFailedError, match="two holders at a time"):
        check(postgresql.AdvisoryLock(session, "shared"), postgresql.AdvisoryLock(session, "shared"))


def test_a_program_that_is_missing_is_named_with_its_package() -> None:
    with pytest.raises(AbsentError, match="install Debian's package no-such-package"):
        places.program("no-such-program", "no-such-package")


@pytest.mark.slow
def test_what_is_not_installed_is_left_out_and_the_rest_is_measured(
    no_programs: None, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(["--only", "postgresql,etcd", "--threads", "1", "--rounds", "1", "--seconds", "0.01"])
    assert command.run(options) == 0
    printed = capsys.readouterr().out
    assert "redislock_fast, appendfsync always" in printed
    assert "postgresql: no program 'initdb': install Debian's package postgresql" in printed
    assert "etcd: no program 'etcd': install Debian's package etcd-server" in printed
