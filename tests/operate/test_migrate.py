"""`fencepost migrate`: applied once, whoever runs it how often; a failure leaves nothing."""

from pathlib import Path

from fencepost.schemas import migrate
from support.command_line import Fencepost, run_apart
from support.database import Database, Databases
from support.processes import wait_for

RELATIONS = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace('fencepost')"
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"


def number(database: Database, statement: str) -> int:
    with database.connect(autocommit=True) as conn:
        row = conn.execute(statement.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_bare_migrate_applies_and_arms_and_says_so_in_one_line(empty_database: Database, fencepost: Fencepost) -> None:
    done = fencepost(empty_database, "migrate")

    assert done.code == 0
    assert f"armed; the witness is {empty_database.state}/witness.json" in done.out.splitlines()
    assert "single role" in done.out
    again = fencepost(empty_database, "migrate", "apply")
    assert again.code == 0
    assert "tables up to date" in again.out and "armed already" in again.out


def test_status_tells_pending_from_applied_and_sql_prints_every_migration(
    empty_database: Database, fencepost: Fencepost
) -> None:
    before = fencepost(empty_database, "migrate", "status")
    assert before.code == 1 and "pending" in before.out
    assert number(empty_database, RELATIONS) == 0

    assert fencepost(empty_database, "migrate").code == 0
    after = fencepost(empty_database, "migrate", "status")
    assert after.code == 0 and "pending" not in after.out

    script = fencepost(empty_database, "migrate", "sql").out
    assert all(f"-- {m.name}\n" in script for m in [*migrate.tables(), *migrate.functions()])


def test_two_migrates_at_once_do_the_work_once(empty_database: Database, tmp_path: Path) -> None:
    with empty_database.connect() as gate:
        gate.execute(migrate.LOCK.encode())
        both = [run_apart(empty_database, "migrate", folder=tmp_path) for _ in range(2)]
        wait_for(lambda: number(empty_database, WAITING) == 2, 60, "both to wait for the lock")
    ended = [process.communicate(timeout=150) for process in both]

    assert [process.returncode for process in both] == [0, 0], ended
    assert sorted("0001_authority.sql" in out for out, _ in ended) == [False, True]
    assert all("armed" in out for out, _ in ended)
    assert number(empty_database, "SELECT count(*) FROM fencepost.installation") == 1
    assert number(empty_database, "SELECT count(*) FROM fencepost.migration") == len(migrate.tables())
    assert number(empty_database, "SELECT count(*) FROM fencepost.tick") == 1
    assert number(empty_database, "SELECT fencepost.armed()::int") == 1


def test_migrate_that_fails_half_way_leaves_nothing(databases: Databases, fencepost: Fencepost) -> None:
    control, database = databases.empty(), databases.empty()
    assert fencepost(control, "migrate").code == 0

    with database.connect(autocommit=True) as conn:
        conn.execute("CREATE SCHEMA fencepost")
        conn.execute("CREATE TABLE fencepost.staged (mine integer)")
    done = fencepost(database, "migrate")

    assert done.code == 1
    assert "staged" in done.line and "already exists" in done.line
    assert number(database, RELATIONS) == 1
    assert not (database.state / "witness.json").exists()
    with database.connect(autocommit=True) as conn:
        conn.execute("DROP TABLE fencepost.staged")
    assert fencepost(database, "migrate").code == 0
    databases.drop(control)
    databases.drop(database)


def test_edited_migration_is_refused_by_name(empty_database: Database, fencepost: Fencepost) -> None:
    assert fencepost(empty_database, "migrate").code == 0
    with empty_database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.migration SET checksum = 'other' WHERE name = '0002_outbox.sql'")

    done = fencepost(empty_database, "migrate")

    assert done.code == 2
    assert "0002_outbox.sql" in done.line and "[migration]" in done.line


def test_wrong_arguments_are_refused_before_anything_is_written(empty_database: Database, fencepost: Fencepost) -> None:
    for arguments, field in ((["--install", "Not A Name"], "[install]"), (["--slots", "0"], "[slots]")):
        done = fencepost(empty_database, "migrate", *arguments)
        assert done.code == 2
        assert field in done.line
        assert number(empty_database, RELATIONS) == 0
    assert fencepost(empty_database, "migrate", "--install", "mine", "--slots", "4").code == 0
    assert number(empty_database, "SELECT slots FROM fencepost.installation") == 4


def test_options_in_the_wrong_place_are_refused_and_not_ignored(empty_database: Database, fencepost: Fencepost) -> None:
    done = fencepost(empty_database, "migrate", "--slots", "4", "apply")
    assert done.code == 2
    assert "give the options behind `apply`" in done.err
    assert number(empty_database, RELATIONS) == 0

    assert fencepost(empty_database, "migrate", "apply", "--slots", "4").code == 0
    assert number(empty_database, "SELECT slots FROM fencepost.installation") == 4


def test_unreachable_database_is_told_with_its_address_and_without_its_password(fencepost: Fencepost) -> None:
    done = fencepost(None, "migrate", FENCEPOST_DATABASE="postgresql://app:hunter2@127.0.0.1:1/app")

    assert done.code == 3
    assert "127.0.0.1:1/app" in done.line and "[database]" in done.line
