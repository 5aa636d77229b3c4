"""SQLAlchemy: a session carries the event with its pending changes; `sessionmaker` lends the handler a session.

With the engine instead of the sessionmaker, the handler is lent a Connection. The dialect is postgresql+psycopg.

export DATABASE=postgresql+psycopg://localhost/app
python with_sqlalchemy.py report-1 && python consume_kafka.py with_sqlalchemy
"""

import os
import sys

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.relay import outbox
from fencepost.schemas.event import Event

engine = create_engine(os.environ.get("DATABASE", "postgresql+psycopg://localhost/app"))
database = sessionmaker(engine)


class Base(DeclarativeBase):
    """The application's tables."""


class Submission(Base):
    """What was handed in."""

    __tablename__ = "submissions"
    id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]


class Analysis(Base):
    """What has to be analysed."""

    __tablename__ = "analyses"
    submission_id: Mapped[str] = mapped_column(primary_key=True)


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


def accept(submission: str) -> None:
    """The row, still pending, and its event commit together, or neither does."""
    with database.begin() as session:
        session.add(Submission(id=submission, state="accepted"))
        outbox.enqueue(session, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))


@inbox(consumer="report-analysis")
def on_accepted(tx: Session, event: ReportAccepted) -> None:
    """Once per operation, in one commit with its reservation and the job."""
    tx.add(Analysis(submission_id=event.submission_id))
    handoff.submit(tx, "report.analyse", event)


if __name__ == "__main__":
    accept(sys.argv[1])
