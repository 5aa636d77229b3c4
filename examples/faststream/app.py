"""A FastStream application on RabbitMQ whose subscriber is an inbox: each operation is handled and committed once.

export FENCEPOST_DATABASE=postgresql://localhost/app RABBITMQ=amqp://guest:guest@localhost/ QUEUE=reports
fencepost migrate && psql "$FENCEPOST_DATABASE" -c 'CREATE TABLE analyses (submission_id text)'
python app.py        # while a relay publishes report.accepted to the queue
"""

import asyncio
import os
from typing import Any

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue
from psycopg import AsyncConnection

from fencepost.consumer.faststream import Inboxes
from fencepost.consumer.inbox import inbox
from fencepost.schemas.event import Event

broker = RabbitBroker(os.environ.get("RABBITMQ", "amqp://guest:guest@localhost/"))
inboxes = Inboxes(broker, os.environ.get("FENCEPOST_DATABASE", "postgresql://localhost/app"))
app = FastStream(broker, after_startup=[inboxes.start], after_shutdown=[inboxes.close])
queue = RabbitQueue(os.environ.get("QUEUE", "reports"), declare=False)


class ReportAccepted(Event, type="report.accepted", version=1):
    """A submission was accepted; its report is to be made."""

    submission_id: str


@inboxes.on(broker.subscriber(queue, ack_policy=AckPolicy.MANUAL, channel=Channel(prefetch_count=16)))
@inbox(consumer="report-analysis")
async def on_accepted(tx: AsyncConnection[Any], event: ReportAccepted) -> None:
    """The change and the reservation share one commit; the message is acknowledged after it."""
    await tx.execute("INSERT INTO analyses (submission_id) VALUES (%s)", (event.submission_id,))


if __name__ == "__main__":
    asyncio.run(app.run())
