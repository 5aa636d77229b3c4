"""The application under test: an event, a consumer that hands over, and a worker that publishes."""

from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection
from sqlalchemy import text
from sqlalchemy.orm import Session

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.worker import Backoff, Worker
from fencepost.operate.testing import reach
from fencepost.relay import outbox
from fencepost.schemas.event import Event, Private

SCHEMA = """
CREATE TABLE handled (n bigint GENERATED ALWAYS AS IDENTITY, consumer text, operation text, note text);
CREATE TABLE report (operation text PRIMARY KEY, attempt integer NOT NULL);
"""


class Accepted(Event, type="kit.accepted", version=1):
    """Something was accepted."""

    n: int
    note: Private[str | None] = None


class Withdrawn(Event, type="kit.withdrawn", version=2):
    """Something was withdrawn."""

    reason: str


@inbox(consumer="sync")
def on_accepted(tx: Connection[Any], event: Accepted) -> None:
    """Counts and hands over."""
    tx.execute("INSERT INTO handled (consumer, operation, note) VALUES ('sync', %s, %s)", (event.operation, event.note))
    reach("counted")
    handoff.submit(tx, "kit.report", event)


@inbox(consumer="async")
async def on_accepted_async(tx: AsyncConnection[Any], event: Accepted) -> None:
    """Counts."""
    await tx.execute("INSERT INTO handled (consumer, operation) VALUES ('async', %s)", (event.operation,))


@inbox(consumer="session")
def on_accepted_by_session(tx: Session, event: Accepted) -> None:
    """Counts, in a session of SQLAlchemy."""
    tx.execute(text("INSERT INTO handled (consumer, operation) VALUES ('session', :op)"), {"op": event.operation})


@inbox(consumer="broken")
def broken(tx: Connection[Any], event: Accepted) -> None:
    """Fails for one operation."""
    tx.execute("INSERT INTO handled (consumer, operation) VALUES ('broken', %s)", (event.operation,))
    if event.n == 1:
        raise ValueError("no")


@inbox(consumer="broken")
async def broken_async(tx: AsyncConnection[Any], event: Accepted) -> None:
    """Fails for one operation."""
    await tx.execute("INSERT INTO handled (consumer, operation) VALUES ('broken', %s)", (event.operation,))
    if event.n == 1:
        raise ValueError("no")


worker = Worker()


@worker.job("kit.report", lease=600, max_attempts=3, backoff=Backoff(base=60))
def report(ctx: Context, job: Job) -> None:
    """Publishes which attempt it was; fails where it is told to."""
    if job.json()["n"] == 13 and job.attempts == 1:
        raise ValueError("unlucky")
    ctx.publish(
        lambda tx: tx.execute("INSERT INTO report (operation, attempt) VALUES (%s, %s)", (job.operation, job.attempts))
    )


def accept(dsn: str, *numbers: int, key: str = "") -> None:
    """Commits one event for each number, in order."""
    with psycopg.connect(dsn) as conn:
        for n in numbers:
            with conn.transaction():
                name = f"op-{n}"
                outbox.enqueue(
                    conn, Accepted(tenant="acme", operation=name, ordering_key=key or name, n=n, note="secret")
                )


def handled(dsn: str, consumer: str) -> list[str]:
    """The operations that a consumer has counted, in order."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("SELECT operation FROM handled WHERE consumer = %s ORDER BY n", (consumer,)).fetchall()
    return [row[0] for row in rows]
