"""What a user of fencepost may want to know of handlers: that they run once, whatever dies where."""

from typing import Any

import pytest
from psycopg import Connection

from fencepost.operate.testing import (
    Database,
    MemoryBroker,
    age,
    assert_enqueued,
    assert_submitted,
    crash,
    lose_jobs,
    run_jobs,
)

from .app import OrderPlaced, on_order_placed, place, worker


def placed(database: Database, *orders: str) -> None:
    """Orders that are committed."""
    with database.connect() as conn:
        for order in orders:
            place(conn, order, 4200)


def paid(conn: Connection[Any]) -> list[str]:
    """Which orders were paid, each as often as it was."""
    return [row[0] for row in conn.execute("SELECT order_id FROM payments ORDER BY order_id")]


def test_an_order_and_its_event_are_in_one_transaction(fencepost_database: Database) -> None:
    with fencepost_database.connect() as conn:
        place(conn, "order-1", 4200)
        assert_enqueued(conn, OrderPlaced, operation="order-1", cents=4200)
        conn.rollback()
        assert_enqueued(conn, OrderPlaced, times=0)


@pytest.mark.parametrize("point", ["before commit", "after commit"])
def test_an_order_is_paid_once_wherever_the_consumer_dies(
    fencepost_database: Database, fencepost_broker: MemoryBroker, point: str
) -> None:
    placed(fencepost_database, "order-1", "order-2")
    fencepost_broker.relay()
    with crash(point):
        fencepost_broker.deliver(on_order_placed)
    fencepost_broker.deliver(on_order_placed, copies=2, shuffle=1)
    with fencepost_database.connect() as conn:
        assert paid(conn) == ["order-1", "order-2"]
        assert_submitted(conn, "order.confirm", times=2)


def test_an_order_is_paid_once_when_the_relay_dies_after_sending(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    placed(fencepost_database, "order-1")
    with crash("after publish"):
        fencepost_broker.relay()
    fencepost_broker.relay()
    assert len(fencepost_broker.messages()) == 2
    fencepost_broker.deliver(on_order_placed)
    with fencepost_database.connect() as conn:
        assert paid(conn) == ["order-1"]


def test_a_confirmation_survives_a_worker_that_dies(
    fencepost_database: Database, fencepost_broker: MemoryBroker
) -> None:
    placed(fencepost_database, "order-1")
    fencepost_broker.relay()
    fencepost_broker.deliver(on_order_placed)
    with fencepost_database.connect() as conn:
        lose_jobs(conn, "order.confirm")
        age(conn, 3600, of="leases")
    (ran,) = run_jobs(worker, fencepost_database)
    assert (ran.state, ran.attempts) == ("done", 2)
    with fencepost_database.connect() as conn:
        assert conn.execute("SELECT order_id FROM confirmations").fetchall() == [("order-1",)]
