"""What the broker in memory keeps: one message per arrival at it, encoded as the real relay would send it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal, assert_never, cast
from uuid import UUID

from fencepost.consumer.delivery import Delivery
from fencepost.relay.publisher import OutboxRow, Outgoing
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import CONTENT_TYPE, instant

__all__ = ["Kind", "Message", "encoded", "shuffled"]

Kind = Literal["kafka", "rabbitmq"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message at the broker; ``topic`` is the route's target, ``offset`` its place there. Bytes are not shown."""

    kind: Kind
    topic: str
    offset: int
    routing_key: str
    event_id: UUID
    type: str
    version: int
    tenant: str
    operation: str
    ordering_key: str
    row: OutboxRow = field(repr=False)
    source: str = field(repr=False)

    @property
    def body(self) -> bytes:
        """The payload, unchanged."""
        return self.row.payload

    def headers(self) -> list[tuple[str, bytes | str]]:
        """The headers on the wire, in binary mode."""
        r = self.row
        attributes = cast(dict[str, str], json.loads(r.attributes)) if r.attributes else None
        args = (r.event_id, r.type, r.version, r.tenant, r.operation, r.ordering_key, r.epoch, r.digest, r.seq)
        match self.kind:
            case "kafka":
                encode = kafka_binding.encoder(self.source)
                return [*encode(*args, r.recorded_at, attributes, r.reference)]
            case "rabbitmq":
                return [*amqp_binding.encoder(self.source)(*args, r.recorded_at, attributes, r.reference).items()]
            case _:
                assert_never(self.kind)

    def delivery(self, cluster: str, *, redelivered: bool = False) -> Delivery:
        """This message as it arrives at a consumer; each arrival of it has the same coordinates."""
        match self.kind:
            case "kafka":
                return Delivery.from_kafka(
                    cluster_id=cluster,
                    topic=self.topic,
                    partition=0,
                    offset=self.offset,
                    headers=self.headers(),
                    key=kafka_binding.key(self.tenant, self.ordering_key),
                    value=self.body,
                )
            case "rabbitmq":
                return Delivery.from_rabbitmq(
                    cluster=cluster,
                    vhost="/",
                    queue=self.topic,
                    message_id=str(self.event_id),
                    headers=dict(self.headers()),
                    content_type=CONTENT_TYPE,
                    body=self.body,
                    redelivered=redelivered,
                )
            case _:
                assert_never(self.kind)

    def older(self, by: timedelta) -> Message:
        """The same message, its event accepted earlier."""
        recorded = datetime.fromisoformat(self.row.recorded_at) - by
        return replace(self, row=self.row._replace(recorded_at=instant(recorded)))


def encoded(kind: Kind, source: str, offset: int, outgoing: Outgoing) -> Message:
    """The message of one event; what can be no message raises here, as it would be refused by the relay."""
    row, route = outgoing
    message = Message(
        kind=kind,
        topic=route.to,
        offset=offset,
        routing_key=route.routing_key.replace("{type}", row.type),
        event_id=UUID(str(row.event_id)),
        type=row.type,
        version=row.version,
        tenant=row.tenant,
        operation=row.operation,
        ordering_key=row.ordering_key,
        row=row,
        source=source,
    )
    message.headers()
    return message


def shuffled(messages: Sequence[Message], seed: int) -> list[Message]:
    """Another order of the same messages in which those of each topic and key keep theirs; equal for equal seeds."""
    lanes: dict[tuple[str, str, str], list[Message]] = {}
    for message in messages:
        lanes.setdefault((message.topic, message.tenant, message.ordering_key), []).append(message)
    order = [lane for lane, waiting in lanes.items() for _ in waiting]
    random.Random(seed).shuffle(order)
    heads = {lane: iter(waiting) for lane, waiting in lanes.items()}
    return [next(heads[lane]) for lane in order]
