"""What a real broker may bring, and what may happen in between: each operation once, nothing lost, nothing in a loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString

import aio_pika
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from psycopg import AsyncConnection, Connection

from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.outcomes import Outcome
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.schemas import amqp_binding, kafka_binding
from fencepost.schemas.envelope import Envelope
from support.brokers import channel_of, declare, delete, left, produce
from support.database import Database
from support.deliveries import Submitted, envelope
from support.poison import ATTRIBUTES, SECRET, UNREADABLE
from support.processes import Child, wait_for
from support.services import Kafka, Rabbit, Services, unique
from support.workers import CHILD_PATH

Tx = Connection[Any]
DEADLINE_SECONDS = 30.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, max_attempts=3, drain_seconds=10)
WAITING: LiteralString = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE %(query)s"""
END_OTHERS: LiteralString = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""
LEFT_OPEN: LiteralString = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"""


def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def dead(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT reason, detail, attempts FROM fencepost.dead_letter ORDER BY id").fetchall()


def wait_until_waiting(database: Database, query: str) -> None:
    with database.connect(autocommit=True) as conn:
        wait_for(
            lambda: conn.execute(WAITING, {"query": query}).fetchall()[0][0] >= 1, DEADLINE_SECONDS, f"{query} to wait"
        )


@contextmanager
def running(runner: KafkaRunner | RabbitRunner) -> Generator[None]:
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
        yield
    finally:
        stop.set()
        thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert errors == []


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent, as it is: nothing here is checked."""

    headers: dict[str, Any] | Sequence[tuple[str, Any]]
    body: bytes


class OnKafka:
    """A topic of this test, and a group."""

    name = "kafka"

    def __init__(self, kafka: Kafka) -> None:
        self.kafka, self.topic, self.group, self.sent = kafka, kafka.topic(), unique("group"), 0

    def send(self, *values: Envelope | Message) -> None:
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap, "acks": "all", "log_level": 0})
        for each in values:
            headers: list[tuple[str, str | bytes | None]]
            if isinstance(each, Envelope):
                headers = [*kafka_binding.encode(each)]
                body, key = each.payload, self.key(each)
            else:
                headers = [*(each.headers.items() if isinstance(each.headers, dict) else each.headers)]
                body, key = each.body, None
            producer.produce(self.topic, value=body, key=key, headers=headers)
        assert producer.flush(DEADLINE_SECONDS) == 0
        self.sent += len(values)

    def key(self, sent: Envelope) -> bytes:
        return kafka_binding.key(sent.tenant, sent.ordering_key)

    def runner(self, handler: Any, dsn: str, options: RunnerOptions = FAST) -> KafkaRunner:
        config = {"session.timeout.ms": self.kafka.session_ms, "heartbeat.interval.ms": 300}
        return KafkaRunner(
            handler,
            dsn,
            bootstrap=self.kafka.bootstrap,
            topics=[self.topic],
            group=self.group,
            config=config,
            options=options,
        )

    def committed(self) -> int:
        consumer = Consumer({"bootstrap.servers": self.kafka.bootstrap, "group.id": self.group, "log_level": 0})
        try:
            (found,) = consumer.committed([TopicPartition(self.topic, 0)], timeout=DEADLINE_SECONDS)
            return max(found.offset, 0)
        finally:
            consumer.close()

    def empty(self) -> bool:
        return self.committed() == self.sent


class OnRabbit:
    """A queue of this test."""

    name = "rabbitmq"

    def __init__(self, rabbitmq: Rabbit) -> None:
        self.rabbitmq, self.queue = rabbitmq, rabbitmq.name()
        declare(rabbitmq, self.queue)

    def send(self, *values: Envelope | Message) -> None:
        async def publish_all() -> None:
            async with channel_of(self.rabbitmq) as channel:
                for each in values:
                    if isinstance(each, Envelope):
                        headers, content_type = amqp_binding.encode(each)
                        body, name = each.payload, str(each.id)
                    else:
                        headers, content_type, body, name = dict(each.headers), "application/json", each.body, None
                    message = aio_pika.Message(
                        body, headers=dict(headers), content_type=content_type, message_id=name, delivery_mode=2
                    )
                    await channel.default_exchange.publish(message, self.queue, timeout=DEADLINE_SECONDS)

        asyncio.run(publish_all())

    def runner(self, handler: Any, dsn: str, options: RunnerOptions = FAST) -> RabbitRunner:
        return RabbitRunner(handler, dsn, url=self.rabbitmq.url, queue=self.queue, options=options)

    def empty(self) -> bool:
        return left(self.rabbitmq, self.queue) == 0


On = OnKafka | OnRabbit


@pytest.fixture(params=["kafka", "rabbitmq"])
def on(request: pytest.FixtureRequest) -> Generator[On]:
    """Each broker in turn, a real one."""
    if request.param == "kafka":
        yield OnKafka(request.getfixturevalue("real_kafka"))
        return
    made = OnRabbit(request.getfixturevalue("rabbitmq"))
    yield made
    delete(made.rabbitmq, made.queue)


def poisoned(on: On) -> list[Message]:
    """Every content that cannot be read, and every attribute that this broker would carry and that means nothing."""
    good = envelope(operation="poison")
    bodies = [body for body, _ in UNREADABLE.values() if on.name == "rabbitmq" or len(body) < 900_000]
    if isinstance(on, OnKafka):
        encoded = list(kafka_binding.encode(good))
        found = [Message(encoded, body) for body in bodies]
        for name, value in ATTRIBUTES:
            kept = [(each, text) for each, text in encoded if each != f"ce_{name}"]
            found.append(Message([*kept, (f"ce_{name}", value.encode("utf-8", "surrogatepass"))], good.payload))
        found += [
            Message([*encoded, ("ce_subject", b"\xff")], good.payload),
            Message([*encoded, encoded[0]], good.payload),
            Message([(name, None) for name, _ in encoded], good.payload),
            Message([], good.payload),
        ]
        return found
    headers = dict(amqp_binding.encode(good)[0])
    found = [Message(headers, body) for body in bodies]
    prefix = "cloudEvents:" if any(name.startswith("cloudEvents:") for name in headers) else "ce-"
    storable = [(name, value) for name, value in ATTRIBUTES if "\ud800" not in value]
    found += [Message({**headers, f"{prefix}{name}": value}, good.payload) for name, value in storable]
    nested: Any = {"a": [1, {"b": datetime(2026, 1, 1, tzinfo=UTC)}]}
    for odd in (7, True, None, bytearray(b"\xff\0"), nested, [nested] * 3, 1.5):
        found.append(Message({**headers, f"{prefix}fptenant": odd}, good.payload))
    found.append(Message({}, good.payload))
    return found


def test_whatever_cannot_be_read_is_set_aside_once_with_its_reason_and_the_others_go_on(
    on: On, domain18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fencepost")
    bad = poisoned(on)
    on.send(
        envelope(operation="first"),
        *bad,
        envelope(operation="unknown", type="test.nobody"),
        envelope(operation="newer", version=9),
        envelope(operation="last"),
    )
    runner = on.runner(inbox(consumer="reports")(insert), domain18.dsn)

    with running(runner):
        wait_for(lambda: len(operations(domain18)) == 2, DEADLINE_SECONDS, "the good ones")
        wait_for(lambda: len(dead(domain18)) == len(bad) + 2, DEADLINE_SECONDS, "every bad one")
        if isinstance(on, OnKafka):
            wait_for(on.empty, DEADLINE_SECONDS, "the last offset")

    assert on.empty()
    assert sorted(operations(domain18)) == ["first", "last"]
    letters = dead(domain18)
    assert {reason for reason, _, _ in letters} == {"undecodable", "unknown_type", "newer_version"}
    assert [attempts for _, _, attempts in letters] == [1] * len(letters)
    assert all(detail.replace("_", "").isalnum() for _, detail, _ in letters)
    assert runner.standing.failures == 0, "nothing was tried again"
    assert SECRET not in caplog.text
    with domain18.connect() as conn:
        kept = conn.execute("SELECT payload FROM fencepost.dead_letter ORDER BY id").fetchall()
    assert {bytes(row[0]) for row in kept} >= {each.body for each in bad}


class Gate:
    """A handler that says when it has begun and goes on when it is told, to fail or not."""

    def __init__(self, *, fails: bool) -> None:
        self.begun, self.go, self.runs, self._fails = threading.Event(), threading.Event(), 0, fails

    def __call__(self, tx: Tx, event: Submitted) -> None:
        self.runs += 1
        first = self.runs == 1
        self.begun.set()
        assert self.go.wait(DEADLINE_SECONDS)
        insert(tx, event)
        if first and self._fails:
            raise ValueError("the first one fails")


@pytest.mark.parametrize("fails", [False, True], ids=["the first commits", "the first rolls back"])
def test_two_consumers_with_one_copy_each_at_the_same_time_handle_it_once(
    rabbitmq: Rabbit, domain18: Database, fails: bool
) -> None:
    on = OnRabbit(rabbitmq)
    gate = Gate(fails=fails)
    sent = envelope()

    def consumer() -> RabbitRunner:
        """With an inbox of its own, as another process has."""
        handler: Inbox[Submitted] = inbox(consumer="reports", wait_seconds=DEADLINE_SECONDS)(gate.__call__)
        return RabbitRunner(handler, domain18.dsn, url=rabbitmq.url, queue=on.queue, prefetch=1, options=FAST)

    one, two = consumer(), consumer()
    with running(one), running(two):
        wait_for(lambda: one.standing.consuming and two.standing.consuming, DEADLINE_SECONDS, "both")
        on.send(sent, sent)
        assert gate.begun.wait(DEADLINE_SECONDS)
        wait_until_waiting(domain18, "%reserve%")
        assert gate.runs == 1, "the other one waits for its transaction"
        gate.go.set()
        with domain18.connect(autocommit=True) as conn:
            arrivals = "SELECT sum(arrivals) FROM fencepost.delivery"
            wait_for(lambda: conn.execute(arrivals).fetchall() == [(2,)], DEADLINE_SECONDS, "both copies")

    assert operations(domain18) == ["op-1"]
    assert (gate.runs, on.empty(), dead(domain18)) == (1 + fails, True, [])
    delete(rabbitmq, on.queue)


def test_a_broker_that_closes_the_connection_while_handlers_run_gets_no_stale_ack(
    rabbitmq: Rabbit, domain18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    if rabbitmq.node is None:
        pytest.skip("this broker's connections are not ours to close")
    caplog.set_level(logging.INFO, "fencepost")
    on = OnRabbit(rabbitmq)
    inside, go = threading.Semaphore(0), threading.Event()

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        inside.release()
        assert go.wait(DEADLINE_SECONDS)

    on.send(*(envelope(operation=f"op-{number}") for number in range(10)))
    runner = RabbitRunner(handler, domain18.dsn, url=rabbitmq.url, queue=on.queue, prefetch=5, options=FAST)
    with running(runner):
        for _ in range(3):
            assert inside.acquire(timeout=DEADLINE_SECONDS)
        rabbitmq.node.rabbitmqctl("close_all_connections", "a test")
        wait_for(lambda: caplog.text.count("consuming") == 2, DEADLINE_SECONDS, "the next session")
        go.set()
        wait_for(lambda: len(operations(domain18)) == 10, DEADLINE_SECONDS, "ten effects")
        wait_for(lambda: on.empty() and runner.standing.oldest() is None, DEADLINE_SECONDS, "an empty queue")

    assert sorted(operations(domain18)) == sorted(f"op-{number}" for number in range(10))
    assert on.empty()
    assert "acknowledgement dropped" in caplog.text
    assert dead(domain18) == []
    delete(rabbitmq, on.queue)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_consumers_behind_a_transaction_pooler_survive_the_loss_of_all_its_connections(
    on: On, domain18: Database, services: Services, kind: str
) -> None:
    through = services.pgbouncer("18", pool_size=4).dsn(domain18.dsn)

    @inbox(consumer="reports")
    async def insert_async(tx: AsyncConnection[Any], event: Submitted) -> None:
        await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))

    handler = insert_async if kind == "async" else inbox(consumer="reports")(insert)
    runner = on.runner(handler, through)
    sent = [envelope(operation=f"op-{number:02}") for number in range(60)]
    with running(runner), domain18.connect(autocommit=True) as conn:
        on.send(*sent[:20])
        wait_for(lambda: len(operations(domain18)) == 20, DEADLINE_SECONDS, "the control")
        on.send(*sent[20:])
        assert conn.execute(END_OTHERS).fetchall()[0][0] > 0
        on.send(*sent[30:40])  # Again: copies of what came meanwhile.
        told = runner.standing.outcome
        wait_for(lambda: told(Outcome.HANDLED) + told(Outcome.DUPLICATE) >= 70, DEADLINE_SECONDS, "the rest")
        if isinstance(on, OnKafka):
            wait_for(on.empty, DEADLINE_SECONDS, "the last offset")
        wait_for(lambda: conn.execute(LEFT_OPEN).fetchall() == [(0,)], DEADLINE_SECONDS, "no session in between")

    assert sorted(operations(domain18)) == [each.operation for each in sent]
    assert dead(domain18) == []
    assert on.empty()


STOPPED = """
import logging, sys
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from support.deliveries import Submitted

logging.basicConfig(level=logging.INFO, format="%(message)s")
dsn, bootstrap, topic, group = sys.argv[1:]

@inbox(consumer="reports")
def handler(tx, event: Submitted):
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
    if event.operation == "op-1":
        tx.execute("SELECT pg_advisory_xact_lock(77)")

config = {"session.timeout.ms": 2500, "heartbeat.interval.ms": 300}
KafkaRunner(handler, dsn, bootstrap=bootstrap, topics=[topic], group=group, config=config).run()
print("drained")
"""


def test_a_member_that_was_stopped_past_its_session_commits_no_offset_when_it_goes_on(
    real_kafka: Kafka, domain18: Database, tmp_path: Path
) -> None:
    on = OnKafka(real_kafka)
    produce(real_kafka, on.topic, [keyed(f"op-{number}") for number in range(3)])
    handler: Inbox[Submitted] = inbox(consumer="reports", wait_seconds=0.3)(insert)
    arguments = [domain18.dsn, real_kafka.bootstrap, on.topic, on.group]
    with (
        domain18.connect(autocommit=True) as holder,
        Child.script(STOPPED, folder=tmp_path, arguments=arguments, **CHILD_PATH) as stopped,
    ):
        holder.execute("SELECT pg_advisory_lock(77)")
        wait_until_waiting(domain18, "%advisory_xact_lock%")
        wait_for(lambda: on.committed() == 1, DEADLINE_SECONDS, "the control: the offset of what was done")
        stopped.pause()
        runner = on.runner(handler, domain18.dsn)
        with running(runner):
            wait_for(lambda: runner.standing.failures > 0, DEADLINE_SECONDS, "the new owner to meet the transaction")
            holder.execute("SELECT pg_advisory_unlock(77)")
            assert operations(domain18) == ["op-0"], "still open, and nobody else's"
            stopped.resume()
            stopped.says(f"{on.topic}/0: lost", DEADLINE_SECONDS)
            wait_for(lambda: on.committed() == 3, DEADLINE_SECONDS, "the end")
        assert stopped.terminate() == 0, stopped.text
        assert "drained" in stopped.text

    assert operations(domain18) == ["op-0", "op-1", "op-2"]
    assert on.committed() == 3, "the offset was not set back"
    assert dead(domain18) == []


def keyed(operation: str) -> Envelope:
    return envelope(Submitted(tenant="acme", operation=operation, document="a", ordering_key="one"))


def test_a_handler_that_outlasts_the_drain_is_left_behind_and_its_message_is_handled_by_the_next(
    on: On, domain18: Database
) -> None:
    """Async: the handler is cancelled and its transaction rolled back. Sync: see `operate/test_running.py`."""
    inside = threading.Event()

    @inbox(consumer="reports")
    async def stuck(tx: AsyncConnection[Any], event: Submitted) -> None:
        await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))
        if event.operation == "op-1":
            inside.set()
            await asyncio.sleep(DEADLINE_SECONDS)

    on.send(envelope(operation="op-0"), envelope(operation="op-1"))
    with running(on.runner(stuck, domain18.dsn, RunnerOptions(drain_seconds=0.1))):
        assert inside.wait(DEADLINE_SECONDS)
        wait_for(lambda: operations(domain18) == ["op-0"], DEADLINE_SECONDS, "the other")
    assert operations(domain18) == ["op-0"]
    wait_for(lambda: not on.empty(), DEADLINE_SECONDS, "the message to be given back")

    with running(on.runner(inbox(consumer="reports")(insert), domain18.dsn)):
        wait_for(lambda: operations(domain18) == ["op-0", "op-1"], DEADLINE_SECONDS, "the next")
        if isinstance(on, OnKafka):
            wait_for(on.empty, DEADLINE_SECONDS, "the last offset")
    assert on.empty()
