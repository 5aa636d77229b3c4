"""SQLAlchemy with asyncio: `async_sessionmaker` lends the handler an AsyncSession. The dialect is postgresql+psycopg.

export DATABASE=postgresql+psycopg://localhost/app
python with_sqlalchemy_async.py report-1 && python consume_rabbitmq.py with_sqlalchemy_async
"""

import asyncio
import os
import sys

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.relay import outbox
from fencepost.schemas.event import Event

engine = create_async_engine(os.environ.get("DATABASE", "postgresql+psycopg://localhost/app"))
database = async_sessionmaker(engine)


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


async def accept(submission: str) -> None:
    """The row, still pending, and its event commit together, or neither does."""
    async with database.begin() as session:
        session.add(Submission(id=submission, state="accepted"))
        await outbox.enqueue(session, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))
    await engine.dispose()


@inbox(consumer="report-analysis")
async def on_accepted(tx: AsyncSession, event: ReportAccepted) -> None:
    """Once per operation, in one commit with its reservation and the job."""
    tx.add(Analysis(submission_id=event.submission_id))
    await handoff.submit_async(tx, "report.analyse", event)


if __name__ == "__main__":
    asyncio.run(accept(sys.argv[1]))
