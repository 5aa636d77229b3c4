"""A FastStream subscriber is an inbox only where nothing but the inbox acknowledges; in FastStream's own memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.confluent import KafkaBroker, TestKafkaBroker
from faststream.rabbit import Channel, RabbitBroker, RabbitRouter, TestRabbitBroker
from psycopg import AsyncConnection, Connection

from fencepost.consumer.faststream import Inboxes
from fencepost.consumer.inbox import inbox
from fencepost.consumer.runner import RunnerOptions
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError
from support.database import Database
from support.deliveries import Submitted, envelope

Tx = Connection[Any]
Send = Callable[[Envelope], Awaitable[None]]
FAST = RunnerOptions(backoff_base=0.01, backoff_max=0.02, max_attempts=3)
LIMITED = Channel(prefetch_count=8)
MANUAL = AckPolicy.MANUAL


@inbox(consumer="reports")
def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
    if event.operation == "poison":
        raise ValueError("never")


@inbox(consumer="reports")
async def insert_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
    if event.operation == "poison":
        raise ValueError("never")


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def dead(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT reason, operation, attempts FROM fencepost.dead_letter ORDER BY id").fetchall()


def in_rabbitmq(dsn: str, handler: Any, use: Callable[[Send], Awaitable[None]]) -> None:
    broker = RabbitBroker("amqp://127.0.0.1:1")
    inboxes = Inboxes(broker, dsn, options=FAST)
    inboxes.on(broker.subscriber("reports", ack_policy=MANUAL, channel=LIMITED))(handler)

    async def send(value: Envelope) -> None:
        headers, content_type = amqp_binding.encode(value)
        await broker.publish(
            value.payload,
            "reports",
            headers=dict(headers),
            content_type=content_type,
            message_id=str(value.id),
        )

    async def main() -> None:
        try:
            async with TestRabbitBroker(broker):
                await use(send)
        finally:
            await inboxes.close()

    asyncio.run(main())


def in_kafka(dsn: str, handler: Any, use: Callable[[Send], Awaitable[None]]) -> None:
    broker = KafkaBroker("127.0.0.1:1")
    inboxes = Inboxes(broker, dsn, options=FAST)
    inboxes.on(broker.subscriber("reports", group_id="reports", ack_policy=MANUAL))(handler)

    async def send(value: Envelope) -> None:
        headers = {name: text.decode() for name, text in kafka_binding.encode(value)}
        key = kafka_binding.key(value.tenant, value.ordering_key)
        await broker.publish(value.payload, "reports", headers=headers, key=key)

    async def main() -> None:
        try:
            async with TestKafkaBroker(broker):
                await use(send)
        finally:
            await inboxes.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("run", [in_rabbitmq, in_kafka])
def test_in_memory_copies_are_handled_once_and_what_cannot_be_handled_is_set_aside(
    domain18: Database, run: Callable[..., None], kind: str
) -> None:
    first = envelope(operation="op-1")

    async def use(send: Send) -> None:
        await send(first)
        await send(first)
        await send(envelope(operation="op-1", document="other"))
        await send(envelope(operation="poison"))
        await send(replace(envelope(operation="op-2"), payload=b"{"))
        await send(envelope(operation="end"))

    run(domain18.dsn, insert if kind == "sync" else insert_async, use)

    assert operations(domain18) == ["op-1", "end"]
    assert dead(domain18) == [("conflict", "op-1", 1), ("handler_failed", "poison", 3), ("undecodable", "op-2", 1)]


@pytest.mark.parametrize("policy", [each for each in AckPolicy if each is not MANUAL])
def test_a_subscriber_that_acknowledges_by_itself_is_refused_when_it_is_declared(policy: AckPolicy) -> None:
    rabbit, kafka = RabbitBroker("amqp://127.0.0.1:1"), KafkaBroker("127.0.0.1:1")
    queues, topics = Inboxes(rabbit, ""), Inboxes(kafka, "")
    queues.on(rabbit.subscriber("a", ack_policy=MANUAL, channel=LIMITED))(insert)
    topics.on(kafka.subscriber("a", group_id="g", ack_policy=MANUAL))(insert)

    with pytest.raises(ConfigError) as of_queue:
        queues.on(rabbit.subscriber("b", ack_policy=policy, channel=LIMITED))
    if policy is AckPolicy.REJECT_ON_ERROR:  # FastStream warns of it itself.
        with pytest.warns(UserWarning, match="REJECT_ON_ERROR"):
            subscriber = kafka.subscriber("b", group_id="g", ack_policy=policy)
    else:
        subscriber = kafka.subscriber("b", group_id="g", ack_policy=policy)
    with pytest.raises(ConfigError) as of_topic:
        topics.on(subscriber)
    for refused in (of_queue.value, of_topic.value):
        assert (refused.field, "AckPolicy.MANUAL" in (refused.hint or "")) == ("ack_policy", True)


def test_the_policies_that_faststream_chooses_by_itself_are_refused_and_the_brokers_own_manual_is_not() -> None:
    rabbit, kafka = RabbitBroker("amqp://127.0.0.1:1"), KafkaBroker("127.0.0.1:1")
    for inboxes, subscriber in (
        (Inboxes(rabbit, ""), rabbit.subscriber("a", channel=LIMITED)),
        (Inboxes(kafka, ""), kafka.subscriber("a", group_id="g")),
    ):
        with pytest.raises(ConfigError) as refused:
            inboxes.on(subscriber)
        assert refused.value.field == "ack_policy"

    rabbit = RabbitBroker("amqp://127.0.0.1:1", ack_policy=MANUAL)
    Inboxes(rabbit, "").on(rabbit.subscriber("a", channel=LIMITED))(insert)
    kafka = KafkaBroker("127.0.0.1:1", ack_policy=MANUAL)
    Inboxes(kafka, "").on(kafka.subscriber("a", group_id="g"))(insert)


def test_deliveries_without_limit_or_several_at_a_time_are_refused() -> None:
    rabbit = RabbitBroker("amqp://127.0.0.1:1", ack_policy=MANUAL)
    kafka = KafkaBroker("127.0.0.1:1", ack_policy=MANUAL)
    queues, topics = Inboxes(rabbit, ""), Inboxes(kafka, "")
    queues.on(rabbit.subscriber("a", channel=LIMITED))
    topics.on(kafka.subscriber("a", group_id="g"))

    def field(inboxes: Inboxes, subscriber: Any) -> str | None:
        with pytest.raises(ConfigError) as refused:
            inboxes.on(subscriber)
        assert refused.value.hint
        return refused.value.field

    assert field(queues, rabbit.subscriber("b")) == "channel"
    assert field(queues, rabbit.subscriber("b", channel=Channel())) == "channel"
    assert field(queues, kafka.subscriber("b", group_id="g")) == "subscriber"
    assert field(topics, kafka.subscriber("b", group_id="g", max_workers=2)) == "max_workers"
    assert field(topics, kafka.subscriber("b", group_id="g", batch=True)) == "batch"
    assert field(topics, kafka.subscriber("b")) == "group_id"
    with pytest.raises(ConfigError) as refused:
        Inboxes(KafkaBroker("127.0.0.1:1"), "", options=RunnerOptions(batch=2))
    assert refused.value.field == "batch"


@pytest.mark.parametrize("name", ["enable.auto.commit", "auto.commit.enable"])
@pytest.mark.parametrize("value", [True, "true"])
def test_a_brokers_setting_that_commits_by_itself_is_refused(name: str, value: object) -> None:
    def on(settings: dict[str, Any]) -> None:
        broker = KafkaBroker("127.0.0.1:1", config=settings)  # type: ignore[arg-type]
        Inboxes(broker, "").on(broker.subscriber("a", group_id="g", ack_policy=MANUAL))

    on({name: False})
    with pytest.raises(ConfigError) as refused:
        on({name: value})
    assert refused.value.field == name


def test_one_subscriber_takes_one_inbox_and_only_an_inbox() -> None:
    broker = RabbitBroker("amqp://127.0.0.1:1", ack_policy=MANUAL)
    inboxes = Inboxes(broker, "")
    subscriber = broker.subscriber("a", channel=LIMITED)
    assert inboxes.on(subscriber)(insert) is insert

    with pytest.raises(ConfigError) as second:
        inboxes.on(subscriber)(insert_async)
    with pytest.raises(ConfigError) as bare:
        inboxes.on(broker.subscriber("b", channel=LIMITED))(insert.handler)  # type: ignore[type-var]  # pyright: ignore
    with pytest.raises(ConfigError) as broker_of_another_kind:
        Inboxes(object(), "")  # type: ignore[arg-type]  # pyright: ignore
    assert [each.value.field for each in (second, bare, broker_of_another_kind)] == ["subscriber", "handler", "broker"]


def test_a_database_that_does_not_fit_the_handler_is_refused_when_it_is_declared(domain18: Database) -> None:
    broker = RabbitBroker("amqp://127.0.0.1:1", ack_policy=MANUAL)
    with domain18.connect() as conn:
        inboxes = Inboxes(broker, conn)
        inboxes.on(broker.subscriber("a", channel=LIMITED))(insert)
        with pytest.raises(ConfigError) as refused:
            inboxes.on(broker.subscriber("b", channel=LIMITED))(insert_async)
    assert refused.value.field == "database"


def test_a_subscriber_of_a_router_is_an_inbox_under_the_name_that_its_queue_really_has(domain18: Database) -> None:
    broker, router = RabbitBroker("amqp://127.0.0.1:1"), RabbitRouter(prefix="eu.")
    inboxes = Inboxes(broker, domain18.dsn, options=FAST)
    inboxes.on(router.subscriber("reports", ack_policy=MANUAL, channel=LIMITED))(insert)
    broker.include_router(router)
    value = envelope(operation="op-1")
    headers, content_type = amqp_binding.encode(value)

    async def main() -> None:
        try:
            async with TestRabbitBroker(broker):
                for _ in range(2):
                    await broker.publish(value.payload, "eu.reports", headers=dict(headers), content_type=content_type)
        finally:
            await inboxes.close()

    asyncio.run(main())
    assert operations(domain18) == ["op-1"]
    with domain18.connect() as conn:
        found = conn.execute("SELECT coordinates FROM fencepost.delivery").fetchall()
    assert {json.loads(text)[3] for (text,) in found} == {"eu.reports"}
