"""One committed handling per tenant, consumer, operation and type, whatever arrives, and nothing that arrives is lost."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg import AsyncConnection, Connection, IsolationLevel, sql
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from fencepost.consumer import handoff
from fencepost.consumer.connections import AsyncConnections, Connections
from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, Inbox, inbox
from fencepost.consumer.outcomes import Outcome, Reserved
from fencepost.schemas import kafka_binding
from fencepost.schemas.digest import digest
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import CommitWasRollback, ConfigError, InvalidInput, Undecodable, WrongTransaction
from fencepost.schemas.event import Event
from support.database import Database
from support.deliveries import Submitted, Withdrawn, envelope, from_kafka, from_rabbitmq
from support.poison import SECRET, UNREADABLE
from support.services import Services
from support.wire import listening

Tx = Connection[Any]


def insert(tx: Tx, event: Submitted) -> None:
    """The domain change of these tests; the table has no unique key, so that a second handling shows."""
    tx.execute(
        "INSERT INTO done (tenant, operation, document) VALUES (%s, %s, %s)",
        (event.tenant, event.operation, event.document),
    )


@inbox(consumer="reports")
def reports(tx: Tx, event: Submitted) -> None:
    insert(tx, event)


@inbox(consumer="reports")
async def reports_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await tx.execute(
        "INSERT INTO done (tenant, operation, document) VALUES (%s, %s, %s)",
        (event.tenant, event.operation, event.document),
    )


def done(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT operation, document FROM done ORDER BY n").fetchall()


def rows(database: Database, table: str) -> list[dict[str, Any]]:
    with database.connect() as conn, conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(sql.SQL("SELECT * FROM fencepost.{} ORDER BY 1").format(sql.Identifier(table))).fetchall()


def test_an_event_is_handled_in_one_commit_with_its_reservation(domain: Database) -> None:
    sent = envelope()

    handled = reports.handle(domain.dsn, from_kafka(sent))

    assert handled.outcome is Outcome.HANDLED
    assert (handled.tenant, handled.operation, handled.event_id, handled.arrivals) == ("acme", "op-1", sent.id, 1)
    assert done(domain) == [("op-1", "a")]
    (reservation,) = rows(domain, "reservation")
    assert (reservation["consumer"], reservation["event_id"], reservation["epoch"]) == ("reports", sent.id, 1)
    assert reservation["meaning"] == sent.meaning.raw, "the database computes the meaning that the envelope has"
    assert rows(domain, "dead_letter") == []


def test_a_handler_that_raises_leaves_nothing_and_the_next_delivery_handles(domain: Database) -> None:
    fail = True

    @inbox(consumer="reports")
    def fragile(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if fail:
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        fragile.handle(domain.dsn, from_kafka(envelope()))
    assert (done(domain), rows(domain, "reservation"), rows(domain, "delivery")) == ([], [], [])

    fail = False
    assert fragile.handle(domain.dsn, from_kafka(envelope())).outcome is Outcome.HANDLED
    assert done(domain) == [("op-1", "a")]


def test_a_second_delivery_is_a_duplicate_at_the_same_and_at_new_coordinates(domain: Database) -> None:
    sent = envelope()
    assert reports.handle(domain.dsn, from_kafka(sent)).outcome is Outcome.HANDLED

    again = reports.handle(domain.dsn, from_kafka(sent))
    elsewhere = reports.handle(domain.dsn, from_kafka(sent, offset=7))
    other_broker = reports.handle(domain.dsn, from_rabbitmq(sent, redelivered=True))

    assert [h.outcome for h in (again, elsewhere, other_broker)] == [Outcome.DUPLICATE] * 3
    assert [h.arrivals for h in (again, elsewhere, other_broker)] == [2, 1, 1]
    assert done(domain) == [("op-1", "a")]
    assert len(rows(domain, "delivery")) == 3
    assert rows(domain, "dead_letter") == []


def test_the_same_meaning_under_another_epoch_is_a_duplicate_and_says_so(domain: Database) -> None:
    first = reports.handle(domain.dsn, from_kafka(envelope(epoch=1)))
    second = reports.handle(domain.dsn, from_kafka(envelope(epoch=2), offset=1))

    assert (first.outcome, first.other_epoch) == (Outcome.HANDLED, False)
    assert (second.outcome, second.other_epoch) == (Outcome.DUPLICATE, True)
    assert done(domain) == [("op-1", "a")]


def test_another_meaning_is_a_conflict_kept_with_both_meanings_and_the_queue_goes_on(domain: Database) -> None:
    first, second = envelope(document="a"), envelope(document="b")
    reports.handle(domain.dsn, from_kafka(first))

    conflict = reports.handle(domain.dsn, from_kafka(second, offset=1))
    after = reports.handle(domain.dsn, from_kafka(envelope(operation="op-2"), offset=2))

    assert (conflict.outcome, after.outcome) == (Outcome.CONFLICT, Outcome.HANDLED)
    assert done(domain) == [("op-1", "a"), ("op-2", "a")]
    (kept,) = rows(domain, "dead_letter")
    assert (kept["reason"], kept["stored_meaning"], kept["arrived_meaning"]) == (
        "conflict",
        first.meaning.raw,
        second.meaning.raw,
    )
    assert (kept["payload"], kept["event_id"]) == (second.payload, second.id)


def test_another_version_of_the_type_is_a_conflict_not_a_second_handling(domain: Database) -> None:
    @inbox(consumer="reports")
    def any_version(tx: Tx, event: Envelope) -> None:
        tx.execute("INSERT INTO done (tenant, operation, document) VALUES ('', %s, '')", (event.operation,))

    assert any_version.handle(domain.dsn, from_kafka(envelope())).outcome is Outcome.HANDLED
    later = envelope(version=2)
    assert any_version.handle(domain.dsn, from_kafka(later, offset=1)).outcome is Outcome.CONFLICT
    assert len(done(domain)) == 1


def test_a_delivery_that_comes_back_changed_is_kept_each_time_and_not_handled(domain: Database) -> None:
    reports.handle(domain.dsn, from_rabbitmq(envelope(), "one-id"))
    other = envelope(operation="op-2")
    third = envelope(operation="op-3")

    outcomes = [reports.handle(domain.dsn, from_rabbitmq(each, "one-id")).outcome for each in (other, third, third)]

    assert outcomes == [Outcome.CONFLICT] * 3
    assert done(domain) == [("op-1", "a")]
    kept = rows(domain, "dead_letter")
    assert [(k["reason"], k["operation"], k["attempts"]) for k in kept] == [
        ("delivery_changed", "op-2", 1),
        ("delivery_changed", "op-3", 2),
    ], "a reused message id hides nothing"


def test_four_tenants_and_consumers_have_four_reservations_and_no_joined_key_collides(domain: Database) -> None:
    @inbox(consumer="other")
    def other(tx: Tx, event: Submitted) -> None:
        insert(tx, event)

    offset = 0

    def deliver(handler: Inbox[Submitted], tenant: str, operation: str) -> Outcome:
        nonlocal offset
        offset += 1
        return handler.handle(domain.dsn, from_kafka(envelope(tenant=tenant, operation=operation), offset)).outcome

    pairs = [(reports, "a"), (reports, "b"), (other, "a"), (other, "b")]
    assert [deliver(each, tenant, "1") for each, tenant in pairs] == [Outcome.HANDLED] * 4
    assert [deliver(reports, "a:b", "c"), deliver(reports, "a", "b:c")] == [Outcome.HANDLED] * 2
    assert [deliver(reports, "A", "1"), deliver(reports, "a", "1")] == [Outcome.HANDLED, Outcome.DUPLICATE]
    assert len(rows(domain, "reservation")) == 7
    assert rows(domain, "dead_letter") == []


def test_a_tenant_that_is_none_is_refused_by_python_and_by_the_database(domain: Database) -> None:
    good = envelope()
    with domain.connect() as conn:
        assert reports.reserve_in(conn, good, "somewhere").outcome is Reserved.RESERVED
        conn.rollback()

    for offset, tenant in enumerate(["", " a", "a ", "a\n"]):
        signed = digest(tenant, good.operation, good.type, good.version, good.epoch, good.binding)
        bad = replace(good, tenant=tenant, digest=signed)
        handled = reports.handle(domain.dsn, from_kafka(bad, offset))
        assert (handled.outcome, handled.field) == (Outcome.UNDECODABLE, "fptenant")
        with domain.connect() as conn, pytest.raises(InvalidInput) as refused:
            reports.reserve_in(conn, bad, "somewhere")
        assert refused.value.field == "tenant"
    assert rows(domain, "reservation") == []


def test_what_cannot_be_read_is_kept_once_with_its_bytes_and_the_queue_goes_on(
    domain: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for offset, (payload, reason) in enumerate(UNREADABLE.values()):
        bad = from_kafka(envelope(), offset, payload=payload)
        outcomes = [reports.handle(domain.dsn, bad) for _ in range(2)]
        assert [(h.outcome, h.reason) for h in outcomes] == [(Outcome.UNDECODABLE, reason)] * 2
    after = reports.handle(domain.dsn, from_kafka(envelope(operation="op-2"), offset=100))

    assert after.outcome is Outcome.HANDLED
    kept = rows(domain, "dead_letter")
    assert [(k["reason"], k["detail"], k["attempts"], k["payload"]) for k in kept] == [
        ("undecodable", reason, 2, payload) for payload, reason in UNREADABLE.values()
    ]
    assert done(domain) == [("op-2", "a")]
    assert SECRET not in caplog.text


def test_attributes_that_postgresql_cannot_store_are_kept_all_the_same(domain: Database) -> None:
    good: list[tuple[str, str | bytes | None]] = [*kafka_binding.encode(envelope())]
    cases: list[tuple[list[tuple[str, str | bytes | None]] | None, bytes | None]] = [
        ([*good, ("ce_subject", b"a\0b")], None),
        ([*good, ("ce_subject", b"\xff")], None),
        ([*good, ("ce_subject", "\ud800")], None),
        ([*good, ("ce_sub\0ject", b"x")], None),
        ([*good, good[3]], None),
        (good, b"\0\xff"),
        ([("ce_id", None)], None),
        (None, None),
    ]
    bad = [
        Delivery.from_kafka(
            cluster_id="c", topic="t", partition=0, offset=offset, headers=headers, key=key, value=b"{}"
        )
        for offset, (headers, key) in enumerate(cases)
    ]

    handled = [reports.handle(domain.dsn, each) for each in bad]

    assert {h.outcome for h in handled} == {Outcome.UNDECODABLE}
    assert len(rows(domain, "dead_letter")) == len(bad)


def test_equal_content_is_a_duplicate_and_different_content_a_conflict_however_it_is_written(domain: Database) -> None:
    def deliver(operation: str, payload: bytes, offset: int) -> Outcome:
        @inbox(consumer="reports")
        def raw(tx: Tx, event: Envelope) -> None:
            tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

        return raw.handle(domain.dsn, from_kafka(envelope(operation=operation, payload=payload), offset)).outcome

    same = [
        (b'{"a":1,"b":"x"}', b'{ "b" : "x", "a" : 1 }'),
        (b'{"a":"\xc3\xa9"}', b'{"a":"\\u00e9"}'),
        (b'{"a":1}', b'{"a":1,"_private":{"note":"n"}}'),
        (b'{"a":0}', b'{"a":-0}'),
    ]
    other = [
        (b'{"a":9007199254740991}', b'{"a":9007199254740990}'),
        (b'{"a":"1"}', b'{"a":1}'),
        (b'{"a":true}', b'{"a":1}'),
        (b'{"a":null}', b"{}"),
        (b'{"a":"2026-01-01T00:00:00Z"}', b'{"a":"2026-01-01T00:00:00+00:00"}'),
        (b'{"a":"\\u00e9"}', b'{"a":"e\\u0301"}'),
    ]
    for number, (first, second) in enumerate(same):
        assert deliver(f"same-{number}", first, number * 2) is Outcome.HANDLED
        assert deliver(f"same-{number}", second, number * 2 + 1) is Outcome.DUPLICATE, second
    for number, (first, second) in enumerate(other):
        assert deliver(f"other-{number}", first, 100 + number * 2) is Outcome.HANDLED
        assert deliver(f"other-{number}", second, 101 + number * 2) is Outcome.CONFLICT, second


def test_a_changed_payload_is_undecodable_because_its_digest_does_not_fit(domain: Database) -> None:
    handled = reports.handle(domain.dsn, from_kafka(envelope(), payload=b'{"document":"forged"}'))

    assert (handled.outcome, handled.reason, handled.operation) == (Outcome.UNDECODABLE, "digest_mismatch", "op-1")
    assert done(domain) == []


def test_a_swallowed_database_error_is_an_error_and_never_a_commit(domain: Database) -> None:
    @inbox(consumer="reports")
    def guarded(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        try:
            with tx.transaction():
                tx.execute("SELECT 1/0")
        except psycopg.Error:
            pass

    assert guarded.handle(domain.dsn, from_kafka(envelope(operation="op-0"))).outcome is Outcome.HANDLED

    @inbox(consumer="reports")
    def swallowing(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        try:
            tx.execute("SELECT 1/0")
        except psycopg.Error:
            pass

    with pytest.raises(CommitWasRollback):
        swallowing.handle(domain.dsn, from_kafka(envelope(), offset=1))
    assert done(domain) == [("op-0", "a")]
    assert len(rows(domain, "reservation")) == 1

    @inbox(consumer="reports")
    async def swallowing_async(tx: AsyncConnection[Any], event: Submitted) -> None:
        try:
            await tx.execute("SELECT 1/0")
        except psycopg.Error:
            pass

    with pytest.raises(CommitWasRollback):
        asyncio.run(swallowing_async.handle(domain.dsn, from_kafka(envelope(), offset=1)))
    assert len(rows(domain, "reservation")) == 1


def test_a_handler_that_ends_the_transaction_is_told_so(domain: Database) -> None:
    statements: list[LiteralString] = ["ROLLBACK", "ROLLBACK; BEGIN", "COMMIT; BEGIN"]
    for offset, statement in enumerate(statements):

        @inbox(consumer="reports")
        def ending(tx: Tx, event: Submitted, statement: LiteralString = statement) -> None:
            tx.execute(statement)

        with pytest.raises(CommitWasRollback):
            ending.handle(domain.dsn, from_kafka(envelope(operation=f"op-{offset}"), offset))
    assert done(domain) == []


def test_a_handler_may_name_its_application_and_is_told_all_the_same_when_it_ends_the_transaction(
    domain: Database,
) -> None:
    ends = False

    @inbox(consumer="reports")
    def naming(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        tx.execute("SET LOCAL application_name = 'mine'")
        if ends:
            tx.execute("COMMIT; BEGIN")

    with domain.connect(autocommit=True, application_name="theirs") as conn:
        assert naming.handle(conn, from_kafka(envelope())).outcome is Outcome.HANDLED
        assert conn.execute("SHOW application_name").fetchone() == ("theirs",)
        ends = True
        with pytest.raises(CommitWasRollback):
            naming.handle(conn, from_kafka(envelope(operation="op-2"), 1))


def test_a_name_that_is_the_mark_already_proves_nothing(domain: Database) -> None:
    ends = False

    @inbox(consumer="reports")
    def ending(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if ends:
            tx.execute("COMMIT; BEGIN")

    with domain.connect(autocommit=True, application_name="a" * 50 + " (inbox)") as conn:
        assert ending.handle(conn, from_kafka(envelope())).outcome is Outcome.HANDLED
        ends = True
        with pytest.raises(CommitWasRollback):
            ending.handle(conn, from_kafka(envelope(operation="op-2"), 1))


@pytest.mark.parametrize("name", ["", "a" * 63, "x (inbox)"])
def test_one_statement_reserves_whatever_the_application_is_called(domain: Database, name: str) -> None:
    with domain.connect(autocommit=True, application_name=name) as conn:
        with listening(conn) as sent:
            assert reports.handle(conn, from_kafka(envelope())).outcome is Outcome.HANDLED
        assert conn.info.parameter_status("application_name") == name
    assert len([each for each in sent.statements if "fencepost." in each]) == 1
    assert len(sent.statements) == 2, "that, and the handler's own"
    assert sent.round_trips == 3, "the reservation with its BEGIN, the handler's statement, COMMIT"


@pytest.mark.parametrize("autocommit", [True, False])
def test_three_round_trips_handle_whatever_the_isolation_and_leave_the_connection_as_it_was(
    domain: Database, autocommit: bool
) -> None:
    seen: list[object] = []

    @inbox(consumer="reports", isolation=IsolationLevel.REPEATABLE_READ)
    def strict(tx: Tx, event: Submitted) -> None:
        seen.extend(tx.execute("SELECT current_setting('transaction_isolation')").fetchall())

    with domain.connect(autocommit=autocommit) as conn:
        with listening(conn) as sent:
            assert strict.handle(conn, from_kafka(envelope())).outcome is Outcome.HANDLED
        assert (conn.autocommit, conn.info.transaction_status) == (autocommit, TransactionStatus.IDLE)
    assert (sent.round_trips, seen) == (3, [("repeatable read",)])


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_quotes_and_backslashes_are_letters_of_an_operation(domain: Database, conforming: str) -> None:
    texts = ["it's; ROLLBACK; --", "a\\'b", 'c\\"d', "{e,f}", "ü'ß", "%(tenant)s", "NULL"]
    with domain.connect(autocommit=True, options=f"-c standard_conforming_strings={conforming}") as conn:
        first = [from_kafka(envelope(operation=each), n) for n, each in enumerate(texts)]
        assert [reports.handle(conn, each).outcome for each in first] == [Outcome.HANDLED] * 7
        copies = [from_kafka(envelope(operation=each), 10 + n) for n, each in enumerate(texts)]
        assert [getattr(each, "outcome", None) for each in reports.handle_many(conn, copies)] == [Outcome.DUPLICATE] * 7
        others = [from_kafka(envelope(operation=f"2{each}"), 20 + n) for n, each in enumerate(texts)]
        assert [getattr(each, "outcome", None) for each in reports.handle_many(conn, others)] == [Outcome.HANDLED] * 7
    assert {row["operation"] for row in rows(domain, "reservation")} == {*texts, *(f"2{each}" for each in texts)}


def test_coordinates_are_kept_as_they_are_alone_and_in_a_batch(domain: Database) -> None:
    found = ["line\nend", "tab\t'\\\"", "no\u00a0break"]
    for n, coordinates in enumerate(found):
        sent = [
            replace(from_kafka(envelope(operation=f"op-{n}-{m}")), coordinates=f"{coordinates}{m}") for m in range(3)
        ]
        reports.handle(domain.dsn, sent[0])
        reports.handle_many(domain.dsn, sent[1:])
    kept = {row["coordinates"] for row in rows(domain, "delivery")}
    assert kept == {f"{each}{m}" for each in found for m in range(3)}


def test_a_connection_in_pipeline_mode_is_refused(domain: Database) -> None:
    with domain.connect(autocommit=True) as conn:
        assert reports.handle(conn, from_kafka(envelope())).outcome is Outcome.HANDLED
        with conn.pipeline(), pytest.raises(WrongTransaction) as error:
            reports.handle(conn, from_kafka(envelope(operation="op-2"), 1))
        assert error.value.field == "pipeline"
    assert done(domain) == [("op-1", "a")]


def test_the_connection_refuses_commit_and_rollback_inside_a_handler(domain: Database) -> None:
    @inbox(consumer="reports")
    def committing(tx: Tx, event: Submitted) -> None:
        tx.commit()

    with pytest.raises(psycopg.ProgrammingError):
        committing.handle(domain.dsn, from_kafka(envelope()))
    assert rows(domain, "reservation") == []


def test_a_deferred_constraint_that_fails_at_commit_leaves_nothing(domain: Database) -> None:
    with domain.connect() as conn:
        conn.execute("CREATE TABLE single (document text UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    @inbox(consumer="reports")
    def once(tx: Tx, event: Submitted) -> None:
        tx.execute("INSERT INTO single VALUES (%s)", (event.document,))

    assert once.handle(domain.dsn, from_kafka(envelope())).outcome is Outcome.HANDLED
    with pytest.raises(psycopg.errors.UniqueViolation):
        once.handle(domain.dsn, from_kafka(envelope(operation="op-2"), offset=1))
    assert len(rows(domain, "reservation")) == 1


def test_a_job_is_handed_over_in_the_same_commit_and_disappears_with_a_rollback(domain: Database) -> None:
    fail = False

    @inbox(consumer="reports")
    def handing(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        assert handoff.submit(tx, "report.analyse", event, priority=3)
        if fail:
            raise ValueError

    event = Submitted(tenant="acme", operation="op-1", document="a", note="private")
    sent = envelope(event)
    handing.handle(domain.dsn, from_kafka(sent))

    (job,) = rows(domain, "job")
    assert (job["tenant"], job["operation"], job["class"], job["priority"]) == ("acme", "op-1", "report.analyse", 3)
    assert (job["args"], job["source_event"]) == (event.payload(), sent.id)
    fail = True
    with pytest.raises(ValueError):
        handing.handle(domain.dsn, from_kafka(envelope(operation="op-2"), offset=1))
    assert len(rows(domain, "job")) == 1
    assert done(domain) == [("op-1", "a")]


def test_an_async_handler_hands_over_in_the_same_commit(domain: Database) -> None:
    @inbox(consumer="reports")
    async def handing(tx: AsyncConnection[Any], event: Submitted) -> None:
        await handoff.submit_async(tx, "report.analyse", event)
        await handoff.submit_async(tx, "report.index", {"n": 1}, tenant=event.tenant, operation=event.operation)

    assert isinstance(handing, AsyncInbox)
    assert asyncio.run(handing.handle(domain.dsn, from_kafka(envelope()))).outcome is Outcome.HANDLED
    assert {(j["class"], j["args"]) for j in rows(domain, "job")} == {
        ("report.analyse", b'{"document":"a"}'),
        ("report.index", b'{"n":1}'),
    }


def test_the_async_inbox_keeps_the_same_promises(domain: Database) -> None:
    async def deliver() -> list[Outcome]:
        pool = AsyncConnections(domain.dsn)
        try:
            sent = envelope()
            arrivals = [
                from_kafka(sent),
                from_kafka(sent, 1),
                from_kafka(envelope(document="b"), 2),
                from_kafka(envelope(), 3, payload=b"nonsense"),
                from_kafka(envelope(operation="op-2"), 4),
            ]
            return [(await reports_async.handle(pool, each)).outcome for each in arrivals]
        finally:
            await pool.close()

    assert asyncio.run(deliver()) == [
        Outcome.HANDLED,
        Outcome.DUPLICATE,
        Outcome.CONFLICT,
        Outcome.UNDECODABLE,
        Outcome.HANDLED,
    ]
    assert done(domain) == [("op-1", "a"), ("op-2", "a")]


def test_who_owns_the_transaction_decides_over_the_reservation(domain: Database) -> None:
    sent = envelope()
    with domain.connect() as conn:
        assert reports.reserve_in(conn, sent, "x").outcome is Reserved.RESERVED
        conn.rollback()
        assert reports.reserve_in(conn, sent, "x").outcome is Reserved.RESERVED
        conn.commit()
        assert reports.reserve_in(conn, sent, "x").outcome is Reserved.DUPLICATE
        assert reports.reserve_in(conn, envelope(document="b"), "y").outcome is Reserved.CONFLICT
        with pytest.raises(InvalidInput) as refused:
            reports.reserve_in(conn, sent, "")
        assert refused.value.field == "coordinates"
        with pytest.raises(Undecodable):
            reports.reserve_in(conn, replace(sent, payload=b'{"document":"c"}'), "z")


def test_a_connection_inside_a_transaction_is_refused_because_nothing_would_be_committed(domain: Database) -> None:
    with domain.connect() as conn:
        assert reports.handle(conn, from_kafka(envelope())).outcome is Outcome.HANDLED
        conn.execute("SELECT 1")
        with pytest.raises(WrongTransaction):
            reports.handle(conn, from_kafka(envelope(operation="op-2"), offset=1))
    assert done(domain) == [("op-1", "a")]


def test_the_annotation_decides_what_a_handler_is_given(domain: Database) -> None:
    given: list[Event | Envelope] = []

    @inbox(consumer="either")
    def either(tx: Tx, event: Submitted | Withdrawn) -> None:
        given.append(event)

    @inbox(consumer="every")
    def every(tx: Tx, event: Event) -> None:
        given.append(event)

    @inbox(consumer="raw")
    def raw(tx: Tx, event: Envelope) -> None:
        given.append(event)

    sent = envelope(Withdrawn(tenant="acme", operation="op-1", reason="late"))
    for handler in (either, every, raw):
        assert handler.handle(domain.dsn, from_kafka(sent)).outcome is Outcome.HANDLED
    assert [type(each) for each in given] == [Withdrawn, Withdrawn, Envelope]
    first = given[0]
    assert isinstance(first, Withdrawn)
    assert (first.event_id, first.reason) == (sent.id, "late")


def test_a_handler_whose_event_cannot_be_told_is_refused_when_it_is_declared() -> None:
    with pytest.raises(ConfigError):

        @inbox(consumer="reports")
        def wrong(tx: Tx, event: int) -> None: ...

    with pytest.raises(ConfigError):
        cast(Any, inbox(consumer="reports"))(lambda: None)

    with pytest.raises(InvalidInput):
        inbox(consumer="Not A Name")(insert)


def test_the_isolation_of_a_handler_is_what_was_asked_for(domain: Database) -> None:
    seen: list[str] = []

    @inbox(consumer="reports", isolation=IsolationLevel.SERIALIZABLE)
    def strict(tx: Tx, event: Submitted) -> None:
        seen.append(tx.execute("SHOW transaction_isolation").fetchall()[0][0])
        seen.append(tx.execute("SHOW lock_timeout").fetchall()[0][0])

    assert strict.handle(domain.dsn, from_kafka(envelope())).outcome is Outcome.HANDLED
    assert seen == ["serializable", "0"]


def test_a_pooler_with_one_server_connection_carries_the_consumer(
    services: Services, pg_major: str, domain: Database
) -> None:
    through = services.pgbouncer(pg_major, pool_size=1).dsn(domain.dsn)
    pool = Connections(through, limit=2)
    sent = envelope()

    outcomes = [reports.handle(pool, from_kafka(sent, offset)).outcome for offset in range(8)]
    with pool.connection(), pool.connection() as second:
        second.execute("SELECT 1")
        second.rollback()
        assert reports.handle(through, from_kafka(sent, 9)).outcome is Outcome.DUPLICATE
    pool.close()

    assert outcomes == [Outcome.HANDLED, *[Outcome.DUPLICATE] * 7]
    assert done(domain) == [("op-1", "a")]
