"""Topics and exchanges are made only for those who ask, and never changed."""

import json
from typing import Any

import aiormq
import pytest
from aio_pika.abc import AbstractChannel
from confluent_kafka.admin import AdminClient

from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import OnRabbit
from fencepost.relay.publisher import Route
from support.command_line import Fencepost, Result
from support.database import Database
from support.relaying import enqueue
from support.services import Kafka, Rabbit, unique


def relay(database: Database, fencepost: Fencepost, kind: str, address: str, to: str, **more: Any) -> Result:
    routes = [{"match": "test.*", "to": to}]
    table = json.dumps([{"name": "here", "kind": kind, "address": address, "routes": routes, **more}])
    return fencepost(database, "relay", "run", "--once", FENCEPOST_DESTINATIONS=table)


def partitions(kafka: Kafka, topic: str) -> int:
    found = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}).list_topics(timeout=10).topics
    return len(found[topic].partitions) if topic in found else 0


def exists(rabbit: Rabbit, exchange: str) -> bool:
    async def look(channel: AbstractChannel) -> bool:
        try:
            await channel.get_exchange(exchange)
        except aiormq.exceptions.ChannelNotFoundEntity:
            return False
        return True

    return OnRabbit(rabbit).on_channel(look)


def test_a_topic_is_created_when_asked_for_with_its_options_and_then_left_alone(
    database18: Database, real_kafka: Kafka, fencepost: Fencepost
) -> None:
    topic = unique("declared")
    enqueue(database18, 3)
    done = relay(database18, fencepost, "kafka", real_kafka.bootstrap, topic)
    assert (done.code, partitions(real_kafka, topic)) == (0, 0)
    assert "parked 3" in done.out  # the control: nobody asked

    enqueue(database18, 3, first=3, keys=1)
    other = unique("declared")
    options = {"partitions": 4, "replication": 1}
    again = relay(
        database18, fencepost, "kafka", real_kafka.bootstrap, other, declare=True, options=options, name="two"
    )
    assert again.code == 0, again.err
    assert partitions(real_kafka, other) == 4
    enqueue(database18, 2, first=10)
    options = {"partitions": 2}
    third = relay(
        database18, fencepost, "kafka", real_kafka.bootstrap, other, declare=True, options=options, name="two"
    )
    assert third.out.startswith("published 2, parked 0, "), third.out
    assert partitions(real_kafka, other) == 4
    assert len(OnKafka(real_kafka).read(Route("*", other), 2)) == 2


def test_an_exchange_is_declared_when_asked_for_and_then_left_alone(
    database18: Database, rabbitmq: Rabbit, fencepost: Fencepost
) -> None:
    exchange = rabbitmq.name()
    assert relay(database18, fencepost, "rabbitmq", rabbitmq.url, exchange).code == 0
    assert not exists(rabbitmq, exchange)  # the control: nobody asked
    assert relay(database18, fencepost, "rabbitmq", rabbitmq.url, exchange, declare=True).code == 0
    assert exists(rabbitmq, exchange)

    async def bind(channel: AbstractChannel) -> None:
        queue = await channel.declare_queue(exchange, durable=True)
        # Declared again with the same properties, or this is refused.
        await queue.bind(await channel.declare_exchange(exchange, "topic", durable=True), "test.#")

    OnRabbit(rabbitmq).on_channel(bind)
    enqueue(database18, 4)
    assert relay(database18, fencepost, "rabbitmq", rabbitmq.url, exchange, declare=True).code == 0
    assert len(OnRabbit(rabbitmq).read(Route("*", exchange), 4)) == 4


def test_an_exchange_of_another_type_is_used_as_it_is(
    database18: Database, rabbitmq: Rabbit, fencepost: Fencepost
) -> None:
    exchange = rabbitmq.name()

    async def declare(channel: AbstractChannel) -> None:
        queue = await channel.declare_queue(exchange, durable=True)
        await queue.bind(await channel.declare_exchange(exchange, "fanout", durable=True))

    OnRabbit(rabbitmq).on_channel(declare)
    enqueue(database18, 2)
    assert relay(database18, fencepost, "rabbitmq", rabbitmq.url, exchange, declare=True).code == 0
    assert len(OnRabbit(rabbitmq).read(Route("*", exchange), 2)) == 2


def test_what_a_broker_refuses_to_make_ends_the_relay_in_one_line(
    database18: Database, real_kafka: Kafka, rabbitmq: Rabbit, fencepost: Fencepost
) -> None:
    topic = unique("declared")
    good = relay(database18, fencepost, "kafka", real_kafka.bootstrap, topic, declare=True, name="good")
    assert good.code == 0  # the control
    for name, address, kind, to, options in (
        ("one", real_kafka.bootstrap, "kafka", unique("declared"), {"replication": 9}),
        ("two", real_kafka.bootstrap, "kafka", "no such name!", {}),
        ("three", rabbitmq.url, "rabbitmq", "amq.ours", {}),
    ):
        done = relay(database18, fencepost, kind, address, to, declare=True, options=options, name=name)
        assert done.code == 2, (name, done.err)
        assert f"refuses to {'create topic' if kind == 'kafka' else 'declare exchange'} {to}" in done.err
        assert f"[destinations.{name}.declare]" in done.err


@pytest.mark.parametrize(
    ("options", "declare", "field"),
    [
        ({"partitions": 3}, False, "destinations.here.options.partitions"),
        ({"replication": "many"}, True, "destinations.here.options.replication"),
        ({"partitions": 0}, True, "destinations.here.options.partitions"),
    ],
)
def test_numbers_of_topics_are_refused_where_they_mean_nothing(
    database18: Database, fencepost: Fencepost, options: dict[str, object], declare: bool, field: str
) -> None:
    done = relay(database18, fencepost, "kafka", "127.0.0.1:9", "there", declare=declare, options=options)
    assert done.code == 2
    assert f"[{field}]" in done.line
