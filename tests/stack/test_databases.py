"""The database fixture itself: clones are armed, separate, and gone afterwards."""

import psycopg

from fencepost.schemas import arming
from support.database import Database, Databases


def test_a_clone_is_armed_and_an_empty_database_has_no_schema(database: Database, empty_database: Database) -> None:
    with database.connect() as conn:
        assert arming.read_tip(conn).armed
    with empty_database.connect() as conn:
        assert conn.execute("SELECT to_regnamespace('fencepost')").fetchone() == (None,)


def test_two_clones_share_nothing_and_a_dropped_one_is_gone(databases: Databases) -> None:
    first, second = databases.migrated(), databases.migrated()
    try:
        with first.connect() as conn:
            conn.execute("CREATE TABLE only_here (value int)")
        with second.connect() as conn:
            assert conn.execute("SELECT to_regclass('only_here')").fetchone() == (None,)
            assert arming.read_tip(conn).armed
        assert first.state != second.state
        assert any(first.state.iterdir())
    finally:
        lingering = psycopg.connect(first.dsn)
        databases.drop(first)
        databases.drop(second)
        lingering.close()

    assert not first.state.exists()
