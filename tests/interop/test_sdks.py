"""Other implementations of CloudEvents read from real brokers what the relay wrote, and the consumer reads what they write."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from confluent_kafka import Producer
from psycopg import Connection

from conformance.harness import Arrived
from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import OnRabbit
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.relay import outbox
from fencepost.relay.publisher import Route
from fencepost.schemas.event import Event, Private
from fencepost.schemas.identity import uuid7
from interop.sdks import BrokerName, Message, Mode, Sdk
from support.command_line import run_here
from support.database import Database
from support.processes import wait_for
from support.services import Kafka, Rabbit, Services, unique

DEADLINE_SECONDS = 40.0
TABLE = "CREATE TABLE done (tenant text, operation text, title text, pages int, note text)"


class Filed(Event, type="interop.filed", version=1):
    title: str
    pages: int
    parts: list[str] | None = None
    note: Private[str | None] = None


class OnBroker:
    """One broker with a place of this test in it."""

    def __init__(self, name: BrokerName, services: Services) -> None:
        self.name: BrokerName = name
        self._services = services
        self._broker = OnKafka(self.kafka) if name == "kafka" else OnRabbit(services.rabbitmq())
        self.route: Route = self._broker.destination()

    @property
    def kafka(self) -> Kafka:
        return self._services.kafka()

    @property
    def rabbit(self) -> Rabbit:
        return self._services.rabbitmq()

    @property
    def address(self) -> str:
        return self.kafka.bootstrap if self.name == "kafka" else self.rabbit.url

    def read(self, expected: int) -> list[Message]:
        """What is in the broker, as any client sees it."""
        return [self._message(arrived) for arrived in self._broker.read(self.route, expected)]

    def _message(self, arrived: Arrived) -> Message:
        wire = cast(tuple[Any, ...], arrived.wire)
        if self.name == "kafka":
            key, headers, value = wire
            return Message({name: raw.decode() for name, raw in headers}, value, key=key.decode())
        return Message(dict(wire[0]), wire[-1], wire[1])

    def send(self, messages: Sequence[Message]) -> None:
        """Hands messages of others to the broker and waits for its confirm."""
        if self.name == "kafka":
            producer = Producer({"bootstrap.servers": self.address, "acks": "all", "log_level": 0})
            for each in messages:
                producer.produce(self.route.to, value=each.body, key=each.key, headers=cast(Any, each.headers))
            assert producer.flush(DEADLINE_SECONDS) == 0
            return

        async def publish(channel: AbstractChannel) -> None:
            exchange = await channel.get_exchange(self.route.to)
            for each in messages:
                message = aio_pika.Message(
                    each.body, headers=cast(Any, each.headers), content_type=each.content_type, delivery_mode=2
                )
                await exchange.publish(message, "filed", timeout=DEADLINE_SECONDS)

        assert isinstance(self._broker, OnRabbit)
        self._broker.on_channel(publish)

    def runner(self, dsn: str, handler: Any) -> KafkaRunner | RabbitRunner:
        options = RunnerOptions(backoff_base=0.05, backoff_max=0.2, max_attempts=3, drain_seconds=10)
        if self.name == "rabbitmq":
            return RabbitRunner(handler, dsn, url=self.address, queue=self.route.to, options=options)
        config: dict[str, object] = {"auto.offset.reset": "earliest"}
        return KafkaRunner(
            handler,
            dsn,
            bootstrap=self.address,
            topics=[self.route.to],
            group=unique("interop"),
            config=config,
            options=options,
        )


@pytest.fixture(params=["kafka", "rabbitmq"])
def broker(request: pytest.FixtureRequest, services: Services) -> OnBroker:
    return OnBroker(request.param, services)


@contextmanager
def running(runner: KafkaRunner | RabbitRunner) -> Generator[None, None, None]:
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            runner.run(stop)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert errors == []


@inbox(consumer="interop")
def filed(tx: Connection[Any], event: Filed) -> None:
    tx.execute(
        "INSERT INTO done VALUES (%s, %s, %s, %s, %s)",
        (event.tenant, event.operation, event.title, event.pages, event.note),
    )


def rows(database: Database, query: str) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute(query.encode()).fetchall()


def relayed(database: Database, broker: OnBroker, mode: Mode, events: Sequence[Filed]) -> list[UUID]:
    """Commits the events and lets the command line publish them; returns their ids."""
    ids: list[UUID] = []
    with database.connect() as conn:
        for event in events:
            ids.append(outbox.enqueue(conn, event, attributes={"subject": "Übersicht"}).event_id)
    destination = {
        "name": "here",
        "kind": broker.name,
        "address": broker.address,
        "routes": [{"match": "interop.*", "to": broker.route.to}],
        "mode": mode,
    }
    done = run_here(
        database,
        "relay",
        "run",
        "--once",
        FENCEPOST_DESTINATIONS=json.dumps([destination]),
        FENCEPOST_RELAY_HEALTH_ADDRESS="off",
    )
    assert done.out.startswith(f"published {len(events)}, parked 0, "), done
    return ids


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_an_sdk_reads_what_the_relay_wrote(database18: Database, broker: OnBroker, mode: Mode, sdk: Sdk) -> None:
    event = Filed(
        tenant="ténant",
        operation="op-1",
        ordering_key="key",
        title='é "quoted" \u2028 😀',
        pages=2**53 - 1,
        parts=["a", ""],
        note="for them",
    )
    (event_id,) = relayed(database18, broker, mode, [event])

    (message,) = broker.read(1)
    seen = sdk.read(broker.name, message)

    assert seen["data"] == json.loads(event.payload())
    assert (seen["id"], seen["type"], seen["specversion"]) == (str(event_id), "interop.filed.v1", "1.0")
    assert (seen["fptenant"], seen["fpoperation"], seen["subject"]) == ("ténant", "op-1", "Übersicht")
    assert seen["datacontenttype"] == "application/json"
    assert seen["fpdigest"].startswith("sha256-v1:") and len(seen["sequence"]) == 20
    assert datetime.fromisoformat(seen["time"]).tzinfo is not None
    # The SDKs take the key of a Kafka record for the attribute; ours has the tenant in it.
    assert seen["partitionkey"] == ('["ténant","key"]' if broker.name == "kafka" else "key")
    if mode == "binary":
        assert message.body == event.payload()
    else:
        assert event.payload() in message.body


def attributes(operation: str, **changes: str) -> dict[str, str]:
    """What a foreign producer sets; the SDK adds specversion, and the producer the digest."""
    return {
        "id": str(uuid7()),
        "source": "urn:elsewhere",
        "type": "interop.filed.v1",
        "time": "2026-01-02T03:04:05Z",
        "datacontenttype": "application/json",
        "partitionkey": "key",
        "sequence": "0" * 20,
        "fptenant": "acme",
        "fpoperation": operation,
        "fpepoch": "0",
        "subject": "theirs",
        **changes,
    }


@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_the_consumer_reads_what_an_sdk_wrote_and_names_what_it_lacks(
    database18: Database, broker: OnBroker, mode: Mode, sdk: Sdk
) -> None:
    payload = Filed(tenant="acme", operation="x", title='é "q" 😀', pages=3, note="private").payload()
    lacking = ("fptenant", "fpoperation", "fpepoch", "sequence", "partitionkey")
    messages = [sdk.write(broker.name, mode, attributes("op-1"), payload)]
    for name in lacking:
        whole = attributes(f"op-{name}")
        digest = whole | {"fpdigest": "sha256-v1:" + "0" * 64}
        messages.append(sdk.write(broker.name, mode, {k: v for k, v in digest.items() if k != name}, payload))
    messages.append(sdk.write(broker.name, mode, attributes("op-0", fpdigest="sha256-v1:" + "0" * 64), payload))
    messages.append(sdk.write(broker.name, mode, attributes("op-9", type="interop.filed.v9"), payload))
    messages.append(sdk.write(broker.name, mode, attributes("op-2"), payload))
    with database18.connect() as conn:
        conn.execute(TABLE)
    broker.send(messages)

    def handled() -> bool:
        return len(rows(database18, "SELECT operation FROM done")) == 2

    with running(broker.runner(database18.dsn, filed)):
        wait_for(handled, DEADLINE_SECONDS, "both good events")
        wait_for(lambda: len(dead(database18)) == len(messages) - 2, DEADLINE_SECONDS, "the dead letters")

    found = [("acme", "op-1", 'é "q" 😀', 3, "private"), ("acme", "op-2", 'é "q" 😀', 3, "private")]
    assert sorted(rows(database18, "SELECT * FROM done")) == found
    expected = [("undecodable", "missing_attribute", name) for name in lacking]
    expected += [("undecodable", "digest_mismatch", "fpdigest"), ("newer_version", "newer_version", "version")]
    assert sorted(dead(database18)) == sorted(expected)


def dead(database: Database) -> list[tuple[Any, ...]]:
    return rows(database, "SELECT reason, detail, field FROM fencepost.dead_letter")
