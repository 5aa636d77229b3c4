"""Migrations: applied once whatever runs them, all or nothing, and equal to the snapshot that people read."""

import threading
from importlib.resources import files
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.schemas import migrate
from fencepost.schemas.errors import ConfigError, Unreachable
from fencepost.schemas.witness import FileWitness
from support.catalog import describe
from support.database import Database

CREATE_LATIN1 = "CREATE DATABASE fp_latin1 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
SNAPSHOT = files("fencepost.schemas") / "sql" / "schema.sql"


def test_an_empty_database_is_migrated_armed_and_has_nothing_pending(empty_database: Database) -> None:
    report = migrate.apply(empty_database.dsn, state=empty_database.state)

    assert report.armed and report.created
    assert FileWitness(empty_database.state).exists()
    assert migrate.status(empty_database.dsn).pending == ()


def test_running_again_changes_nothing(empty_database: Database) -> None:
    migrate.apply(empty_database.dsn, state=empty_database.state)
    with empty_database.connect() as conn:
        before = describe(conn)

    report = migrate.apply(empty_database.dsn, state=empty_database.state)

    assert report.applied == () and report.armed and not report.created
    with empty_database.connect() as conn:
        assert describe(conn) == before


def test_running_again_waits_for_no_work_under_way_and_no_work_for_it(database: Database) -> None:
    """The locks of every kind of writer are held throughout: a run that needs more would wait, or deadlock."""
    used = "attempt, authority_log, decision, effect, effect_event, job, outbox, publication, slot, staged"
    with database.connect() as writer, database.connect(autocommit=True) as other:
        other.execute("SET lock_timeout = '5s'")
        other.execute("SELECT fencepost.register_class('c', 'strict', '9 s', 5, 5, '1 s', '5 s', '9 s', '9 s')")
        writer.execute("LOCK TABLE fencepost.gate IN ROW SHARE MODE")
        for table in used.split(", "):
            writer.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(sql.Identifier("fencepost", table)))

        assert migrate.apply(database.dsn, state=database.state).armed
        assert other.execute("SELECT count(*) FROM fencepost.claim('w', ARRAY['c'], 4)").fetchone() == (0,)
        writer.commit()


def test_the_triggers_are_made_once_and_made_again_when_they_are_gone(database: Database) -> None:
    query = """SELECT tgrelid::regclass::text, tgname, oid FROM pg_trigger
               WHERE tgname IN ('append_only', 'generation_guard', 'publication_guard') ORDER BY 1, 2"""
    with database.connect(autocommit=True) as conn:
        before = conn.execute(query).fetchall()
        conn.execute("DROP TRIGGER append_only ON fencepost.staged")

        migrate.apply(database.dsn, state=database.state)

        after = conn.execute(query).fetchall()
    assert len(before) == 14 and [row[:2] for row in after] == [row[:2] for row in before]
    assert [was[0] for was, now in zip(before, after, strict=True) if was[2] != now[2]] == ["fencepost.staged"]


def test_two_runs_at_once_do_the_work_once(empty_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever comes second waits for the first, however long that takes; what bounds a wait for a table does not bound it.
    monkeypatch.setattr(migrate, "TABLE_WAIT", "1ms")
    reports: list[migrate.Report] = []
    barrier = threading.Barrier(2)

    def run() -> None:
        barrier.wait(60)
        reports.append(migrate.apply(empty_database.dsn, state=empty_database.state))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(r.created for r in reports) == [False, True]
    assert all(r.armed for r in reports)


def test_a_failed_run_leaves_nothing_behind(empty_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = migrate.Migration("9999_broken.sql", b"CREATE TABLE fencepost.half (); SELECT 1 / 0")
    real = migrate.tables()
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "tables", lambda: [*real, broken])
        with pytest.raises(psycopg.errors.DivisionByZero):
            migrate.apply(empty_database.dsn, state=empty_database.state)

    with empty_database.connect() as conn:
        assert conn.execute("SELECT to_regnamespace('fencepost')").fetchone() == (None,)
    assert not FileWitness(empty_database.state).exists()
    assert migrate.apply(empty_database.dsn, state=empty_database.state).armed


def test_an_edited_migration_is_refused_by_name(empty_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate.apply(empty_database.dsn, state=empty_database.state)
    edited = [migrate.Migration(m.name, m.text + b"\n-- later thought") for m in migrate.tables()]
    monkeypatch.setattr(migrate, "tables", lambda: edited)

    with pytest.raises(ConfigError, match=r"0001_authority\.sql"):
        migrate.apply(empty_database.dsn, state=empty_database.state)


def test_the_snapshot_is_what_the_migrations_make(empty_database: Database, database: Database) -> None:
    assert SNAPSHOT.read_text() == migrate.script(), (
        "run: fencepost migrate sql > schemas/fencepost/schemas/sql/schema.sql"
    )
    with empty_database.connect(autocommit=True) as conn:
        conn.execute(SNAPSHOT.read_bytes())
        by_snapshot = describe(conn)
    with database.connect() as conn:
        assert describe(conn) == by_snapshot


def test_tables_made_from_the_printed_script_are_completed_and_armed(empty_database: Database) -> None:
    with empty_database.connect(autocommit=True) as conn:
        conn.execute(migrate.script().encode())

    report = migrate.apply(empty_database.dsn, state=empty_database.state)

    assert report.created and report.armed and report.applied == ()


def test_an_unreachable_database_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as caught:
        migrate.apply("postgresql://me:hunter2@127.0.0.1:9/none", state=tmp_path)

    assert "127.0.0.1:9" in str(caught.value)
    assert "hunter2" not in str(caught.value) + repr(caught.value)


def test_another_encoding_is_refused(empty_database: Database) -> None:
    with empty_database.connect(autocommit=True) as conn:
        conn.execute(CREATE_LATIN1)
        try:
            with pytest.raises(ConfigError, match="UTF8"):
                migrate.apply(make_conninfo(empty_database.dsn, dbname="fp_latin1"), state=empty_database.state)
        finally:
            conn.execute("DROP DATABASE fp_latin1 WITH (FORCE)")
