"""A refused event waits with its key and a typed reason; other keys flow; nothing is dropped in silence."""

from __future__ import annotations

import threading
from typing import LiteralString

import pytest

from fencepost.relay.destination import NoRoute
from fencepost.relay.publisher import CONFIRMED, Answer, OutboxRow, Outcome, ParkReason, Route
from fencepost.relay.sidecar import Relay
from support.database import Database
from support.memory_broker import MemoryBroker
from support.relays import BRISK, accepted, arrived, destination, relay_once, relaying, until, value

PARKED: LiteralString = "SELECT operation, reason FROM fencepost.parked ORDER BY seq"
NONE_PARKED: LiteralString = "SELECT count(*) = 0 FROM fencepost.parked"
UNROUTABLE = Outcome(Answer.REFUSED, ParkReason.UNROUTABLE, "no queue")


def refusing(*operations: str, reason: ParkReason = ParkReason.UNROUTABLE) -> MemoryBroker:
    """A broker that refuses these."""
    return MemoryBroker(lambda row: Outcome(Answer.REFUSED, reason) if row.operation in operations else CONFIRMED)


def test_a_refused_event_holds_its_key_back_and_no_other(database: Database) -> None:
    broker = refusing("k1-2", reason=ParkReason.TOO_LARGE)
    accepted(database, *[f"k1-{n}" for n in range(1, 4)], key="k1")
    accepted(database, *[f"k2-{n}" for n in range(1, 4)], key="k2")
    relay_once(database, destination(broker))
    accepted(database, "k1-4", key="k1")
    accepted(database, "k2-4", key="k2")
    relay_once(database, destination(broker))
    assert [o for o in broker.operations() if o.startswith("k1")] == ["k1-1"]
    assert [o for o in broker.operations() if o.startswith("k2")] == ["k2-1", "k2-2", "k2-3", "k2-4"]
    with database.connect() as conn:
        assert conn.execute(PARKED).fetchall() == [("k1-2", "too_large"), ("k1-3", "behind"), ("k1-4", "behind")]


def test_a_key_flows_again_in_order_once_its_first_event_gets_through(database: Database) -> None:
    failing = threading.Event()
    failing.set()

    def verdict(row: OutboxRow) -> Outcome:
        return UNROUTABLE if row.operation == "k1-2" and failing.is_set() else CONFIRMED

    broker = MemoryBroker(verdict)
    accepted(database, *[f"k1-{n}" for n in range(1, 6)], key="k1")
    accepted(database, *[f"k2-{n}" for n in range(1, 6)], key="k2")
    with relaying(database, destination(broker)), database.connect(autocommit=True) as conn:
        until(conn, "SELECT coalesce(max(attempts), 0) >= 3 FROM fencepost.parked")
        assert conn.execute(PARKED).fetchall()[0] == ("k1-2", "unroutable")
        assert arrived(broker.operations, 6).count("k2-5") == 1
        failing.clear()
        until(conn, NONE_PARKED)
        accepted(database, "k1-6", key="k1")
        arrived(broker.operations, 11)
    assert [o for o in broker.operations() if o.startswith("k1")] == [f"k1-{n}" for n in range(1, 7)]


def test_an_unanswered_event_before_a_refused_one_is_sent_again_and_never_stuck_behind_it(database: Database) -> None:
    silent = threading.Event()
    silent.set()

    def verdict(row: OutboxRow) -> Outcome:
        match row.operation:
            case "k-1" if silent.is_set():
                return Outcome(Answer.UNKNOWN)
            case "k-2":
                return Outcome(Answer.REFUSED, ParkReason.TOO_LARGE)
            case _:
                return CONFIRMED

    # With several events of a key in flight, as Kafka has them, the answers need not be in order.
    broker = MemoryBroker(verdict, withholding=False)
    accepted(database, "k-1", "k-2", "k-3", key="k")
    with relaying(database, destination(broker)), database.connect(autocommit=True) as conn:
        arrived(lambda: [o for o in broker.operations() if o == "k-1"], 3)
        silent.clear()
        until(conn, "SELECT count(*) > 0 FROM fencepost.parked")
        found = conn.execute("SELECT operation, reason, overtaken_by FROM fencepost.parked ORDER BY seq").fetchall()
        assert [row[0] for row in found] == ["k-2"] and found[0][1] == "too_large"
        # k-3 got through although k-2 did not: recorded as what it is.
        assert found[0][2] == value(conn, "SELECT seq FROM fencepost.outbox WHERE operation = 'k-3'")


def test_what_no_destination_takes_is_parked_under_the_reserved_one(database: Database) -> None:
    broker = MemoryBroker()
    to = destination(broker, routes=[Route("other.*", "here")])
    accepted(database, "a")
    relay = Relay(database.dsn, [to], pace=BRISK)
    summary = relay.run_once()
    assert (summary.published, summary.parked) == (0, 1)
    with database.connect() as conn:
        found = conn.execute("SELECT destination, operation, reason, next_try_at FROM fencepost.parked").fetchall()
        assert found == [("-", "a", "no_route", None)]
        # The reserved destination reads no payloads, what it parks has them.
        assert value(
            conn, "SELECT p.payload = o.payload FROM fencepost.parked AS p JOIN fencepost.outbox AS o USING (seq)"
        )


@pytest.mark.parametrize("routes", [[Route("relay.*", "here")], [Route("*", "here")]])
def test_what_some_destination_takes_is_not_parked(database: Database, routes: list[Route]) -> None:
    broker = MemoryBroker()
    accepted(database, "a")
    summary = Relay(database.dsn, [destination(broker, routes=routes)], pace=BRISK).run_once()
    assert (summary.published, summary.parked) == (1, 0)
    with database.connect() as conn:
        assert value(conn, NONE_PARKED) is True


def test_the_reserved_destination_waits_until_there_is_another(database: Database) -> None:
    broker = MemoryBroker()
    with relaying(database, NoRoute()) as waiting, database.connect(autocommit=True) as conn:
        until(conn, "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()")
        accepted(database, "a")
        relay_once(database, destination(broker, routes=[Route("other.*", "here")]))
        until(conn, "SELECT count(*) = 1 FROM fencepost.parked")
    assert waiting.counters.parked == 1
