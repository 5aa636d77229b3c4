"""Retained events are sent again as they were but for one declared mark, in order, and never what is gone or on its way."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import psycopg
import pytest

from conformance.conftest import BROKERS
from conformance.harness import Arrived, Broker
from conformance.on_kafka import OnKafka
from fencepost.consumer.delivery import Delivery as Arrival
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Outcome as Handling
from fencepost.relay import backfill
from fencepost.relay.backfill import Chosen, Sent
from fencepost.relay.destination import Destination, NoRoute
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, ParkReason, Route
from fencepost.relay.recycling import recycle_outbox
from fencepost.schemas.errors import InvalidInput, Unreachable
from support.database import Database
from support.memory_broker import MemoryBroker
from support.relaying import Noted, address_of, enqueue, kind_of, made, relay
from support.relays import BRISK, accept, accepted, destination, loop, registered, relay_once, value
from support.services import Services


@inbox(consumer="reports")
def noted(tx: psycopg.Connection[Any], event: Noted) -> None:
    tx.execute("INSERT INTO done VALUES (%s)", (event.operation,))


@pytest.fixture(params=sorted(BROKERS))
def broker(request: pytest.FixtureRequest, services: Services) -> Broker:
    name: str = request.param
    return BROKERS[name](services)


def again(database: Database, to: Destination, chosen: Chosen) -> Sent:
    """Sends the range; the last that was told."""
    with database.connect(autocommit=True) as conn:
        span = backfill.resolve(conn, to.name, chosen)
        to.open(conn, 0)
        stop = threading.Event()
        return [Sent(span.after, 0), *backfill.send(conn, span, to, pace=BRISK, stop=stop)][-1]


def arrival(broker: Broker, one: Arrived, offset: int) -> Arrival:
    """The message as a consumer gets it."""
    if isinstance(broker, OnKafka):
        key, headers, value_ = cast(tuple[bytes, tuple[tuple[str, bytes], ...], bytes], one.wire)
        return Arrival.from_kafka(
            cluster_id="c", topic="t", partition=0, offset=offset, headers=headers, key=key, value=value_
        )
    headers, content_type, _, message_id, _, body = cast(tuple[Any, ...], one.wire)
    return Arrival.from_rabbitmq(
        cluster="c",
        vhost="/",
        queue="q",
        message_id=message_id,
        headers=dict(headers),
        content_type=content_type,
        body=body,
        redelivered=False,
    )


def test_consumers_see_what_is_sent_again_as_duplicates_with_one_mark(
    database18: Database, broker: Broker, services: Services
) -> None:
    route = broker.destination()
    enqueue(database18, 12)
    relay(database18.dsn, broker, services, [route]).run_once()
    kind, address = kind_of(broker), address_of(broker, services)
    to = Destination("events", kind, [route], lambda source: made(kind, address, source, delivery_timeout=16.0))
    with database18.connect(autocommit=True) as conn:
        span = backfill.resolve(conn, "events", Chosen(3, 10))
        assert backfill.count(conn, span) == 8
        to.open(conn, time.monotonic() + 20)
        try:
            pace = replace(BRISK, confirm=20.0, lease=60.0)
            told = list(backfill.send(conn, span, to, pace=pace, stop=threading.Event()))
        finally:
            to.close(time.monotonic() + 5)
    assert told == [Sent(10, 8)]

    found = broker.read(route, 20)
    first = {a.envelope.sequence: a.envelope for a in found if not a.envelope.replayed}
    copies = [a.envelope for a in found if a.envelope.replayed]
    assert sorted(first) == list(range(1, 13))
    assert sorted(c.sequence for c in copies) == list(range(3, 11))
    for copy in copies:
        copy.verify()
        bare = replace(copy, attributes={n: v for n, v in copy.attributes.items() if n != "fpreplayed"})
        assert bare == first[copy.sequence]
    for key in {c.ordering_key for c in copies}:
        seen = [c.sequence for c in copies if c.ordering_key == key]
        assert seen == sorted(seen)
    with database18.connect(autocommit=True) as conn:
        conn.execute("CREATE TABLE done (operation text)")
        for offset, one in enumerate(sorted(found, key=lambda a: a.envelope.replayed)):
            expected = Handling.DUPLICATE if one.envelope.replayed else Handling.HANDLED
            assert noted.handle(database18.dsn, arrival(broker, one, offset)).outcome is expected
        assert value(conn, "SELECT count(*) FROM done") == 12


def test_only_what_was_chosen_is_sent_again(database: Database) -> None:
    broker = MemoryBroker()
    to = destination(broker)
    accepted(database, "a", "b", tenant="acme")
    accepted(database, "c", tenant="umbra")
    accepted(database, "d", tenant="acme")
    relay_once(database, to)
    with database.connect(autocommit=True) as conn:
        times = dict(conn.execute("SELECT operation, recorded_at FROM fencepost.outbox").fetchall())
    for chosen, expected in (
        (Chosen(1), ["a", "b", "c", "d"]),
        (Chosen(2, 3), ["b", "c"]),
        (Chosen(4, 100), ["d"]),
        (Chosen(5), []),
        (Chosen(times["b"], times["d"]), ["b", "c"]),
        (Chosen(times["c"]), ["c", "d"]),
        (Chosen(datetime.now(UTC) + timedelta(hours=1)), []),
        (Chosen(1, tenant="umbra"), ["c"]),
        (Chosen(1, type="relay.changed", tenant="acme"), ["a", "b", "d"]),
        (Chosen(1, type="other.type"), []),
    ):
        broker.arrived.clear()
        told = again(database, to, chosen)
        assert (broker.operations(), told.sent) == (expected, len(expected)), chosen
        with database.connect(autocommit=True) as conn:
            assert backfill.count(conn, backfill.resolve(conn, "memory", chosen)) == len(expected), chosen
    broker.arrived.clear()
    again(database, to, Chosen(1))
    assert {row.attributes for row in broker.arrived} == {'{"fpreplayed": "true"}'}


def test_what_is_not_acked_yet_is_not_sent_before_its_time(database: Database) -> None:
    broker = MemoryBroker()
    to = destination(broker)
    with database.connect() as late:
        accept(late, "late")
        accepted(database, "a")
        relay_once(database, to)
        accepted(database, "b")
        late.commit()
    broker.arrived.clear()
    assert again(database, to, Chosen(1)).sent == 1
    assert broker.operations() == ["a"]
    relay_once(database, to)
    broker.arrived.clear()
    assert again(database, to, Chosen(1)).sent == 3
    assert broker.operations() == ["late", "a", "b"]


def test_a_destination_that_came_later_gets_what_is_older_than_it(database: Database) -> None:
    accepted(database, "a", "b")
    relay_once(database, destination(MemoryBroker()))
    new = destination(broker := MemoryBroker(), "new")
    registered(database, "new")
    relay_once(database, new)
    assert broker.operations() == []
    assert again(database, new, Chosen(1)).sent == 2
    assert broker.operations() == ["a", "b"]


def test_parked_events_and_those_without_a_route_are_left_out(database: Database) -> None:
    broker = MemoryBroker(
        lambda row: Outcome(Answer.REFUSED, ParkReason.TOO_LARGE) if row.operation == "big" else CONFIRMED
    )
    accepted(database, "a", "big", "behind", key="k")
    to = destination(broker)
    relay_once(database, to)
    broker.arrived.clear()
    assert again(database, to, Chosen(1)).sent == 1
    assert broker.operations() == ["a"]
    elsewhere = destination(MemoryBroker(), "elsewhere", routes=[Route("other.*", "there")])
    with database.connect(autocommit=True) as conn:
        elsewhere.register(conn)
    assert again(database, elsewhere, Chosen(1)) == Sent(3, 0, 3)


def test_a_recycled_range_is_refused_with_the_oldest_that_is_left(database: Database) -> None:
    broker = MemoryBroker()
    to = destination(broker)
    with database.connect(autocommit=True) as conn:
        accepted(database, "a", "b")
        relay_once(database, to)
        loop(database, NoRoute(), pace=replace(BRISK, record=0.0)).run(once=True)
        assert again(database, to, Chosen(1)).sent == 2  # the allowed control
        early = value(conn, "SELECT min(recorded_at) FROM fencepost.outbox")
        conn.execute("SELECT fencepost.set_retention('0', NULL, 'ops', 'a test')")
        assert [recycle_outbox(conn, min_age=0).outcome for _ in range(2)] == ["opened", "recycled"]
        accepted(database, "c")
        relay_once(database, to)
    for since in (1, 2, early):
        with pytest.raises(InvalidInput, match="recycled") as refused:
            again(database, to, Chosen(since))
        assert refused.value.field == "from"
        if isinstance(since, int):
            assert "--from 3" in str(refused.value)
    broker.arrived.clear()
    assert again(database, to, Chosen(3)).sent == 1
    assert again(database, to, Chosen(datetime.now(UTC) - timedelta(0))).sent == 0


def test_recycling_in_the_middle_of_a_range_is_noticed(database: Database) -> None:
    broker = MemoryBroker()
    to = destination(broker)
    accepted(database, "a", "b", "c")
    relay_once(database, to)
    loop(database, NoRoute(), pace=replace(BRISK, record=0.0)).run(once=True)
    with database.connect(autocommit=True) as conn, database.connect(autocommit=True) as other:
        span = backfill.resolve(conn, "memory", Chosen(1))
        other.execute("SELECT fencepost.set_retention('0', NULL, 'ops', 'a test')")
        assert [recycle_outbox(other, min_age=0).outcome for _ in range(2)] == ["opened", "recycled"]
        with pytest.raises(InvalidInput, match="recycled"):
            list(backfill.send(conn, span, to, pace=BRISK, stop=threading.Event()))


def test_a_refused_event_ends_a_backfill_with_its_number_and_a_silent_broker_with_where_to_go_on(
    database: Database,
) -> None:
    answers: dict[str, Outcome] = {}

    def verdict(row: OutboxRow) -> Outcome:
        return answers.get(row.operation, CONFIRMED)

    broker = MemoryBroker(verdict)
    to = destination(broker)
    accepted(database, "a", "b", "c")
    relay_once(database, to)
    answers["b"] = Outcome(Answer.REFUSED, ParkReason.NOT_AUTHORISED, "topic x")
    told = again(database, to, Chosen(1))
    assert (told.position, told.sent, told.refused) == (1, 2, "2: not_authorised topic x")
    answers["b"] = Outcome(Answer.UNKNOWN)
    with pytest.raises(Unreachable, match="--from 2"):
        again(database, to, Chosen(1))
    answers.clear()
    assert again(database, to, Chosen(2)).sent == 2


def test_long_ranges_go_in_bounded_batches_in_the_order_of_the_sequence(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = MemoryBroker()
    to = destination(broker)
    with database.connect() as conn:
        for n in range(60):
            accept(conn, f"op-{n}", key=f"k{n % 7}")
            conn.commit()
    relay_once(database, to)
    for window, size in ((7, 1 << 20), (1000, 30), (1000, 1), (13, 50)):
        monkeypatch.setattr(backfill, "WINDOW", window)
        monkeypatch.setattr(backfill, "BYTES", size)
        broker.arrived.clear()
        broker.sends = 0
        assert again(database, to, Chosen(1)) == Sent(60, 60)
        assert broker.operations() == [f"op-{n}" for n in range(60)]
        assert broker.sends > 60 / window and broker.sends > 1
