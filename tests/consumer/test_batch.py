"""A batch is one commit of many handlings: each is whole or not there, none is done twice, and none is lost by another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import Connection, IsolationLevel

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Busy, Handled, Outcome, Unhandled
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import CommitWasRollback, InvalidInput, WrongTransaction
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka, from_rabbitmq
from support.lending import KINDS, Act, Kind

Tx = Connection[Any]
DEADLINE_SECONDS = 20.0
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


@inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)
def reports(tx: Tx, event: Submitted) -> None:
    insert(tx, event)


def arriving(number: int, *, prefix: str = "op", first: int = 0, key: str = "") -> list[Delivery]:
    """Deliveries of events one after the other, each of an ordering key of its own unless given."""
    return [
        from_kafka(
            envelope(
                Submitted(tenant="acme", operation=f"{prefix}-{n}", document="a", ordering_key=key or f"{prefix}-{n}")
            ),
            first + n,
        )
        for n in range(number)
    ]


def found(results: list[Handled | Unhandled]) -> list[str]:
    return [each.outcome if isinstance(each, Handled) else "unhandled" for each in results]


def done(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def kept(database: Database) -> dict[str, int]:
    """Operation and arrivals of each delivery whose operation is reserved; and that no batch was left open."""
    with database.connect() as conn:
        assert conn.execute("SELECT count(*) FROM fencepost.inbox_batch").fetchone() == (0,)
        counted = conn.execute(
            "SELECT (SELECT count(*) FROM fencepost.reservation), (SELECT count(DISTINCT operation) FROM fencepost.delivery)"
        ).fetchone()
        assert counted is not None
        assert counted[0] == counted[1], "a delivery without its reservation, or the other way round"
        return dict(conn.execute("SELECT operation, arrivals FROM fencepost.delivery").fetchall())


@every_kind
def test_a_batch_is_one_transaction_and_its_second_coming_is_duplicates(domain: Database, kind: Kind) -> None:
    handler = kind.inbox(lambda act, event: act.insert(event))

    def transactions() -> tuple[int, ...] | None:
        with domain.connect() as conn:
            return conn.execute("SELECT count(*), count(DISTINCT xmin::text) FROM fencepost.reservation").fetchone()

    first = kind.deliver_many(domain.dsn, handler, *arriving(5))
    assert transactions() == (5, 1)
    second = kind.deliver_many(domain.dsn, handler, *arriving(7))
    assert transactions() == (7, 1), "which has counted the others' second arrival"

    assert found(first) == ["handled"] * 5
    assert found(second) == ["duplicate"] * 5 + ["handled"] * 2
    assert [each.coordinates for each in second] == [each.coordinates for each in arriving(7)]
    assert done(domain) == [f"op-{n}" for n in range(7)]
    assert kept(domain) == {**{f"op-{n}": 2 for n in range(5)}, "op-5": 1, "op-6": 1}


@every_kind
def test_a_failing_handler_takes_back_only_its_own_message_and_the_rest_is_committed(
    domain: Database, kind: Kind
) -> None:
    fails = True

    def body(act: Act, event: Submitted) -> None:
        act.insert(event)
        if fails and event.operation == "op-1":
            raise ValueError("a bug")
        if fails and event.operation == "op-3":
            act.execute("SELECT 1 / 0")

    handler = kind.inbox(body)
    results = kind.deliver_many(domain.dsn, handler, *arriving(5))

    assert found(results) == ["handled", "unhandled", "handled", "unhandled", "handled"]
    assert isinstance(results[1], Unhandled)
    assert isinstance(results[1].error, ValueError)
    assert "bug" not in repr(results[1]), "what a handler says may quote a payload"
    assert done(domain) == ["op-0", "op-2", "op-4"]
    assert kept(domain) == {"op-0": 1, "op-2": 1, "op-4": 1}

    fails = False
    assert found(kind.deliver_many(domain.dsn, handler, *arriving(5))) == [
        *("duplicate", "handled", "duplicate", "handled", "duplicate")
    ]
    assert sorted(done(domain)) == [f"op-{n}" for n in range(5)]


def test_a_swallowed_database_error_is_a_failure_of_its_own_message_only(domain: Database) -> None:
    @inbox(consumer="reports")
    def swallowing(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "op-1":
            try:
                tx.execute("SELECT 1 / 0")
            except psycopg.Error:
                pass

    results = swallowing.handle_many(domain.dsn, arriving(3))

    assert found(results) == ["handled", "unhandled", "handled"]
    assert isinstance(results[1], Unhandled)
    assert isinstance(results[1].error, CommitWasRollback)
    assert done(domain) == ["op-0", "op-2"]


def test_events_behind_a_failed_one_of_their_key_are_not_handled_and_others_are(domain: Database) -> None:
    @inbox(consumer="reports")
    def fragile(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "a-1":
            raise ValueError

    one, two = arriving(4, prefix="a", key="a"), arriving(4, prefix="b", first=10, key="b")
    mixed = [each for pair in zip(one, two, strict=True) for each in pair]

    results = fragile.handle_many(domain.dsn, mixed)

    assert found(results[0::2]) == ["handled", "unhandled", "unhandled", "unhandled"]
    assert found(results[1::2]) == ["handled"] * 4
    assert [each.error for each in results[4::2] if isinstance(each, Unhandled)] == [None, None]
    assert done(domain) == ["a-0", "b-0", "b-1", "b-2", "b-3"]
    assert found(reports.handle_many(domain.dsn, mixed)[0::2]) == ["duplicate", "handled", "handled", "handled"]
    assert done(domain)[-3:] == ["a-1", "a-2", "a-3"]


def test_each_message_gets_the_answer_that_it_would_get_alone(domain: Database) -> None:
    (known,) = arriving(1, prefix="known")
    reports.handle(domain.dsn, known)
    reports.handle(domain.dsn, from_rabbitmq(envelope(operation="first"), "one-id"))
    with domain.connect() as conn:
        conn.execute("INSERT INTO fencepost.consumer (consumer, horizon) VALUES ('reports', '2020-01-01')")
    old = envelope(operation="old").time.replace(year=2019)

    results = reports.handle_many(
        domain.dsn,
        [
            known,
            from_kafka(envelope(operation="new"), 1),
            from_kafka(envelope(operation="new"), 1),
            from_kafka(envelope(operation="new"), 2),
            from_kafka(envelope(operation="new", document="b"), 3),
            from_kafka(envelope(operation="known-0", document="b"), 4),
            from_kafka(envelope(operation="bad"), 5, payload=b"{}"),
            from_kafka(envelope(operation="old", time=old), 6),
            from_rabbitmq(envelope(operation="second"), "one-id"),
            from_kafka(envelope(operation="last"), 7),
        ],
    )

    assert found(results) == [
        *("duplicate", "handled", "duplicate", "duplicate", "conflict", "conflict", "undecodable"),
        *("before_horizon", "conflict", "handled"),
    ]
    assert done(domain) == ["known-0", "first", "new", "last"]
    with domain.connect() as conn:
        letters = conn.execute("SELECT reason, attempts FROM fencepost.dead_letter ORDER BY id").fetchall()
        arrivals = conn.execute(
            "SELECT arrivals FROM fencepost.delivery WHERE coordinates = %s", (results[1].coordinates,)
        ).fetchone()
    assert letters == [
        *(("conflict", 1), ("conflict", 1), ("undecodable", 1), ("before_horizon", 1), ("delivery_changed", 1)),
    ]
    assert arrivals == (2,)


@every_kind
def test_content_that_the_handler_cannot_read_is_a_dead_letter_and_reserves_nothing(
    domain: Database, kind: Kind
) -> None:
    @inbox(consumer="reports")
    def anything(tx: Tx, event: Envelope) -> None:
        pass

    seen = from_kafka(envelope(operation="seen", payload=b'{"document": 5}'), 1)
    assert anything.handle(domain.dsn, seen).outcome is Outcome.HANDLED
    bad = from_kafka(envelope(operation="bad", payload=b'{"document": 6}'), 2)
    handler = kind.inbox(lambda act, event: act.insert(event))

    results = kind.deliver_many(domain.dsn, handler, seen, bad, *arriving(3, first=3))

    assert found(results) == ["undecodable", "undecodable", "handled", "handled", "handled"]
    assert done(domain) == ["op-0", "op-1", "op-2"]
    assert kept(domain) == {"seen": 1, "op-0": 1, "op-1": 1, "op-2": 1}
    with domain.connect() as conn:
        letters = conn.execute("SELECT coordinates FROM fencepost.dead_letter ORDER BY id").fetchall()
    assert letters == [(seen.coordinates,), (bad.coordinates,)]


def test_a_copy_within_the_batch_of_a_failed_message_is_no_duplicate_of_it(domain: Database) -> None:
    @inbox(consumer="reports")
    def broken(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        raise ValueError

    twice = [from_kafka(envelope(), 1), from_kafka(envelope(), 2)]
    assert found(broken.handle_many(domain.dsn, twice)) == ["unhandled", "unhandled"]
    assert (done(domain), kept(domain)) == ([], {})
    assert found(reports.handle_many(domain.dsn, twice)) == ["handled", "duplicate"]


@pytest.mark.parametrize("statements", [("COMMIT",), ("COMMIT", "BEGIN"), ("ROLLBACK",), ("ROLLBACK", "BEGIN")])
def test_a_handler_that_ends_the_transaction_loses_no_other_event(
    domain: Database, statements: tuple[str, ...]
) -> None:
    @inbox(consumer="reports")
    def ending(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "op-1":
            for each in statements:
                tx.execute(each.encode())

    with pytest.raises((CommitWasRollback, WrongTransaction, psycopg.Error)):
        ending.handle_many(domain.dsn, arriving(4))

    assert (done(domain), kept(domain)) == ([], {}), "in between, events that nobody handled would be duplicates"
    assert found(reports.handle_many(domain.dsn, arriving(4))) == ["handled"] * 4


@pytest.mark.parametrize("isolation", [None, IsolationLevel.SERIALIZABLE], ids=["default", "serializable"])
def test_a_lost_race_repeats_the_whole_batch(domain: Database, isolation: IsolationLevel | None) -> None:
    runs: list[str] = []

    @inbox(consumer="reports", isolation=isolation)
    def racing(tx: Tx, event: Submitted) -> None:
        runs.append(event.operation)
        insert(tx, event)
        if runs.count("op-1") == 1 and event.operation == "op-1":
            tx.execute("DO $$ BEGIN RAISE serialization_failure; END $$")

    assert found(racing.handle_many(domain.dsn, arriving(3))) == ["handled"] * 3
    assert runs == ["op-0", "op-1", "op-0", "op-1", "op-2"]
    assert done(domain) == ["op-0", "op-1", "op-2"]


def test_two_batches_of_the_same_events_in_opposite_order_handle_each_once_and_never_deadlock(domain: Database) -> None:
    start = threading.Barrier(2)
    with domain.connect() as conn:
        before = conn.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()

    def deliver(deliveries: list[Delivery]) -> list[str]:
        start.wait(10)
        return found(reports.handle_many(domain.dsn, deliveries))

    with ThreadPoolExecutor(2) as threads:
        for turn in range(5):
            ahead = arriving(40, prefix=f"op-{turn}", first=turn * 1000)
            back = list(reversed(arriving(40, prefix=f"op-{turn}", first=turn * 1000)))
            one, two = (each.result(60) for each in [threads.submit(deliver, ahead), threads.submit(deliver, back)])
            assert sorted(one + two) == ["duplicate"] * 40 + ["handled"] * 40
    assert len(done(domain)) == len(set(done(domain))) == 200
    with domain.connect() as conn:
        conn.execute("SELECT pg_stat_clear_snapshot()")
        after = conn.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert after == before


def test_a_copy_in_flight_elsewhere_makes_the_batch_busy_and_nothing_of_it_stays(domain: Database) -> None:
    @inbox(consumer="reports", wait_seconds=0.2)
    def patient(tx: Tx, event: Submitted) -> None:
        row = tx.execute("SHOW lock_timeout").fetchone()
        assert row == ("0",), "the handler's own waits are not bounded by the inbox's"
        insert(tx, event)

    with domain.connect() as holding:
        patient.reserve_in(holding, envelope(operation="op-1"), "elsewhere")
        with pytest.raises(Busy):
            patient.handle_many(domain.dsn, arriving(3))
        holding.rollback()
    assert kept(domain) == {}
    assert found(patient.handle_many(domain.dsn, arriving(3))) == ["handled"] * 3


def test_a_batch_of_nothing_is_nothing_and_one_that_is_too_large_is_refused(domain: Database) -> None:
    assert reports.handle_many(domain.dsn, []) == []
    assert found(reports.handle_many(domain.dsn, arriving(1000))) == ["handled"] * 1000
    with pytest.raises(InvalidInput) as refused:
        reports.handle_many(domain.dsn, arriving(1001))
    assert refused.value.field == "deliveries"


RESERVE = """
SELECT outcome FROM fencepost.reserve_many('reports', %(tenants)s::text[], %(operations)s::text[], %(types)s::text[], %(versions)s::int[],
    ARRAY[gen_random_uuid(), gen_random_uuid()], ARRAY['urn:x', 'urn:x'], ARRAY[1, 1]::bigint[], ARRAY['ref:x', 'ref:x'],
    ARRAY[now(), now()], %(coordinates)s::text[])"""
FINE: dict[str, Any] = {
    "tenants": ["t", "t"],
    "operations": ["a", "b"],
    "types": ["x.y", "x.y"],
    "versions": [1, 1],
    "coordinates": ["1", "2"],
}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("tenants", ["t", ""], "tenant"),
        ("tenants", ["t", None], "tenant"),
        ("tenants", ["t"], "coordinates"),
        ("operations", ["a", "a"], "operation"),
        ("operations", ["a", "b "], "operation"),
        ("types", ["x.y", ""], "type"),
        ("versions", [1, 0], "version"),
        ("versions", [1, None], "version"),
        ("coordinates", ["1", "1"], "coordinates"),
        ("coordinates", ["1", ""], "coordinates"),
        ("coordinates", [], "coordinates"),
    ],
)
def test_reserve_many_refuses_what_is_wrong_and_names_it(domain: Database, field: str, value: Any, named: str) -> None:
    with domain.connect() as conn:
        assert conn.execute(RESERVE, FINE).fetchall() == [("reserved",), ("reserved",)]
        conn.rollback()
        with pytest.raises(InvalidInput) as refused:
            conn.execute(RESERVE, {**FINE, field: value})
    assert refused.value.field == named


def test_a_batch_is_settled_once_by_its_own_transaction_and_takes_back_nothing_of_another(domain: Database) -> None:
    with domain.connect() as conn:
        conn.execute(RESERVE, FINE)
        conn.execute("SELECT fencepost.settle_batch('reports', '{2}')")
        conn.commit()
        assert kept(domain) == {"a": 1}, "the allowed control"

        conn.execute(RESERVE, FINE)
        with pytest.raises(WrongTransaction) as refused:
            conn.commit()
        assert refused.value.field == "batch"
        with pytest.raises(WrongTransaction):
            conn.execute("SELECT fencepost.settle_batch('reports', '{1}')")
        conn.rollback()
        conn.execute(RESERVE, {**FINE, "operations": ["c", "d"], "coordinates": ["3", "4"]})
        with pytest.raises(WrongTransaction):
            conn.execute("SELECT fencepost.settle_batch('other', '{}')")
        conn.rollback()
        conn.execute(RESERVE, {**FINE, "operations": ["c", "d"], "coordinates": ["3", "4"]})
        with pytest.raises(InvalidInput) as taken:
            conn.execute("SELECT fencepost.settle_batch('reports', '{1,3}')")
        assert taken.value.field == "coordinates"
        conn.rollback()
    assert kept(domain) == {"a": 1}


def test_the_outcome_of_a_batch_is_that_of_each(domain: Database) -> None:
    (only,) = reports.handle_many(domain.dsn, [from_kafka(envelope(epoch=1))])
    (again,) = reports.handle_many(domain.dsn, [from_kafka(envelope(epoch=2), 1)])

    assert isinstance(only, Handled)
    assert isinstance(again, Handled)
    assert (only.outcome, only.tenant, only.operation, only.arrivals) == (Outcome.HANDLED, "acme", "op-1", 1)
    assert (again.outcome, again.other_epoch) == (Outcome.DUPLICATE, True)
