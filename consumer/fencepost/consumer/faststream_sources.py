"""FastStream: where the deliveries of a subscriber come from, how they are acknowledged, and how they come again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, cast
from uuid import uuid4

from aio_pika import IncomingMessage
from aio_pika.exceptions import ChannelInvalidStateError
from confluent_kafka import Consumer, Message, TopicPartition
from faststream import StreamMessage
from faststream.confluent.message import KafkaMessage
from faststream.confluent.subscriber.usecase import DefaultSubscriber
from faststream.rabbit.subscriber import RabbitSubscriber

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.runner import RunnerOptions, Tries
from fencepost.consumer.topics import TopicIds

__all__ = ["Queue", "Topic"]

METADATA_SECONDS = 5.0


class Queue:
    """A RabbitMQ queue: deliveries side by side, as many as the channel's prefetch."""

    rewinds = False

    def __init__(self, subscriber: RabbitSubscriber) -> None:
        self.subscriber = subscriber
        self._cluster, self._vhost = "", "/"

    async def parse(self, raw: IncomingMessage, original: Callable[[Any], Awaitable[Any]]) -> Any:
        return _unanswered(await original(raw))

    def out_of_turn(self, raw: IncomingMessage) -> bool:
        return False

    def tries(self, raw: IncomingMessage, options: RunnerOptions) -> Tries:
        return Tries(options)

    async def delivery(self, raw: IncomingMessage) -> Delivery:
        with suppress(ChannelInvalidStateError):  # Closed by now, or FastStream's memory: the last known name stays.
            self._learn(raw.channel.connection)
        queue = self.subscriber.queue
        return Delivery.from_rabbitmq(
            cluster=self._cluster,
            vhost=self._vhost,
            queue=self.subscriber.routing().removesuffix(queue.routing()) + queue.name,
            message_id=raw.message_id,
            headers=raw.headers,
            content_type=raw.content_type,
            body=raw.body,
            redelivered=bool(raw.redelivered),
        )

    def _learn(self, connection: object) -> None:
        """The same names as the runner's, so that a delivery is the same one for both."""
        properties = cast(Mapping[str, object], getattr(connection, "server_properties", {}))
        name = properties.get("cluster_name")
        self._cluster = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or "")
        self._vhost = str(getattr(connection, "vhost", "/"))

    async def done(self, raw: IncomingMessage) -> None:
        await raw.ack()

    async def back(self, raw: IncomingMessage) -> None:
        await raw.nack(requeue=True)


class Topic:
    """Kafka partitions, one message at a time; in FastStream's memory there are neither offsets nor a way back."""

    def __init__(self, subscriber: DefaultSubscriber) -> None:
        self.subscriber = subscriber
        self._tried: dict[tuple[str, int], tuple[int, Tries]] = {}
        # Invariant: nothing of a partition is handled above an offset that it could not yet be wound back to.
        self._owed: dict[tuple[str, int], int] = {}
        self._ids: TopicIds | None = None
        self._topic_ids: dict[str, str] = {}
        self._cluster_id = ""
        self._memory, self._arrivals = uuid4().hex, count()

    @property
    def _native(self) -> Consumer | None:
        native: object = getattr(self.subscriber.consumer, "consumer", None)
        return native if isinstance(native, Consumer) else None

    @property
    def rewinds(self) -> bool:
        return self._native is not None

    async def parse(self, raw: Message, original: Callable[[Any], Awaitable[Any]]) -> Any:
        try:
            return _unanswered(await original(raw))
        except UnicodeDecodeError:  # FastStream decodes every header; ours say for themselves what cannot be read.
            return KafkaMessage(raw, raw.value() or b"", consumer=cast(Any, self.subscriber.consumer), is_manual=True)

    def out_of_turn(self, raw: Message) -> bool:
        place, offset = _place(raw)
        if place in self._owed and offset <= self._owed[place]:
            del self._owed[place]
        return place in self._owed

    def tries(self, raw: Message, options: RunnerOptions) -> Tries:
        place, offset = _place(raw)
        if place not in self._tried or self._tried[place][0] != offset:
            self._tried[place] = (offset, Tries(options))
        return self._tried[place][1]

    async def delivery(self, raw: Message) -> Delivery:
        (topic, partition), offset = _place(raw)
        topic_id, native = self._memory, self._native
        if native is None:
            offset = next(self._arrivals)
        else:
            if self._ids is None:
                found = await asyncio.to_thread(native.list_topics, topic, METADATA_SECONDS)
                self._cluster_id = str(getattr(found, "cluster_id", None) or "")
                self._ids = TopicIds(cast(Any, self.subscriber.consumer).config, found)
            if topic not in self._topic_ids:
                self._topic_ids[topic] = await asyncio.to_thread(self._ids.of, topic)
            topic_id = self._topic_ids[topic]
        return Delivery.from_kafka(
            cluster_id=self._cluster_id,
            topic=topic,
            topic_id=topic_id,
            partition=partition,
            offset=offset,
            headers=_headers(raw),
            key=raw.key(),
            value=raw.value(),
        )

    async def done(self, raw: Message) -> None:
        place, offset = _place(raw)
        self._tried.pop(place, None)
        if (native := self._native) is not None:
            native.commit(offsets=[TopicPartition(*place, offset + 1)], asynchronous=True)

    async def back(self, raw: Message) -> None:
        place, offset = _place(raw)
        self._owed[place] = min(offset, self._owed.get(place, offset))
        await self._seek(place, self._owed[place])
        del self._owed[place]

    async def _seek(self, place: tuple[str, int], offset: int) -> None:
        if self._native is not None and self.subscriber.consumer is not None:
            await self.subscriber.consumer.seek(*place, offset)


def _place(raw: Message) -> tuple[tuple[str, int], int]:
    return (cast(str, raw.topic()), cast(int, raw.partition())), cast(int, raw.offset())


def _headers(raw: Message) -> list[tuple[str, str | bytes | None]]:
    try:
        headers = raw.headers() or []
    except UnicodeDecodeError:
        return [(":unreadable", None)]  # Becomes undecodable, and is kept as such.
    return list(headers.items()) if isinstance(headers, dict) else headers


def _unanswered(message: StreamMessage[Any]) -> StreamMessage[Any]:
    """FastStream would publish the handler's result to whatever the sender named."""
    message.reply_to = ""
    return message
