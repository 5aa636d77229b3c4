"""One database per server for this folder, emptied and armed before each test: making one costs more than most tests."""

from collections.abc import Iterator

import psycopg.sql
import pytest

from fencepost.schemas import arming
from support.database import Database, Databases

TABLES = (
    "manifest",
    "object",
    "staged",
    "publication",
    "effect_event",
    "lookup",
    "effect",
    "attempt",
    "agenda",
    "wait",
    "signal",
    "progress",
    "result",
    "job_hold",
    "job_event",
    "archive",
    "job_retention",
    "archive_retention",
    "job",
    "turn",
    "paused",
    "lifecycle",
    "job_class",
    "decision",
    "tenant",
    "restriction",
    "principal_grant",
    "principal",
    "lost_begin",
    "duty",
    "schedule",
)
FIRST = "SELECT i.epoch_counter = 1 AND i.floor = 1 AND i.era = 1 FROM fencepost.installation AS i"
ALONE = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def empty(database: Database) -> Database:
    """No session but ours, no job, no effect, no result; armed by its own witness."""
    with database.connect(autocommit=True) as conn:
        conn.execute(ALONE)
        # History is append-only for everybody but a superuser who says so.
        conn.execute("SET session_replication_role = replica")
        for table in TABLES:
            conn.execute(psycopg.sql.SQL("DELETE FROM fencepost.{}").format(psycopg.sql.Identifier(table)))
        conn.execute("DROP TABLE IF EXISTS result")
        conn.execute("UPDATE fencepost.installation SET frozen = false, recovered_at = NULL")
        conn.execute("SELECT setval('fencepost.job_doorbell', 0)")
    arming.ensure_armed(database.dsn, database.state)
    return database


class Kept:
    """The database of this folder on one server; made anew after a test that changed what no test may take back: epochs."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._made: Database | None = None

    def emptied(self) -> Database:
        """Empty, armed, and at the first epoch."""
        if self._made is not None and not self._at_first(self._made):
            self.drop()
        if self._made is None:
            self._made = self._databases.migrated()
        return empty(self._made)

    def drop(self) -> None:
        """At the end."""
        if self._made is not None:
            self._databases.drop(self._made)
            self._made = None

    @staticmethod
    def _at_first(database: Database) -> bool:
        with database.connect(autocommit=True) as conn:
            return conn.execute(FIRST).fetchone() == (True,)


@pytest.fixture(scope="session")
def kept(databases: Databases) -> Iterator[Kept]:
    """The database of this folder, on each supported PostgreSQL."""
    made = Kept(databases)
    yield made
    made.drop()


@pytest.fixture(scope="session")
def kept18(databases18: Databases) -> Iterator[Kept]:
    """The database of this folder, on the newest supported PostgreSQL."""
    made = Kept(databases18)
    yield made
    made.drop()


@pytest.fixture
def database(kept: Kept) -> Database:
    """An empty, armed database, on each supported PostgreSQL."""
    return kept.emptied()


@pytest.fixture
def database18(kept18: Kept) -> Database:
    """An empty, armed database, on the newest supported PostgreSQL."""
    return kept18.emptied()
