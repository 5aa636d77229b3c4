"""The smallest whole chain: an event, a consumer that handles it once, and work that publishes behind its fence.

export FENCEPOST_DATABASE=postgresql://localhost/app KAFKA=localhost:9092
export FENCEPOST_DESTINATIONS='[{"name": "reports", "kind": "kafka", "address": "localhost:9092",
                                 "routes": [{"match": "report.*", "to": "reports"}]}]'
fencepost migrate && psql "$FENCEPOST_DATABASE" -f schema.sql
python app.py report-1
fencepost relay run &  fencepost consumer run app:consumer &  fencepost worker run app:worker
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import Connection

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.effects import Dispatch, Success
from fencepost.jobs.worker import Worker
from fencepost.relay import outbox
from fencepost.schemas.event import Event

DSN = os.environ.get("FENCEPOST_DATABASE", "postgresql://localhost/app")


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


def accept(submission: str) -> None:
    """The domain change and its event commit together, or neither does."""
    with psycopg.connect(DSN) as conn, conn.transaction():
        conn.execute("UPDATE submissions SET state = 'accepted' WHERE id = %s", (submission,))
        outbox.enqueue(conn, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))


@inbox(consumer="report-analysis")
def on_accepted(tx: Connection[Any], event: ReportAccepted) -> None:
    """Runs once per operation: reservation, change and hand-over share one commit."""
    tx.execute("INSERT INTO analyses (submission_id) VALUES (%s)", (event.submission_id,))
    handoff.submit(tx, "report.analyse", event)


consumer = KafkaRunner(on_accepted, DSN, bootstrap=os.environ.get("KAFKA", "localhost:9092"), topics=["reports"])
worker = Worker()


def summarise(request: Mapping[str, Any], dispatch: Dispatch) -> Success:
    """Stands for a call to a provider: give it `dispatch.idempotency_key`, stop after `dispatch.seconds_left()`."""
    text = f"summary of {request['submission_id']}"
    return Success(receipt=hashlib.sha256(dispatch.idempotency_key.encode()).hexdigest()[:12], result=text)


@worker.job("report.analyse", lease=30, max_attempts=5)
def analyse(ctx: Context, job: Job) -> None:
    """The effect is recorded before it is dispatched; the report appears only under a current fence."""
    done = ctx.effect("summarise", summarise, job.json())
    ctx.publish(lambda tx: save_report(tx, job, done))


def save_report(tx: Connection[Any], job: Job, done: Success) -> None:
    """The domain's own table; PostgreSQL refuses the commit when the fence is gone by then."""
    tx.execute(
        "INSERT INTO reports (submission_id, body, receipt) VALUES (%s, %s, %s)",
        (job.operation, done.result, done.receipt),
    )


if __name__ == "__main__":
    accept(sys.argv[1])
