"""The SQL recipes of docs/how-to/fencing.md: a holder that wakes too late changes nothing, in SQLite and in PostgreSQL.

Rules: the statements that run are those that stand in the document, found by their headings.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import LockError

from tests.conftest import absent
from tests.integration.fencing.test_guards import two_holders
from tests.support.helpers import PATIENCE_S, ROOT, start, wait_until
from tests.support.postgresql import PostgreSQL, find_programs

_CODE = re.compile(r"^### ([^\n]*)\n\n```sql\n(.*?)```", re.DOTALL | re.MULTILINE)
_DOCUMENT = (ROOT / "docs" / "how-to" / "fencing.md").read_text()
_STATEMENTS = dict(_CODE.findall(_DOCUMENT))
_TABLES = [_STATEMENTS["Rows with a fence"], _STATEMENTS["A table of fences"]]
_UPDATE = _STATEMENTS["A row that is there"]
_UPSERT = _STATEMENTS["A row that may not be there yet"]
_CLAIM = _STATEMENTS["Any statements"]


class Database:
    """One of the two.

    Args:
        connect: makes a connection.
        is_sqlite: which.
    """

    def __init__(self, connect: Callable[[], Any], is_sqlite: bool) -> None:
        self.connect = connect
        self.is_sqlite = is_sqlite
        self._own = connect()
        self._own.execute("DROP TABLE IF EXISTS reports")
        self._own.execute("DROP TABLE IF EXISTS fences")
        for table in _TABLES:
            self._own.execute(table)
        self._own.commit()

    def run(self, connection: Any, statement: str, fence: int, body: str = "") -> int:
        """How many rows the statement has written."""
        if not self.is_sqlite:
            statement = re.sub(r":(\w+)", r"%(\1)s", statement)
        values = {"id": "today", "lock": "today", "body": body, "fence": fence}
        rowcount: int = connection.execute(statement, values).rowcount
        return rowcount

    def write(self, statement: str, fence: int, body: str = "") -> int:
        """The same, in a transaction of its own."""
        rowcount = self.run(self._own, statement, fence, body)
        self._own.commit()
        return rowcount

    def start_rows(self) -> None:
        """Let all rows be there, with a fence that is lower than any holder's."""
        self.write(_UPSERT, 0, "nothing")
        self.write(_CLAIM, 0)

    def rows(self) -> list[Any]:
        """All of both tables."""
        found = [self._own.execute(f"SELECT * FROM {table}").fetchall() for table in ("reports", "fences")]
        self._own.commit()
        return [tuple(row) for rows in found for row in rows]

    def somebody_waits(self) -> bool:
        """Whether a statement waits for another transaction, as far as the database tells."""
        if self.is_sqlite:
            return True
        with closing(self.connect()) as connection:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            count: int = connection.execute(waiting).fetchone()[0]
            return count > 0


@pytest.fixture(scope="session")
def psycopg() -> Any:
    """The driver, which needs a libpq."""
    try:
        import psycopg
    except ImportError as error:
        absent(f"no psycopg here: {error}")
    return psycopg


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The session's server."""
    programs = find_programs()
    if programs is None:
        absent("no PostgreSQL here")
    with PostgreSQL(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Each database in turn, with the document's tables, which are empty."""
    is_sqlite = request.param == "sqlite"
    if is_sqlite:
        # Used by one thread at a time.
        connect = partial(sqlite3.connect, tmp_path / "database", timeout=PATIENCE_S, check_same_thread=False)
    else:
        driver = request.getfixturevalue("psycopg")
        connect = partial(driver.connect, request.getfixturevalue("postgresql").conninfo)
    with ExitStack() as connections:
        yield Database(lambda: connections.enter_context(closing(connect())), is_sqlite)


STATEMENTS = pytest.mark.parametrize("statement", [_UPDATE, _UPSERT, _CLAIM], ids=["update", "upsert", "claim"])


@STATEMENTS
def test_paused_holder_changes_nothing(database: Database, valkey_client: redis.Redis, statement: str) -> None:
    database.start_rows()
    paused, later = two_holders(valkey_client)
    assert database.write(statement, later, "later") == 1
    before = database.rows()
    assert database.write(statement, paused, "stale") == 0
    assert database.rows() == before
    assert any(later in row for row in before)


@STATEMENTS
def test_paused_holder_that_waits_for_the_commit_of_a_later_one_changes_nothing(
    database: Database, statement: str
) -> None:
    database.start_rows()
    later = database.connect()
    database.run(later, statement, 34, "later")
    answer = start(lambda: database.write(statement, 33, "stale"))
    wait_until(database.somebody_waits, "the stale statement waits")
    later.commit()
    assert answer.result(PATIENCE_S) == 0
    assert any(34 in row for row in database.rows())


@STATEMENTS
def test_holder_may_write_again(database: Database, statement: str) -> None:
    database.start_rows()
    assert [database.write(statement, fence) for fence in (33, 33, 34, 34, 33)] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("statement", [_UPSERT, _CLAIM], ids=["upsert", "claim"])
def test_first_holder_finds_no_row(database: Database, statement: str) -> None:
    assert [database.write(statement, fence) for fence in (34, 33)] == [1, 0]


@STATEMENTS
def test_every_order_of_holders_ends_with_the_last(database: Database, statement: str) -> None:
    for round_, order in enumerate(itertools.permutations((1, 2, 3))):
        database.start_rows()
        fences = [10 * round_ + fence for fence in order]
        written = [database.write(statement, fence) for fence in fences]
        assert written == [int(fence == max(fences[: at + 1])) for at, fence in enumerate(fences)]


@STATEMENTS
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_stale_statement_with_an_old_snapshot_fails(database: Database, psycopg: Any, statement: str) -> None:
    database.start_rows()
    paused = database.connect()
    paused.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    paused.execute("SELECT 1 FROM reports, fences")
    database.write(statement, 34)
    with pytest.raises(psycopg.errors.SerializationFailure):
        database.run(paused, statement, 33)


def test_the_documents_function_does_all_or_nothing(tmp_path: Path) -> None:
    function = re.search(r"```python\n(def publish.*?)```", _DOCUMENT, re.DOTALL)
    assert function is not None
    names: dict[str, Any] = {"CLAIM": _CLAIM, "LockError": LockError}
    exec(function[1], names)
    with closing(sqlite3.connect(tmp_path / "database")) as connection:
        for table in (*_TABLES, "CREATE TABLE drafts (id)", "CREATE TABLE papers (id, body)"):
            connection.execute(table)
        connection.execute("INSERT INTO drafts VALUES ('one'), ('other')")
        names["publish"](connection, "lock", 34, "one", "body")
        with pytest.raises(LockError, match="lock has a later holder than 33"):
            names["publish"](connection, "lock", 33, "other", "stale")
        assert connection.execute("SELECT * FROM papers").fetchall() == [("one", "body")]
        assert connection.execute("SELECT * FROM drafts").fetchall() == [("other",)]
