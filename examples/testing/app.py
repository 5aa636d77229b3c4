"""An order is placed, its payment is taken once, and a confirmation is due."""

from typing import Any

from psycopg import Connection

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.worker import Worker
from fencepost.relay import outbox
from fencepost.schemas.event import Event

SCHEMA = """
CREATE TABLE orders (id text PRIMARY KEY, cents integer NOT NULL);
CREATE TABLE payments (order_id text NOT NULL, cents integer NOT NULL);
CREATE TABLE confirmations (order_id text NOT NULL);
"""


class OrderPlaced(Event, type="order.placed", version=1):
    """A customer has placed an order."""

    cents: int


def place(conn: Connection[Any], order: str, cents: int) -> None:
    """The order and its event, in the caller's transaction."""
    conn.execute("INSERT INTO orders (id, cents) VALUES (%s, %s)", (order, cents))
    outbox.enqueue(conn, OrderPlaced(tenant="shop", operation=order, cents=cents))


@inbox(consumer="payments")
def on_order_placed(tx: Connection[Any], event: OrderPlaced) -> None:
    """Payment and hand-over share one commit."""
    tx.execute("INSERT INTO payments (order_id, cents) VALUES (%s, %s)", (event.operation, event.cents))
    handoff.submit(tx, "order.confirm", event)


worker = Worker()


@worker.job("order.confirm", lease=30, max_attempts=5)
def confirm(ctx: Context, job: Job) -> None:
    """Appears only under a current fence."""
    ctx.publish(lambda tx: tx.execute("INSERT INTO confirmations (order_id) VALUES (%s)", (job.operation,)))
