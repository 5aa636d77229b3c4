"""A protected table takes no write but behind the fence of the row's tenant and operation, whatever a client does (G8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from fencepost.jobs.claim import claim
from fencepost.jobs.fence import Fence, fence
from fencepost.jobs.protect import protect, unprotect
from fencepost.jobs.publish import FencedTransaction, publish
from fencepost.schemas import migrate, privileges
from fencepost.schemas.errors import InvalidInput, NotFenced, StaleFence
from support.database import Database, Databases
from support.jobs import CLASS, Conn, claimed, given
from support.roles import Roles, separated

NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class App:
    """An application with separated roles: one login owns the tables, another one works."""

    roles: Roles
    root: Conn
    owner: Conn
    worker: Conn
    manual: Conn

    def claim(self, operation: str, tenant: str = "t") -> Fence:
        """The fence of a new job of this operation, held by the worker."""
        given(self.root, operation, tenant=tenant)
        return claimed(self.worker, operation).fence

    def login(self, conn: Conn) -> str:
        """The name of the role that this connection logged in as."""
        return conn.info.user

    def rows(self, table: str) -> list[tuple[str, str, str]]:
        """Every row, as tenant, operation, by."""
        found = self.root.execute(f"SELECT tenant, operation, by FROM {table} ORDER BY 1, 2, 3".encode())
        return [(str(t), str(o), str(b)) for t, o, b in found]


@pytest.fixture(scope="module")
def app(databases18: Databases) -> Iterator[App]:
    with separated(databases18) as roles:
        owner, worker = roles.login("authority_admin"), roles.login("executor")
        with (
            roles.database.connect(autocommit=True) as root,
            owner.connect(autocommit=True) as owning,
            worker.connect(autocommit=True) as working,
            worker.connect() as manual,
        ):
            root.execute(f"CREATE SCHEMA app AUTHORIZATION {owning.info.user}".encode())
            owning.execute(f"GRANT USAGE ON SCHEMA app TO {working.info.user}".encode())
            owning.execute(
                "ALTER DEFAULT PRIVILEGES IN SCHEMA app GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON TABLES"
                f" TO {working.info.user}".encode()
            )
            yield App(roles, root, owning, working, manual)


@pytest.fixture
def operation() -> str:
    """An operation of this test only."""
    return f"op-{next(NUMBERS)}"


@pytest.fixture
def table(app: App) -> str:
    """A protected table of this test only; tenant `t` has published `kept` into it."""
    app.manual.rollback()
    name = f"app.result_{next(NUMBERS)}"
    app.owner.execute(
        f"CREATE TABLE {name} (tenant text, operation text, by text, PRIMARY KEY (tenant, operation))".encode()
    )
    save(app.owner, name, "kept")
    guarded(app.owner, name)
    return name


def guarded(conn: Conn, table: str, **columns: str) -> None:
    with conn.transaction():
        protect(conn, table, **({"tenant": "tenant", "operation": "operation"} | columns))


def save(conn: psycopg.Connection[Any], table: str, operation: str, by: str = "a", tenant: str = "t") -> None:
    conn.execute(f"INSERT INTO {table} VALUES (%(t)s, %(o)s, %(b)s)".encode(), {"t": tenant, "o": operation, "b": by})


def refused(act: Callable[[], object], field: str = "fence") -> None:
    with pytest.raises(NotFenced) as error:
        act()
    assert error.value.field == field and error.value.hint


def copy(conn: psycopg.Connection[Any], table: str, operation: str) -> None:
    with conn.cursor().copy(f"COPY {table} FROM STDIN".encode()) as into:
        into.write_row(("t", operation, "copied"))


def writes(table: str, operation: str) -> dict[str, Callable[[psycopg.Connection[Any]], object]]:
    """Every way to write a row of an operation; in this order they all work behind its fence."""

    def run(statement: str) -> Callable[[psycopg.Connection[Any]], object]:
        return lambda conn: conn.execute(statement.replace("{t}", table).replace("{o}", operation).encode())

    return {
        "insert": run("INSERT INTO {t} VALUES ('t', '{o}', 'a')"),
        "update": run("UPDATE {t} SET by = 'b' WHERE operation = '{o}'"),
        "on conflict": run(
            "INSERT INTO {t} VALUES ('t', '{o}', 'c') ON CONFLICT (tenant, operation) DO UPDATE SET by = excluded.by"
        ),
        "merge": run(
            "MERGE INTO {t} AS r USING (VALUES ('t', '{o}')) AS v (t, o) ON r.tenant = v.t AND r.operation = v.o"
            " WHEN MATCHED THEN UPDATE SET by = 'd' WHEN NOT MATCHED THEN INSERT VALUES (v.t, v.o, 'd')"
        ),
        "merge delete": run(
            "MERGE INTO {t} AS r USING (VALUES ('t', '{o}')) AS v (t, o) ON r.tenant = v.t AND r.operation = v.o"
            " WHEN MATCHED THEN DELETE"
        ),
        "copy": lambda conn: copy(conn, table, operation),
        "writing query": run("WITH w AS (DELETE FROM {t} WHERE operation = '{o}' RETURNING *) SELECT count(*) FROM w"),
        "do block": run("DO $$ BEGIN INSERT INTO {t} VALUES ('t', '{o}', 'e'); END $$"),
    }


def test_a_publication_writes_in_every_way_and_no_way_works_without_it(app: App, table: str, operation: str) -> None:
    held = app.claim(operation)

    def callback(tx: FencedTransaction) -> None:
        for write in writes(table, operation).values():
            write(tx)

    publish(app.worker, held, callback)
    assert app.rows(table) == [("t", "kept", "a"), ("t", operation, "e")]

    for conn in (app.worker, app.owner, app.root):
        for name, write in {**writes(table, "kept"), "new": writes(table, "other")["insert"]}.items():
            if name not in ("insert", "copy", "do block"):  # these meet the row that is there
                refused(lambda conn=conn, write=write: write(conn))  # type: ignore[misc]
        refused(lambda conn=conn: copy(conn, table, "other"))  # type: ignore[misc]
        refused(lambda conn=conn: conn.execute(f"DELETE FROM {table}".encode()))  # type: ignore[misc]
    done = app.worker.execute(f"INSERT INTO {table} VALUES ('t', 'kept', 'z') ON CONFLICT DO NOTHING".encode())
    assert done.rowcount == 0
    assert app.rows(table) == [("t", "kept", "a"), ("t", operation, "e")]


def test_the_fence_of_another_tenant_or_operation_writes_nothing(app: App, table: str, operation: str) -> None:
    held, other = app.claim(operation), app.claim(operation + "-other", tenant="u")
    with app.manual.transaction():
        fence(app.manual, held)
        fence(app.manual, other)
        for tenant, op in (("t", other.operation), ("u", operation), ("t", "other"), ("T", operation)):
            refused(lambda t=tenant, o=op: nested(app.manual, lambda c: save(c, table, o, "stranger", t)))  # type: ignore[misc]
        refused(lambda: nested(app.manual, lambda c: remove(c, table, "kept")))
        save(app.manual, table, operation)
        save(app.manual, table, other.operation, tenant="u")
    assert app.rows(table)[1:] == [("t", operation, "a"), ("u", other.operation, "a")]


def nested(conn: Conn, act: Callable[[Conn], object]) -> None:
    with conn.transaction():
        act(conn)


def remove(conn: Conn, table: str, operation: str, tenant: str = "t") -> None:
    conn.execute(f"DELETE FROM {table} WHERE tenant = '{tenant}' AND operation = '{operation}'".encode())


def test_a_row_moves_between_operations_only_behind_both_fences(app: App, table: str, operation: str) -> None:
    first, second = app.claim(operation), app.claim(operation + "-b", tenant="u")
    move = f"UPDATE {table} SET tenant = 'u', operation = '{second.operation}' WHERE operation = '{operation}'".encode()
    with app.manual.transaction():
        fence(app.manual, first)
        save(app.manual, table, operation)
        refused(lambda: nested(app.manual, lambda c: c.execute(move)))
    with app.manual.transaction():
        fence(app.manual, second)
        refused(lambda: nested(app.manual, lambda c: c.execute(move)))
    with app.manual.transaction():
        fence(app.manual, first)
        fence(app.manual, second)
        app.manual.execute(move)
    assert app.rows(table)[1:] == [("u", second.operation, "a")]


def test_a_row_that_names_no_tenant_or_no_operation_is_refused(app: App, operation: str) -> None:
    app.owner.execute("CREATE TABLE app.loose (tenant text, operation text, by text)")
    guarded(app.owner, "app.loose")
    held = app.claim(operation)
    for field, row in (("tenant", f"NULL, '{operation}'"), ("operation", "'t', NULL")):
        statement = f"INSERT INTO app.loose VALUES ({row}, 'a')".encode()
        refused(lambda s=statement: publish(app.worker, held, lambda tx: tx.execute(s)), field)  # type: ignore[misc]
    publish(app.worker, held, lambda tx: save(tx, "app.loose", operation))
    assert app.rows("app.loose") == [("t", operation, "a")]


def until_the_lease_has_ended(app: App, operation: str) -> None:
    app.root.execute(
        "SELECT pg_sleep(extract(epoch FROM lease_until - clock_timestamp()) + 0.01) FROM fencepost.job WHERE operation = %(o)s",
        {"o": operation},
    )


def begin_shortly(app: App, operation: str, *, checked: bool = False) -> Fence:
    """Leaves the manual connection inside a transaction that holds a fence whose lease ends soon; `checked`: and was checked early."""
    held = app.claim(operation)
    for seconds in (1, 4, 16):
        app.root.execute(
            "UPDATE fencepost.job SET lease_until = clock_timestamp() + %(s)s * interval '1 s' WHERE operation = %(o)s",
            {"s": seconds, "o": operation},
        )
        try:
            fence(app.manual, held)
            if checked:
                app.manual.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except StaleFence:
            app.manual.rollback()
        else:
            return held
    raise AssertionError("no fence was to be had")


def test_a_lease_that_ends_between_the_write_and_the_commit_leaves_nothing(
    app: App, table: str, operation: str
) -> None:
    held = begin_shortly(app, operation)
    save(app.manual, table, operation)
    until_the_lease_has_ended(app, operation)
    with pytest.raises(StaleFence) as error:
        app.manual.commit()
    assert error.value.field == "lease"
    assert app.rows(table) == [("t", "kept", "a")]
    again = claimed(app.worker, operation).fence
    assert again.generation > held.generation
    publish(app.worker, again, lambda tx: save(tx, table, operation, "successor"))
    assert app.rows(table)[1:] == [("t", operation, "successor")]


def test_a_commit_check_that_is_fired_early_lets_nobody_in_between(app: App, table: str, operation: str) -> None:
    app.manual.execute("SET CONSTRAINTS ALL IMMEDIATE")
    refused(lambda: save(app.manual, table, operation))
    app.manual.rollback()

    begin_shortly(app, operation, checked=True)
    save(app.manual, table, operation)
    refused(lambda: nested(app.manual, lambda c: save(c, table, "other")))
    until_the_lease_has_ended(app, operation)
    assert [j for j in claim(app.worker, "other", [CLASS], 100) if j.operation == operation] == []
    app.manual.commit()
    assert app.rows(table)[1:] == [("t", operation, "a")]

    begin_shortly(app, operation + "-late")
    save(app.manual, table, operation + "-late")
    until_the_lease_has_ended(app, operation + "-late")
    with pytest.raises(StaleFence) as error:
        app.manual.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert error.value.field == "lease"
    app.manual.rollback()


def test_a_fence_that_a_savepoint_took_back_covers_nothing(app: App, table: str, operation: str) -> None:
    held = app.claim(operation)
    with app.manual.transaction():
        with suppress(ZeroDivisionError), app.manual.transaction():
            fence(app.manual, held)
            save(app.manual, table, operation, "taken back")
            raise ZeroDivisionError
        refused(lambda: nested(app.manual, lambda c: save(c, table, operation, "unfenced")))
        with app.manual.transaction():
            fence(app.manual, held)
        with suppress(ZeroDivisionError), app.manual.transaction():
            save(app.manual, table, operation, "taken back")
            raise ZeroDivisionError
        save(app.manual, table, operation, "fenced")
    assert app.rows(table)[1:] == [("t", operation, "fenced")]
    refused(lambda: remove(app.worker, table, operation))


def test_truncate_is_refused_even_behind_a_fence(app: App, table: str, operation: str) -> None:
    app.owner.execute("CREATE TABLE app.free (a integer PRIMARY KEY)")
    app.worker.execute("TRUNCATE app.free")
    app.owner.execute(f"ALTER TABLE {table} ADD COLUMN a integer REFERENCES app.free".encode())
    held = app.claim(operation)
    for statement in (f"TRUNCATE {table}", "TRUNCATE app.free CASCADE"):
        refused(lambda s=statement: app.worker.execute(s.encode()), "truncate")  # type: ignore[misc]
        refused(lambda s=statement: publish(app.worker, held, lambda tx: tx.execute(s.encode())), "truncate")  # type: ignore[misc]
    app.owner.execute(f"ALTER TABLE {table} DROP COLUMN a".encode())
    app.owner.execute("DROP TABLE app.free")
    assert app.rows(table) == [("t", "kept", "a")]


def test_a_view_and_a_cascade_of_a_foreign_key_are_writes_like_others(app: App, table: str, operation: str) -> None:
    app.owner.execute(f"CREATE VIEW {table}_view AS SELECT * FROM {table}".encode())
    app.owner.execute("CREATE TABLE app.parent (name text PRIMARY KEY)")
    app.owner.execute(
        "CREATE TABLE app.child (tenant text, operation text, by text,"
        " name text REFERENCES app.parent ON DELETE CASCADE ON UPDATE CASCADE)"
    )
    guarded(app.owner, "app.child")
    app.owner.execute("INSERT INTO app.parent VALUES ('p')")
    held = app.claim(operation)
    with app.manual.transaction():
        fence(app.manual, held)
        save(app.manual, f"{table}_view", operation)
        app.manual.execute(f"INSERT INTO app.child VALUES ('t', '{operation}', 'a', 'p')".encode())
    cascades = ("DELETE FROM app.parent", "UPDATE app.parent SET name = 'q'")
    refused(lambda: save(app.worker, f"{table}_view", "other"))
    for cascade in cascades:
        refused(lambda c=cascade: app.worker.execute(c.encode()))  # type: ignore[misc]
    assert app.rows("app.child") == app.rows(table)[1:] == [("t", operation, "a")]
    publish(app.worker, held, lambda tx: [tx.execute(c.encode()) for c in reversed(cascades)])
    assert app.rows("app.child") == []


def test_what_later_triggers_make_of_a_row_counts(app: App, table: str, operation: str) -> None:
    app.owner.execute(
        "CREATE FUNCTION app.rewrite() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.operation := 'kept-2'; RETURN NEW; END $$"
    )
    app.owner.execute(
        f"CREATE TRIGGER zz BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION app.rewrite()".encode()
    )
    held = app.claim(operation)
    refused(lambda: publish(app.worker, held, lambda tx: save(tx, table, operation)))
    app.owner.execute(f"DROP TRIGGER zz ON {table}".encode())
    publish(app.worker, held, lambda tx: save(tx, table, operation))


def test_a_working_login_cannot_take_the_protection_off(app: App, table: str, operation: str) -> None:
    (function,) = app.root.execute(
        "SELECT t.tgfoid::regprocedure::text FROM pg_trigger AS t"
        f" WHERE t.tgrelid = '{table}'::regclass AND t.tgname = 'fencepost_protected'".encode()
    ).fetchone() or ("",)
    for attempt in (
        f"ALTER TABLE {table} DISABLE TRIGGER ALL",
        f"ALTER TABLE {table} DISABLE TRIGGER fencepost_protected",
        f"DROP TRIGGER fencepost_protected ON {table}",
        f"DROP TABLE {table}",
        "SET session_replication_role = replica",
        f"SELECT fencepost.unprotect('{table}')",
        f"SELECT fencepost.end_protection('{table}')",
        "DELETE FROM fencepost.protected",
        "INSERT INTO fencepost.publication OVERRIDING SYSTEM VALUE SELECT * FROM fencepost.publication",
        f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        f"DROP FUNCTION {function}",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            app.worker.execute(attempt.encode())
    refused(lambda: save(app.worker, table, operation))


def test_a_table_that_a_working_login_could_unprotect_is_not_protected(app: App, operation: str) -> None:
    worker, owner = app.login(app.worker), app.login(app.owner)
    app.root.execute(f"CREATE SCHEMA own AUTHORIZATION {owner}".encode())
    app.owner.execute("CREATE TABLE own.mine (tenant text, operation text, by text)")
    reaches = (
        (f"ALTER TABLE own.mine OWNER TO {worker}", f"ALTER TABLE own.mine OWNER TO {owner}"),
        (f"ALTER SCHEMA own OWNER TO {worker}", f"ALTER SCHEMA own OWNER TO {owner}"),
        (f"GRANT {owner} TO {worker}", f"REVOKE {owner} FROM {worker}"),
        (
            f"GRANT SET ON PARAMETER session_replication_role TO {worker}",
            f"REVOKE SET ON PARAMETER session_replication_role FROM {worker}",
        ),
    )
    for reach, back in reaches:
        app.root.execute(reach.encode())
        try:
            with pytest.raises(InvalidInput) as error:
                guarded(app.root, "own.mine")
            assert error.value.field == "owner" and worker in str(error.value)
        finally:
            app.root.execute(back.encode())
    guarded(app.root, "own.mine")
    assert faults(app) == {}
    app.root.execute(reaches[2][0].encode())
    assert worker in faults(app)["own.mine"]
    app.root.execute(reaches[2][1].encode())
    assert faults(app) == {}


def faults(app: App) -> dict[str, str]:
    found = app.owner.execute("SELECT relation, fault FROM fencepost.protection() WHERE fault IS NOT NULL")
    return {str(relation): str(fault) for relation, fault in found}


def test_what_cannot_be_protected_is_refused_by_field(app: App, table: str) -> None:
    for statement in (
        "CREATE TABLE app.odd (tenant text, operation text, at timestamptz, request text)",
        "CREATE TABLE app.split (tenant text, operation text) PARTITION BY LIST (tenant)",
        "CREATE TABLE app.split_t PARTITION OF app.split FOR VALUES IN ('t')",
        "CREATE TABLE app.heir () INHERITS (app.odd)",
        "CREATE VIEW app.seen AS SELECT * FROM app.odd",
    ):
        app.owner.execute(statement.encode())
    app.root.execute("CREATE TABLE public.foreign_table (tenant text, operation text)")
    for wrong, field, columns in (
        ("app.none", "table", {}),
        ("app.seen", "table", {}),
        ("app.split_t", "table", {}),
        ("app.odd", "table", {}),
        ("app.heir", "table", {}),
        ("public.foreign_table", "table", {}),
        ("fencepost.job", "table", {}),
        (table, "tenant", {"tenant": "none"}),
        (table, "operation", {"operation": "none"}),
        (table, "operation", {"operation": "tenant"}),
        (table, "tenant", {"tenant": ""}),
    ):
        with pytest.raises(InvalidInput) as error:
            guarded(app.owner, wrong, **columns)
        assert error.value.field == field, wrong
    app.owner.execute("DROP TABLE app.heir")
    with pytest.raises(InvalidInput) as error:
        guarded(app.owner, "app.odd", operation="at")
    assert error.value.field == "operation"
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        guarded(app.worker, table)
    with pytest.raises(InvalidInput), app.owner.transaction():
        unprotect(app.owner, "app.odd")
    guarded(app.owner, "app.odd", operation="request")
    assert faults(app) == {}


def test_a_partition_of_another_owner_is_refused_and_found_later(app: App) -> None:
    owner, root = app.login(app.owner), app.login(app.root)
    for statement in (
        "CREATE TABLE app.shared (tenant text, operation text, by text) PARTITION BY LIST (by)",
        "CREATE TABLE app.shared_a PARTITION OF app.shared FOR VALUES IN ('a')",
    ):
        app.owner.execute(statement.encode())
    app.root.execute(f'ALTER TABLE app.shared_a OWNER TO "{root}"'.encode())
    with pytest.raises(InvalidInput) as error:
        guarded(app.root, "app.shared")
    assert error.value.field == "partition"
    app.root.execute(f"ALTER TABLE app.shared_a OWNER TO {owner}".encode())
    guarded(app.owner, "app.shared")
    app.root.execute(f'ALTER TABLE app.shared_a OWNER TO "{root}"'.encode())
    assert faults(app) == {"app.shared": "app.shared_a has another owner"}
    app.root.execute("DROP TABLE app.shared")
    assert faults(app) == {}


def test_only_the_owner_unprotects_and_then_the_table_is_like_any_other(app: App, table: str, operation: str) -> None:
    refused(lambda: save(app.worker, table, operation))
    with pytest.raises(psycopg.errors.InsufficientPrivilege), app.worker.transaction():
        unprotect(app.worker, table)
    with app.roles.login("authority_admin", "reader").connect(autocommit=True) as admin:
        app.owner.execute(f"GRANT USAGE ON SCHEMA app TO {admin.info.user}".encode())
        for act in (
            "SELECT fencepost.end_protection(%(t)s::regclass)",
            "SELECT fencepost.begin_protection(%(t)s::regclass, 'tenant', 'operation')",
        ):
            with pytest.raises(InvalidInput) as error:
                admin.execute(act.encode(), {"t": table})
            assert error.value.field == "table"
    with app.owner.transaction():
        unprotect(app.owner, table)
    save(app.worker, table, operation)
    app.worker.execute(f"TRUNCATE {table}".encode())
    left = app.root.execute("SELECT count(*) FROM fencepost.protected WHERE relation = %(r)s", {"r": table})
    assert left.fetchone() == (0,)
    guarded(app.owner, table)
    refused(lambda: save(app.worker, table, operation))


def test_a_renamed_table_stays_protected_and_its_name_is_free_for_another(app: App, table: str, operation: str) -> None:
    schema, _, name = table.partition(".")
    app.owner.execute(f"ALTER TABLE {table} RENAME TO {name}_old".encode())
    refused(lambda: save(app.worker, f"{table}_old", operation))
    app.owner.execute(f"CREATE TABLE {table} (LIKE {schema}.{name}_old)".encode())
    save(app.worker, table, operation)
    guarded(app.owner, table)
    refused(lambda: save(app.worker, f"{table}_old", operation))
    refused(lambda: save(app.worker, table, operation))
    app.owner.execute(f"DROP TABLE {table}".encode())
    app.owner.execute(f"CREATE TABLE {table} (tenant text, operation text, by text)".encode())
    assert "no enabled trigger" in faults(app)[table]
    guarded(app.owner, table)
    refused(lambda: save(app.worker, table, operation))
    assert faults(app) == {}
    app.owner.execute(f"DROP TABLE {table}".encode())
    assert faults(app) == {}
    guarded(app.owner, f"{table}_old")
    left = "SELECT count(*) FROM fencepost.protected WHERE relation = %(r)s"
    assert app.root.execute(left, {"r": table}).fetchone() == (0,)


def test_a_protection_that_is_not_whole_is_named_and_made_whole_by_protecting_again(app: App, table: str) -> None:
    for damage, words in (
        ("ALTER TABLE {t} DISABLE TRIGGER fencepost_protected", "no enabled trigger"),
        ("ALTER TABLE {t} ENABLE REPLICA TRIGGER fencepost_protected", "no enabled trigger"),
        ("DROP TRIGGER fencepost_protected ON {t}", "no enabled trigger"),
        ("ALTER TABLE {t} DISABLE TRIGGER fencepost_protected_truncate", "TRUNCATE"),
        ("ALTER TABLE {t} RENAME COLUMN by TO operation_2", ""),
    ):
        app.owner.execute(damage.replace("{t}", table).encode())
        assert words in faults(app).get(table, "")
        guarded(app.owner, table)
        assert faults(app) == {}
    app.owner.execute(f"ALTER TABLE {table} RENAME COLUMN operation TO request".encode())
    assert faults(app) == {table: "a column is gone"}
    with pytest.raises(psycopg.errors.UndefinedColumn):
        save(app.worker, table, "other")
    guarded(app.owner, table, operation="request")
    refused(lambda: save(app.worker, table, "other"))


def test_every_role_keeps_exactly_its_row_of_the_matrix_and_migrating_again_changes_nothing(
    app: App, table: str, operation: str
) -> None:
    assert privileges.differences(app.root, app.roles.install) == []
    database = app.roles.database
    (function,) = app.root.execute(
        f"SELECT tgfoid::regprocedure::text FROM pg_trigger WHERE tgrelid = '{table}'::regclass"
        " AND tgname = 'fencepost_protected'".encode()
    ).fetchone() or ("",)
    # As an older version might have made it.
    app.root.execute(
        f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'".encode()
    )
    save(app.worker, table, "older")
    migrate.apply(database.dsn, state=database.state, single_role=False, install=app.roles.install)
    assert privileges.differences(app.root, app.roles.install) == []
    refused(lambda: save(app.worker, table, operation))
    publish(app.worker, app.claim(operation), lambda tx: save(tx, table, operation))


def test_identities_of_other_types_are_compared_as_text_and_no_code_of_the_owner_runs_as_ours(
    app: App, operation: str
) -> None:
    app.owner.execute("CREATE TABLE app.typed (tenant integer, operation uuid)")
    guarded(app.owner, "app.typed")
    uuid = "0190f4f2-5bd6-7f6c-8d5b-0a4c2ce7a001"
    held = app.claim(uuid, tenant="42")
    insert = f"INSERT INTO app.typed VALUES (42, '{uuid}')".encode()
    refused(lambda: app.worker.execute(insert))
    publish(app.worker, held, lambda tx: tx.execute(insert))

    app.owner.execute("CREATE TYPE app.sly AS ENUM ('t')")
    app.owner.execute(
        "CREATE FUNCTION app.ran(app.sly) RETURNS text LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'ran as %', current_user; END $$"
    )
    app.owner.execute("CREATE CAST (app.sly AS text) WITH FUNCTION app.ran AS IMPLICIT")
    for column in ("tenant", "operation"):
        app.owner.execute("CREATE TABLE app.changed (tenant text, operation text)")
        guarded(app.owner, "app.changed")
        app.owner.execute(f"ALTER TABLE app.changed ALTER {column} TYPE app.sly USING 't'::app.sly".encode())
        with app.roles.login("executor").connect() as fresh:
            refused(lambda: fresh.execute("INSERT INTO app.changed VALUES ('t', 't')"), "columns")
        app.owner.execute("DROP TABLE app.changed")


def test_a_column_whose_collation_calls_different_names_equal_lets_no_other_tenant_in(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute("DROP TABLE IF EXISTS anycase, anycase_2")
        try:
            conn.execute(
                "CREATE COLLATION IF NOT EXISTS anycase"
                " (provider = icu, locale = 'und-u-ks-level2', deterministic = false)"
            )
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this PostgreSQL was built without ICU")
        conn.execute("CREATE TABLE anycase (tenant text COLLATE anycase, operation text COLLATE anycase, by text)")
        conn.execute("CREATE TABLE anycase_2 (LIKE anycase)")
        for each in ("anycase", "anycase_2"):
            guarded(conn, each)
        given(conn)
        held = claimed(conn).fence
        for tenant, op in (("T", "op-1"), ("t", "OP-1")):
            refused(lambda t=tenant, o=op: publish(conn, held, lambda tx: save(tx, "anycase", o, tenant=t)))  # type: ignore[misc]
        publish(conn, held, lambda tx: save(tx, "anycase", "op-1"))
        assert conn.execute("SELECT tenant, operation FROM anycase").fetchall() == [("t", "op-1")]
        refused(lambda: conn.execute("UPDATE anycase SET tenant = 'T'"))
        given(conn, tenant="T")
        other = claimed(conn).fence
        publish(conn, other, lambda tx: save(tx, "anycase_2", "op-1", tenant="T"))
        given(conn, job_class="report.mail")
        third = claimed(conn, job_class="report.mail").fence
        refused(lambda: publish(conn, third, lambda tx: tx.execute("UPDATE anycase_2 SET tenant = 't'")))
        conn.execute("DROP TABLE anycase, anycase_2")


def test_a_fence_that_another_transaction_held_meanwhile_covers_nothing(app: App, table: str, operation: str) -> None:
    held = app.claim(operation)
    app.manual.execute("SELECT pg_current_xact_id()")
    with app.worker.transaction():
        fence(app.worker, held)
        refused(lambda: nested(app.manual, lambda c: save(c, table, operation)))
    refused(lambda: save(app.manual, table, operation))
    app.manual.rollback()
    publish(app.worker, held, lambda tx: save(tx, table, operation))


def test_publications_of_a_copy_whose_numbers_come_again_fence_nothing(app: App, table: str, operation: str) -> None:
    held = app.claim(operation)
    with app.root.transaction():
        app.root.execute("SET LOCAL session_replication_role = replica")
        app.root.execute(
            """INSERT INTO fencepost.publication (tenant, operation, class, generation, attempt, owner, epoch, lease_until, xid)
               SELECT 't', %(o)s, 'c', 1, gen_random_uuid(), 'w', 1, 'infinity', (x::text::bigint + n)::text::xid8
               FROM generate_series(1, 5000) AS n, pg_current_xact_id() AS x""",
            {"o": operation},
        )
    met = "SELECT count(*) FROM fencepost.publication WHERE operation = %(o)s AND xid = pg_current_xact_id()"
    app.root.execute("BEGIN")
    assert app.root.execute(met, {"o": operation}).fetchone() == (1,)
    refused(lambda: save(app.root, table, operation))
    app.root.execute("ROLLBACK")
    publish(app.worker, held, lambda tx: save(tx, table, operation))


@pytest.mark.parametrize("how", ["partition of", "attach"])
def test_partitions_are_covered_also_those_that_come_later(database: Database, how: str) -> None:
    with database.connect(autocommit=True) as conn, database.connect() as manual:
        conn.execute("DROP TABLE IF EXISTS parted")
        conn.execute("CREATE TABLE parted (tenant text, operation text, by text) PARTITION BY LIST (by)")
        conn.execute("CREATE TABLE parted_a PARTITION OF parted FOR VALUES IN ('a') PARTITION BY LIST (by)")
        conn.execute("CREATE TABLE parted_a_a PARTITION OF parted_a FOR VALUES IN ('a')")
        guarded(conn, "parted")
        if how == "partition of":
            conn.execute("CREATE TABLE parted_b PARTITION OF parted FOR VALUES IN ('b')")
        else:
            conn.execute("CREATE TABLE parted_b (tenant text, operation text, by text)")
            conn.execute("ALTER TABLE parted ATTACH PARTITION parted_b FOR VALUES IN ('b')")
        given(conn)
        held = claimed(conn).fence
        move = b"UPDATE parted SET by = 'b' WHERE operation = 'op-1'"
        for name, by in (("parted", "a"), ("parted_a_a", "a"), ("parted", "b"), ("parted_b", "b")):
            refused(lambda n=name, b=by: save(conn, n, "op-1", b))  # type: ignore[misc]
        fence(manual, held)
        save(manual, "parted", "op-1", "a")
        save(manual, "parted_b", "op-1", "b")
        manual.commit()
        refused(lambda: conn.execute(move))
        fence(manual, held)
        manual.execute(move)
        manual.commit()
        for name in ("parted", "parted_a", "parted_a_a"):
            refused(lambda n=name: conn.execute(f"TRUNCATE {n}".encode()), "truncate")  # type: ignore[misc]
        fault = "SELECT fault FROM fencepost.protection() WHERE relation = 'public.parted'"
        assert conn.execute(fault).fetchone() == ("TRUNCATE of public.parted_b is not refused",)
        guarded(conn, "parted")
        assert conn.execute(fault).fetchone() == (None,)
        refused(lambda: conn.execute("TRUNCATE parted_b"), "truncate")
        assert conn.execute("SELECT by, count(*) FROM parted GROUP BY 1").fetchall() == [("b", 2)]
        conn.execute("DROP TABLE parted")
