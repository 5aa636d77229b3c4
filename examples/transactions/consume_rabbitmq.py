"""A consumer as many have it, with aio-pika; the inbox is the one call in the middle.

python consume_rabbitmq.py with_sqlalchemy_async     (with_psycopg_async)

An error gives the message back to its queue. `RabbitRunner` does more: retries with backoff, dead letters, reconnection,
and acknowledgements on the delivery's own channel only.
"""

import asyncio
import importlib
import os
import sys

import aio_pika

from fencepost.consumer.delivery import Delivery

mine = importlib.import_module(sys.argv[1])
QUEUE = os.environ.get("QUEUE", "reports")


async def consume() -> None:
    """Until the connection ends."""
    async with await aio_pika.connect(os.environ.get("RABBITMQ", "amqp://localhost")) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=1)
        queue = await channel.get_queue(QUEUE)
        async with queue.iterator() as messages:
            async for message in messages:
                async with message.process(requeue=True):
                    delivery = Delivery.from_rabbitmq(
                        cluster="main",
                        vhost="/",
                        queue=QUEUE,
                        message_id=message.message_id,
                        headers=message.headers,
                        content_type=message.content_type,
                        body=message.body,
                    )
                    print((await mine.on_accepted.handle(mine.database, delivery)).outcome, flush=True)


if __name__ == "__main__":
    asyncio.run(consume())
