"""The application: a consumer that reserves and hands over, and a worker that analyses, asks the provider and publishes.

    fencepost consumer run reports.app:consumer
    fencepost worker run reports.app:worker

Settings: FENCEPOST_DATABASE; REPORTS_PROVIDER (address), REPORTS_BROKER (kafka or rabbitmq), REPORTS_BROKER_ADDRESS,
REPORTS_WORKER (name of this worker), REPORTS_LEASE_SECONDS and REPORTS_EFFECT_SECONDS (longer for a slow machine).
"""

from __future__ import annotations

import logging
import os
from typing import Any, assert_never

from psycopg import Connection

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.jobs.claim import Job
from fencepost.jobs.context import Context
from fencepost.jobs.publish import FencedTransaction
from fencepost.jobs.worker import Backoff, Worker
from fencepost.operate.consumer import Runner
from fencepost.relay import outbox
from fencepost.schemas.errors import ConfigError, LeaseLost, StaleFence

from . import domain
from .analysis import Analysis, analyse
from .client import Provider
from .domain import Submission
from .events import ReportAccepted, ReportPublished

TENANT = "library"
JOB = "report.analyse"
EFFECT = "summarise"
TOPIC = "reports"
CONSUMER = "report-analysis"
LEASE_SECONDS = float(os.environ.get("REPORTS_LEASE_SECONDS", "3"))
EFFECT_SECONDS = float(os.environ.get("REPORTS_EFFECT_SECONDS", "3"))
NETWORK_SECONDS = 0.5
TEXT_CHARS = 20_000

log = logging.getLogger("fencepost.reports")
worker = Worker(owner=os.environ.get("REPORTS_WORKER"))


def accept(tx: Connection[Any], submission: Submission) -> None:
    """The domain change and its event, in the caller's transaction: both or neither."""
    domain.insert_submission(tx, submission)
    d = submission.document
    outbox.enqueue(
        tx,
        ReportAccepted(
            tenant=TENANT,
            operation=submission.submission_id,
            submission_id=submission.submission_id,
            package=d.package,
            kind=d.kind,
            sha256=d.sha256,
        ),
    )


@inbox(consumer=CONSUMER)
def on_report(tx: Connection[Any], event: ReportAccepted | ReportPublished) -> None:
    """Runs once for each operation and type, however often it is delivered."""
    match event:
        case ReportAccepted():
            domain.mark(tx, event.submission_id, "scheduled")
            handoff.submit(tx, JOB, event)
        case ReportPublished():
            domain.mark(tx, event.submission_id, "published")
        case _ as never:
            assert_never(never)


@worker.job(
    JOB,
    lease=LEASE_SECONDS,
    max_attempts=4,
    backoff=Backoff(base=0.2, max=1.0),
    max_effect_timeout=EFFECT_SECONDS,
    network_bound=NETWORK_SECONDS,
)
def run(ctx: Context, job: Job) -> None:
    """The effect is recorded before it is dispatched; nothing is published but behind the fence."""
    provider = Provider(os.environ["REPORTS_PROVIDER"])
    submission = domain.read_submission(os.environ["FENCEPOST_DATABASE"], str(job.json()["submission_id"]))
    text = submission.document.text
    request = {"operation": job.operation, "text": text[:TEXT_CHARS]}
    answer = ctx.effect(EFFECT, provider.summarise, request, kind="lookup")
    summary = provider.prefix(job.operation) + _summary(answer.result)

    earlier = ctx.staged()
    analysis = analyse(text) if earlier is None else Analysis.from_plain(earlier.result)
    computed_by = job.fence.attempt if earlier is None else earlier.attempt

    def publish(tx: FencedTransaction) -> None:
        domain.insert_report(
            tx,
            submission.submission_id,
            analysis,
            computed_by=computed_by,
            attempt=job.fence.attempt,
            generation=job.fence.generation,
            worker=job.fence.owner,
            receipt=answer.receipt,
            summary=summary,
        )
        published = ReportPublished(
            tenant=job.tenant,
            operation=job.operation,
            submission_id=submission.submission_id,
            receipt=answer.receipt,
        )
        outbox.enqueue(tx, published)

    try:
        ctx.publish(publish)
    except (StaleFence, LeaseLost) as refused:
        log.warning("publication of %s refused: %s", job.operation, refused)
        ctx.stage(analysis.plain())
        raise


def consumer(dsn: str) -> Runner:
    """The runner for the broker that the environment names."""
    address = os.environ["REPORTS_BROKER_ADDRESS"]
    match os.environ["REPORTS_BROKER"]:
        case "kafka":
            from fencepost.consumer.kafka import KafkaRunner

            return KafkaRunner(on_report, dsn, bootstrap=address, topics=[TOPIC])
        case "rabbitmq":
            from fencepost.consumer.rabbitmq import RabbitRunner

            return RabbitRunner(
                on_report, dsn, url=address, queue=CONSUMER, exchange=TOPIC, routing_keys=["report.#"], declare=True
            )
        case _:
            raise ConfigError("neither kafka nor rabbitmq", field="REPORTS_BROKER")


def _summary(result: Any) -> str:
    # Reconciled by look-up: the receipt is known, the text of the lost answer is not.
    return str(result["summary"]) if result else "(the answer was lost; the receipt was looked up)"
