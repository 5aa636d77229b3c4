"""Runners that handle many messages in one transaction: fast where all goes well, and no promise the less where it does not."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from psycopg import AsyncConnection, Connection

from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.outcomes import Handled
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import Again, AsyncHandling, Handling, RunnerOptions, Tries
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError
from support.brokers import declare, delete, left, produce, publish
from support.database import Database
from support.deliveries import Submitted, envelope, from_kafka
from support.processes import wait_for
from support.services import Kafka, Rabbit, unique

Tx = Connection[Any]
DEADLINE_SECONDS = 30.0
BATCHES = RunnerOptions(
    concurrency=1, batch=20, max_attempts=3, backoff_base=0.05, backoff_max=0.2, drain_seconds=10, idle_seconds=0.1
)


def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


async def insert_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


def keyed(operation: str, key: str = "") -> Envelope:
    return envelope(Submitted(tenant="acme", operation=operation, document="a", ordering_key=key or operation))


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def arrivals(database: Database) -> int:
    """Deliveries that were handled or known as duplicates, committed."""
    with database.connect() as conn:
        row = conn.execute("SELECT coalesce(sum(arrivals), 0) FROM fencepost.delivery").fetchone()
    assert row is not None
    return int(row[0])


def commits(database: Database) -> int:
    """Transactions that reserved something."""
    with database.connect() as conn:
        row = conn.execute("SELECT count(DISTINCT xmin::text) FROM fencepost.reservation").fetchone()
    assert row is not None
    return int(row[0])


def dead(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT reason, operation, attempts FROM fencepost.dead_letter ORDER BY reason").fetchall()


def committed(kafka: Kafka, group: str, topic: str, partition: int = 0) -> int:
    """The offset that the broker has for the group; 0 where there is none."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})
    try:
        (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=DEADLINE_SECONDS)
        return max(found.offset, 0)
    finally:
        consumer.close()


@contextmanager
def running(runner: KafkaRunner | RabbitRunner) -> Generator[threading.Event]:
    """The runner in a thread, stopped and drained at the end; its error, if any, is the test's."""
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
        yield stop
    finally:
        stop.set()
        thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert errors == []


@dataclass(frozen=True)
class Source:
    """A broker with a place of this test: what is sent there, who reads it, and whether all of it is acknowledged."""

    send: Callable[[list[Envelope | bytes]], None]
    runner: Callable[..., KafkaRunner | RabbitRunner]
    unfinished: Callable[[int], int]
    """Of so many messages, those that are not acknowledged; on RabbitMQ without those that a runner has in hand."""


@contextmanager
def of_kafka(kafka: Kafka, database: Database) -> Generator[Source]:
    topic, group = kafka.topic(), unique("group")
    config = {"session.timeout.ms": kafka.session_ms, "heartbeat.interval.ms": 300}

    def runner(handler: Any, options: RunnerOptions = BATCHES) -> KafkaRunner:
        return KafkaRunner(
            handler,
            database.dsn,
            bootstrap=kafka.bootstrap,
            topics=[topic],
            group=group,
            config=config,
            options=options,
        )

    yield Source(
        lambda values: produce(kafka, topic, values), runner, lambda sent: sent - committed(kafka, group, topic)
    )


@contextmanager
def of_rabbitmq(rabbitmq: Rabbit, database: Database) -> Generator[Source]:
    queue = rabbitmq.name()
    declare(rabbitmq, queue)

    def runner(handler: Any, options: RunnerOptions = BATCHES) -> RabbitRunner:
        return RabbitRunner(handler, database.dsn, url=rabbitmq.url, queue=queue, prefetch=200, options=options)

    yield Source(lambda values: publish(rabbitmq, "", queue, values), runner, lambda _: left(rabbitmq, queue))
    delete(rabbitmq, queue)


@pytest.fixture(params=["kafka", "rabbitmq"])
def source(request: pytest.FixtureRequest, domain18: Database) -> Generator[Source]:
    made: AbstractContextManager[Source]
    if request.param == "kafka":
        made = of_kafka(request.getfixturevalue("kafka"), domain18)
    else:
        made = of_rabbitmq(request.getfixturevalue("rabbitmq"), domain18)
    with made as found:
        yield found


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_batches_keep_the_order_of_every_key_and_copies_are_handled_once(
    domain18: Database, source: Source, kind: str
) -> None:
    sent = [keyed(f"{index % 30}:{index}", str(index % 30)) for index in range(150)]
    source.send([*sent, *sent[:10]])
    handler = inbox(consumer="reports")(insert) if kind == "sync" else inbox(consumer="reports")(insert_async)

    with running(source.runner(handler, replace(BATCHES, concurrency=2))):
        wait_for(lambda: arrivals(domain18) == 160, DEADLINE_SECONDS, "every commit")
        wait_for(lambda: source.unfinished(160) == 0, DEADLINE_SECONDS, "every acknowledgement")

    done = operations(domain18)
    for key in range(30):
        assert [each for each in done if each.startswith(f"{key}:")] == [f"{key}:{n}" for n in range(key, 150, 30)]
    assert commits(domain18) < 150, "messages of different keys share commits"
    assert (len(done), dead(domain18), source.unfinished(160)) == (150, [], 0)


def test_a_poisoned_message_is_set_aside_by_itself_and_the_good_ones_around_it_are_handled(
    domain18: Database, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "poison":
            raise ValueError(f"do-not-log {event.document}")

    good = [keyed(f"op-{n}") for n in range(11)]
    conflict = envelope(operation="op-0", document="b")
    source.send([*good[:6], keyed("poison", "k"), keyed("behind", "k"), b"\0do-not-log", *good[6:], conflict])
    with running(source.runner(handler)):
        wait_for(lambda: len(operations(domain18)) == 12, DEADLINE_SECONDS, "the good ones")
        wait_for(lambda: len(dead(domain18)) == 3, DEADLINE_SECONDS, "the others")
        wait_for(lambda: source.unfinished(15) == 0, DEADLINE_SECONDS, "every acknowledgement")

    assert sorted(operations(domain18)) == sorted(["behind", *(each.operation for each in good)])
    assert dead(domain18) == [("conflict", "op-0", 1), ("handler_failed", "poison", 3), ("undecodable", None, 1)]
    assert "do-not-log" not in caplog.text
    assert source.unfinished(15) == 0


def test_nothing_is_acknowledged_before_the_commit_and_what_was_rolled_back_comes_again(
    domain18: Database, source: Source
) -> None:
    inside = threading.Event()
    blocks = True
    runs: list[str] = []

    @inbox(consumer="reports")
    async def handler(tx: AsyncConnection[Any], event: Submitted) -> None:
        runs.append(event.operation)
        await insert_async(tx, event)
        if blocks:
            inside.set()
            await asyncio.Event().wait()

    source.send([keyed(f"op-{n}") for n in range(10)])
    with running(source.runner(handler, replace(BATCHES, drain_seconds=0))):
        assert inside.wait(DEADLINE_SECONDS)
    wait_for(lambda: source.unfinished(10) == 10, DEADLINE_SECONDS, "the broker to have them all again")
    assert (operations(domain18), len(runs)) == ([], 1)

    blocks = False
    with running(source.runner(handler)):
        wait_for(lambda: len(operations(domain18)) == 10, DEADLINE_SECONDS, "every commit")
        wait_for(lambda: source.unfinished(10) == 0, DEADLINE_SECONDS, "every acknowledgement")
    assert sorted(operations(domain18)) == [f"op-{n}" for n in range(10)]
    assert source.unfinished(10) == 0


class Watched(KafkaRunner):
    """A runner that remembers what it committed and what was taken from it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: list[tuple[str, int]] = []

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        super()._revoked(consumer, partitions)
        self.log.extend(("revoked", each.partition) for each in partitions)

    def _on_commit(self, error: Any, offsets: list[TopicPartition]) -> None:
        super()._on_commit(error, offsets)
        self.log.extend(("committed", each.partition) for each in offsets)


def test_a_partition_that_was_revoked_with_a_batch_in_hand_is_not_committed(
    real_kafka: Kafka, domain18: Database
) -> None:
    kafka = real_kafka
    topic, group = kafka.topic(partitions=2), unique("group")
    for partition in (0, 1):
        produce(kafka, topic, [keyed(f"p{partition}-{n}") for n in range(5)], partition)
    inside, go = threading.Event(), threading.Event()

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        inside.set()
        assert go.wait(DEADLINE_SECONDS)

    def member(kind: type[KafkaRunner]) -> KafkaRunner:
        config = {"session.timeout.ms": kafka.session_ms, "heartbeat.interval.ms": 300}
        return kind(
            handler,
            domain18.dsn,
            bootstrap=kafka.bootstrap,
            topics=[topic],
            group=group,
            config=config,
            options=BATCHES,
        )

    first = member(Watched)
    assert isinstance(first, Watched)
    with running(first):
        assert inside.wait(DEADLINE_SECONDS)
        with running(member(KafkaRunner)):
            wait_for(lambda: any(what == "revoked" for what, _ in first.log), DEADLINE_SECONDS, "a rebalance")
            revoked = next(partition for what, partition in first.log if what == "revoked")
            go.set()
            for partition in (0, 1):
                wait_for(lambda: committed(kafka, group, topic, partition) == 5, DEADLINE_SECONDS, "the end")  # noqa: B023
            assert ("committed", revoked) not in first.log[first.log.index(("revoked", revoked)) :]

    assert sorted(operations(domain18)) == [f"p{partition}-{n}" for partition in (0, 1) for n in range(5)]


def attempt_many(kind: str, body: Callable[[str], None], dsn: str, options: RunnerOptions) -> list[Handled | Again]:
    """One attempt at three deliveries; the handler of each first calls ``body`` with its operation."""
    works = [(from_kafka(keyed(f"op-{n}"), n), Tries(options)) for n in range(3)]
    if kind == "sync":

        @inbox(consumer="reports", wait_seconds=0.1)
        def handler(tx: Tx, event: Submitted) -> None:
            body(event.operation)
            insert(tx, event)

        handling = Handling(handler, dsn, options)
        try:
            return handling.attempt_many(works)
        finally:
            handling.close()

    @inbox(consumer="reports", wait_seconds=0.1)
    async def handler_async(tx: AsyncConnection[Any], event: Submitted) -> None:
        body(event.operation)
        await insert_async(tx, event)

    async def attempt() -> list[Handled | Again]:
        handling = AsyncHandling(handler_async, dsn, options)
        try:
            return await handling.attempt_many(works)
        finally:
            await handling.close()

    return asyncio.run(attempt())


def outcomes(results: list[Handled | Again]) -> list[str]:
    return [each.outcome if isinstance(each, Handled) else "again" for each in results]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_database_that_is_away_postpones_a_whole_batch_and_blames_no_message(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fencepost.consumer")
    results = attempt_many(kind, lambda _: None, "postgresql://127.0.0.1:1/none", replace(BATCHES, max_attempts=1))

    assert outcomes(results) == ["again"] * 3
    assert len({each.seconds for each in results if isinstance(each, Again)}) == 1
    assert [record.getMessage().count("2 others") for record in caplog.records] == [1]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_copy_in_flight_elsewhere_holds_back_only_its_own_message_of_a_batch(domain18: Database, kind: str) -> None:
    with domain18.connect() as holding:
        inbox(consumer="reports")(insert).reserve_in(holding, keyed("op-1"), "elsewhere")
        results = attempt_many(kind, lambda _: None, domain18.dsn, BATCHES)
        holding.rollback()
    assert outcomes(results) == ["handled", "again", "handled"]
    assert operations(domain18) == ["op-0", "op-2"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_that_failed_too_often_is_set_aside_out_of_its_batch(domain18: Database, kind: str) -> None:
    def body(operation: str) -> None:
        if operation == "op-1":
            raise ValueError

    results = attempt_many(kind, body, domain18.dsn, replace(BATCHES, max_attempts=1))

    assert outcomes(results) == ["handled", "handler_failed", "handled"]
    assert operations(domain18) == ["op-0", "op-2"]
    assert dead(domain18) == [("handler_failed", "op-1", 1)]


def test_batches_are_bounded_and_no_larger_than_what_the_broker_hands_out() -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        """Never called."""

    def made(batch: int, prefetch: int) -> RabbitRunner:
        options = RunnerOptions(batch=batch)
        return RabbitRunner(handler, "", url="amqp://127.0.0.1", queue="q", prefetch=prefetch, options=options)

    assert isinstance(made(100, 100), RabbitRunner)
    for batch, prefetch, field in ((0, 16, "batch"), (1001, 2000, "batch"), (17, 16, "prefetch")):
        with pytest.raises(ConfigError) as refused:
            made(batch, prefetch)
        assert refused.value.field == field
