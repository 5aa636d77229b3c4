"""What the database itself refuses of a reservation, whoever calls, and what the role of a consumer may do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Outcome
from fencepost.schemas import migrate
from fencepost.schemas.errors import InvalidInput
from support.database import Database, Databases
from support.deliveries import Submitted, envelope, from_kafka

RESERVE: LiteralString = """
SELECT outcome FROM fencepost.reserve(%(tenant)s, %(consumer)s, %(operation)s, %(type)s, %(version)s, %(event_id)s, %(source)s,
  %(epoch)s, %(binding)s, %(event_time)s::timestamptz, %(coordinates)s, %(headers)s::jsonb, %(payload)s)
"""
DEAD_LETTER: LiteralString = """
SELECT fencepost.dead_letter(%(consumer)s, %(coordinates)s, %(reason)s, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 1,
  %(headers)s::jsonb, %(payload)s)
"""
GOOD: dict[str, Any] = {
    "tenant": "acme",
    "consumer": "reports",
    "operation": "op-1",
    "type": "test.submitted",
    "version": 1,
    "event_id": uuid.UUID(int=1),
    "source": "urn:test",
    "epoch": 1,
    "binding": f"jcs-sha256:{'0' * 64}",
    "event_time": "2026-01-01T00:00:00Z",
    "coordinates": "[1]",
    "headers": "[]",
    "payload": b"{}",
    "reason": "undecodable",
}


def refused(database: Database, query: LiteralString, values: dict[str, Any]) -> str | None:
    with database.connect() as conn, pytest.raises(InvalidInput) as error:
        conn.execute(query, values)
    return error.value.field


def test_every_part_of_a_reservation_is_required_by_name(domain: Database) -> None:
    with domain.connect() as conn:
        assert conn.execute(RESERVE, GOOD).fetchall() == [("reserved",)]
        conn.rollback()
    parts = [name for name in GOOD if name not in ("headers", "reason")]
    assert [refused(domain, RESERVE, {**GOOD, name: None}) for name in parts] == parts
    assert refused(domain, RESERVE, {**GOOD, "coordinates": "x" * 1501}) == "coordinates"
    assert refused(domain, RESERVE, {**GOOD, "binding": "md5:0"}) == "binding"
    assert refused(domain, RESERVE, {**GOOD, "version": 32768}) == "version"
    waiting: LiteralString = RESERVE.replace("%(payload)s)", "%(payload)s, %(wait)s)")
    with domain.connect() as conn:
        assert conn.execute(waiting, {**GOOD, "wait": 1}).fetchall() == [("reserved",)]
    assert refused(domain, waiting, {**GOOD, "wait": 0}) == "wait_ms"


def test_without_content_what_would_have_to_be_kept_is_not_recorded_until_it_comes_with_its_content(
    domain: Database,
) -> None:
    bare = {**GOOD, "headers": None, "payload": None}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("conflict", {"binding": f"jcs-sha256:{'1' * 64}", "coordinates": "[2]"}),
        ("conflict", {"operation": "op-2"}),
        ("before_horizon", {"operation": "op-3", "coordinates": "[3]", "event_time": "2019-01-01T00:00:00Z"}),
    ]
    recorded = """
    SELECT (SELECT count(*) FROM fencepost.reservation), (SELECT sum(arrivals) FROM fencepost.delivery),
           (SELECT count(*) FROM fencepost.dead_letter)"""
    with domain.connect(autocommit=True) as conn:
        conn.execute("INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', '2020-01-01')")
        assert conn.execute(RESERVE, bare).fetchall() == [("reserved",)], "the allowed control"
        assert conn.execute(RESERVE, bare).fetchall() == [("duplicate",)]
        for number, (outcome, changes) in enumerate(cases):
            assert conn.execute(RESERVE, bare | changes).fetchall() == [("alone",)]
            assert conn.execute(recorded).fetchone() == (1, 2 + number, number)
            assert conn.execute(RESERVE, GOOD | changes).fetchall() == [(outcome,)]
            assert conn.execute(recorded).fetchone() == (1, 3 + number, number + 1)


def test_every_part_of_a_dead_letter_is_required_by_name(domain: Database) -> None:
    with domain.connect() as conn:
        conn.execute(DEAD_LETTER, GOOD)
        conn.rollback()
    parts = ["consumer", "coordinates", "reason", "payload"]
    assert [refused(domain, DEAD_LETTER, {**GOOD, name: None}) for name in parts] == parts
    assert refused(domain, DEAD_LETTER, {**GOOD, "reason": "conflict"}) == "reason"


@pytest.fixture
def consumer_dsn(databases: Databases) -> Iterator[str]:
    """The way into a database with roles of its own, as the role of a consumer."""
    database = databases.empty()
    install = f"c{uuid.uuid4().hex[:8]}"
    migrate.apply(database.dsn, state=database.state, single_role=False, install=install)
    role = f"fencepost_{install}_consumer"
    with database.connect() as conn:
        conn.execute("CREATE TABLE done (operation text)")
        conn.execute(sql.SQL("GRANT SELECT, INSERT ON done TO {}").format(sql.Identifier(role)))
    yield make_conninfo(database.dsn, options=f"-c role={role}")
    databases.drop(database)
    with psycopg.connect(make_conninfo(database.dsn, dbname="postgres"), autocommit=True) as conn:
        for (name,) in conn.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE %s", (f"fencepost_{install}_%",)):
            conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@inbox(consumer="reports")
def handler(tx: Connection[Any], event: Submitted) -> None:
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
    handoff.submit(tx, "report.analyse", event)


def test_the_role_of_a_consumer_is_enough_for_the_inbox_and_has_no_table_to_write(consumer_dsn: str) -> None:
    sent = [envelope(), envelope(), envelope(document="b"), envelope(operation="op-2")]
    outcomes = [handler.handle(consumer_dsn, from_kafka(each, offset)).outcome for offset, each in enumerate(sent)]
    outcomes.append(handler.handle(consumer_dsn, from_kafka(envelope(), 9, payload=b"nonsense")).outcome)

    assert outcomes == [
        Outcome.HANDLED,
        Outcome.DUPLICATE,
        Outcome.CONFLICT,
        Outcome.HANDLED,
        Outcome.UNDECODABLE,
    ]
    statements: list[LiteralString] = [
        "DELETE FROM fencepost.reservation",
        "INSERT INTO fencepost.dead_letter (consumer) VALUES ('x')",
        "SELECT FROM fencepost.delivery",
        "SELECT fencepost._dead_letter('c','x','conflict','','','','','',1,NULL,NULL,NULL,1,'[]','')",
    ]
    for statement in statements:
        with psycopg.connect(consumer_dsn) as conn, pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute(statement)
