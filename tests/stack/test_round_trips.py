"""One real round trip per service: what the rest of the tests stand on."""

import asyncio
import time
import uuid

import aio_pika
import psycopg
from confluent_kafka import Consumer, Message, Producer

from stack.obtain import Obtained
from stack.postgres import PostgresServer
from support.database import Database
from support.services import Kafka, Pooler, Rabbit

DEADLINE_SECONDS = 20.0


def test_sql_commits_durably_and_prepared_transactions_are_possible(
    pg: Obtained[PostgresServer], pg_major: str, empty_database: Database
) -> None:
    with empty_database.connect() as conn:
        conn.execute("CREATE TABLE witness (value text)")
        conn.execute("INSERT INTO witness VALUES (%s)", ["kept"])
    with empty_database.connect(autocommit=True) as conn:
        assert conn.execute("SELECT value FROM witness").fetchall() == [("kept",)]
        assert conn.execute("SHOW fsync").fetchone() == ("on",)
        assert conn.execute("SELECT current_setting('max_prepared_transactions')::int >= 20").fetchone() == (True,)
        server = conn.info.server_version // 10_000

    assert str(server) == pg_major
    assert pg.version.split(".")[0] == pg_major


def test_a_transaction_passes_through_the_pooler_in_transaction_mode(
    pgbouncer: Pooler, empty_database: Database
) -> None:
    through = pgbouncer.dsn(empty_database.dsn)
    with psycopg.connect(through, connect_timeout=10, prepare_threshold=None) as conn:
        conn.execute("CREATE TABLE passed (value int)")
        conn.execute("INSERT INTO passed VALUES (1)")

    with empty_database.connect() as direct:
        assert direct.execute("SELECT value FROM passed").fetchall() == [(1,)]


def test_a_persistent_message_is_confirmed_by_rabbitmq_and_comes_back(rabbitmq: Rabbit) -> None:
    name = rabbitmq.name()

    async def round_trip() -> tuple[object, bytes]:
        connection = await aio_pika.connect(rabbitmq.url, timeout=DEADLINE_SECONDS)
        async with connection:
            channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            queue = await channel.declare_queue(name, durable=True)
            message = aio_pika.Message(b"kept", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            confirmed = await channel.default_exchange.publish(
                message, routing_key=name, mandatory=True, timeout=DEADLINE_SECONDS
            )
            received = await queue.get(timeout=DEADLINE_SECONDS)
            await received.ack()
            await queue.delete()
            return confirmed, received.body

    confirmed, body = asyncio.run(round_trip())

    assert type(confirmed).__name__ == "Ack"
    assert body == b"kept"


def test_a_message_acknowledged_by_every_replica_is_consumed_from_kafka(kafka: Kafka) -> None:
    topic = kafka.topic()
    reports: list[tuple[bool, int | None]] = []

    def reported(error: object, message: Message) -> None:
        reports.append((error is None, message.offset()))

    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "acks": "all", "enable.idempotence": True, "log_level": 0}
    )
    producer.produce(topic, value=b"kept", key=b"k", on_delivery=reported)
    assert producer.flush(DEADLINE_SECONDS) == 0

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": f"round-trip-{uuid.uuid4().hex}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    try:
        consumer.subscribe([topic])
        deadline = time.monotonic() + DEADLINE_SECONDS
        received = None
        while received is None and time.monotonic() < deadline:
            received = consumer.poll(0.5)
    finally:
        consumer.close()

    assert reports == [(True, 0)]
    assert received is not None and received.error() is None
    assert (received.key(), received.value()) == (b"k", b"kept")
