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
    "job",
    "turn",
    "paused",
    "lifecycle",
    "job_class",
    "decision",
    "tenant",
    "restriction",
    "lost_begin",
    "duty",
    "schedule",
)
ALONE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


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


@pytest.fixture(scope="session")
def shared(databases: Databases) -> Iterator[Database]:
    """The database of this folder, on each supported PostgreSQL."""
    made = databases.migrated()
    yield made
    databases.drop(made)


@pytest.fixture(scope="session")
def shared18(databases18: Databases) -> Iterator[Database]:
    """The database of this folder, on the newest supported PostgreSQL."""
    made = databases18.migrated()
    yield made
    databases18.drop(made)


@pytest.fixture
def database(shared: Database) -> Database:
    """An empty, armed database, on each supported PostgreSQL."""
    return empty(shared)


@pytest.fixture
def database18(shared18: Database) -> Database:
    """An empty, armed database, on the newest supported PostgreSQL."""
    return empty(shared18)
