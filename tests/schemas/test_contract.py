"""The contract itself: what is exposed to whom, how definer functions are made, and that our statements fit it."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

import fencepost.consumer
import fencepost.jobs
import fencepost.operate
import fencepost.relay
import fencepost.schemas
from fencepost.schemas import grants, migrate
from fencepost.schemas.errors import InvalidInput
from fencepost.schemas.witness_database import DatabaseWitness
from support.database import Database

NAMED = re.compile(r"%\((\w+)\)s")


def _statements() -> Iterator[tuple[str, str]]:
    """Every upper-case SQL constant of every module."""
    for package in (fencepost.schemas, fencepost.relay, fencepost.consumer, fencepost.jobs, fencepost.operate):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if module.name.endswith(".cli") or module.name.endswith("__main__"):
                continue
            loaded = importlib.import_module(module.name)
            for name, value in vars(loaded).items():
                if (
                    name.isupper()
                    and isinstance(value, str)
                    and re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\s", value)
                ):
                    yield f"{module.name}.{name}", value


def test_every_statement_constant_can_be_prepared(database: Database) -> None:
    found = dict(_statements())
    assert len(found) > 20
    with DatabaseWitness(database.dsn).held(), database.connect(autocommit=True) as conn:
        for name, statement in found.items():
            numbers: dict[str, str] = {}
            text = NAMED.sub(lambda m, n=numbers: n.setdefault(m[1], f"${len(n) + 1}"), statement).replace("%%", "%")  # type: ignore[misc]
            try:
                conn.execute(f"PREPARE one AS {text}".encode(), prepare=False)
            except psycopg.errors.IndeterminateDatatype:
                continue
            except psycopg.Error as error:
                raise AssertionError(f"{name}: {error}") from error
            conn.execute("DEALLOCATE one")


def test_every_definer_function_pins_its_search_path_and_public_may_call_nothing(database: Database) -> None:
    with database.connect() as conn:
        definers = conn.execute(
            """SELECT p.proname, 'search_path=pg_catalog, pg_temp' = ANY (coalesce(p.proconfig, '{}'))
               FROM pg_proc p WHERE p.pronamespace = 'fencepost'::regnamespace AND p.prosecdef"""
        ).fetchall()
        assert len(definers) > 20
        assert [name for name, pinned in definers if not pinned] == []
        public = conn.execute(
            """SELECT p.oid::regprocedure::text FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
               WHERE p.pronamespace = 'fencepost'::regnamespace AND a.grantee = 0"""
        ).fetchall()
        assert public == []


def test_a_new_function_would_be_public_so_the_check_above_can_fail(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("CREATE FUNCTION fencepost.stray() RETURNS integer LANGUAGE sql AS 'SELECT 1'")
        row = conn.execute("SELECT has_function_privilege('public', 'fencepost.stray()', 'EXECUTE')").fetchone()
        assert row == (True,)


def test_the_matrix_names_every_callable_function(database: Database) -> None:
    with database.connect() as conn:
        callable_functions = {
            r[0]
            for r in conn.execute(
                "SELECT proname FROM pg_proc WHERE pronamespace = 'fencepost'::regnamespace AND proname !~ '^_'"
            )
        }
    assert callable_functions == set(grants.FUNCTIONS)


def test_shadowing_through_pg_temp_does_not_reach_a_definer_function(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        conn.execute("CREATE TEMP TABLE ticket (LIKE fencepost.ticket)")
        conn.execute("CREATE TEMP TABLE job (tenant text)")
        conn.execute("SET search_path = pg_temp, public")

        assert conn.execute("SELECT fencepost.armed()").fetchone() == (True,)


ALLOWED = (
    "SELECT fencepost.enqueue(gen_random_uuid(), 't', 'o', 'a.b', 1, 'k', 'ref:x', 'application/json', NULL, '\\x7b7d')"
)


@pytest.fixture
def separated(empty_database: Database) -> Iterator[Database]:
    migrate.apply(empty_database.dsn, state=empty_database.state, single_role=False, install="sep")
    yield empty_database
    with empty_database.connect(autocommit=True) as conn:
        conn.execute("DROP SCHEMA fencepost CASCADE")
        for name in ("owner", *grants.ROLES):
            role = sql.Identifier(grants.role("sep", name))
            conn.execute(sql.SQL("REASSIGN OWNED BY {} TO CURRENT_USER").format(role))
            conn.execute(sql.SQL("DROP OWNED BY {}").format(role))
        for name in ("owner", *grants.ROLES):
            conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(grants.role("sep", name))))


def _as(conn: psycopg.Connection[Any], role: str, statement: str) -> None:
    with conn.transaction(force_rollback=True):
        conn.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(grants.role("sep", role))))
        conn.execute(statement.encode())


def test_each_role_can_do_its_row_of_the_matrix_and_nothing_else(separated: Database) -> None:
    with separated.connect(autocommit=True) as conn:
        for name in grants.ROLES:
            if name == "migrator":
                continue
            role = grants.role("sep", name)
            may = {
                r[0]
                for r in conn.execute(
                    """SELECT p.proname FROM pg_proc p WHERE p.pronamespace = 'fencepost'::regnamespace
                       AND has_function_privilege(%(role)s, p.oid, 'EXECUTE')""",
                    {"role": role},
                )
            }
            assert may == {f for f, roles in grants.FUNCTIONS.items() if name in roles}, name
            writes = conn.execute(
                """SELECT c.relname FROM pg_class c WHERE c.relnamespace = 'fencepost'::regnamespace AND c.relkind IN ('r', 'p', 'v')
                   AND has_table_privilege(%(role)s, c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')""",
                {"role": role},
            ).fetchall()
            assert writes == [], name


def test_a_projector_reaches_no_function_that_causes_anything(separated: Database) -> None:
    with separated.connect(autocommit=True) as conn:
        _as(conn, "producer", ALLOWED)

        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            _as(conn, "projector", ALLOWED)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            _as(conn, "producer", "SELECT fencepost.claim('w', '{c}', 1)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            _as(conn, "executor", "UPDATE fencepost.job SET exec = 'done'")


def test_no_role_of_the_matrix_can_log_in(separated: Database) -> None:
    with separated.connect() as conn:
        logins = conn.execute(
            "SELECT rolname FROM pg_roles WHERE rolname LIKE 'fencepost_sep_%' AND rolcanlogin"
        ).fetchall()
    assert logins == []


DURABLE = (
    *("arm", "beat", "tick", "ack", "retried", "reserve", "dead_letter", "fence", "complete", "stage"),
    *("begin_effect", "record_effect", "reconcile", "cancel", "requeue", "settle_dead_letter", "advance_horizon"),
    *("reserve_many", "condemn_object", "remove_schedule", "release_dead_letter"),
)


def test_what_others_act_upon_commits_durably_even_where_the_session_does_not(database: Database) -> None:
    with database.connect(autocommit=True) as conn:
        bodies: dict[str, str] = dict(
            conn.execute(
                "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'fencepost'::regnamespace"
            ).fetchall()
        )
        assert [n for n in DURABLE if "set_config('synchronous_commit', 'on', true)" not in bodies[n]] == []
        conn.execute("SET synchronous_commit = off")
        with conn.transaction():
            conn.execute(
                """SELECT fencepost.reserve('t', 'c', 'o', 'a.b', 1, gen_random_uuid(), 'urn:x', 1, 'ref:x',
                                            clock_timestamp(), '["test"]', '[]', '\\x7b7d')"""
            )
            assert conn.execute("SHOW synchronous_commit").fetchone() == ("on",)
        assert conn.execute("SHOW synchronous_commit").fetchone() == ("off",)


def test_operators_decide_about_parked_events_and_destinations_and_relays_do_not(separated: Database) -> None:
    acts = (
        "SELECT fencepost.retry_parked('d', 1, 'ann', 'why')",
        "SELECT fencepost.skip_parked('d', 1, 'ann', 'why')",
        "SELECT fencepost.remove_destination('d', 'ann', 'why')",
    )
    with separated.connect(autocommit=True) as conn:
        for act in acts:
            with pytest.raises(InvalidInput):  # allowed, and there is nothing of that name
                _as(conn, "reconciler", act)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                _as(conn, "relay", act)
        for table in ("parked", "route", "destination", "slot"):
            _as(conn, "relay", f"SELECT count(*) FROM fencepost.{table}")
        for table in ("parked", "route", "destination", "relay", "decision"):
            _as(conn, "reconciler", f"SELECT count(*) FROM fencepost.{table}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            _as(conn, "reader", "SELECT payload FROM fencepost.parked")


def test_a_payload_of_a_dead_letter_is_read_by_an_audited_act_only_and_consumers_do_not_decide(
    separated: Database,
) -> None:
    acts = (
        "SELECT fencepost.retry_dead_letter(1, false, 'ann', 'why')",
        "SELECT fencepost.discard_dead_letter(1, 'ann', 'why')",
        "SELECT fencepost.read_dead_letter(1, 'ann', 'why')",
    )
    release = "SELECT fencepost.release_dead_letter(1, 'ann', 'why')"
    with separated.connect(autocommit=True) as conn:
        for act in acts:
            with pytest.raises(InvalidInput):  # allowed, and there is no such letter
                _as(conn, "reconciler", act)
        with pytest.raises(InvalidInput):
            _as(conn, "authority_admin", release)
        for role in ("reconciler", "authority_admin", "reader"):
            _as(conn, role, "SELECT * FROM fencepost.dead_letters")
        _as(conn, "consumer", "SELECT * FROM fencepost.take_dead_letter('c', interval '1 s', 1)")
        _as(conn, "maintenance", "SELECT fencepost.advance_horizon('c')")
        _as(conn, "authority_admin", "SELECT fencepost.set_inbox_retention('c', NULL, 'ann', 'why')")
        forbidden = [(role, act) for role in ("consumer", "reader", "maintenance", "projector") for act in acts]
        forbidden += [(role, release) for role in ("reconciler", "consumer", "reader", "executor")]
        forbidden += [(role, "SELECT FROM fencepost.dead_letter") for role in grants.ROLES if role != "migrator"]
        forbidden += [
            ("consumer", "SELECT fencepost.advance_horizon('c')"),
            ("consumer", "SELECT fencepost.set_inbox_retention('c', NULL, 'ann', 'why')"),
            ("reconciler", "SELECT * FROM fencepost.take_dead_letter('c', interval '1 s', 1)"),
        ]
        for role, statement in forbidden:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                _as(conn, role, statement)
