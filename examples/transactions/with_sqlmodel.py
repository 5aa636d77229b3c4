"""SQLModel: its sessions are SQLAlchemy's, and so are its engines; `sessionmaker` is told which class to make.

export DATABASE=postgresql+psycopg://localhost/app
python with_sqlmodel.py report-1 && python consume_kafka.py with_sqlmodel
"""

import os
import sys

from sqlalchemy.orm import sessionmaker
from sqlmodel import Field, Session, SQLModel, create_engine

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.relay import outbox
from fencepost.schemas.event import Event

engine = create_engine(os.environ.get("DATABASE", "postgresql+psycopg://localhost/app"))
database = sessionmaker(engine, class_=Session)


class Submissions(SQLModel, table=True):
    """What was handed in; the table has the class's name."""

    id: str = Field(primary_key=True)
    state: str


class Analyses(SQLModel, table=True):
    """What has to be analysed."""

    submission_id: str = Field(primary_key=True)


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


def accept(submission: str) -> None:
    """The row, still pending, and its event commit together, or neither does."""
    with Session(engine) as session:
        session.add(Submissions(id=submission, state="accepted"))
        outbox.enqueue(session, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))
        session.commit()


@inbox(consumer="report-analysis")
def on_accepted(tx: Session, event: ReportAccepted) -> None:
    """Once per operation, in one commit with its reservation and the job."""
    tx.add(Analyses(submission_id=event.submission_id))
    handoff.submit(tx, "report.analyse", event)


if __name__ == "__main__":
    accept(sys.argv[1])
