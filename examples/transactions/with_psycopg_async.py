"""psycopg with asyncio: the calls are awaited, the promises are the same.

export DATABASE=postgresql://localhost/app
python with_psycopg_async.py report-1 && python consume_rabbitmq.py with_psycopg_async
"""

import asyncio
import os
import sys
from typing import Any

from psycopg import AsyncConnection

from fencepost.consumer import handoff
from fencepost.consumer.inbox import inbox
from fencepost.relay import outbox
from fencepost.schemas.event import Event

database = os.environ.get("DATABASE", "postgresql://localhost/app")  # or a psycopg_pool.AsyncConnectionPool


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


async def accept(submission: str) -> None:
    """The row and its event commit together, or neither does."""
    async with await AsyncConnection.connect(database) as conn, conn.transaction():
        await conn.execute("INSERT INTO submissions VALUES (%s, 'accepted')", (submission,))
        await outbox.enqueue(conn, ReportAccepted(tenant="acme", operation=submission, submission_id=submission))


@inbox(consumer="report-analysis")
async def on_accepted(tx: AsyncConnection[Any], event: ReportAccepted) -> None:
    """Once per operation, in one commit with its reservation and the job."""
    await tx.execute("INSERT INTO analyses VALUES (%s)", (event.submission_id,))
    await handoff.submit_async(tx, "report.analyse", event)


if __name__ == "__main__":
    asyncio.run(accept(sys.argv[1]))
