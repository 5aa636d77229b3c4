"""Each example of a caller's transaction does what its first lines say, on a real database and a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import aio_pika
import pytest
from confluent_kafka import Producer
from psycopg.conninfo import conninfo_to_dict

from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from support.database import Database
from support.deliveries import envelope
from support.processes import Child, wait_for
from support.services import Kafka, Rabbit
from support.transactions import url

EXAMPLES = Path(__file__).parents[2] / "examples" / "transactions"
SENT = envelope(type="report.accepted", operation="report-1", payload=b'{"submission_id":"report-1"}')


def settings(database: Database, example: str) -> dict[str, str]:
    """The environment that the example asks for."""
    if "psycopg" in example or "django" in example:
        parts = {name: str(value) for name, value in conninfo_to_dict(database.dsn).items()}
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE", "password": "PGPASSWORD"}
        return {"DATABASE": database.dsn, **{names[name]: value for name, value in parts.items() if name in names}}
    return {"DATABASE": url(database.dsn).render_as_string(hide_password=False)}


@contextmanager
def accepted_then(
    script: str, example: str, database: Database, folder: Path, **more: str
) -> Generator[tuple[Child, Database]]:
    """One submission accepted by the example, then its consumer at work."""
    with database.connect() as conn:
        conn.execute((EXAMPLES / "schema.sql").read_bytes())
    env = {**settings(database, example), **more}
    with Child([str(EXAMPLES / f"{example}.py"), "report-1"], output=folder / "accept", env=env) as accepting:
        assert accepting.wait() == 0, accepting.text
    with database.connect() as conn:
        assert conn.execute("SELECT id, state FROM submissions").fetchall() == [("report-1", "accepted")]
        found = conn.execute("SELECT type, version, operation, payload FROM fencepost.outbox").fetchall()
        assert found == [("report.accepted", 1, "report-1", SENT.payload)]
    with Child([str(EXAMPLES / script), example], output=folder / "consume", env=env) as consuming:
        yield consuming, database


def handled_once(consuming: Child, database: Database) -> None:
    """Two copies came: the first was handled, the second found it so."""
    wait_for(lambda: consuming.text.count("\n") >= 2 or not consuming.alive, 60, "two copies to be handled")
    assert consuming.text.split() == ["handled", "duplicate"]
    with database.connect() as conn:
        assert conn.execute("SELECT submission_id FROM analyses").fetchall() == [("report-1",)]
        assert conn.execute("SELECT operation, class FROM fencepost.job").fetchall() == [("report-1", "report.analyse")]


@pytest.mark.parametrize("example", ["with_psycopg", "with_sqlalchemy", "with_sqlmodel", "with_django"])
def test_a_confluent_kafka_consumer_with_an_inbox_handles_once(
    kafka: Kafka, database18: Database, tmp_path: Path, example: str
) -> None:
    topic = kafka.topic()
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "acks": "all", "log_level": 0})
    for _ in range(2):
        key = kafka_binding.key(SENT.tenant, SENT.ordering_key)
        producer.produce(topic, value=SENT.payload, key=key, headers=list(kafka_binding.encode(SENT)))
    assert producer.flush(30) == 0
    # A group of its own: one with a killed member waits for that member's session to run out.
    broker = {"KAFKA": kafka.bootstrap, "TOPIC": topic, "GROUP": topic}
    with accepted_then("consume_kafka.py", example, database18, tmp_path, **broker) as ran:
        handled_once(*ran)


@pytest.mark.parametrize("example", ["with_psycopg_async", "with_sqlalchemy_async"])
def test_an_aio_pika_consumer_with_an_inbox_handles_once(
    rabbitmq: Rabbit, database18: Database, tmp_path: Path, example: str
) -> None:
    queue = rabbitmq.name()
    asyncio.run(_publish(rabbitmq, queue, [SENT, SENT]))
    try:
        with accepted_then(
            "consume_rabbitmq.py", example, database18, tmp_path, RABBITMQ=rabbitmq.url, QUEUE=queue
        ) as ran:
            handled_once(*ran)
    finally:
        asyncio.run(_delete(rabbitmq, queue))


async def _publish(rabbitmq: Rabbit, queue: str, values: list[Envelope]) -> None:
    async with await aio_pika.connect(rabbitmq.url, timeout=30) as connection:
        channel = await connection.channel()
        await channel.declare_queue(queue, durable=True)
        for each in values:
            headers, content_type = amqp_binding.encode(each)
            message = aio_pika.Message(
                each.payload, headers=dict(headers), content_type=content_type, message_id=str(each.id)
            )
            await channel.default_exchange.publish(message, queue, timeout=30)


async def _delete(rabbitmq: Rabbit, queue: str) -> None:
    async with await aio_pika.connect(rabbitmq.url, timeout=30) as connection:
        await (await connection.channel()).queue_delete(queue)
