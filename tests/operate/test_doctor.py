"""`fencepost doctor`: green when all is well; each thing that is wrong is one clear line and exit code 1."""

import json
import shutil
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.schemas import arming, grants
from stack.obtain import Obtained
from stack.postgres import PostgresServer
from support.command_line import Fencepost, Result
from support.database import Database, Databases
from support.services import Pooler


def failing(result: Result) -> dict[str, str]:
    """Message by name of the check, of those that fail."""
    lines = [line.split(maxsplit=2) for line in result.out.splitlines()]
    return {line[1]: line[2] for line in lines if line[0] == "fail"}


def healthy(fencepost: Fencepost, database: Database) -> None:
    """The control: everything is looked at and nothing fails."""
    done = fencepost(database, "doctor")
    assert done.code == 0, done.out
    assert failing(done) == {}
    for check in (
        "connection",
        "server",
        "encoding",
        "pooler",
        "migrations",
        "public",
        "search_path",
        "armed",
        "witness",
    ):
        assert f"ok    {check} " in done.out, check
    assert "warn  roles" in done.out


def test_healthy_database_is_green_and_the_same_as_json(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)

    found = json.loads(fencepost(database, "doctor", "--json").out)
    assert {f["level"] for f in found} <= {"ok", "warn"}


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        ("GRANT EXECUTE ON FUNCTION fencepost.armed() TO PUBLIC", "public", "PUBLIC may execute armed"),
        ("ALTER FUNCTION fencepost.armed() SET search_path = public", "search_path", "armed without search_path"),
        ("ALTER FUNCTION fencepost.armed() RESET search_path", "search_path", "armed without search_path"),
        ("DELETE FROM fencepost.migration WHERE name = '0004_jobs.sql'", "migrations", "0004_jobs.sql pending"),
        ("UPDATE fencepost.migration SET checksum = 'x' WHERE name = '0001_authority.sql'", "migrations", "0001_auth"),
        ("UPDATE fencepost.ticket SET nonce = nonce", "armed", "DISARMED after a plain restart"),
        ("UPDATE fencepost.tip SET seq = seq - 1", "witness", "behind its witness"),
        ("UPDATE fencepost.tip SET seq = seq + 5", "witness", "ahead of its witness"),
        ("UPDATE fencepost.tip SET nonce = gen_random_uuid()", "witness", "different turns"),
        ("UPDATE fencepost.installation SET id = gen_random_uuid()", "witness", "another installation"),
    ],
)
def test_each_damage_is_one_line_and_exit_code_1(
    database: Database, fencepost: Fencepost, damage: str, check: str, words: str
) -> None:
    healthy(fencepost, database)

    with database.connect(autocommit=True) as conn:
        conn.execute(damage.encode())
    done = fencepost(database, "doctor")

    assert done.code == 1
    assert list(failing(done)) == [check], done.out
    assert words in failing(done)[check]


def test_public_and_search_path_are_mended_by_migrate(database: Database, fencepost: Fencepost) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute("GRANT EXECUTE ON FUNCTION fencepost.armed() TO PUBLIC")
        conn.execute("ALTER FUNCTION fencepost.armed() SET search_path = public")
    assert set(failing(fencepost(database, "doctor"))) == {"public", "search_path"}

    assert fencepost(database, "migrate").code == 0
    healthy(fencepost, database)


def test_database_without_the_schema_says_what_to_run(empty_database: Database, fencepost: Fencepost) -> None:
    done = fencepost(empty_database, "doctor")

    assert done.code == 1
    assert failing(done) == {"migrations": "none is applied in this database; run `fencepost migrate`"}


def test_missing_witness_is_a_failure_while_armed_and_when_disarmed(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)
    (database.state / "witness.json").unlink()
    lost = fencepost(database, "doctor")
    assert lost.code == 1
    assert list(failing(lost)) == ["witness"] and "FENCEPOST_STATE" in failing(lost)["witness"]

    with database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
    disarmed = fencepost(database, "doctor")
    assert disarmed.code == 1
    assert set(failing(disarmed)) == {"armed", "witness"}


@pytest.fixture
def server(databases18: Databases) -> Iterator[PostgresServer]:
    """A server of this test, which may be restarted."""
    with PostgresServer("18") as started:
        yield started


def test_restart_disarms_until_the_witness_is_equal_again(
    server: PostgresServer, fencepost: Fencepost, databases18: Databases
) -> None:
    made = Databases(server.dsn, databases18.empty().state)
    database = made.empty()
    assert fencepost(database, "migrate").code == 0
    healthy(fencepost, database)
    aside = database.state.with_name("aside")
    shutil.copytree(database.state, aside)
    (database.state / "witness.json").unlink()

    server.restart()
    without = fencepost(database, "doctor")
    assert without.code == 1
    assert set(failing(without)) == {"armed", "witness"}

    shutil.copy(aside / "witness.json", database.state / "witness.json")
    equal = fencepost(database, "doctor")
    assert list(failing(equal)) == ["armed"]
    assert "plain restart" in failing(equal)["armed"] and "fencepost migrate" in failing(equal)["armed"]

    assert fencepost(database, "migrate").code == 0
    healthy(fencepost, database)


def test_stale_copy_of_the_witness_does_not_arm_a_restarted_database(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)
    stale = database.state / "stale.json"
    shutil.copy(database.state / "witness.json", stale)
    arming.arm(database.dsn, database.state)
    healthy(fencepost, database)

    shutil.copy(stale, database.state / "witness.json")
    with database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.ticket SET nonce = nonce")
    done = fencepost(database, "doctor")

    assert done.code == 1
    assert "ahead of its witness" in failing(done)["armed"]
    migrated = fencepost(database, "migrate")
    assert migrated.code == 1
    assert "disarmed" in migrated.out and "[ahead]" in migrated.out


def test_silent_heartbeat_is_a_warning(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)
    with database.connect(autocommit=True) as conn:
        conn.execute("UPDATE fencepost.tip SET beat_at = clock_timestamp() - interval '5 minutes'")

    done = fencepost(database, "doctor")

    assert done.code == 0
    assert "warn  heartbeat" in done.out and "5 min" in done.out


def test_pooler_is_recognised(database: Database, pgbouncer: Pooler, fencepost: Fencepost) -> None:
    assert "direct connection" in fencepost(database, "doctor").out

    behind = Database(pgbouncer.dsn(database.dsn), database.state)
    done = fencepost(behind, "doctor")

    assert done.code == 0, done.out
    assert "ok    pooler" in done.out and "prepare_threshold=None" in done.out


def test_unknown_variable_is_a_warning_with_what_was_meant(database: Database, fencepost: Fencepost) -> None:
    assert "every FENCEPOST_* variable is known" in fencepost(database, "doctor", FENCEPOST_TEST_X="1").out

    done = fencepost(database, "doctor", FENCEPOST_DATABSE="postgresql://app:hunter2@127.0.0.1/x")

    assert done.code == 0
    assert "FENCEPOST_DATABSE (meant FENCEPOST_DATABASE?)" in done.out


def test_unreachable_database_is_one_failing_line(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)

    done = fencepost(None, "doctor", FENCEPOST_DATABASE="postgresql://app:hunter2@127.0.0.1:1/app")

    assert done.code == 1
    assert "127.0.0.1:1/app" in failing(done)["connection"]


def test_login_without_a_role_is_told_to_get_one(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)
    name = f"fp_stranger_{uuid.uuid4().hex[:8]}"
    with database.connect(autocommit=True) as conn:
        conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        try:
            done = fencepost(Database(make_conninfo(database.dsn, user=name), database.state), "doctor")
            shown = fencepost(Database(make_conninfo(database.dsn, user=name), database.state), "status")
        finally:
            conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))

    assert done.code == 1
    assert failing(done)["migrations"].startswith("permission denied for schema fencepost; grant this login")
    assert shown.code == 1
    assert "permission denied" in shown.line and "[database]" in shown.line


def test_schema_without_an_installation_is_a_failure(database: Database, fencepost: Fencepost) -> None:
    healthy(fencepost, database)
    with database.connect(autocommit=True) as conn:
        conn.execute("DELETE FROM fencepost.installation")

    done = fencepost(database, "doctor")

    assert done.code == 1
    assert failing(done) == {"migrations": "applied, but nothing was installed; run `fencepost migrate`"}


def test_separated_roles_are_recognised_and_a_missing_one_named(
    databases: Databases, pg: Obtained[PostgresServer], fencepost: Fencepost
) -> None:
    install = f"t{uuid.uuid4().hex[:8]}"
    database = databases.empty()
    try:
        assert fencepost(database, "migrate", "--separate-roles", "--install", install).code == 0
        done = fencepost(database, "doctor")
        assert done.code == 0, done.out
        assert "separated, but this login is a superuser" in done.out
        with database.connect(autocommit=True) as conn:
            gone = sql.Identifier(grants.role(install, "projector"))
            conn.execute(sql.SQL("DROP OWNED BY {}").format(gone))
            conn.execute(sql.SQL("DROP ROLE {}").format(gone))
        missing = fencepost(database, "doctor")
        assert list(failing(missing)) == ["roles"]
        assert grants.role(install, "projector") in failing(missing)["roles"]
    finally:
        databases.drop(database)
        with psycopg.connect(pg.address, autocommit=True, connect_timeout=10) as conn:
            for name in ("owner", *grants.ROLES):
                conn.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(grants.role(install, name))))
