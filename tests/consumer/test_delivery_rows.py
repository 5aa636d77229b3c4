"""Deliveries beside reservations: one that comes back as something else is noticed, and a batch takes back only its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import Connection, IsolationLevel

from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Handled, Outcome
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import InvalidInput
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka
from support.processes import wait_for

DEADLINE_SECONDS = 20.0
DAY = timedelta(days=1)
LETTERS: LiteralString = """
SELECT reason, stored_meaning, arrived_meaning, attempts FROM fencepost.dead_letter ORDER BY id"""
KNOWN: LiteralString = "SELECT tenant, consumer, operation, type FROM fencepost.reservation ORDER BY 1, 2, 3, 4"
WAITING: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%reserve_many%'"""


@inbox(consumer="reports")
def reports(tx: Connection[Any], event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


def submitted(operation: str = "op-1", document: str = "a", days: float = 0) -> Envelope:
    event = Submitted(tenant="acme", operation=operation, document=document)
    return envelope(event, time=datetime.now(UTC) - days * DAY)


def rows(database: Database, query: LiteralString) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute(query).fetchall()


def executed(database: Database, query: LiteralString) -> None:
    with database.connect() as conn:
        conn.execute(query)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("many", [False, True], ids=["alone", "batch"])
def test_a_copy_that_comes_back_as_another_operation_is_a_changed_delivery(domain18: Database, many: bool) -> None:
    def deliver(sent: Envelope, number: int) -> tuple[Outcome, int]:
        delivery = from_kafka(sent, number)
        found = reports.handle_many(domain18.dsn, [delivery])[0] if many else reports.handle(domain18.dsn, delivery)
        assert isinstance(found, Handled)
        return found.outcome, found.arrivals

    first, anew = submitted(), submitted("op-2")
    assert deliver(first, 0) == (Outcome.HANDLED, 1)
    assert deliver(first, 1) == (Outcome.DUPLICATE, 1), "a copy: no reservation is made with it"

    assert deliver(anew, 1) == (Outcome.CONFLICT, 2)
    assert deliver(submitted(document="b"), 1) == (Outcome.CONFLICT, 3)
    assert deliver(first, 1) == (Outcome.DUPLICATE, 4)

    assert [row[:3] for row in rows(domain18, LETTERS)] == [
        ("delivery_changed", first.meaning.raw, anew.meaning.raw),
        ("delivery_changed", first.meaning.raw, submitted(document="b").meaning.raw),
    ]
    assert rows(domain18, KNOWN) == [("acme", "reports", "op-1", "test.submitted")]
    assert deliver(anew, 2) == (Outcome.HANDLED, 1), "it was not handled, nor forgotten"
    assert len(rows(domain18, "SELECT FROM done")) == 2


@pytest.mark.parametrize("many", [False, True], ids=["alone", "batch"])
def test_a_delivery_that_was_set_aside_and_is_handled_later_is_one_delivery(domain18: Database, many: bool) -> None:
    executed(
        domain18, "INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', now() - interval '7 days')"
    )
    delivery = from_kafka(submitted(days=30))

    def deliver() -> tuple[Outcome, int]:
        found = reports.handle_many(domain18.dsn, [delivery])[0] if many else reports.handle(domain18.dsn, delivery)
        assert isinstance(found, Handled)
        return found.outcome, found.arrivals

    assert [deliver(), deliver()] == [(Outcome.BEFORE_HORIZON, 1), (Outcome.BEFORE_HORIZON, 2)]
    deliveries: LiteralString = "SELECT unreserved, arrivals FROM fencepost.delivery"
    assert rows(domain18, deliveries) == [(True, 2)]
    executed(domain18, "UPDATE fencepost.dead_letter SET unhandled = true")
    assert [deliver(), deliver()] == [(Outcome.HANDLED, 3), (Outcome.DUPLICATE, 4)]
    assert rows(domain18, deliveries) == [(False, 4)]


@pytest.mark.parametrize("document", ["a", "b"], ids=["of a new operation", "of a known one"])
def test_what_was_forged_is_set_aside_and_reserves_nothing(domain18: Database, document: str) -> None:
    real = submitted("op-2") if document == "a" else submitted()
    forged = from_kafka(real, 9, payload=submitted(document="forged").payload)
    with psycopg.connect(domain18.dsn, autocommit=True) as conn:
        for number in range(8):  # in words, and prepared
            assert reports.handle(conn, from_kafka(submitted(), number)).outcome is not Outcome.UNDECODABLE
            assert reports.handle(conn, forged).outcome is Outcome.UNDECODABLE
    assert [(row[0], row[3]) for row in rows(domain18, LETTERS)] == [("undecodable", 8)]
    assert rows(domain18, KNOWN) == [("acme", "reports", "op-1", "test.submitted")]
    with domain18.connect() as conn:
        counted = conn.execute("SELECT count(*) FROM fencepost.delivery WHERE coordinates = %s", (forged.coordinates,))
        assert counted.fetchone() == (0,)
    assert reports.handle(domain18.dsn, from_kafka(real, 9)).outcome is (
        Outcome.HANDLED if document == "a" else Outcome.DUPLICATE
    )


# The functions themselves, whoever calls them.

MANY: LiteralString = """
SELECT outcome, arrivals FROM fencepost.reserve_many(%(consumer)s, %(tenants)s::text[], %(operations)s::text[], %(types)s::text[],
    %(versions)s::int[], %(event_ids)s::uuid[], %(sources)s::text[], %(epochs)s::bigint[], %(bindings)s::text[],
    %(event_times)s::timestamptz[], %(coordinates)s::text[]) ORDER BY n"""
ONE: LiteralString = """
SELECT outcome, arrivals FROM fencepost.reserve('t', %(consumer)s, %(operation)s, 'x.y', 1, gen_random_uuid(), 'urn:x', 1, 'ref:x',
    %(event_time)s, %(coordinates)s, '[]', '')"""
SETTLE: LiteralString = "SELECT fencepost.settle_batch(%(consumer)s, %(unhandled)s::text[])"
WHAT: LiteralString = "SELECT operation, coordinates, arrivals FROM fencepost.delivery ORDER BY 1, 2"


def many(*sent: tuple[str, str], consumer: str = "reports") -> dict[str, Any]:
    """Values of MANY for pairs of operation and coordinates."""
    same = {"tenants": "t", "types": "x.y", "versions": 1, "sources": "urn:x", "epochs": 1, "bindings": "ref:x"}
    made: dict[str, Any] = {name: [value] * len(sent) for name, value in same.items()}
    made["event_ids"] = ["00000000-0000-0000-0000-000000000001"] * len(sent)
    made["event_times"] = [datetime.now(UTC)] * len(sent)
    return {
        "consumer": consumer,
        **made,
        "operations": [each[0] for each in sent],
        "coordinates": [each[1] for each in sent],
    }


def one(operation: str, coordinates: str, days: float = 0, consumer: str = "reports") -> dict[str, Any]:
    return {
        "consumer": consumer,
        "operation": operation,
        "coordinates": coordinates,
        "event_time": datetime.now(UTC) - days * DAY,
    }


def test_a_batch_takes_back_nothing_that_another_batch_of_its_transaction_counted(domain18: Database) -> None:
    with domain18.connect() as conn:
        conn.execute(MANY, many(("a", "[1]")))
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": []})
    with domain18.connect() as conn:
        assert conn.execute(MANY, many(("a", "[1]"))).fetchall() == [("duplicate", 2)]
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["[1]"]})
        assert conn.execute(MANY, many(("b", "[2]"))).fetchall() == [("reserved", 1)]
        for wrong in (["[1]"], ["[2]", "[2]"]):
            with pytest.raises(InvalidInput) as refused, conn.transaction():
                conn.execute(SETTLE, {"consumer": "reports", "unhandled": wrong})
            assert refused.value.field == "coordinates"
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["[2]"]})
    assert rows(domain18, WHAT) == [("a", "[1]", 1)]


def test_what_a_batch_reserved_and_did_not_handle_is_taken_back_however_often_it_came(domain18: Database) -> None:
    with domain18.connect() as conn:
        assert conn.execute(MANY, many(("a", "[1]"), ("b", "[2]"))).fetchall() == [("reserved", 1)] * 2
        assert conn.execute(ONE, one("a", "[1]")).fetchall() == [("duplicate", 2)]
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["[1]"]})
    assert rows(domain18, WHAT) == [("b", "[2]", 1)]


def test_a_copy_that_is_taken_back_is_as_if_it_had_not_arrived(domain18: Database) -> None:
    with domain18.connect() as conn:
        for _ in range(2):
            conn.execute(MANY, many(("a", "[1]")))
            conn.execute(SETTLE, {"consumer": "reports", "unhandled": []})
        conn.execute(ONE, one("a", "[2]"))
    with domain18.connect() as conn:
        found = conn.execute(MANY, many(("a", "[3]"))).fetchall()
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["[3]"]})
        found += conn.execute(MANY, many(("a", "[2]"))).fetchall()
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["[2]"]})
    assert found == [("duplicate", 1), ("duplicate", 2)]
    assert rows(domain18, WHAT) == [("a", "[1]", 2), ("a", "[2]", 1)]


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batch"])
def test_a_delivery_that_came_after_this_snapshot_is_no_new_one(domain18: Database, batched: bool) -> None:
    query, values = (MANY, many(("b", "[2]"))) if batched else (ONE, one("b", "[2]"))
    with domain18.connect() as conn:
        conn.execute(ONE, one("a", "[1]"))
    for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE):
        with domain18.connect() as old, domain18.connect(autocommit=True) as conn:
            old.isolation_level = level
            conn.execute("DELETE FROM fencepost.unreserved_delivery")
            old.execute("SELECT FROM fencepost.reservation")
            assert old.execute(*((MANY, many(("c", "[9]"))) if batched else (ONE, one("c", "[9]")))).fetchall() == [
                ("reserved", 1)
            ], "the allowed control"
            if batched:
                old.execute(SETTLE, {"consumer": "reports", "unhandled": []})
            assert conn.execute(ONE, one("a", "[2]")).fetchall() == [("duplicate", 1)], "a copy, committed"
            if level is IsolationLevel.READ_COMMITTED:
                assert old.execute(query, values).fetchall() == [("alone", 0) if batched else ("conflict", 2)]
            else:
                with pytest.raises(psycopg.errors.SerializationFailure):
                    old.execute(query, values)
            old.rollback()


def test_a_batch_that_waited_for_a_delivery_which_was_then_refused_does_not_take_it_as_new(
    domain18: Database, threads: ThreadPoolExecutor
) -> None:
    executed(
        domain18, "INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', now() - interval '7 days')"
    )

    def late() -> list[tuple[Any, ...]]:
        with domain18.connect() as conn:
            found = conn.execute(MANY, many(("b", "[1]"), ("c", "[2]"))).fetchall()
            conn.execute(SETTLE, {"consumer": "reports", "unhandled": []})
        return found

    # An insertion that is taken back, as of an event before the horizon: whoever meets it waits for its transaction.
    with domain18.connect() as first:
        assert first.execute(ONE, one("a", "[1]", days=30)).fetchall() == [("before_horizon", 1)]
        first.execute(ONE, one("b", "[5]"))
        waiting = threads.submit(late)
        with domain18.connect(autocommit=True) as conn:
            wait_for(lambda: conn.execute(WAITING).fetchall() == [(1,)], DEADLINE_SECONDS, "the batch to wait")
        first.execute("DELETE FROM fencepost.reservation WHERE operation = 'b'")
    assert waiting.result(DEADLINE_SECONDS) == [("alone", 0), ("reserved", 1)]
    assert rows(domain18, WHAT) == [("a", "[1]", 1), ("c", "[2]", 1)]


def test_what_arrives_at_one_consumer_is_no_delivery_of_another(domain18: Database) -> None:
    theirs: LiteralString = """
        SELECT operation, coordinates, arrivals FROM fencepost.delivery WHERE consumer = 'other' ORDER BY 1, 2"""
    before = [("a", "[1]", 1), ("a", "[2]", 1), ("a", "[7]", 1)]
    with domain18.connect(autocommit=True) as conn:
        for coordinates in ("[1]", "[2]", "[7]"):
            conn.execute(ONE, one("a", coordinates, consumer="other"))
        assert conn.execute(theirs).fetchall() == before

        # Alone: at coordinates that the other has reserved with, and at those of its copy.
        assert conn.execute(ONE, one("b", "[7]")).fetchall() == [("reserved", 1)]
        assert conn.execute(ONE, one("a", "[5]")).fetchall() == [("reserved", 1)]
        assert conn.execute(ONE, one("a", "[1]")).fetchall() == [("duplicate", 1)]
        assert conn.execute(ONE, one("b", "[2]")).fetchall() == [("duplicate", 1)], (
            "no conflict with what the other has"
        )
        assert conn.execute(theirs).fetchall() == before

        # And in a batch that takes all of it back.
        for sent, found in (
            (("c", "[1.1]"), ("reserved", 1)),
            (("b", "[7]"), ("duplicate", 2)),
            (("b", "[2]"), ("duplicate", 2)),
        ):
            conn.execute(ONE, one("a", "[1.1]", consumer="other"))
            with conn.transaction():
                assert conn.execute(MANY, many(sent)).fetchall() == [found]
                conn.execute(SETTLE, {"consumer": "reports", "unhandled": [sent[1]]})
        assert [row for row in conn.execute(theirs).fetchall() if row[1] != "[1.1]"] == before
        conn.execute(ONE, one("d", "[8]", consumer="other"))
        with conn.transaction():
            assert conn.execute(MANY, many(("d", "[8]"))).fetchall() == [("reserved", 1)]
            conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["[8]"]})
        assert ("d", "[8]", 1) in conn.execute(theirs).fetchall()


@pytest.mark.parametrize("level", list(IsolationLevel), ids=[each.name.lower() for each in IsolationLevel])
def test_a_copy_counts_on_under_every_isolation(domain18: Database, level: IsolationLevel) -> None:
    with domain18.connect() as conn:
        conn.isolation_level = level
        for coordinates in ("[1]", "[2]", "[3]"):
            conn.execute(ONE, one("a", coordinates))
        conn.commit()
        assert conn.execute(ONE, one("a", "[2]")).fetchall() == [("duplicate", 2)]
        assert conn.execute(MANY, many(("a", "[2]"))).fetchall() == [("duplicate", 3)]
        conn.execute(SETTLE, {"consumer": "reports", "unhandled": []})
    assert rows(domain18, WHAT) == [("a", "[1]", 1), ("a", "[2]", 3), ("a", "[3]", 1)]


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batch"])
def test_another_epoch_is_told_of_a_duplicate_and_of_nothing_else(domain18: Database, batched: bool) -> None:
    def deliver(sent: Envelope, number: int) -> tuple[Outcome, bool]:
        delivery = from_kafka(sent, number)
        found = reports.handle_many(domain18.dsn, [delivery])[0] if batched else reports.handle(domain18.dsn, delivery)
        assert isinstance(found, Handled)
        return found.outcome, found.other_epoch

    event = Submitted(tenant="acme", operation="op-1", document="a")
    changed = Submitted(tenant="acme", operation="op-1", document="b")
    now = datetime.now(UTC)
    assert deliver(envelope(event, epoch=1, time=now), 0) == (Outcome.HANDLED, False)
    for number in (0, 1):
        assert deliver(envelope(event, epoch=1, time=now), number) == (Outcome.DUPLICATE, False)
        assert deliver(envelope(event, epoch=2, time=now), number) == (Outcome.DUPLICATE, True)
    assert deliver(envelope(changed, epoch=2, time=now), 2) == (Outcome.CONFLICT, False)


def test_counting_what_has_changed_or_comes_late_leaves_another_consumers_deliveries_alone(domain18: Database) -> None:
    executed(
        domain18, "INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', now() - interval '7 days')"
    )
    with domain18.connect(autocommit=True) as conn:
        for operation, coordinates in (("a", "[1]"), ("x", "[4]")):
            conn.execute(ONE, one(operation, coordinates, consumer="other"))
        assert conn.execute(ONE, one("a", "[1]")).fetchall() == [("reserved", 1)]
        assert conn.execute(ONE, one("b", "[1]")).fetchall() == [("conflict", 2)]
        assert conn.execute(ONE, one("x", "[4]", days=30)).fetchall() == [("before_horizon", 1)]
        conn.execute("UPDATE fencepost.dead_letter SET unhandled = true WHERE reason = 'before_horizon'")
        assert conn.execute(ONE, one("x", "[4]", days=30)).fetchall() == [("reserved", 2)]
    found = rows(domain18, "SELECT consumer, operation, arrivals FROM fencepost.delivery ORDER BY 1, 2")
    assert found == [("other", "a", 1), ("other", "x", 1), ("reports", "a", 2), ("reports", "x", 2)]
