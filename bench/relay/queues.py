"""Queues of RabbitMQ that a measurement makes, watches and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aio_pika


async def declare(url: str, queue: str, *, drop: bool = False) -> None:
    """A quorum queue, or none any more."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    if drop:
        await channel.queue_delete(queue)
    else:
        await channel.declare_queue(queue, durable=True, arguments={"x-queue-type": "quorum"})
    await connection.close()


async def arrivals(url: str, queue: str, count: int) -> list[tuple[str, str]]:
    """Key and sequence of all that is in the queue, in order."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=500)
    found: list[tuple[str, str]] = []
    source = await channel.get_queue(queue)
    async with asyncio.timeout(60), source.iterator() as messages:
        async for message in messages:
            found.append((str(message.headers["ce-partitionkey"]), str(message.headers["ce-sequence"])))
            await message.ack()
            if len(found) >= count:
                break
    await connection.close()
    return found


def in_order(found: Sequence[tuple[str, str]]) -> bool:
    """Whether first arrivals of each key came in the order of the sequence."""
    seen: set[str] = set()
    newest: dict[str, str] = {}
    for key, sequence in found:
        if sequence not in seen and sequence < newest.get(key, ""):
            return False
        seen.add(sequence)
        newest[key] = max(sequence, newest.get(key, ""))
    return True


async def arrived(url: str, queue: str, count: int) -> None:
    """Waits until the queue holds everything."""
    connection = await aio_pika.connect(url)
    channel = await connection.channel()
    try:
        async with asyncio.timeout(120):
            while True:
                found = await channel.declare_queue(queue, passive=True)
                if (found.declaration_result.message_count or 0) >= count:
                    break
                await asyncio.sleep(0.2)
    finally:
        await connection.close()
