"""FastStream applications on real brokers: acknowledged means committed, whatever dies or fails in between."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from faststream import AckPolicy, BaseMiddleware, StreamMessage
from faststream.confluent import KafkaBroker
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue
from psycopg import AsyncConnection, Connection
from yarl import URL

from fencepost.consumer import faststream_sources
from fencepost.consumer.faststream import Inboxes
from fencepost.consumer.inbox import AsyncInbox, Inbox, inbox
from fencepost.consumer.runner import RunnerOptions
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from support.database import Database
from support.deliveries import Submitted, envelope
from support.processes import Child, wait_for
from support.proxy import Proxy
from support.services import Kafka, Rabbit, unique

Tx = Connection[Any]
AnyInbox = Inbox[Any] | AsyncInbox[Any]
DEADLINE_SECONDS = 40.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, max_attempts=3)


@inbox(consumer="reports")
def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
    if event.operation == "poison":
        raise ValueError(f"do-not-log {event.document}")


@inbox(consumer="reports")
async def insert_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
    if event.operation == "poison":
        raise ValueError(f"do-not-log {event.document}")


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def dead(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        found = "SELECT reason, operation, attempts FROM fencepost.dead_letter ORDER BY reason"
        return conn.execute(found).fetchall()


def coordinates(database: Database) -> list[Any]:
    with database.connect() as conn:
        found: list[Any] = json.loads(conn.execute("SELECT coordinates FROM fencepost.delivery").fetchall()[0][0])
        return found


async def until(found: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_for, lambda: found() or None, DEADLINE_SECONDS, what)


@asynccontextmanager
async def channel_of(rabbitmq: Rabbit) -> AsyncGenerator[AbstractChannel, None]:
    connection = await aio_pika.connect(rabbitmq.url, timeout=DEADLINE_SECONDS)
    async with connection:
        yield await connection.channel(publisher_confirms=True, on_return_raises=True)


def publish(rabbitmq: Rabbit, queue: str, values: Iterable[Envelope | bytes]) -> None:
    async def send() -> None:
        async with channel_of(rabbitmq) as channel:
            for value in values:
                if isinstance(value, bytes):
                    message = aio_pika.Message(value, headers={"ce-id": 7}, content_type="application/json")
                else:
                    headers, content_type = amqp_binding.encode(value)
                    message = aio_pika.Message(
                        value.payload, headers=dict(headers), content_type=content_type, message_id=str(value.id)
                    )
                await channel.default_exchange.publish(message, queue, timeout=DEADLINE_SECONDS)

    asyncio.run(send())


@pytest.fixture
def queue(rabbitmq: Rabbit) -> Generator[str, None, None]:
    """A durable queue of this test."""
    name = rabbitmq.name()

    async def make(gone: bool) -> None:
        async with channel_of(rabbitmq) as channel:
            await (channel.queue_delete(name) if gone else channel.declare_queue(name, durable=True))

    asyncio.run(make(False))
    yield name
    asyncio.run(make(True))


def left(rabbitmq: Rabbit, name: str) -> int:
    """Messages in the queue; read after the consumer has gone, that is all of them."""

    async def ask() -> int:
        async with channel_of(rabbitmq) as channel:
            return (await channel.declare_queue(name, passive=True)).declaration_result.message_count or 0

    return asyncio.run(ask())


def consume(
    rabbitmq: Rabbit,
    database: Database,
    queue: str,
    handler: AnyInbox,
    done: Callable[[], bool],
    *middlewares: Any,
    url: str | None = None,
    options: RunnerOptions = FAST,
) -> None:
    """A FastStream application on RabbitMQ until `done`, stopped as FastStream stops it."""

    async def main() -> None:
        broker = RabbitBroker(url or rabbitmq.url, middlewares=middlewares, reconnect_interval=0.2)
        inboxes = Inboxes(broker, database.dsn, options=options)
        subscriber = broker.subscriber(
            RabbitQueue(queue, declare=False), ack_policy=AckPolicy.MANUAL, channel=Channel(prefetch_count=4)
        )
        inboxes.on(subscriber)(handler)
        try:
            async with broker:
                await broker.start()
                await inboxes.start()
                await until(done, "the end of the queue")
        finally:
            await inboxes.close()

    asyncio.run(main())


def produce(kafka: Kafka, topic: str, values: Iterable[Envelope | bytes], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "acks": "all", "log_level": 0})
    for value in values:
        if isinstance(value, bytes):
            producer.produce(topic, value=value, headers=[("ce_id", b"\xff")], partition=partition)
        else:
            key = kafka_binding.key(value.tenant, value.ordering_key)
            headers: list[tuple[str, str | bytes | None]] = [*kafka_binding.encode(value)]
            producer.produce(topic, value=value.payload, key=key, headers=headers, partition=partition)
    assert producer.flush(DEADLINE_SECONDS) == 0


def committed(kafka: Kafka, group: str, topic: str, partition: int = 0) -> int:
    """The offset that the broker has for the group; 0 where there is none."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})

    def ask() -> int | None:
        try:
            (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=DEADLINE_SECONDS)
        except KafkaException:  # A new group has no coordinator yet.
            return None
        return max(found.offset, 0)

    try:
        offset = wait_for(lambda: None if (found := ask()) is None else [found], DEADLINE_SECONDS, "the coordinator")
        return offset[0]
    finally:
        consumer.close()


def poll(
    kafka: Kafka,
    database: Database,
    topic: str,
    group: str,
    handler: AnyInbox,
    done: Callable[[], bool],
    *middlewares: Any,
    options: RunnerOptions = FAST,
) -> None:
    """A FastStream application on Kafka until `done`, stopped as FastStream stops it."""

    async def main() -> None:
        broker = KafkaBroker(kafka.bootstrap, middlewares=middlewares)
        inboxes = Inboxes(broker, database.dsn, options=options)
        subscriber = broker.subscriber(
            topic,
            group_id=group,
            ack_policy=AckPolicy.MANUAL,
            auto_offset_reset="earliest",
            session_timeout_ms=kafka.session_ms,
            heartbeat_interval_ms=300,
        )
        inboxes.on(subscriber)(handler)
        try:
            async with broker:
                await broker.start()
                await inboxes.start()
                await until(done, "the end of the topic")
        finally:
            await inboxes.close()

    asyncio.run(main())


class Failing(BaseMiddleware[Any, Any]):
    """Fails at the first two arrivals of op-1, before and behind the parser, and swallows the third."""

    arrivals = 0

    async def on_receive(self) -> None:
        if b"op-1" in str(self.msg.headers() if callable(self.msg.headers) else self.msg.headers).encode():
            type(self).arrivals += 1
            if type(self).arrivals == 1:
                raise ValueError("before the parser")

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        if "op-1" in str(msg.headers):
            if type(self).arrivals == 2:
                raise ValueError("behind the parser")
            if type(self).arrivals == 3:
                return None
        return await call_next(msg)


@pytest.fixture
def failing() -> type[Failing]:
    class Mine(Failing):
        arrivals = 0

    return Mine


@pytest.mark.parametrize("handler", [insert, insert_async], ids=["sync", "async"])
def test_a_queue_goes_on_over_copies_conflicts_and_what_can_never_be_handled(
    rabbitmq: Rabbit, domain18: Database, queue: str, handler: AnyInbox, caplog: pytest.LogCaptureFixture
) -> None:
    first = envelope(operation="op-0")
    publish(rabbitmq, queue, [first, first])
    consume(rabbitmq, domain18, queue, handler, lambda: len(operations(domain18)) == 1)
    broker, cluster, vhost, name, _ = coordinates(domain18)
    assert (broker, vhost, name, "@" in cluster) == ("rabbitmq", "/", queue, True)

    publish(rabbitmq, queue, [first, envelope(operation="op-0", document="other"), b"\0do-not-log"])
    publish(rabbitmq, queue, [envelope(operation="poison"), envelope(operation="end")])
    consume(
        *(rabbitmq, domain18, queue, handler),
        lambda: len(dead(domain18)) == 3 and operations(domain18) == ["op-0", "end"],
    )

    assert dead(domain18) == [("conflict", "op-0", 1), ("handler_failed", "poison", 3), ("undecodable", None, 1)]
    assert left(rabbitmq, queue) == 0
    assert "do-not-log" not in caplog.text


@pytest.mark.parametrize("handler", [insert, insert_async], ids=["sync", "async"])
def test_a_partition_goes_on_over_copies_conflicts_and_what_can_never_be_handled(
    kafka: Kafka, domain18: Database, handler: AnyInbox, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = kafka.topic(), unique("group")
    first = envelope(operation="op-0")
    produce(kafka, topic, [first, first, envelope(operation="op-0", document="other"), b"\0do-not-log"])
    produce(kafka, topic, [envelope(operation="poison"), envelope(operation="end")])

    poll(kafka, domain18, topic, group, handler, lambda: committed(kafka, group, topic) == 6)

    assert operations(domain18) == ["op-0", "end"]
    assert dead(domain18) == [("conflict", "op-0", 1), ("handler_failed", "poison", 3), ("undecodable", None, 1)]
    broker, cluster, name, topic_id, partition, _ = coordinates(domain18)
    assert (broker, name, partition, bool(cluster)) == ("kafka", topic, 0, True)
    assert topic_id or not kafka.real
    assert "do-not-log" not in caplog.text


def test_no_offset_is_committed_above_a_message_that_is_tried_again(real_kafka: Kafka, domain18: Database) -> None:
    kafka = real_kafka
    topic, group = kafka.topic(partitions=2), unique("group")
    for partition in (0, 1):
        produce(kafka, topic, [envelope(operation=f"p{partition}-{number}") for number in range(20)], partition)
    seen: list[int] = []

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert.handler(tx, event)
        if event.operation == "p0-3" and len(seen) < 2:
            seen.append(committed(kafka, group, topic))
            raise ValueError("not yet")

    poll(
        *(kafka, domain18, topic, group, handler),
        lambda: all(committed(kafka, group, topic, partition) == 20 for partition in (0, 1)),
    )

    assert len(seen) == 2 and all(offset <= 3 for offset in seen)
    for partition in (0, 1):
        mine = [each for each in operations(domain18) if each.startswith(f"p{partition}")]
        assert mine == [f"p{partition}-{number}" for number in range(20)]
    assert dead(domain18) == []


def test_a_partition_that_cannot_be_wound_back_at_once_is_not_handled_above_the_failure(
    kafka: Kafka, domain18: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, [envelope(operation=f"op-{number}") for number in range(5)])
    refused = 0
    failed: list[str] = []

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert.handler(tx, event)
        if event.operation == "op-1" and not failed:
            failed.append(event.operation)
            raise ValueError("not yet")

    client = faststream_sources.Topic
    seek = client._seek  # pyright: ignore[reportPrivateUsage]

    async def once_refused(self: Any, *where: Any) -> None:
        nonlocal refused
        refused += 1
        if refused == 1:
            raise RuntimeError("not now")
        await seek(self, *where)

    monkeypatch.setattr(client, "_seek", once_refused)
    poll(kafka, domain18, topic, group, handler, lambda: committed(kafka, group, topic) == 5)

    assert operations(domain18) == [f"op-{number}" for number in range(5)]
    assert refused == 2


@pytest.mark.parametrize("broker", ["rabbitmq", "kafka"])
def test_what_another_middleware_fails_on_or_swallows_comes_again(
    request: pytest.FixtureRequest, domain18: Database, failing: type[Failing], broker: str
) -> None:
    sent = [envelope(operation=f"op-{number}") for number in range(3)]
    if broker == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        topic, group = kafka.topic(), unique("group")
        produce(kafka, topic, sent)
        poll(kafka, domain18, topic, group, insert, lambda: committed(kafka, group, topic) == 3, failing)
        assert operations(domain18) == ["op-0", "op-1", "op-2"]
    else:
        rabbitmq: Rabbit = request.getfixturevalue("rabbitmq")
        queue: str = request.getfixturevalue("queue")
        publish(rabbitmq, queue, sent)
        consume(rabbitmq, domain18, queue, insert, lambda: len(operations(domain18)) == 3, failing)
        assert sorted(operations(domain18)) == ["op-0", "op-1", "op-2"]
        assert left(rabbitmq, queue) == 0
    assert failing.arrivals == 4


@pytest.mark.parametrize("broker", ["rabbitmq", "kafka"])
def test_a_stop_does_not_wait_for_the_next_try_and_leaves_the_delivery_to_others(
    request: pytest.FixtureRequest, domain18: Database, broker: str
) -> None:
    slow = RunnerOptions(backoff_base=25, backoff_max=25)
    tried = threading.Event()
    began = 0.0

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        nonlocal began
        began = began or time.monotonic()
        tried.set()
        raise ValueError("not yet")

    if broker == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        topic, group = kafka.topic(), unique("group")
        produce(kafka, topic, [envelope()])
        poll(kafka, domain18, topic, group, handler, tried.is_set, options=slow)
        ended = time.monotonic()
        assert committed(kafka, group, topic) == 0
        poll(kafka, domain18, topic, group, insert, lambda: committed(kafka, group, topic) == 1)
    else:
        rabbitmq: Rabbit = request.getfixturevalue("rabbitmq")
        queue: str = request.getfixturevalue("queue")
        publish(rabbitmq, queue, [envelope()])
        consume(rabbitmq, domain18, queue, handler, tried.is_set, options=slow)
        ended = time.monotonic()
        wait_for(lambda: left(rabbitmq, queue) == 1, DEADLINE_SECONDS, "the message to be given back")
        consume(rabbitmq, domain18, queue, insert, lambda: operations(domain18) == ["op-1"])
    assert ended - began < 15  # FastStream itself waits that long for what runs.
    assert operations(domain18) == ["op-1"]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("broker", ["rabbitmq", "kafka"])
def test_a_dead_letter_that_was_given_back_is_handled_in_idle_time_and_others_flow(
    request: pytest.FixtureRequest, domain18: Database, broker: str, kind: str
) -> None:
    mended = False

    @inbox(consumer="reports")
    def sync(tx: Tx, event: Submitted) -> None:
        insert.handler(tx, event)
        if event.operation == "op-1" and not mended:
            raise ValueError("not yet")

    @inbox(consumer="reports")
    async def async_(tx: AsyncConnection[Any], event: Submitted) -> None:
        await insert_async.handler(tx, event)
        if event.operation == "op-1" and not mended:
            raise ValueError("not yet")

    def given_back() -> bool:
        nonlocal mended
        if not mended and sorted(operations(domain18)) == ["op-0", "op-2"] and dead(domain18):
            assert dead(domain18) == [("handler_failed", "op-1", 1)]
            mended = True
            with domain18.connect() as conn:
                retry = (
                    "SELECT fencepost.retry_dead_letter(d.id, false, 'ann', 'mended') FROM fencepost.dead_letter AS d"
                )
                conn.execute(retry)
        return sorted(operations(domain18)) == ["op-0", "op-1", "op-2"]

    sent = [envelope(operation=f"op-{number}") for number in range(3)]
    options = replace(FAST, max_attempts=1, idle_seconds=0.05)
    handler: AnyInbox = sync if kind == "sync" else async_
    if broker == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        topic, group = kafka.topic(), unique("group")
        produce(kafka, topic, sent)
        poll(kafka, domain18, topic, group, handler, given_back, options=options)
    else:
        rabbitmq: Rabbit = request.getfixturevalue("rabbitmq")
        queue: str = request.getfixturevalue("queue")
        publish(rabbitmq, queue, sent)
        consume(rabbitmq, domain18, queue, handler, given_back, options=options)
        assert left(rabbitmq, queue) == 0
    assert dead(domain18) == []


def test_a_connection_that_is_cut_while_handlers_run_costs_no_effect_and_consuming_resumes(
    rabbitmq: Rabbit, domain18: Database, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(rabbitmq, queue, [envelope(operation=f"op-{number}") for number in range(8)])
    runs: list[str] = []
    go = threading.Event()

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        runs.append(event.operation)
        insert.handler(tx, event)
        assert go.wait(DEADLINE_SECONDS)

    def cut_once() -> bool:
        if len(runs) >= 4 and not go.is_set():
            proxy.cut()
            wait_for(lambda: "another copy" in caplog.text, DEADLINE_SECONDS, "a copy to be delivered")
            go.set()
        with domain18.connect() as conn:  # Each copy of the four that were in hand has been seen, too.
            return conn.execute("SELECT sum(arrivals) FROM fencepost.delivery").fetchall() == [(12,)]

    with Proxy(URL(rabbitmq.url).port or 5672) as proxy:
        url = str(URL(rabbitmq.url).with_host("127.0.0.1").with_port(proxy.port))
        consume(rabbitmq, domain18, queue, handler, cut_once, url=url, options=replace(FAST, concurrency=8))

    assert sorted(operations(domain18)) == [f"op-{number}" for number in range(8)]
    assert left(rabbitmq, queue) == 0
    assert dead(domain18) == []


DYING = """
import asyncio, os, signal, sys
from fencepost.consumer import faststream_sources
from fencepost.consumer.faststream import Inboxes
from fencepost.consumer.inbox import inbox
from fencepost.schemas.event import Event
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

kind, where, source, group, dsn, crash = sys.argv[1:]

class Submitted(Event, type="test.submitted", version=1):
    document: str

async def die(self, raw):
    os.kill(os.getpid(), signal.SIGKILL)

if crash == "F1":  # After the commit, before the acknowledgement.
    faststream_sources.Queue.done = faststream_sources.Topic.done = die

if kind == "rabbitmq":
    broker = RabbitBroker(where)
    subscriber = broker.subscriber(
        RabbitQueue(source, declare=False), ack_policy=AckPolicy.MANUAL, channel=Channel(prefetch_count=1)
    )
else:
    broker = KafkaBroker(where)
    subscriber = broker.subscriber(
        source, group_id=group, ack_policy=AckPolicy.MANUAL, auto_offset_reset="earliest",
        session_timeout_ms=2500, heartbeat_interval_ms=300,
    )
inboxes = Inboxes(broker, dsn)

@inboxes.on(subscriber)
@inbox(consumer="reports")
async def insert(tx, event: Submitted):
    await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
    if crash == "inside":
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(FastStream(broker, after_shutdown=[inboxes.close]).run())
"""


@pytest.mark.parametrize(("crash", "survives"), [("F1", ["op-0"]), ("inside", [])])
@pytest.mark.parametrize("broker", ["rabbitmq", "kafka"])
def test_a_killed_application_loses_nothing_and_handles_nothing_twice(
    request: pytest.FixtureRequest, domain18: Database, tmp_path: Path, broker: str, crash: str, survives: list[str]
) -> None:
    sent, group = [envelope(operation=f"op-{number}") for number in range(3)], unique("group")
    if broker == "kafka":
        kafka: Kafka = request.getfixturevalue("kafka")
        where, source = kafka.bootstrap, kafka.topic()
        produce(kafka, source, sent)
    else:
        rabbitmq: Rabbit = request.getfixturevalue("rabbitmq")
        where, source = rabbitmq.url, request.getfixturevalue("queue")
        publish(rabbitmq, source, sent)

    arguments = [broker, where, source, group, domain18.dsn]
    with Child.script(DYING, folder=tmp_path, arguments=[*arguments, crash]) as child:
        assert child.wait(DEADLINE_SECONDS) == -9, child.text
    assert operations(domain18) == survives

    with Child.script(DYING, folder=tmp_path, arguments=[*arguments, "never"]) as child:
        wait_for(lambda: len(operations(domain18)) == 3 or None, DEADLINE_SECONDS, "three events")
        assert child.terminate() == 0, child.text
    assert operations(domain18) == ["op-0", "op-1", "op-2"]
    if broker == "kafka":
        assert committed(request.getfixturevalue("kafka"), group, source) == 3
    else:
        assert left(request.getfixturevalue("rabbitmq"), source) == 0


EXAMPLE = Path(__file__).parents[2] / "examples" / "faststream" / "app.py"


def test_the_example_handles_what_its_queue_holds(
    rabbitmq: Rabbit, domain18: Database, queue: str, tmp_path: Path
) -> None:
    with domain18.connect() as conn:
        conn.execute("CREATE TABLE analyses (submission_id text)")
    accepted = envelope(operation="report-1", type="report.accepted", payload=b'{"submission_id":"report-1"}')
    publish(rabbitmq, queue, [accepted, accepted])

    env = {"FENCEPOST_DATABASE": domain18.dsn, "RABBITMQ": rabbitmq.url, "QUEUE": queue}
    with Child([str(EXAMPLE)], output=tmp_path / "out", env=env) as child:
        with domain18.connect(autocommit=True) as conn:
            arrivals = "SELECT arrivals FROM fencepost.delivery WHERE arrivals = 2"
            wait_for(lambda: conn.execute(arrivals).fetchone(), DEADLINE_SECONDS, "both copies")
            rows = conn.execute("SELECT submission_id FROM analyses").fetchall()
        assert child.terminate() == 0, child.text
    assert rows == [("report-1",)]
    assert left(rabbitmq, queue) == 0
