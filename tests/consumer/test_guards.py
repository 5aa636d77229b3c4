"""Every predicate of the inbox counts: what differs in one part only is another thing, and is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import Connection, IsolationLevel

from fencepost.consumer import acts
from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.outcomes import Busy, Handled, Outcome, Reserved, Unhandled
from fencepost.consumer.reservation import reserve_in
from fencepost.consumer.upkeep import Purge
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import InvalidInput
from support.database import Database
from support.deliveries import Submitted, Withdrawn, envelope, from_kafka, from_rabbitmq

DAY = timedelta(days=1)
WINDOW = timedelta(days=7)
AGE: LiteralString = """
WITH r AS (UPDATE fencepost.reservation SET reserved_at = reserved_at - interval '30 days', last_at = last_at - interval '30 days')
UPDATE fencepost.unreserved_delivery SET first_at = first_at - interval '30 days', last_at = last_at - interval '30 days'"""
LETTERS: LiteralString = """
SELECT reason, consumer, tenant, operation, attempts, stored_meaning, arrived_meaning FROM fencepost.dead_letter ORDER BY id"""
KNOWN: LiteralString = "SELECT tenant, consumer, operation, type FROM fencepost.reservation ORDER BY 1, 2, 3, 4"


def write(tx: Connection[Any], event: Submitted | Withdrawn) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


reports: Inbox[Any] = inbox(consumer="reports")(write)
other: Inbox[Any] = inbox(consumer="other")(write)


def submitted(tenant: str = "acme", operation: str = "op-1", document: str = "a", days: float = 0) -> Envelope:
    event = Submitted(tenant=tenant, operation=operation, document=document, ordering_key=f"{tenant} {operation}")
    return envelope(event, time=datetime.now(UTC) - days * DAY)


def withdrawn(operation: str = "op-1", days: float = 0) -> Envelope:
    event = Withdrawn(tenant="acme", operation=operation, ordering_key=f"withdrawn {operation}")
    return envelope(event, time=datetime.now(UTC) - days * DAY)


def rows(database: Database, query: LiteralString) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute(query).fetchall()


def executed(database: Database, query: LiteralString) -> None:
    with database.connect() as conn:
        conn.execute(query)


class Feed:
    """Delivers events at coordinates of their own, alone or each as a batch."""

    def __init__(self, database: Database, many: bool) -> None:
        self.database = database
        self._many = many
        self._offset = 0

    def __call__(self, handler: Inbox[Any], *sent: Envelope) -> list[Outcome]:
        deliveries = [from_kafka(each, self._offset + n) for n, each in enumerate(sent)]
        self._offset += len(sent)
        found: list[Handled | Unhandled] = (
            handler.handle_many(self.database.dsn, deliveries)
            if self._many
            else [handler.handle(self.database.dsn, each) for each in deliveries]
        )
        assert not [each for each in found if isinstance(each, Unhandled)]
        return [each.outcome for each in found if isinstance(each, Handled)]


@pytest.fixture(params=[False, True], ids=["alone", "batch"])
def feed(request: pytest.FixtureRequest, domain18: Database) -> Feed:
    return Feed(domain18, request.param)


def test_an_operation_is_another_one_by_tenant_by_type_by_consumer_and_by_itself(feed: Feed) -> None:
    known = [submitted(), submitted("b"), submitted(operation="op-2"), withdrawn()]
    theirs = [submitted(document="theirs"), submitted("b", document="theirs")]
    assert feed(other, *theirs) == [Outcome.HANDLED] * 2
    assert feed(reports, *known) == [Outcome.HANDLED] * 4

    assert feed(reports, *known) == [Outcome.DUPLICATE] * 4
    assert feed(other, *theirs) == [Outcome.DUPLICATE] * 2, "what others made of it is not its own"
    assert feed(other, submitted(operation="op-2"), withdrawn()) == [Outcome.HANDLED] * 2
    assert feed(reports, submitted("c"), theirs[0]) == [Outcome.HANDLED, Outcome.CONFLICT]
    ((reason, consumer, tenant, operation, _, stored, arrived),) = rows(feed.database, LETTERS)
    assert (reason, consumer, tenant, operation) == ("conflict", "reports", "acme", "op-1")
    assert (stored, arrived) == (known[0].meaning.raw, theirs[0].meaning.raw)


def test_a_tenant_neither_waits_for_nor_hears_of_another(domain18: Database) -> None:
    quick: Inbox[Any] = inbox(consumer="reports", wait_seconds=0.2)(write)
    with domain18.connect() as busy:
        assert reserve_in(busy, "reports", submitted("a", document="secret-of-a"), "[0]").outcome is Reserved.RESERVED
        with pytest.raises(Busy):
            quick.handle(domain18.dsn, from_kafka(submitted("a"), 1))
        told = quick.handle(domain18.dsn, from_kafka(submitted("b", document="of-b"), 2))
        busy.commit()
    assert (told.outcome, told.tenant) == (Outcome.HANDLED, "b")

    conflict = quick.handle(domain18.dsn, from_kafka(submitted("b", document="secret-of-b"), 3))
    assert (conflict.outcome, conflict.tenant) == (Outcome.CONFLICT, "b")
    ((_, _, tenant, _, _, stored, _),) = rows(domain18, LETTERS)
    assert tenant == "b" and stored == submitted("b", document="of-b").meaning.raw
    assert "secret" not in repr(conflict) + repr(told)
    with domain18.connect() as conn:
        shown = conn.execute("SELECT d::text FROM fencepost.dead_letters AS d").fetchall()
    assert len(shown) == 1 and "secret" not in shown[0][0]


def test_the_same_delivery_with_another_meaning_is_a_changed_delivery_and_both_meanings_are_kept(
    domain18: Database,
) -> None:
    first, second, third = submitted(), submitted(document="b"), withdrawn()
    control = submitted(operation="op-2")
    for many in (False, True):
        sent = [from_rabbitmq(each, "one-id") for each in (first, second, third)]
        if many:
            found = [reports.handle_many(domain18.dsn, [from_kafka(control), each])[1] for each in sent]
        else:
            found = [reports.handle(domain18.dsn, each) for each in sent]
        outcomes = [each.outcome for each in found if isinstance(each, Handled)]
        assert outcomes == [Outcome.DUPLICATE if many else Outcome.HANDLED, Outcome.CONFLICT, Outcome.CONFLICT]
    assert [(row[0], row[4:]) for row in rows(domain18, LETTERS)] == [
        ("delivery_changed", (2, first.meaning.raw, second.meaning.raw)),
        ("delivery_changed", (2, first.meaning.raw, third.meaning.raw)),
    ]
    assert rows(domain18, KNOWN) == [
        ("acme", "reports", "op-1", "test.submitted"),
        ("acme", "reports", "op-2", "test.submitted"),
    ]


def test_what_is_before_the_horizon_takes_no_reservation_of_others_along(feed: Feed) -> None:
    with feed.database.connect() as conn:
        conn.execute("INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', now() - interval '7 days')")
    kept = [submitted("b"), submitted(operation="op-2"), withdrawn()]
    assert feed(reports, *kept) == [Outcome.HANDLED] * 3
    assert feed(other, submitted(days=30)) == [Outcome.HANDLED], "another consumer has a horizon of its own"
    before = rows(feed.database, KNOWN)

    assert feed(reports, submitted(days=30)) == [Outcome.BEFORE_HORIZON]

    assert rows(feed.database, KNOWN) == before
    assert feed(reports, *kept) == [Outcome.DUPLICATE] * 3
    assert feed(other, submitted(days=30)) == [Outcome.DUPLICATE]


def test_a_type_that_is_kept_for_ever_is_that_type_of_that_consumer_only(feed: Feed) -> None:
    with feed.database.connect() as conn:
        for consumer in ("reports", "other"):
            acts.set_retention(conn, consumer, WINDOW, actor="ann", reason="a test")
            acts.keep_type(conn, consumer, "test.nobody", actor="ann", reason="a test")
        acts.keep_type(conn, "reports", "test.withdrawn", actor="ann", reason="a test")
    for consumer in ("reports", "other"):
        with feed.database.connect(autocommit=True) as conn:
            assert Purge(consumer).turn(conn).horizon is not None

    assert feed(reports, withdrawn(days=30)) == [Outcome.HANDLED], "all of its history is there"
    assert feed(reports, submitted(days=30)) == [Outcome.BEFORE_HORIZON]
    assert feed(other, withdrawn(days=30)) == [Outcome.BEFORE_HORIZON]

    with feed.database.connect() as conn:
        acts.keep_type(conn, "other", "test.withdrawn", actor="ann", reason="no longer", forever=False)
        acts.keep_type(conn, "reports", "test.nobody", actor="ann", reason="no longer", forever=False)
    assert feed(reports, withdrawn("op-2", days=30)) == [Outcome.HANDLED], "neither of these was that"
    with feed.database.connect() as conn:
        acts.keep_type(conn, "reports", "test.withdrawn", actor="ann", reason="no longer", forever=False)
    assert feed(reports, withdrawn("op-3", days=30)) == [Outcome.BEFORE_HORIZON]


@pytest.mark.parametrize("many", [False, True], ids=["alone", "batch"])
def test_a_purge_forgets_its_own_consumer_within_its_own_window(domain18: Database, many: bool) -> None:
    feed = Feed(domain18, many)
    with domain18.connect() as conn:
        acts.set_retention(conn, "reports", WINDOW, actor="ann", reason="a test")
        acts.set_retention(conn, "other", 90 * DAY, actor="ann", reason="a test")
        acts.keep_type(conn, "other", "test.submitted", actor="ann", reason="a test")
        acts.keep_type(conn, "reports", "test.withdrawn", actor="ann", reason="a test")
    for handler in (reports, other):
        sent = [submitted(days=30), withdrawn(days=30), submitted(operation="gone", days=30)]
        assert feed(handler, *sent) == [Outcome.HANDLED] * 3
    executed(domain18, AGE)
    # One delivery of long ago comes again today: its reservation stays with it.
    again = Feed(domain18, many)
    assert again(reports, submitted(days=30)) == [Outcome.DUPLICATE]
    assert feed(reports, submitted(operation="young")) == [Outcome.HANDLED]

    with domain18.connect(autocommit=True) as conn:
        gone = Purge("reports").turn(conn)

    assert (gone.reservations, gone.deliveries) == (1, 1)
    assert rows(domain18, KNOWN) == [
        ("acme", "other", "gone", "test.submitted"),
        ("acme", "other", "op-1", "test.submitted"),
        ("acme", "other", "op-1", "test.withdrawn"),
        ("acme", "reports", "op-1", "test.submitted"),
        ("acme", "reports", "op-1", "test.withdrawn"),
        ("acme", "reports", "young", "test.submitted"),
    ]
    assert rows(domain18, "SELECT consumer, operation, type, arrivals FROM fencepost.delivery ORDER BY 1, 2, 3") == [
        ("other", "gone", "test.submitted", 1),
        ("other", "op-1", "test.submitted", 1),
        ("other", "op-1", "test.withdrawn", 1),
        ("reports", "op-1", "test.submitted", 2),
        ("reports", "op-1", "test.withdrawn", 1),
        ("reports", "young", "test.submitted", 1),
    ]
    with domain18.connect(autocommit=True) as conn:
        assert Purge("other").turn(conn).reservations == 0


def test_a_longer_window_never_brings_back_what_a_shorter_one_may_have_forgotten(domain18: Database) -> None:
    feed = Feed(domain18, many=False)
    for window in (WINDOW, 90 * DAY):
        with domain18.connect() as conn:
            acts.set_retention(conn, "reports", window, actor="ann", reason="a test")
        with domain18.connect(autocommit=True) as conn:
            Purge("reports").turn(conn)
        assert feed(reports, submitted(operation=f"op-{window.days}", days=30)) == [Outcome.BEFORE_HORIZON]
    assert feed(reports, submitted(operation="young", days=1)) == [Outcome.HANDLED]


def test_dead_letters_outlive_every_purge(domain18: Database) -> None:
    feed = Feed(domain18, many=False)
    assert feed(reports, submitted(days=30), submitted(document="b", days=30)) == [Outcome.HANDLED, Outcome.CONFLICT]
    executed(domain18, AGE)
    executed(domain18, "UPDATE fencepost.dead_letter SET created_at = now() - interval '1 year', last_at = created_at")
    with domain18.connect() as conn:
        acts.set_retention(conn, "reports", WINDOW, actor="ann", reason="a test")
    with domain18.connect(autocommit=True) as conn:
        gone = Purge("reports").turn(conn)

    assert (gone.reservations, gone.deliveries) == (1, 2)
    assert [row[0] for row in rows(domain18, LETTERS)] == ["conflict"]


def test_an_operators_word_about_one_old_delivery_is_about_no_other(domain18: Database) -> None:
    with domain18.connect() as conn:
        for consumer in ("reports", "other"):
            conn.execute(
                "INSERT INTO fencepost.consumer (consumer, horizon) VALUES (%s, now() - interval '7 days')", (consumer,)
            )
    said = from_kafka(submitted(days=30))
    assert reports.handle(domain18.dsn, said).outcome is Outcome.BEFORE_HORIZON
    executed(domain18, "UPDATE fencepost.dead_letter SET unhandled = true")

    assert reports.handle(domain18.dsn, from_kafka(submitted(days=30), 1)).outcome is Outcome.BEFORE_HORIZON
    assert other.handle(domain18.dsn, said).outcome is Outcome.BEFORE_HORIZON
    # The delivery was purged, and its coordinates belong to another message now.
    executed(domain18, "DELETE FROM fencepost.unreserved_delivery")
    assert reports.handle(domain18.dsn, from_kafka(submitted(document="b", days=30))).outcome is Outcome.BEFORE_HORIZON
    executed(domain18, "DELETE FROM fencepost.unreserved_delivery")
    assert reports.handle(domain18.dsn, said).outcome is Outcome.HANDLED


VANISHING: LiteralString = """
CREATE FUNCTION vanish() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN DELETE FROM fencepost.reservation WHERE operation = 'op-1'; RETURN NULL; END $$;
CREATE TRIGGER vanish AFTER INSERT ON fencepost.reservation FOR EACH STATEMENT EXECUTE FUNCTION vanish();
"""


def test_a_reservation_that_is_purged_between_two_statements_is_a_lost_race_and_no_conflict(feed: Feed) -> None:
    assert feed(reports, submitted()) == [Outcome.HANDLED]
    assert feed(reports, submitted()) == [Outcome.DUPLICATE]
    executed(feed.database, VANISHING)
    try:
        assert feed(reports, submitted()) == [Outcome.DUPLICATE]
    except psycopg.errors.SerializationFailure:
        pass  # The trigger takes it away at every try.
    finally:
        executed(feed.database, "DROP FUNCTION vanish CASCADE")
    assert rows(feed.database, LETTERS) == []
    assert len(rows(feed.database, "SELECT FROM done")) == 1


# The functions themselves, whoever calls them.

MANY: LiteralString = """
SELECT n, outcome, arrivals FROM fencepost.reserve_many(%(consumer)s, %(tenants)s::text[], %(operations)s::text[],
    %(types)s::text[], %(versions)s::int[], %(event_ids)s::uuid[], %(sources)s::text[], %(epochs)s::bigint[],
    %(bindings)s::text[], %(event_times)s::timestamptz[], %(coordinates)s::text[])"""
SETTLE: LiteralString = "SELECT fencepost.settle_batch(%(consumer)s, %(unhandled)s::text[])"


def batch(number: int = 2, **changes: Any) -> dict[str, Any]:
    fine: dict[str, Any] = {
        "tenants": "t",
        "types": "x.y",
        "versions": 1,
        "event_ids": "00000000-0000-0000-0000-000000000001",
        "sources": "urn:x",
        "epochs": 1,
        "bindings": "ref:x",
        "event_times": "2026-01-01T00:00:00Z",
    }
    made = {name: [value] * number for name, value in fine.items()}
    made |= {name: [f"{name}-{n}" for n in range(number)] for name in ("operations", "coordinates")}
    return {"consumer": "reports", **made, **changes}


@pytest.fixture
def conn(domain18: Database) -> Iterator[Connection[Any]]:
    """A connection whose transaction is undone."""
    with domain18.connect() as made:
        yield made
        made.rollback()


WRONG: dict[str, tuple[str, list[Any]]] = {
    "tenants": ("tenant", ["", None, " t"]),
    "operations": ("operation", ["", None, "o\n"]),
    "types": ("type", ["", None]),
    "versions": ("version", [0, 32768, None]),
    "event_ids": ("event_id", [None]),
    "sources": ("source", ["", None, "x" * 201]),
    "epochs": ("epoch", [-1, None]),
    "bindings": ("binding", ["md5:0", None]),
    "event_times": ("event_time", [None]),
    "coordinates": ("coordinates", ["", None, "x" * 1501]),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_part_of_every_entry_of_a_batch_is_required_by_name(conn: Connection[Any], name: str) -> None:
    conn.execute(MANY, batch())
    conn.rollback()
    field, values = WRONG[name]
    for value in values:
        with pytest.raises(InvalidInput) as refused:
            conn.execute(MANY, batch() | {name: [batch()[name][0], value]})
        assert refused.value.field == field, value
        conn.rollback()
    for array in (batch()[name][:1], batch(3)[name]):
        with pytest.raises(InvalidInput) as refused:
            conn.execute(MANY, batch() | {name: array})
        assert refused.value.field == "coordinates"
        conn.rollback()


def test_a_batch_has_a_limit_and_a_consumer_and_takes_what_differs_in_one_part(conn: Connection[Any]) -> None:
    assert len(conn.execute(MANY, batch(1000)).fetchall()) == 1000
    conn.rollback()
    for wrong, field in ((batch(1001), "coordinates"), (batch(consumer=""), "consumer")):
        with pytest.raises(InvalidInput) as refused:
            conn.execute(MANY, wrong)
        assert refused.value.field == field
        conn.rollback()
    found = conn.execute(
        MANY, batch(3, operations=["o"] * 3, tenants=["t", "u", "t"], types=["x.y", "x.y", "x.z"])
    ).fetchall()
    assert found == [(n, "reserved", 1) for n in (1, 2, 3)], "in the order that was asked for"


def test_settling_takes_back_what_this_batch_added_and_nothing_that_was_there(conn: Connection[Any]) -> None:
    """A duplicate that is settled as unhandled keeps the reservation of the transaction that handled it."""
    arrivals: LiteralString = "SELECT consumer, operation, arrivals FROM fencepost.delivery ORDER BY 1, 2"
    for consumer in ("other", "reports"):
        conn.execute(MANY, batch(consumer=consumer))
        conn.execute(SETTLE, {"consumer": consumer, "unhandled": []})
        conn.commit()
    first = [(consumer, f"operations-{n}", 1) for consumer in ("other", "reports") for n in (0, 1)]
    assert conn.execute(arrivals).fetchall() == first

    more = batch(4, operations=["operations-0", "operations-1", "new-1", "new-2"])
    assert [row[1] for row in conn.execute(MANY, more)] == ["duplicate", "duplicate", "reserved", "reserved"]
    conn.execute(SETTLE, {"consumer": "reports", "unhandled": ["coordinates-0", "coordinates-2"]})
    conn.commit()

    assert conn.execute(arrivals).fetchall() == [
        *first[:2],
        ("reports", "new-2", 1),
        ("reports", "operations-0", 1),
        ("reports", "operations-1", 2),
    ]
    assert [row[2] for row in conn.execute(KNOWN) if row[1] == "reports"] == ["new-2", "operations-0", "operations-1"]


@pytest.mark.parametrize("declared_before", [True, False], ids=["declared before", "declared after the snapshot"])
def test_a_batch_under_an_old_snapshot_never_reads_an_old_horizon(domain18: Database, declared_before: bool) -> None:
    def declare() -> None:
        with domain18.connect() as conn:
            acts.set_retention(conn, "reports", WINDOW, actor="ann", reason="a test")

    old = batch(event_times=[datetime.now(UTC) - 30 * DAY] * 2)
    if declared_before:
        declare()
    with domain18.connect() as conn:
        conn.isolation_level = IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT 1 FROM done")  # The snapshot.
        declare()
        with domain18.connect(autocommit=True) as purging:
            assert Purge("reports").turn(purging).horizon is not None
        with pytest.raises(psycopg.errors.SerializationFailure):
            conn.execute(MANY, old)
        conn.rollback()
        assert [row[1] for row in conn.execute(MANY, old)] == ["alone", "alone"]
        conn.rollback()
        assert [row[1] for row in conn.execute(MANY, batch(event_times=[datetime.now(UTC)] * 2))] == ["reserved"] * 2
        conn.rollback()


RESERVE: LiteralString = """
SELECT outcome FROM fencepost.reserve('t', 'reports', 'o', 'x.y', %(version)s, gen_random_uuid(), %(source)s, %(epoch)s, 'ref:x',
    now(), '[1]', %(headers)s::jsonb, %(payload)s)"""
ONE: dict[str, Any] = {"version": 1, "source": "urn:x", "epoch": 0, "headers": "[]", "payload": b""}


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("version", 0, "version"),
        ("source", "", "source"),
        ("source", "x" * 201, "source"),
        ("epoch", -1, "epoch"),
        ("headers", None, "payload"),
        ("payload", None, "payload"),
    ],
)
def test_the_bounds_of_a_reservation_are_refused_by_name(
    conn: Connection[Any], name: str, value: object, field: str
) -> None:
    assert conn.execute(RESERVE, ONE).fetchall() == [("reserved",)]
    conn.rollback()
    with pytest.raises(InvalidInput) as refused:
        conn.execute(RESERVE, {**ONE, name: value})
    assert refused.value.field == field


LETTER: LiteralString = """
SELECT fencepost.dead_letter('reports', %(coordinates)s, 'undecodable', NULL, NULL, NULL, NULL, NULL, NULL, NULL, %(attempts)s,
    %(headers)s::jsonb, %(payload)s, %(meaning)s)"""
KEPT: dict[str, Any] = {"coordinates": "[1]", "attempts": 1, "headers": "[]", "payload": b"x", "meaning": b"\1" * 33}


def test_a_dead_letter_is_one_per_headers_and_payload_and_counts_at_least_one_attempt(conn: Connection[Any]) -> None:
    for changes in ({}, {}, {"attempts": 0}, {"headers": '[["a", "b"]]'}, {"payload": b"y", "attempts": -3}):
        conn.execute(LETTER, KEPT | changes)
    found = conn.execute("SELECT attempts FROM fencepost.dead_letter ORDER BY id").fetchall()
    assert found == [(3,), (1,), (1,)]
    for name, value, field in (
        ("meaning", b"short", "meaning"),
        ("headers", None, "payload"),
        ("coordinates", "", "coordinates"),
        ("coordinates", "x" * 1501, "coordinates"),
    ):
        with conn.transaction(force_rollback=True), pytest.raises(InvalidInput) as refused, conn.transaction():
            conn.execute(LETTER, KEPT | {name: value})
        assert refused.value.field == field
