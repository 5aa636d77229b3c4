"""Django: `connection` inside `atomic()` carries the event, and the handler runs inside `atomic()`.

A project has its own settings and models; these few stand in for them.

export PGHOST=localhost PGDATABASE=app
python with_django.py report-1 && python consume_kafka.py with_django
"""

from __future__ import annotations

import os
import sys

import django
from django.conf import settings
from django.db import connection, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.relay import outbox
from fencepost.schemas.event import Event

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": os.environ.get("PGHOST", "localhost"),
            "PORT": os.environ.get("PGPORT", ""),
            "USER": os.environ.get("PGUSER", ""),
            "NAME": os.environ.get("PGDATABASE", "app"),
            "CONN_MAX_AGE": 60,  # a consumer need not connect for every event
        }
    }
)
django.setup()
database = connection


class Submission(models.Model):
    """What was handed in."""

    id: models.TextField[str, str] = models.TextField(primary_key=True)
    state: models.TextField[str, str] = models.TextField()

    class Meta:
        app_label = "reports"
        db_table = "submissions"


class Analysis(models.Model):
    """What has to be analysed."""

    submission_id: models.TextField[str, str] = models.TextField(primary_key=True)

    class Meta:
        app_label = "reports"
        db_table = "analyses"


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


def accept(submission: str) -> None:
    """The row and its event commit together, or neither does."""
    with transaction.atomic():
        Submission.objects.create(id=submission, state="accepted")
        outbox.enqueue(connection, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))


@inbox(consumer="report-analysis")
def on_accepted(tx: BaseDatabaseWrapper, event: ReportAccepted) -> None:
    """Once per operation, in one commit with its reservation and the job."""
    Analysis.objects.create(submission_id=event.submission_id)
    handoff.submit(tx, "report.analyse", event)


if __name__ == "__main__":
    accept(sys.argv[1])
