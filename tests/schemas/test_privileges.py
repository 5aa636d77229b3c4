"""Each role can do its row of the matrix and nothing else, and what is not so is told, one line for each right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from fencepost.schemas import grants, migrate, privileges
from support.database import Databases
from support.roles import Roles, separated

OUTSIDE = "INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER"


@pytest.fixture(scope="module")
def shared(databases: Databases) -> Iterator[Roles]:
    with separated(databases) as made:
        yield made


@pytest.fixture
def roles(shared: Roles) -> Iterator[tuple[Roles, psycopg.Connection[Any]]]:
    """A connection as superuser whose changes are undone."""
    with shared.database.connect() as conn:
        yield shared, conn
        conn.rollback()


def test_every_role_has_exactly_its_row_in_functions_relations_sequences_and_schema(
    roles: tuple[Roles, psycopg.Connection[Any]],
) -> None:
    made, conn = roles
    assert privileges.differences(conn, made.install) == []

    # Said once more without the code under test, against the catalog.
    functions = conn.execute(
        "SELECT oid, proname FROM pg_proc WHERE pronamespace = 'fencepost'::regnamespace"
    ).fetchall()
    relations = conn.execute(
        "SELECT oid, relname, relkind FROM pg_class WHERE relnamespace = 'fencepost'::regnamespace AND relkind IN ('r', 'p', 'v', 'S')"
    ).fetchall()
    assert len(functions) > 40 and len(relations) > 30
    for name in (*grants.ROLES, "public"):
        if name == "migrator":
            continue
        who = name if name == "public" else made.role(name)
        for oid, function in functions:
            may = conn.execute("SELECT has_function_privilege(%s, %s::oid, 'EXECUTE')", (who, oid)).fetchone()
            assert may == (name in grants.FUNCTIONS.get(function, ()),), (name, function)
        for oid, relation, kind in relations:
            if kind == "S":
                may = conn.execute(
                    "SELECT has_sequence_privilege(%s, %s::oid, 'USAGE, SELECT, UPDATE')", (who, oid)
                ).fetchone()
                assert may == (False,), (name, relation)
                continue
            may = conn.execute("SELECT has_table_privilege(%s, %s::oid, 'SELECT')", (who, oid)).fetchone()
            assert may == (name in grants.TABLES.get(relation, ()),), (name, relation)
            more = conn.execute("SELECT has_table_privilege(%s, %s::oid, %s)", (who, oid, OUTSIDE)).fetchone()
            assert more == (False,), (name, relation)
        usage = conn.execute("SELECT has_schema_privilege(%s, 'fencepost', 'USAGE')", (who,)).fetchone()
        assert usage == (name != "public",)
        create = conn.execute("SELECT has_schema_privilege(%s, 'fencepost', 'CREATE')", (who,)).fetchone()
        assert create == (False,)


def test_every_name_of_the_matrix_exists(roles: tuple[Roles, psycopg.Connection[Any]]) -> None:
    _, conn = roles
    for kind, names in (("regproc", grants.FUNCTIONS), ("regclass", grants.TABLES)):
        for name in names:
            found = conn.execute(f"SELECT to_{kind}('fencepost.{name}') IS NOT NULL".encode()).fetchone()
            assert found == (True,), name
    assert {r for row in (*grants.FUNCTIONS.values(), *grants.TABLES.values()) for r in row} <= set(grants.ROLES)


def test_each_kind_of_difference_is_told(roles: tuple[Roles, psycopg.Connection[Any]]) -> None:
    made, conn = roles
    maintain = "MAINTAIN" if conn.info.server_version >= 170000 else "TRIGGER"
    projector, reader, owner = made.role("projector"), made.role("reader"), made.role("owner")
    for change, expected in (
        (f"GRANT EXECUTE ON FUNCTION fencepost.submit TO {projector}", f"{projector} has EXECUTE on submit"),
        (f"REVOKE EXECUTE ON FUNCTION fencepost.armed FROM {reader}", f"{reader} lacks EXECUTE on armed"),
        (f"GRANT UPDATE ON fencepost.job TO {reader}", f"{reader} has UPDATE on job"),
        (f"GRANT SELECT (payload) ON fencepost.parked TO {reader}", f"{reader} has SELECT on parked"),
        (f"GRANT ALL ON fencepost.duty TO {reader}", f"{reader} has {maintain} on duty"),
        (f"GRANT DELETE ON fencepost.outbox_0 TO {reader}", f"{reader} has DELETE on outbox_0"),
        (f"REVOKE SELECT ON fencepost.status FROM {reader}", f"{reader} lacks SELECT on status"),
        (f"GRANT USAGE ON SEQUENCE fencepost.outbox_seq TO {reader}", f"{reader} has USAGE on outbox_seq"),
        (f"GRANT CREATE ON SCHEMA fencepost TO {reader}", f"{reader} has CREATE on schema fencepost"),
        (f"REVOKE USAGE ON SCHEMA fencepost FROM {reader}", f"{reader} lacks USAGE on schema fencepost"),
        ("GRANT EXECUTE ON FUNCTION fencepost.claim TO PUBLIC", "public has EXECUTE on claim"),
        ("GRANT SELECT ON fencepost.outbox TO PUBLIC", "public has SELECT on outbox"),
        (f"GRANT {made.role('executor')} TO {projector}", f"{projector} has membership on {made.role('executor')}"),
        (f"GRANT pg_read_all_data TO {projector}", f"{projector} has SELECT on job"),
        (f"ALTER ROLE {owner} LOGIN", f"{owner} has LOGIN on its role"),
        (f"ALTER ROLE {reader} CREATEROLE", f"{reader} has CREATEROLE on its role"),
        ("ALTER TABLE fencepost.job OWNER TO CURRENT_USER", "has ownership on job"),
        ("CREATE ROLE stranger_x; GRANT SELECT ON fencepost.job TO stranger_x", "stranger_x has SELECT on job"),
        ("CREATE ROLE stranger_x; GRANT SELECT (args) ON fencepost.job TO stranger_x", "stranger_x has SELECT on job"),
    ):
        with conn.transaction(force_rollback=True):
            conn.execute(change.encode())
            told = [str(d) for d in privileges.differences(conn, made.install)]
            assert any(expected in line for line in told), (change, told)
    assert privileges.differences(conn, made.install) == []


def test_apply_sets_every_drift_right_and_once_more_changes_nothing(
    roles: tuple[Roles, psycopg.Connection[Any]],
) -> None:
    made, conn = roles
    before = acl(conn)
    conn.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA fencepost TO {made.role('projector')}, PUBLIC".encode())
    conn.execute(f"GRANT ALL ON ALL ROUTINES IN SCHEMA fencepost TO {made.role('reader')}, PUBLIC".encode())
    conn.execute(f"REVOKE ALL ON ALL ROUTINES IN SCHEMA fencepost FROM {made.role('relay')}".encode())
    assert len(privileges.differences(conn, made.install)) > 100

    for _ in range(2):
        grants.apply(conn, made.install)
        assert privileges.differences(conn, made.install) == []
        assert acl(conn) == before
        assert grants.missing_roles(conn, made.install) == grants.hand_over(conn, made.install) == []


def acl(conn: psycopg.Connection[Any]) -> set[tuple[Any, ...]]:
    return set(
        conn.execute(
            """SELECT o.name, pg_get_userbyid(a.grantee), a.privilege_type, a.is_grantable
               FROM (SELECT c.oid::regclass::text, c.relacl FROM pg_class c WHERE c.relnamespace = 'fencepost'::regnamespace
                     UNION ALL SELECT p.oid::regprocedure::text, p.proacl FROM pg_proc p
                               WHERE p.pronamespace = 'fencepost'::regnamespace) AS o (name, acl),
                    aclexplode(o.acl) AS a"""
        ).fetchall()
    )


def test_what_the_owner_makes_later_belongs_to_nobody_else(roles: tuple[Roles, psycopg.Connection[Any]]) -> None:
    made, conn = roles
    conn.execute("CREATE FUNCTION fencepost.by_another() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    assert may(conn, "public", "by_another")  # what PostgreSQL does by itself
    conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(made.role("owner"))))
    conn.execute("CREATE FUNCTION fencepost.by_owner() RETURNS int LANGUAGE sql AS 'SELECT 1'")
    assert not may(conn, "public", "by_owner")


def may(conn: psycopg.Connection[Any], who: str, function: str) -> bool:
    row = conn.execute("SELECT has_function_privilege(%s, %s, 'EXECUTE')", (who, f"fencepost.{function}()")).fetchone()
    assert row is not None
    return bool(row[0])


def test_a_login_of_the_migrator_brings_the_installation_to_the_next_version(shared: Roles) -> None:
    login = shared.login("migrator")
    assert migrate.apply(login.dsn, state=login.state).armed
    with shared.database.connect() as conn:
        assert privileges.differences(conn, shared.install) == []


def test_beyond_tells_what_a_login_could_do_besides_its_row(shared: Roles) -> None:
    def found(login: str) -> list[str]:
        with shared.login(login).connect(autocommit=True) as conn:
            return [str(d) for d in privileges.beyond(conn, shared.install, "projector")]

    assert found("projector") == []
    assert any("EXECUTE on submit" in line for line in found("executor"))
    both = shared.login("projector", "executor")
    with both.connect(autocommit=True) as conn:
        told = [str(d) for d in privileges.beyond(conn, shared.install, "projector")]
        assert any(line.endswith(f"has membership on {shared.role('executor')}") for line in told)
    with shared.database.connect(autocommit=True) as conn:
        conn.execute(sql.SQL("SET SESSION ROLE {}").format(sql.Identifier(shared.role("projector"))))
        told = [str(d) for d in privileges.beyond(conn, shared.install, "projector")]
        assert any("has SUPERUSER" in line for line in told)  # it could reset its role


def test_a_role_that_can_be_taken_on_counts_though_nothing_is_inherited(shared: Roles) -> None:
    login = shared.login("projector", "relay")
    with shared.database.connect(autocommit=True) as conn:
        conn.execute(f"ALTER ROLE {shared.name('projector', 'relay')} NOINHERIT".encode())
    with login.connect(autocommit=True) as conn:
        told = [str(d) for d in privileges.beyond(conn, shared.install, "projector")]
    assert any(f"{shared.role('relay')} has EXECUTE on tick" in line for line in told)


HOSTILE = """
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'shadowed'; END $$;
CREATE FUNCTION hostile.sha256(bytea) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'shadowed'; END $$;
CREATE TABLE hostile.job (LIKE fencepost.job);
CREATE TABLE hostile.outbox (LIKE fencepost.outbox);
CREATE TABLE hostile.reservation (LIKE fencepost.reservation);
CREATE TABLE hostile.delivery (LIKE fencepost.delivery);
CREATE TABLE hostile.unreserved_delivery (LIKE fencepost.unreserved_delivery);
CREATE TABLE hostile.dead_letter (LIKE fencepost.dead_letter);
CREATE TABLE hostile.consumer (LIKE fencepost.consumer);
GRANT ALL ON SCHEMA hostile TO PUBLIC;
GRANT ALL ON ALL TABLES IN SCHEMA hostile TO PUBLIC;
"""
ENQUEUE = """SELECT fencepost.enqueue(gen_random_uuid(), 't', 'o', 'a.b', 1, 'k', 'ref:x', 'application/json', NULL, '\\x7b7d')"""
SUBMIT = "SELECT fencepost.submit('t', 'o', 'c', '\\x7b7d', 'ref:x')"
RESERVE = """SELECT outcome FROM fencepost.reserve('t', 'c', 'o', 'a.b', 1, gen_random_uuid(), 'urn:x', 1, %s, pg_catalog.now(), '[1]', '[]', '')"""


def test_shadowing_by_pg_temp_or_a_hostile_search_path_leads_no_function_to_a_strangers_objects(shared: Roles) -> None:
    login = shared.login("producer", "consumer")
    with shared.database.connect(autocommit=True) as conn:
        conn.execute(HOSTILE.encode())
    try:
        with login.connect(autocommit=True) as conn:
            conn.execute("SET search_path = hostile, pg_temp, pg_catalog")
            with pytest.raises(psycopg.errors.RaiseException, match="shadowed"):
                conn.execute("SELECT clock_timestamp()")  # the trap works on what does not pin its path
            conn.execute("CREATE TEMP TABLE job (LIKE hostile.job)")
            conn.execute("CREATE TEMP TABLE outbox (LIKE hostile.outbox)")
            conn.execute("CREATE TEMP TABLE installation (slots int)")
            conn.execute(ENQUEUE.encode())
            conn.execute(SUBMIT.encode())
            for table in ("reservation", "delivery", "unreserved_delivery", "dead_letter", "consumer"):
                conn.execute(f"CREATE TEMP TABLE {table} (LIKE hostile.{table})".encode())
            outcomes = [conn.execute(RESERVE.encode(), (each,)).fetchone() for each in ("ref:x", "ref:x", "ref:y")]
            assert outcomes == [("reserved",), ("duplicate",), ("conflict",)]
            for table in ("reservation", "delivery", "unreserved_delivery", "dead_letter", "consumer"):
                for schema in ("pg_temp", "hostile"):
                    assert conn.execute(f"SELECT count(*) FROM {schema}.{table}".encode()).fetchone() == (0,)
            for shadow in ("pg_temp.job", "pg_temp.outbox", "hostile.job", "hostile.outbox"):
                assert conn.execute(f"SELECT count(*) FROM {shadow}".encode()).fetchone() == (0,)
        with shared.database.connect(autocommit=True) as conn:
            assert conn.execute("SELECT count(*) FROM fencepost.outbox").fetchone() == (1,)
            assert conn.execute("SELECT count(*) FROM fencepost.job").fetchone() == (1,)
    finally:
        with shared.database.connect(autocommit=True) as conn:
            conn.execute("DROP SCHEMA hostile CASCADE")
