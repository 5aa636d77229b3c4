"""The test kit as its users have it: their own pytest, their own files, the real PostgreSQL."""

import re
import shutil
import tomllib
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from fencepost.operate.testing import Database, Databases, age
from fencepost.operate.testing.ageing import TABLES
from fencepost.schemas.errors import InvalidInput, WrongTransaction
from stack.obtain import Obtained
from stack.postgres import PostgresServer
from support.restores import copy_database

ROOT = Path(__file__).parents[2]
KIT = ROOT / "tests" / "support" / "kit"
PLUGIN = "fencepost.operate.pytest_plugin"
INERT = """
import sys

def test_nothing_of_ours_was_imported():
    assert [name for name in sys.modules if name.startswith(("fencepost.schemas", "fencepost.operate.testing", "psycopg"))] == []
"""
WANTS_ONE = "def test_database(fencepost_database): pass"
LEAKING = """
import psycopg, pytest

@pytest.fixture(scope="session")
def fencepost_domain():
    return lambda dsn: globals().update(left_open=psycopg.connect(dsn))
"""
# Times that ageing leaves alone: authority and the witness, settings, and history, which nobody may change.
KEPT = {
    *("installation", "tenant", "ticket", "tip", "authority_log", "decision", "migration"),
    *("destination", "route", "job_class", "attempt", "staged", "publication", "effect_event", "job_event"),
    *("consumer", "consumer_forever", "consumer_topic", "protected", "manifest", "paused", "lifecycle"),
    *("consumer_position", "consumer_recovery"),
    *("signal", "progress", "result"),
    *("restriction", "lost_begin", "principal", "principal_grant"),
    *("archive", "job_retention", "archive_retention"),
    # Follows the jobs: one that ages is pointed to anew.
    "agenda",
}


@pytest.fixture
def server(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, pg18: Obtained[PostgresServer]) -> str:
    """The address that a user's session is given, in its environment; nothing but our plugin is loaded there."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    monkeypatch.setenv("FENCEPOST_TEST_DATABASE", pg18.address)
    pytester.makeini("[pytest]\nfilterwarnings = error")
    return pg18.address


def user(pytester: pytest.Pytester, name: str) -> None:
    """Puts a user's file and conftest in place."""
    shutil.copy(KIT / "user_conftest.py", pytester.path / "conftest.py")
    shutil.copy(KIT / f"{name}.py", pytester.path / f"test_{name}.py")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """A pytest of the user's own, in a process of its own."""
    return pytester.runpytest_subprocess("-p", PLUGIN, *arguments, timeout=150)


def test_users_tests_pass_and_their_databases_are_gone_afterwards(pytester: pytest.Pytester, server: str) -> None:
    user(pytester, "passing")
    result = run(pytester, "-s")
    result.assert_outcomes(passed=28)
    names = set(re.findall(r"database=\('(\w+)',\)", result.stdout.str()))
    assert len(names) == 2
    with psycopg.connect(server) as conn:
        assert conn.execute("SELECT datname FROM pg_database WHERE datname = ANY (%s)", (list(names),)).fetchall() == []


def test_failures_tell_types_and_identities_but_no_payloads(pytester: pytest.Pytester, server: str) -> None:
    user(pytester, "failing")
    result = run(pytester)
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "*AssertionError: expected 1 of kit.accepted.v1 with the given tenant, n, found 0; in the outbox:",
            "*kit.accepted.v1 tenant 'acme', operation 'op-1': other n",
            "*kit.withdrawn.v2 tenant 'acme', operation 'op-2'",
            "*AssertionError: expected 1 of kit.accepted.v1, found 2; in the outbox:",
            "*kit.accepted.v1 tenant 'acme', operation 'op-21': as expected",
            "*AssertionError: expected 1 of kit.accepted.v1, found 0; in the outbox:",
            "*  nothing",
            "*AssertionError: expected 1 of kit.report with the given operation, found 0; in the jobs:",
            "*kit.report tenant 'acme', operation 'op-4712', queued: other operation",
            "*AssertionError: the block ended without crashing at 'after cmmit' (time 1); points reached: *after commit",
        ]
    )
    told = [line for line in result.outlines if line.startswith("E ")]
    assert [line for line in told if "hidden" in line or "4711" in line or "secret" in line] == []


def test_the_plugin_is_inert_where_no_fixture_of_it_is_used(
    pytester: pytest.Pytester, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FENCEPOST_TEST_DATABASE")
    pytester.makepyfile(INERT)
    run(pytester).assert_outcomes(passed=1)


def test_a_missing_address_is_a_typed_error_that_says_what_to_set(
    pytester: pytest.Pytester, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(WANTS_ONE)
    run(pytester).assert_outcomes(passed=1)
    monkeypatch.delenv("FENCEPOST_TEST_DATABASE")
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*ConfigError: no PostgreSQL server is named*[[]fencepost_postgres[]]*set FENCEPOST_*"]
    )


def test_option_goes_before_environment_and_that_before_the_settings(
    pytester: pytest.Pytester, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(WANTS_ONE)
    nowhere = "postgresql://127.0.0.1:1/none"
    monkeypatch.setenv("FENCEPOST_TEST_DATABASE", nowhere)
    run(pytester, "--fencepost-postgres", server).assert_outcomes(passed=1)
    pytester.makeini(f"[pytest]\nfencepost_postgres = {server}")
    run(pytester).assert_outcomes(errors=1)
    monkeypatch.delenv("FENCEPOST_TEST_DATABASE")
    run(pytester).assert_outcomes(passed=1)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "db.example"], ids=["unreachable", "unverified"])
def test_no_password_is_shown_when_the_server_cannot_be_used(
    pytester: pytest.Pytester, server: str, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    pytester.makepyfile(WANTS_ONE)
    monkeypatch.setenv("FENCEPOST_TEST_DATABASE", f"postgresql://app:hunter2@{host}/none")
    result = run(pytester, "--showlocals")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*[[]database[]]*"])
    assert "hunter2" not in result.stdout.str() + result.stderr.str()


def test_connections_left_open_by_the_domain_are_named(pytester: pytest.Pytester, server: str) -> None:
    pytester.makeconftest(LEAKING)
    pytester.makepyfile(WANTS_ONE)
    result = run(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ConfigError: the template database is still in use [[]fencepost_domain[]]*"])


def test_the_example_passes(pytester: pytest.Pytester, server: str) -> None:
    shutil.copytree(ROOT / "examples" / "testing", pytester.path / "testing")
    result = run(pytester, "testing")
    assert result.ret == 0
    assert result.parseoutcomes()["passed"] >= 4


def test_rows_age_only_in_a_database_that_the_fixture_made(database: Database, databases: Databases) -> None:
    with database.connect() as conn:
        assert age(conn, 60, of="events") > 0
        name = conn.info.dbname
    copied = f"{name}_copied"
    with psycopg.connect(make_conninfo(database.dsn, dbname="postgres"), autocommit=True) as conn:
        copy_database(conn, name, copied)
        try:
            with (
                psycopg.connect(make_conninfo(database.dsn, dbname=copied)) as other,
                pytest.raises(WrongTransaction) as refused,
            ):
                age(other, 60, of="events")
        finally:
            conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(copied)))
    assert refused.value.field == "database"


def test_only_known_kinds_and_positive_times_are_accepted(database18: Database) -> None:
    with database18.connect() as conn:
        assert age(conn, 1, of="events") > 0
        with pytest.raises(InvalidInput, match="of"):
            age(conn, 1, of="everything")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidInput, match="by"):
            age(conn, 0, of="events")


def test_every_recorded_time_ages_or_is_kept_on_purpose(database18: Database) -> None:
    with database18.connect() as conn:
        found = conn.execute(
            """SELECT DISTINCT c.relname FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
               WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
                 AND a.atttypid = 'timestamptz'::regtype AND a.attnum > 0 AND NOT a.attisdropped"""
        ).fetchall()
    aged = {table for tables in TABLES.values() for table in tables}
    assert not aged & KEPT
    assert {row[0] for row in found} - aged - KEPT == set(), "put the table into TABLES of ageing.py, or here into KEPT"


def test_the_plugin_is_registered_and_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"fencepost": PLUGIN}
    assert find_spec(PLUGIN) is not None
