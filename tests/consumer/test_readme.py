"""The consumers of the README run as they stand there, against a real broker and a real database."""

from __future__ import annotations

import ast
import asyncio
import re
import textwrap
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import aio_pika
import psycopg
import pytest
import sqlalchemy
import sqlmodel
from confluent_kafka import Consumer, Producer, TopicPartition
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fencepost.consumer.delivery import Delivery
from fencepost.consumer.inbox import AsyncInbox, inbox
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.event import Event
from support.brokers import channel_of, declare, delete, left
from support.database import Database
from support.deliveries import envelope
from support.services import Kafka, Rabbit, unique
from support.transactions import django_connection, url

README = Path(__file__).parents[2] / "consumer" / "README.md"
SENT = envelope(type="report.accepted", operation="report-1", payload=b'{"submission_id":"report-1"}')
KINDS = [
    "psycopg",
    "psycopg, asyncio",
    "SQLAlchemy, Connection",
    "SQLAlchemy, Session",
    "SQLAlchemy, AsyncSession",
    "SQLModel",
    "Django",
]
LINES_MAX = 10


class ReportAccepted(Event, type="report.accepted", version=1):
    """What the README's handlers take."""

    submission_id: str


class Base(DeclarativeBase):
    """The tables of these handlers."""


class Analysis(Base):
    """As the README's reader has it with SQLAlchemy."""

    __tablename__ = "analyses"
    submission_id: Mapped[str] = mapped_column(primary_key=True)


class SqlModelAnalysis(sqlmodel.SQLModel, table=True):
    """As the README's reader has it with SQLModel."""

    __tablename__: ClassVar[Any] = "analyses"
    submission_id: str = sqlmodel.Field(primary_key=True)


@cache
def django_analysis() -> type[models.Model]:
    """As the README's reader has it with Django, once its settings are there."""

    class DjangoAnalysis(models.Model):
        submission_id: models.TextField[str, str] = models.TextField(primary_key=True)

        class Meta:
            app_label = "readme"
            db_table = "analyses"

    return DjangoAnalysis


@cache
def snippets() -> tuple[str, str, dict[str, str]]:
    """The loop of Kafka, that of RabbitMQ, and the handlers by the library that they are for."""
    text = README.read_text().split("## From the consumer you have to an inbox")[1].split("With FastStream")[0]
    code = [textwrap.dedent(found) for found in re.findall(r"(?m)(?:^    .*\n|^\n(?=    ))+", text)]
    kafka, rabbitmq, handlers = (each.strip() for each in code)
    named = re.split(r"(?m)^# (.+)\n", handlers)[1:]
    return kafka, rabbitmq, dict(zip(named[::2], named[1::2], strict=True))


def test_every_kind_of_transaction_is_shown_in_ten_lines() -> None:
    kafka, rabbitmq, handlers = snippets()
    assert list(handlers) == KINDS
    for handler in handlers.values():
        for loop in (kafka, rabbitmq):
            assert len([line for line in f"{handler}\n{loop}".splitlines() if line.strip()]) <= LINES_MAX


class TwoRecords:
    """A consumer of confluent-kafka that ends its loop, as an error does, when two offsets are committed."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer, self.committed = consumer, 0

    def poll(self, seconds: float) -> Any:
        return self if self.committed == 2 else self._consumer.poll(seconds)

    def error(self) -> str:
        return "the end of this test"

    def commit(self, **options: Any) -> None:
        self._consumer.commit(**options)
        self.committed += 1


class TwoMessages:
    """A queue of aio-pika whose iterator ends after two messages."""

    def __init__(self, queue: Any) -> None:
        self._queue, self.given = queue, 0

    def iterator(self) -> Self:
        self._entered: AbstractAsyncContextManager[Any] = self._queue.iterator()
        return self

    async def __aenter__(self) -> Self:
        self._messages = await self._entered.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._entered.__aexit__(*cast(Any, error))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self.given == 2:
            raise StopAsyncIteration
        self.given += 1
        return await asyncio.wait_for(anext(self._messages), 30)


@pytest.fixture
def database(domain18: Database) -> Generator[Database]:
    with domain18.connect() as conn:
        conn.execute("CREATE TABLE analyses (submission_id text)")  # No key, so that a second handling shows.
    yield domain18
    with domain18.connect() as conn:
        conn.execute("DROP TABLE analyses")


def names(database: Database, engines: list[Any]) -> dict[str, Any]:
    """What the README's reader has imported and made."""

    def recorded(make: Callable[..., Any]) -> Callable[[Any], Any]:
        def made(address: Any) -> Any:
            engines.append(make(address))
            return engines[-1]

        return made

    return {
        "dsn": database.dsn,
        "url": url(database.dsn),
        "inbox": inbox,
        "Delivery": Delivery,
        "ReportAccepted": ReportAccepted,
        "Analysis": Analysis,
        "psycopg": psycopg,
        "sqlalchemy": sqlalchemy,
        "sqlmodel": sqlmodel,
        "insert": sqlalchemy.insert,
        "create_engine": recorded(sqlalchemy.create_engine),
        "create_async_engine": recorded(create_async_engine),
        "sessionmaker": sessionmaker,
        "async_sessionmaker": async_sessionmaker,
        "Session": Session,
        "AsyncSession": AsyncSession,
        "BaseDatabaseWrapper": BaseDatabaseWrapper,
    }


def run(code: str, given: dict[str, Any]) -> dict[str, Any]:
    """Runs what the README says, with these names; nothing else is ever run here."""
    exec(compile(code, str(README), "exec", dont_inherit=True), given)  # noqa: S102
    return given


def handled_once(database: Database) -> None:
    with database.connect() as conn:
        assert conn.execute("SELECT submission_id FROM analyses").fetchall() == [("report-1",)]
        assert conn.execute("SELECT operation FROM fencepost.reservation").fetchall() == [("report-1",)]
        assert conn.execute("SELECT sum(arrivals) FROM fencepost.delivery").fetchone() == (2,)


@pytest.mark.parametrize("kind", [each for each in KINDS if "async" not in each.lower()])
def test_a_consumer_of_confluent_kafka_handles_once_with(real_kafka: Kafka, database: Database, kind: str) -> None:
    topic, group = real_kafka.topic(), unique("group")
    producer = Producer({"bootstrap.servers": real_kafka.bootstrap, "acks": "all", "log_level": 0})
    for _ in range(2):
        key = kafka_binding.key(SENT.tenant, SENT.ordering_key)
        producer.produce(topic, value=SENT.payload, key=key, headers=list(kafka_binding.encode(SENT)))
    assert producer.flush(30) == 0
    consumer = Consumer(
        {"bootstrap.servers": real_kafka.bootstrap, "group.id": group, "enable.auto.commit": False, "log_level": 0}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    engines: list[sqlalchemy.Engine] = []
    given = names(database, engines) | {"consumer": TwoRecords(consumer)}
    try:
        with django_connection(database.dsn) as django:
            if kind == "Django":
                given |= {"connection": django, "Analysis": django_analysis()}
            elif kind == "SQLModel":
                given["Analysis"] = SqlModelAnalysis
            run(snippets()[0], run(snippets()[2][kind], given))
        (committed,) = consumer.committed([TopicPartition(topic, 0)], timeout=30)
    finally:
        for each in engines:
            each.dispose()
        consumer.close()
    assert committed.offset == 2
    handled_once(database)


@pytest.mark.parametrize("kind", [each for each in KINDS if "async" in each.lower()])
def test_a_consumer_of_aio_pika_handles_once_with(rabbitmq: Rabbit, database: Database, kind: str) -> None:
    name = rabbitmq.name()
    declare(rabbitmq, name)

    async def consume() -> None:
        engines: list[AsyncEngine] = []
        async with channel_of(rabbitmq) as channel:
            headers, content_type = amqp_binding.encode(SENT)
            for _ in range(2):
                message = aio_pika.Message(
                    SENT.payload, headers=dict(headers), content_type=content_type, message_id=str(SENT.id)
                )
                await channel.default_exchange.publish(message, name, timeout=30)
            given = names(database, engines) | {"queue": TwoMessages(await channel.get_queue(name))}
            assert isinstance(run(snippets()[2][kind], given)["on_accepted"], AsyncInbox)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            await eval(compile(snippets()[1], str(README), "exec", flags=flags, dont_inherit=True), given)
            for each in engines:
                await each.dispose()

    asyncio.run(consume())
    assert left(rabbitmq, name) == 0
    delete(rabbitmq, name)
    handled_once(database)
