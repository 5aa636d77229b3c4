"""What the database refuses whatever a client sends or forgets: at the commit, in the tables, in arguments."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from fencepost.jobs import effects
from fencepost.jobs.cancel import cancel
from fencepost.jobs.fail import fail
from fencepost.jobs.fence import Fence, complete, fence
from fencepost.jobs.renew import renew
from fencepost.schemas.errors import FencepostError, NotArmed, StaleFence
from support.database import Database
from support.jobs import CLASS, Conn, begun, claimed, given, results, save, show, two

ROW = "(tenant, operation, class) = ('t', 'op-1', 'report.analyse')"
NOBODY = "attempt = NULL, owner = NULL, lease_until = NULL"
BEHIND: list[tuple[str, str]] = [
    ("operation", f"DELETE FROM fencepost.job WHERE {ROW}"),
    ("state", f"UPDATE fencepost.job SET attempt = gen_random_uuid() WHERE {ROW}"),
    (
        "state",
        f"UPDATE fencepost.job SET exec = 'queued', {NOBODY} WHERE {ROW}",
    ),
    (
        "state",
        f"UPDATE fencepost.job SET exec = 'done', done_attempt = gen_random_uuid(), {NOBODY} WHERE {ROW}",
    ),
    ("generation", f"UPDATE fencepost.job SET generation = generation + 1 WHERE {ROW}"),
    ("epoch", "INSERT INTO fencepost.tenant (tenant, epoch) VALUES ('t', 2)"),
    ("epoch", f"UPDATE fencepost.job SET epoch = 2 WHERE {ROW}"),
    ("effect", f"UPDATE fencepost.job SET open_effects = 1 WHERE {ROW}"),
]


@pytest.mark.parametrize(("part", "behind"), BEHIND)
def test_a_commit_is_refused_when_any_part_of_its_fence_was_changed_behind_it(
    database18: Database, part: str, behind: str
) -> None:
    """Also by one who may write every table, in the very transaction that holds the fence."""
    with two(database18) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        fence(manual, current)
        save(manual)
        manual.execute(behind.encode())
        with pytest.raises(StaleFence) as refused:
            manual.commit()
        assert refused.value.field == part and results(auto) == []

        fence(manual, current)
        save(manual)
        complete(manual, current)
        manual.commit()
        assert results(auto) == ["a"] and show(auto) == "done"


def test_a_commit_is_refused_by_a_database_that_was_disarmed_behind_its_fence(database18: Database) -> None:
    with two(database18) as (auto, manual):
        given(auto)
        current = claimed(auto).fence
        fence(manual, current)
        save(manual)
        manual.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(NotArmed):
            manual.commit()
        assert results(auto) == []
        fence(manual, current)
        save(manual)
        manual.commit()
        assert results(auto) == ["a"]


@pytest.mark.parametrize("completed", [True, False])
def test_the_lease_counts_at_the_commit_whether_or_not_the_job_was_completed(
    database18: Database, completed: bool
) -> None:
    """It ends behind the last check; a renewal before that end is what the commit goes by."""
    with two(database18) as (auto, manual):
        for operation, renewed in (("renewed", True), ("late", False)):
            given(auto, operation)
            current = claimed(auto, operation).fence
            _short(auto, operation)
            fence(manual, current)
            save(manual, operation)
            if renewed:
                renew(manual, current)
            if completed and not renewed:
                complete(manual, current)
            manual.execute("SELECT pg_sleep_for(lease_until - clock_timestamp() + interval '5 ms') FROM fencepost.publication"
                           " WHERE operation = %(o)s", {"o": operation})  # fmt: skip
            if renewed:
                manual.commit()
                assert results(auto, operation) == ["a"]
                continue
            with pytest.raises(StaleFence) as refused:
                manual.commit()
            assert refused.value.field == "lease" and results(auto, operation) == []


def _short(conn: Conn, operation: str) -> None:
    conn.execute(
        "UPDATE fencepost.job SET lease_until = clock_timestamp() + interval '3 s' WHERE operation = %(o)s",
        {"o": operation},
    )


def test_a_completed_job_is_fenced_by_nobody_although_every_part_fits(database18: Database) -> None:
    """A job that was published and a fence with its generation: the state alone refuses it."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        complete(conn, current)
        with pytest.raises(StaleFence) as refused:
            fence(conn, current)
        assert refused.value.field == "state"


UNLAWFUL = {
    "job_class": [
        "SET policy = 'lax'", "SET lease = interval '0'", "SET max_attempts = 0", "SET max_finishes = 0",
        "SET backoff_base = interval '-1 s'", "SET backoff_max = interval '-1 s'", "SET max_effect_timeout = interval '0'",
        "SET network_bound = interval '-1 s'", "SET escalate_to = '{}'", "SET escalate_severity = '{}'",
        "SET escalate_severity = '{high,odd}'", "SET job_limit = 0", "SET tenant_limit = 1", "SET job_limit = 1, fair = true, tenant_limit = 0",
    ],
    "job": [
        "SET meaning = '\\x01'", "SET digest = '\\x01'", "SET exec = 'odd', attempt = NULL, owner = NULL, lease_until = NULL",
        "SET mode = 'odd'", "SET attempts = -1", "SET finishes = -1", "SET open_effects = -1",
        "SET applied_effects = -1", "SET attempt = NULL", "SET owner = NULL", "SET lease_until = NULL",
        "SET done_attempt = gen_random_uuid()",
        "SET exec = 'queued', owner = NULL, lease_until = NULL", "SET exec = 'queued', attempt = NULL, lease_until = NULL",
        "SET exec = 'queued', attempt = NULL, owner = NULL", "SET exec = 'done', attempt = NULL, owner = NULL, lease_until = NULL",
        "SET exec = 'done', done_attempt = attempt, attempt = NULL, owner = NULL, lease_until = NULL, open_effects = 1",
        "SET generation = -1", "SET archived_at = now()", "SET suspect = true, quiescent_at = NULL",
    ],
    "effect": [
        "SET kind = 'odd'", "SET state = 'odd'", "SET request_digest = '\\x01'", "SET state = 'success'",
        "SET state = 'resolved_applied', receipt = 'r'", "SET state = 'resolved_applied', decision_id = gen_random_uuid()",
        "SET state = 'resolved_not_applied'", "SET severity = 'odd'", "SET unknown_since = clock_timestamp()",
        "SET escalations = -1", "SET class = 'another'",
    ],
    "lookup": ["SET asks = 0", "SET effect_key = 'another'"],
    "object": ["SET object = 'name'"],
    "manifest": ["SET size = -1", "SET store = 'another'"],
    "decision": ["SET kind = 'odd'"],
    "staged": ["SET attempt = gen_random_uuid()"],
}  # fmt: skip
FILLED = """
INSERT INTO fencepost.object (store, object) VALUES ('s', repeat('0', 64)), ('s', repeat('1', 64));
INSERT INTO fencepost.manifest (tenant, operation, name, store, object, size) VALUES ('t', 'op-1', 'n', 's', repeat('0', 64), 1);
INSERT INTO fencepost.lookup (tenant, operation, effect_key, version, taken_by, taken_at, due_at)
    SELECT tenant, operation, effect_key, 1, gen_random_uuid(), begun_at, begun_at FROM fencepost.effect;
"""


def test_no_table_holds_what_breaks_an_invariant_whoever_writes_it(database18: Database) -> None:
    """Straight into the tables, as their owner, with the triggers of history switched off: the second line behind the functions."""
    with database18.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        begun(conn, current)
        conn.execute("SELECT fencepost.stage('t', 'op-1', %(c)s, %(a)s, 'x')", {"c": CLASS, "a": current.attempt})
        given(conn, "op-2")
        cancel(conn, "t", "op-2", CLASS, actor="ann", reason="why")
        conn.execute(FILLED.encode())
        for table, changes in UNLAWFUL.items():
            conn.execute(f"ALTER TABLE fencepost.{table} DISABLE TRIGGER USER".encode())
            row = {"job": " WHERE exec = 'running'", "object": " WHERE object ~ '^1'"}.get(table, "")
            try:
                # The control: the same row may be written.
                columns = conn.execute(f"SELECT * FROM fencepost.{table} LIMIT 0".encode()).description
                assert columns is not None
                same = f"UPDATE fencepost.{table} SET {columns[1].name} = {columns[1].name}{row}"
                assert conn.execute(same.encode()).rowcount == 1, table
                for change in changes:
                    with pytest.raises(psycopg.errors.IntegrityError):
                        conn.execute(f"UPDATE fencepost.{table} {change}{row}".encode())
            finally:
                conn.execute(f"ALTER TABLE fencepost.{table} ENABLE TRIGGER USER".encode())


HISTORY = ("attempt", "staged", "publication", "effect_event", "decision", "manifest")


def test_history_takes_inserts_and_nothing_else_from_anybody(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        given(conn)
        current = claimed(conn).fence
        begun(conn, current)
        conn.execute("SELECT fencepost.stage('t', 'op-1', %(c)s, %(a)s, 'x')", {"c": CLASS, "a": current.attempt})
        given(conn, "op-2")
        fence(conn, claimed(conn, "op-2").fence)
        cancel(conn, "t", "op-2", CLASS, actor="ann", reason="why")
        conn.execute(FILLED.encode())
        for table in HISTORY:
            found = conn.execute(f"SELECT count(*) FROM fencepost.{table}".encode()).fetchone()
            assert found is not None and found[0] > 0, table
            for statement in (
                f"UPDATE fencepost.{table} SET tenant = tenant",
                f"DELETE FROM fencepost.{table}",
                f"DELETE FROM fencepost.{table} WHERE false",
                f"TRUNCATE fencepost.{table} CASCADE",
            ):
                with pytest.raises(FencepostError) as refused, conn.transaction():
                    conn.execute(statement.encode())
                assert refused.value.field == table
        for change, allowed in (("generation + 1", True), ("generation", True), ("generation - 1", False)):
            advance = f"UPDATE fencepost.job SET generation = {change} WHERE operation = 'op-1'".encode()
            if allowed:
                conn.execute(advance)
            else:
                with pytest.raises(StaleFence):
                    conn.execute(advance)


F: dict[str, str] = {
    "tenant": "'t'", "operation": "'op-1'", "class": f"'{CLASS}'", "generation": "{generation}", "attempt": "'{attempt}'",
    "owner": "'{owner}'", "epoch": "{epoch}",
}  # fmt: skip
EFFECT = {"key": "'e1'", "kind": "'opaque'", "effect_attempt": "gen_random_uuid()", "digest": "decode(repeat('00', 32), 'hex')", "timeout": "interval '5 s'"}  # fmt: skip
LONG = "repeat('x', {})"
RECONCILE = {
    "tenant": "'t'", "operation": "'op-2'", "key": "'e1'", "version": "2", "verdict": "'applied'", "evidence_kind": "'operator'",
    "evidence_ref": "'mail'", "receipt": "'r'", "decision_id": "gen_random_uuid()", "actor": "'ann'", "reason": "'why'",
}  # fmt: skip
# A call that is accepted, and for each field values that are refused with that field's name.
CALLS: dict[str, tuple[dict[str, str], dict[str, list[str]], dict[str, list[str]]]] = {
    "begin_effect": (
        F | EFFECT,
        {
            "key": ["NULL", "''"],
            "effect_attempt": ["NULL"],
            "digest": ["NULL", "'\\x00'", "decode(repeat('00', 33), 'hex')"],
            "kind": ["NULL", "'odd'"],
            "timeout": ["NULL", "interval '0'", "interval '-1 s'", "interval '10.001 s'"],
        },
        {"kind": ["'keyed'", "'lookup'"], "timeout": ["interval '10 s'", "interval '1 ms'"]},
    ),
    "stage": (
        {name: F[name] for name in ("tenant", "operation", "class", "attempt")} | {"result": "'x'::bytea"},
        {"result": ["NULL", f"{LONG.format(1048577)}::bytea"], "attempt": ["gen_random_uuid()", "NULL"]},
        {"result": [f"{LONG.format(1048576)}::bytea", "''::bytea"]},
    ),
    "cancel": (
        {name: F[name] for name in ("tenant", "operation", "class")} | {"actor": "'ann'", "reason": "'why'"},
        {"actor": ["NULL", "''"], "reason": ["NULL", "''"], "operation": ["'none'", "NULL"]},
        {},
    ),
    "requeue": (
        {name: F[name] for name in ("tenant", "operation", "class")} | {"actor": "'ann'", "reason": "'why'"},
        {"actor": ["NULL", "''"], "reason": ["NULL", "''"], "operation": ["'none'", "NULL"], "state": []},
        {},
    ),
    "record_effect": (
        {"tenant": "'t'", "operation": "'op-1'", "key": "'open'", "effect_attempt": "'{open}'", "outcome": "'success'",
         "receipt": "'r'", "result": "NULL::bytea", "reason": "NULL"},
        {
            "outcome": ["NULL", "'odd'"], "receipt": ["NULL", "''", LONG.format(2001)],
            "result": [f"{LONG.format(1048577)}::bytea"], "key": ["'none'", "NULL"], "effect_attempt": ["gen_random_uuid()", "NULL"],
        },
        {"outcome": ["'unknown'", "'failed_before_dispatch'"], "receipt": ["'r'", LONG.format(2000)],
         "result": [f"{LONG.format(1048576)}::bytea"], "reason": [LONG.format(600)]},
    ),
    "reconcile": (
        RECONCILE,
        {
            "actor": ["NULL", "''"], "reason": ["NULL", "''"], "verdict": ["NULL", "'odd'"], "evidence_kind": ["NULL", "'odd'"],
            "evidence_ref": ["NULL", "''", "'  '", LONG.format(2001)], "receipt": ["NULL", "''", "' '", LONG.format(2001)],
            "decision_id": ["NULL"], "key": ["'none'"], "version": ["3", "NULL", "1"],
        },
        {"evidence_kind": [f"'{kind}'" for kind in ("receipt_lookup", "provider_statement", "termination_attested", "operator")],
         "evidence_ref": [LONG.format(2000)], "receipt": [LONG.format(2000)], "verdict": ["'not_applied'"]},
    ),
    "assign_effect": (
        {name: RECONCILE[name] for name in ("tenant", "operation", "key", "version")}
        | {"assignee": "'bob'", "severity": "'high'", "decision_id": "gen_random_uuid()", "actor": "'ann'", "reason": "'why'"},
        {
            "assignee": ["NULL", "''"], "severity": ["'odd'"], "decision_id": ["NULL"], "actor": ["NULL", "''"],
            "reason": ["NULL", "''"], "key": ["'none'"], "version": ["3", "NULL"],
        },
        {"severity": ["NULL", "'normal'", "'critical'"]},
    ),
    "take_lookups": (
        {"classes": f"ARRAY['{CLASS}']", "taken_by": "gen_random_uuid()", "limit": "1", "lease": "interval '60 s'"},
        {
            "classes": ["NULL"], "taken_by": ["NULL"], "limit": ["NULL", "0", "1001"],
            "lease": ["NULL", "interval '0.09 s'", "interval '1 hour 1 s'"],
        },
        {"limit": ["1000"], "lease": ["interval '0.1 s'", "interval '1 hour'"]},
    ),
    "defer_lookup": (
        {"tenant": "'t'", "operation": "'op-2'", "key": "'e1'", "taken_by": "gen_random_uuid()", "answer": "'none'",
         "delay": "interval '1 s'"},
        {"answer": ["NULL", "''"], "delay": ["NULL", "interval '-1 s'", "interval '2 days 1 s'"]},
        {"delay": ["interval '0'", "interval '2 days'"]},
    ),
    "present_begin": (
        {"tenant": "'t'", "operation": "'op-1'", "class": f"'{CLASS}'", "key": "'heard'", "kind": "'opaque'",
         "effect_attempt": "gen_random_uuid()", "attempt": "gen_random_uuid()", "digest": EFFECT["digest"]},
        {
            "key": ["NULL", "''"], "effect_attempt": ["NULL"], "attempt": ["NULL"], "kind": ["NULL", "'odd'"],
            "digest": ["NULL", "'\\x00'", "decode(repeat('00', 33), 'hex')"],
        },
        {"kind": ["'keyed'", "'lookup'"]},
    ),
    "complete_many": (
        {name: f"ARRAY[{value}]" for name, value in F.items()} | {"generation": "ARRAY[{generation}]::bigint[]",
         "attempt": "ARRAY['{attempt}']::uuid[]", "epoch": "ARRAY[{epoch}]::bigint[]"},
        {
            "tenant": ["NULL", "'{{}}'", "array_fill('t'::text, ARRAY[1001])"], "operation": ["NULL", "ARRAY['op-1', 'op-2']"],
            "class": ["NULL", "ARRAY['a', 'b']"], "generation": ["NULL", "ARRAY[1, 2]"], "owner": ["NULL", "ARRAY['a', 'b']"],
            "attempt": ["NULL", "ARRAY[gen_random_uuid(), gen_random_uuid()]"], "epoch": ["NULL", "ARRAY[1, 1]"],
        },
        {},
    ),
    "claim": (
        {"owner": "'w'", "classes": f"ARRAY['{CLASS}']", "limit": "1"},
        {"owner": ["NULL", "''"], "classes": ["NULL", f"ARRAY['{CLASS}', 'none']"], "limit": ["NULL", "0", "1001"]},
        {"limit": ["1000"], "classes": ["'{{}}'"]},
    ),
    "escalate_effects": ({"limit": "1"}, {"limit": ["NULL", "0", "10001"]}, {"limit": ["10000"]}),
    "submit": (
        {"tenant": "'t'", "operation": "'new'", "class": "'c'", "args": "'{{}}'::bytea", "binding": "'ref:x'", "source": "NULL",
         "run_at": "NULL", "priority": "0"},
        {
            "tenant": ["NULL", "''"], "operation": ["NULL", "''"], "class": ["NULL", "''"], "binding": ["NULL", "'x'"],
            "args": ["NULL", f"{LONG.format(1048577)}::bytea"],
            "run_at": ["'1999-12-31 23:59+00'", "'-infinity'", "'infinity'", "clock_timestamp() + interval '10 years 1 day'"],
        },
        {"args": [f"{LONG.format(1048576)}::bytea"], "run_at": ["'2000-01-01 00:00+00'", "clock_timestamp() + interval '9 years'"],
         "priority": ["NULL"]},
    ),
}  # fmt: skip
RENAMED = {"key": "effect_key", "digest": "request_digest"}
# Fields that are told as part of something else.
TOLD = {
    ("present_begin", "attempt"): "effect_attempt",
    ("take_lookups", "classes"): "taken_by",
    ("claim", "classes"): "class",
} | {("complete_many", name): "items" for name in F}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_at_their_limits_pass_and_beyond_them_are_refused_by_name(database18: Database, name: str) -> None:
    good, refused, allowed = CALLS[name]
    with database18.connect(autocommit=True) as conn:
        given(conn, max_effect_timeout=10.0, policy="resumable")
        current = claimed(conn).fence
        opened = begun(conn, current, "open")
        given(conn, "op-2", max_effect_timeout=10.0, policy="resumable")
        unknown = claimed(conn, "op-2").fence
        begun(conn, unknown)
        assert fail(conn, unknown, "why") == "blocked"
        conn.execute("UPDATE fencepost.effect SET quiescent_at = clock_timestamp() WHERE state = 'unknown'")
        if name == "complete_many":
            effects.record(conn, current, "open", opened, "success", receipt="r")
        if name == "requeue":
            cancel(conn, "t", "op-1", CLASS, actor="ann", reason="why")
            conn.execute("UPDATE fencepost.job SET open_effects = 0 WHERE operation = 'op-1'")
        for field, values in refused.items():
            for value in values:
                with pytest.raises(FencepostError) as error:
                    _call(conn, name, current, opened, good | {field: value})
                assert error.value.field == TOLD.get((name, field), RENAMED.get(field, field)), value
        for field, values in ({"": [""]} | allowed).items():
            for value in values:
                with conn.transaction(force_rollback=True):
                    _call(conn, name, current, opened, good | ({field: value} if field else {}))


def _call(conn: psycopg.Connection[Any], name: str, f: Fence, opened: UUID, arguments: dict[str, str]) -> None:
    parameters = {key: str(value) for key, value in f.parameters().items()} | {"open": str(opened)}
    listed = ", ".join(value.format(**parameters) if "{" in value else value for value in arguments.values())
    conn.execute(f"SELECT * FROM fencepost.{name}({listed})".encode())
