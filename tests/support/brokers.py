"""Events on real brokers without a relay: sent, counted, and the queues for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
from aio_pika.abc import AbstractChannel
from confluent_kafka import Producer

from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from stack.rabbitmq import RabbitServer
from support.services import Kafka, Rabbit

DEADLINE_SECONDS = 30.0


def produce(kafka: Kafka, topic: str, values: Iterable[Envelope | bytes], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "acks": "all", "log_level": 0})
    for value in values:
        if isinstance(value, bytes):
            producer.produce(topic, value=value, partition=partition)
        else:
            producer.produce(
                topic,
                value=value.payload,
                key=kafka_binding.key(value.tenant, value.ordering_key),
                headers=list(kafka_binding.encode(value)),
                partition=partition,
            )
    assert producer.flush(DEADLINE_SECONDS) == 0


@asynccontextmanager
async def channel_of(rabbitmq: Rabbit) -> AsyncGenerator[AbstractChannel, None]:
    connection = await aio_pika.connect(rabbitmq.url, timeout=DEADLINE_SECONDS)
    async with connection:
        yield await connection.channel(publisher_confirms=True, on_return_raises=True)


def publish(rabbitmq: Rabbit, exchange: str, key: str, values: Iterable[Envelope | bytes]) -> None:
    async def send() -> None:
        async with channel_of(rabbitmq) as channel:
            to = await channel.get_exchange(exchange) if exchange else channel.default_exchange
            for value in values:
                if isinstance(value, bytes):
                    message = aio_pika.Message(value, headers={"ce-id": 7}, delivery_mode=2)
                else:
                    headers, content_type = amqp_binding.encode(value)
                    message = aio_pika.Message(
                        value.payload,
                        headers=dict(headers),
                        content_type=content_type,
                        message_id=str(value.id),
                        delivery_mode=2,
                    )
                await to.publish(message, key, timeout=DEADLINE_SECONDS)

    asyncio.run(send())


def declare(rabbitmq: Rabbit, name: str, **options: Any) -> None:
    async def make() -> None:
        async with channel_of(rabbitmq) as channel:
            await channel.declare_queue(name, durable=True, **options)

    asyncio.run(make())


def delete(rabbitmq: Rabbit, *names: str) -> None:
    async def remove() -> None:
        async with channel_of(rabbitmq) as channel:
            for name in names:
                await channel.queue_delete(name)

    asyncio.run(remove())


def held_back(node: RabbitServer) -> bool:
    """Whether the broker takes nothing from any of its connections: each is blocked, or will be by what it publishes next."""
    states = node.rabbitmqctl("list_connections", "state", "--no-table-headers").split()
    return bool(states) and all(state.startswith("block") for state in states)


def left(rabbitmq: Rabbit, name: str) -> int:
    """Messages in the queue that nobody has in hand; read after the consumer has gone, that is all of them."""

    async def ask() -> int:
        async with channel_of(rabbitmq) as channel:
            found = await channel.declare_queue(name, passive=True)
            return found.declaration_result.message_count or 0

    return asyncio.run(ask())
