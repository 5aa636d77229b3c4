"""Events, envelopes and deliveries for tests of the consumer; every digest is computed, none is copied."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from fencepost.consumer.delivery import Delivery
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.content import binding
from fencepost.schemas.digest import digest
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.event import Event, Private
from fencepost.schemas.identity import uuid7

CLUSTER = "test-cluster"
TOPIC = "reports"
QUEUE = "reports"


class Submitted(Event, type="test.submitted", version=1):
    """An event with a private member."""

    document: str
    note: Private[str | None] = None


class Withdrawn(Event, type="test.withdrawn", version=3):
    """Another type, in a later version."""

    reason: str = "none"


def envelope(
    event: Event | None = None,
    *,
    tenant: str = "acme",
    operation: str = "op-1",
    document: str = "a",
    payload: bytes | None = None,
    type: str | None = None,
    version: int | None = None,
    epoch: int = 1,
    event_id: UUID | None = None,
    sequence: int = 1,
    time: datetime = datetime(2026, 1, 1, tzinfo=UTC),
) -> Envelope:
    """The envelope of an event as its relay would send it; `payload` replaces the content, with a right digest."""
    event = event or Submitted(tenant=tenant, operation=operation, document=document)
    raw = event.payload() if payload is None else payload
    name, number = type or event.event_type, version or event.event_version
    return Envelope(
        id=event_id or uuid7(),
        source="urn:fencepost:test",
        type=name,
        version=number,
        tenant=event.tenant,
        operation=event.operation,
        ordering_key=event.ordering_key,
        epoch=epoch,
        digest=digest(event.tenant, event.operation, name, number, epoch, binding(raw)),
        sequence=sequence,
        time=time,
        payload=raw,
    )


def from_kafka(envelope: Envelope, offset: int = 0, *, payload: bytes | None = None) -> Delivery:
    """A Kafka record of the envelope; `payload` replaces the bytes behind its back."""
    return Delivery.from_kafka(
        cluster_id=CLUSTER,
        topic=TOPIC,
        partition=0,
        offset=offset,
        headers=kafka_binding.encode(envelope),
        key=kafka_binding.key(envelope.tenant, envelope.ordering_key),
        value=envelope.payload if payload is None else payload,
    )


def from_rabbitmq(envelope: Envelope, message_id: str | None = None, *, redelivered: bool = False) -> Delivery:
    """An AMQP message of the envelope."""
    headers, content_type = amqp_binding.encode(envelope)
    return Delivery.from_rabbitmq(
        cluster=CLUSTER,
        vhost="/",
        queue=QUEUE,
        message_id=message_id or str(envelope.id),
        headers=dict(headers),
        content_type=content_type,
        body=envelope.payload,
        redelivered=redelivered,
    )
