"""psycopg: the event is in the connection's transaction, and the handler is lent a connection.

export DATABASE=postgresql://localhost/app
python with_psycopg.py report-1 && python consume_kafka.py with_psycopg
"""

import os
import sys
from typing import Any

import psycopg
from psycopg import Connection

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.relay import outbox
from fencepost.schemas.event import Event

database = os.environ.get("DATABASE", "postgresql://localhost/app")  # or a psycopg_pool.ConnectionPool


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


def accept(submission: str) -> None:
    """The row and its event commit together, or neither does."""
    with psycopg.connect(database) as conn, conn.transaction():
        conn.execute("INSERT INTO submissions VALUES (%s, 'accepted')", (submission,))
        outbox.enqueue(conn, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))


@inbox(consumer="report-analysis")
def on_accepted(tx: Connection[Any], event: ReportAccepted) -> None:
    """Once per operation, in one commit with its reservation and the job."""
    tx.execute("INSERT INTO analyses VALUES (%s)", (event.submission_id,))
    handoff.submit(tx, "report.analyse", event)


if __name__ == "__main__":
    accept(sys.argv[1])
