"""A committed offset says that everything below it is committed in the database; nothing is skipped, nothing done twice."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from psycopg import AsyncConnection, Connection

from fencepost.consumer import acts
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.jobs.authority import By, rotate
from fencepost.relay.destination import source
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError, InvalidInput, Unreachable
from support.brokers import produce
from support.database import Database
from support.deliveries import Submitted, envelope
from support.processes import Child, wait_for
from support.services import Kafka, unique

Tx = Connection[Any]
DEADLINE_SECONDS = 30.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, max_attempts=5, drain_seconds=10)


def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


def events(number: int, prefix: str = "op", *, key: str = "") -> list[Envelope]:
    """Events that share an ordering key, or each with its own."""
    return [keyed(f"{prefix}-{index}", key) for index in range(number)]


def keyed(operation: str, key: str) -> Envelope:
    return envelope(Submitted(tenant="acme", operation=operation, document="a", ordering_key=key or operation))


def committed(kafka: Kafka, group: str, topic: str, partition: int = 0) -> int:
    """The offset that the broker has for the group; 0 where there is none."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0})

    def ask() -> list[int] | None:
        try:
            (found,) = consumer.committed([TopicPartition(topic, partition)], timeout=DEADLINE_SECONDS)
        except KafkaException:  # A new group has no coordinator yet, and a broker that has just started knows none.
            return None
        return [max(found.offset, 0)]

    try:
        return wait_for(ask, DEADLINE_SECONDS, "the coordinator")[0]
    finally:
        consumer.close()


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def dead(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        return conn.execute("SELECT reason, operation, attempts FROM fencepost.dead_letter ORDER BY id").fetchall()


@contextmanager
def running(runner: KafkaRunner) -> Generator[threading.Event, None, None]:
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


@pytest.fixture
def runner_of(kafka: Kafka, domain18: Database) -> Callable[..., KafkaRunner]:
    """Makes a runner whose member keeps its membership through any stall of this machine."""

    def make(handler: Any, topic: str, group: str, *, options: RunnerOptions = FAST, **settings: Any) -> KafkaRunner:
        config: dict[str, object] = {
            "session.timeout.ms": kafka.session_ms,
            "heartbeat.interval.ms": 300,
            **settings,
        }
        return KafkaRunner(
            handler,
            domain18.dsn,
            bootstrap=kafka.bootstrap,
            topics=[topic],
            group=group,
            config=config,
            options=options,
        )

    return make


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_dead_letter_that_was_given_back_is_handled_in_idle_time_while_others_flow(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner], kind: str
) -> None:
    topic, group = kafka.topic(), unique("group")
    mended = False

    @inbox(consumer="reports")
    def sync(tx: Tx, event: Submitted) -> None:
        if event.operation == "op-1" and not mended:
            raise ValueError
        insert(tx, event)

    @inbox(consumer="reports")
    async def async_(tx: AsyncConnection[Any], event: Submitted) -> None:
        if event.operation == "op-1" and not mended:
            raise ValueError
        await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))

    options = replace(FAST, max_attempts=1, idle_seconds=0.05)
    produce(kafka, topic, events(3, key="one"))
    with running(runner_of(sync if kind == "sync" else async_, topic, group, options=options)):
        wait_for(lambda: operations(domain18) == ["op-0", "op-2"], DEADLINE_SECONDS, "the others")
        assert dead(domain18) == [("handler_failed", "op-1", 1)]
        mended = True
        with domain18.connect() as conn:
            conn.execute(
                "SELECT fencepost.retry_dead_letter(d.id, false, 'ann', 'mended') FROM fencepost.dead_letter AS d"
            )
        wait_for(lambda: operations(domain18) == ["op-0", "op-2", "op-1"], DEADLINE_SECONDS, "the retry")
        produce(kafka, topic, events(1, "later"))
        wait_for(lambda: "later-0" in operations(domain18), DEADLINE_SECONDS, "what came later")
        wait_for(lambda: committed(kafka, group, topic) == 4, DEADLINE_SECONDS, "the last offset")
    assert dead(domain18) == []
    assert committed(kafka, group, topic) == 4


def test_events_of_an_old_epoch_are_set_aside_while_others_flow_and_handled_after_their_release(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic, group = kafka.topic(), unique("group")

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)

    with domain18.connect() as conn:
        here = source(conn)
    old = [replace(each, source=here) for each in events(3, "old")]
    rotate(domain18.dsn, domain18.state, By("ann", "a test"), tenant="acme")
    produce(kafka, topic, [*old[:2], *events(2), old[2]])
    with running(runner_of(handler, topic, group, options=replace(FAST, idle_seconds=0.05, batch=3))):
        wait_for(lambda: len(operations(domain18)) == 2 and len(dead(domain18)) == 3, DEADLINE_SECONDS, "all of them")
        assert sorted(dead(domain18)) == [("old_epoch", f"old-{n}", 1) for n in range(3)]
        with domain18.connect() as conn:
            for (number,) in conn.execute("SELECT id FROM fencepost.dead_letter WHERE operation <> 'old-1'").fetchall():
                acts.release(conn, number, actor="ann", reason="looked into it")
        wait_for(lambda: len(operations(domain18)) == 4, DEADLINE_SECONDS, "those that were released")
        produce(kafka, topic, old)
        wait_for(lambda: committed(kafka, group, topic) == 8, DEADLINE_SECONDS, "the copies")
    assert sorted(operations(domain18)) == ["old-0", "old-2", "op-0", "op-1"]
    assert sorted(dead(domain18)) == [("old_epoch", "old-1", 1)] * 2, "one for each delivery"


def test_the_topics_retention_is_noted_and_a_shorter_window_refused(
    real_kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic = real_kafka.topic()

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)

    def noted() -> list[tuple[Any, ...]]:
        with domain18.connect() as conn:
            found = "SELECT topic, retention_ms > 0 FROM fencepost.consumer_topic WHERE topic = %s"
            return conn.execute(found, (topic,)).fetchall()

    with running(runner_of(handler, topic, unique("group"))):
        wait_for(lambda: noted() == [(topic, True)], DEADLINE_SECONDS, "the note")
    with domain18.connect() as conn, pytest.raises(InvalidInput) as refused:
        acts.set_retention(conn, "reports", timedelta(minutes=1), actor="ann", reason="too short")
    assert refused.value.field == "replay_window"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_key_of_a_partition_is_handled_in_its_order_and_committed_to_its_end(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner], kind: str
) -> None:
    topic, group = kafka.topic(), unique("group")
    sent = [keyed(f"{index % 7}:{index}", str(index % 7)) for index in range(150)]
    produce(kafka, topic, [*sent, *sent[:3]])

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)

    @inbox(consumer="reports")
    async def handler_async(tx: AsyncConnection[Any], event: Submitted) -> None:
        await asyncio.sleep(0)
        await tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

    with running(runner_of(handler if kind == "sync" else handler_async, topic, group)):
        wait_for(lambda: len(operations(domain18)) == 150, DEADLINE_SECONDS, "150 events")
        wait_for(lambda: committed(kafka, group, topic) == 153, DEADLINE_SECONDS, "the last offset")

    for key in range(7):
        done = [each for each in operations(domain18) if each.startswith(f"{key}:")]
        assert done == [each.operation for each in sent if each.ordering_key == str(key)]
    assert dead(domain18) == []
    with domain18.connect() as conn:
        text = conn.execute("SELECT coordinates FROM fencepost.delivery ORDER BY first_at LIMIT 1").fetchall()[0][0]
    broker, cluster, where, topic_id, partition, _ = json.loads(text)
    assert (broker, where, partition) == ("kafka", topic, 0)
    assert cluster
    assert topic_id or not kafka.real, "a topic is told from an earlier one of its name"


def test_keys_of_a_partition_run_side_by_side_and_the_offset_waits_for_the_slowest(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic, group = kafka.topic(), unique("group")
    order = ["a-0", "b-0", "b-1", "a-1", "b-2"]
    produce(kafka, topic, [keyed(name, name[0]) for name in order])
    go = threading.Event()

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        if event.operation == "a-0":
            assert go.wait(DEADLINE_SECONDS)
        insert(tx, event)

    with running(runner_of(handler, topic, group)):
        wait_for(lambda: operations(domain18) == ["b-0", "b-1", "b-2"], DEADLINE_SECONDS, "the other key")
        produce(kafka, topic, [keyed("c-0", "c")])
        wait_for(lambda: "c-0" in operations(domain18), DEADLINE_SECONDS, "a later one, and turns of the loop")
        assert committed(kafka, group, topic) == 0
        go.set()
        wait_for(lambda: committed(kafka, group, topic) == 6, DEADLINE_SECONDS, "the end")
    assert operations(domain18) == ["b-0", "b-1", "b-2", "c-0", "a-0", "a-1"]


def test_a_failing_event_holds_its_key_until_it_works_and_no_offset_passes_it(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events(5, key="one"))
    failures = 0
    seen: list[int] = []

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        nonlocal failures
        insert(tx, event)
        if event.operation == "op-2" and failures < 2:
            failures += 1
            time.sleep(0.3)
            seen.append(committed(kafka, group, topic))
            raise ValueError("not yet")

    with running(runner_of(handler, topic, group)):
        wait_for(lambda: len(operations(domain18)) == 5, DEADLINE_SECONDS, "five events")
        wait_for(lambda: committed(kafka, group, topic) == 5, DEADLINE_SECONDS, "the last offset")

    assert operations(domain18) == [f"op-{index}" for index in range(5)]
    assert max(seen) <= 2
    assert committed(kafka, group, topic) == 5


def test_what_can_never_be_handled_is_set_aside_and_the_partition_goes_on(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner], caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = kafka.topic(), unique("group")
    good = envelope(operation="op-0")
    produce(
        kafka,
        topic,
        [
            good,
            envelope(operation="op-0", document="b"),
            b"\0do-not-log",
            envelope(operation="poison"),
            *events(2, "end"),
        ],
    )

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "poison":
            raise ValueError(f"do-not-log {event.document}")

    with running(runner_of(handler, topic, group)):
        wait_for(lambda: committed(kafka, group, topic) == 6, DEADLINE_SECONDS, "the end")

    assert sorted(operations(domain18)) == ["end-0", "end-1", "op-0"]
    assert sorted(dead(domain18)) == [
        ("conflict", "op-0", 1),
        ("handler_failed", "poison", 5),
        ("undecodable", None, 1),
    ]
    assert "ValueError" in caplog.text
    assert "do-not-log" not in caplog.text


def test_a_commit_that_was_a_rollback_is_never_acknowledged_as_done(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, [*events(1), *events(1, "swallowed"), *events(1, "end")])

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation.startswith("swallowed"):
            with suppress(psycopg.Error):
                tx.execute("SELECT 1 / 0")

    with running(runner_of(handler, topic, group)):
        wait_for(lambda: committed(kafka, group, topic) == 3, DEADLINE_SECONDS, "the end")

    assert sorted(operations(domain18)) == ["end-0", "op-0"]
    assert dead(domain18) == [("handler_failed", "swallowed-0", 5)]


CHILD = """
import sys, threading
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from support.deliveries import Submitted

dsn, bootstrap, topic, group, session, blocking = sys.argv[1:]

@inbox(consumer="reports")
def handler(tx, event: Submitted):
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
    if event.operation == blocking:
        print("inside", event.operation)
        threading.Event().wait(60)

config = {"session.timeout.ms": session, "heartbeat.interval.ms": 300}
KafkaRunner(handler, dsn, bootstrap=bootstrap, topics=[topic], group=group, config=config).run()
print("drained")
"""


def child(
    kafka: Kafka, database: Database, topic: str, group: str, folder: Path, *, session: int, blocking: str = ""
) -> Child:
    return script(CHILD, [database.dsn, kafka.bootstrap, topic, group, str(session), blocking], folder)


def script(source: str, arguments: list[str], folder: Path) -> Child:
    """A child that finds what this test finds."""
    here = Path(__file__).parents[1]
    path = f"{here}:{here.parent / 'compose'}:{os.environ.get('PYTHONPATH', '')}"
    return Child.script(source, folder=folder, arguments=arguments, PYTHONPATH=path)


def test_a_killed_consumer_loses_nothing_and_repeats_nothing(
    real_kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner], tmp_path: Path
) -> None:
    kafka = real_kafka
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events(5))

    with child(kafka, domain18, topic, group, tmp_path, session=2500, blocking="op-2") as killed:
        killed.says("inside op-2", DEADLINE_SECONDS)
        wait_for(lambda: committed(kafka, group, topic) == 2, DEADLINE_SECONDS, "two offsets")
        wait_for(lambda: len(operations(domain18)) == 4, DEADLINE_SECONDS, "what comes after it")
        killed.kill()
    assert sorted(operations(domain18)) == ["op-0", "op-1", "op-3", "op-4"]
    assert committed(kafka, group, topic) == 2

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)

    with running(runner_of(handler, topic, group)):
        wait_for(lambda: committed(kafka, group, topic) == 5, DEADLINE_SECONDS, "the end")
    assert sorted(operations(domain18)) == [f"op-{index}" for index in range(5)]


def test_sigterm_drains_and_commits_what_was_done(kafka: Kafka, domain18: Database, tmp_path: Path) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events(3))

    with child(kafka, domain18, topic, group, tmp_path, session=kafka.session_ms) as ending:
        wait_for(lambda: len(operations(domain18)) == 3, DEADLINE_SECONDS, "three events")
        assert ending.terminate(DEADLINE_SECONDS) == 0
        assert ending.text.endswith("drained\n")

    assert committed(kafka, group, topic) == 3


def test_a_handler_slower_than_the_poll_interval_keeps_its_partition(
    real_kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic, group = real_kafka.topic(), unique("group")
    produce(real_kafka, topic, events(2, key="one"))
    runs: list[str] = []

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        runs.append(event.operation)
        insert(tx, event)
        if event.operation == "op-0":
            threading.Event().wait(4)  # Longer than the poll interval: time itself is what is tested.

    with running(runner_of(handler, topic, group, **{"max.poll.interval.ms": 3000, "session.timeout.ms": 3000})):
        wait_for(lambda: committed(real_kafka, group, topic) == 2, DEADLINE_SECONDS, "the end")

    assert runs == ["op-0", "op-1"]
    assert operations(domain18) == ["op-0", "op-1"]


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


def test_a_member_that_loses_a_partition_commits_nothing_for_it_and_every_event_is_handled_once(
    real_kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    kafka = real_kafka
    topic, group = kafka.topic(partitions=2), unique("group")
    for partition in (0, 1):
        produce(kafka, topic, events(3, f"p{partition}", key=f"p{partition}"), partition)
    inside = threading.Semaphore(0)
    go = threading.Event()
    runs: list[str] = []

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        runs.append(event.operation)
        insert(tx, event)
        inside.release()
        assert go.wait(DEADLINE_SECONDS)

    config = {"session.timeout.ms": kafka.session_ms, "heartbeat.interval.ms": 300}
    first = Watched(
        handler, domain18.dsn, bootstrap=kafka.bootstrap, topics=[topic], group=group, config=config, options=FAST
    )
    with running(first):
        for _ in range(2):
            assert inside.acquire(timeout=DEADLINE_SECONDS)
        with running(runner_of(handler, topic, group)):
            wait_for(lambda: any(what == "revoked" for what, _ in first.log), DEADLINE_SECONDS, "a rebalance")
            revoked = next(partition for what, partition in first.log if what == "revoked")
            go.set()
            for partition in (0, 1):
                wait_for(lambda: committed(kafka, group, topic, partition) == 3, DEADLINE_SECONDS, "the end")  # noqa: B023

            def after() -> list[tuple[str, int]]:
                return first.log[first.log.index(("revoked", revoked)) :]

            wait_for(lambda: ("committed", 1 - revoked) in after(), DEADLINE_SECONDS, "the commit of what it kept")
            assert ("committed", revoked) not in after()

    assert sorted(operations(domain18)) == sorted(f"p{partition}-{index}" for partition in (0, 1) for index in range(3))
    assert len(runs) == 6
    for partition in (0, 1):
        assert [each for each in operations(domain18) if each.startswith(f"p{partition}")] == [
            f"p{partition}-{index}" for index in range(3)
        ]


def test_a_database_outage_is_waited_out_without_a_dead_letter(
    kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events(3, key="one"))
    attempts = 0

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        nonlocal attempts
        attempts += 1
        insert(tx, event)
        if attempts <= 12:
            tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    options = replace(FAST, max_attempts=2)  # An inbox repeats five times by itself before a runner hears of it.
    with running(runner_of(handler, topic, group, options=options)):
        wait_for(lambda: committed(kafka, group, topic) == 3, DEADLINE_SECONDS, "the end")

    assert operations(domain18) == ["op-0", "op-1", "op-2"]
    assert (attempts, dead(domain18)) == (15, [])


def test_settings_that_would_acknowledge_unfinished_work_are_refused() -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None: ...

    def made(**config: object) -> KafkaRunner:
        return KafkaRunner(handler, "", bootstrap="127.0.0.1:1", topics=["t"], config=config)

    made(**{"enable.auto.commit": False, "fetch.min.bytes": 1})
    for name in ("enable.auto.commit", "enable.auto.offset.store", "auto.commit.enable", "group.id"):
        with pytest.raises(ConfigError) as refused:
            made(**{name: True})
        assert refused.value.field == name
    with pytest.raises(ConfigError, match="no.such.setting"):
        made(**{"no.such.setting": 1}).run(threading.Event())


@pytest.mark.parametrize(
    ("loose", "field"),
    [
        ({"security.protocol": "sasl_plaintext", "sasl.password": "hidden"}, "security.protocol"),
        ({"security.protocol": "SASL_SSL", "enable.ssl.certificate.verification": False}, "enable.ssl.cert"),
        ({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}, "ssl.endpoint"),
    ],
)
def test_credentials_in_the_clear_and_unverified_servers_are_refused_off_loopback(
    loose: dict[str, object], field: str
) -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None: ...

    def made(bootstrap: str, config: dict[str, object], *, insecure: bool = False) -> KafkaRunner:
        return KafkaRunner(handler, "", bootstrap=bootstrap, topics=["t"], config=config, insecure=insecure)

    made("kafka.example:9093", {"security.protocol": "SASL_SSL", "sasl.password": "hidden"})
    made("127.0.0.1:9092", {"security.protocol": "sasl_plaintext", "sasl.password": "hidden"})
    made("kafka.example:9092", loose, insecure=True)
    with pytest.raises(ConfigError) as refused:
        made("127.0.0.1:9092,kafka.example:9092", loose)
    assert str(refused.value.field).startswith(field)
    assert "hidden" not in repr(refused.value)


def test_a_broker_that_restarts_costs_nothing_and_consuming_goes_on(
    real_kafka: Kafka, domain18: Database, runner_of: Callable[..., KafkaRunner]
) -> None:
    if real_kafka.node is None:
        pytest.skip("this broker is not ours to stop")
    topic, group = real_kafka.topic(), unique("group")
    produce(real_kafka, topic, events(3))
    go, inside = threading.Event(), threading.Event()

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        if event.operation == "held":
            inside.set()
            assert go.wait(DEADLINE_SECONDS)
        insert(tx, event)

    # The client gives up a commit that waits for its coordinator, and a membership without one, after a session.
    with running(runner_of(handler, topic, group, **{"session.timeout.ms": 2500})):
        wait_for(lambda: committed(real_kafka, group, topic) == 3, DEADLINE_SECONDS, "three offsets")
        produce(real_kafka, topic, [keyed("held", "one")])
        assert inside.wait(DEADLINE_SECONDS)
        real_kafka.node.stop()
        go.set()
        wait_for(lambda: "held" in operations(domain18), DEADLINE_SECONDS, "the handler while the broker is away")
        real_kafka.node.start()
        produce(real_kafka, topic, events(3, "later"))
        wait_for(lambda: committed(real_kafka, group, topic) == 7, 2 * DEADLINE_SECONDS, "the end")

    assert sorted(operations(domain18)) == ["held", *(f"later-{n}" for n in range(3)), *(f"op-{n}" for n in range(3))]


SOAK = """
import sys
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from support.deliveries import Submitted

dsn, bootstrap, topic, group = sys.argv[1:]

@inbox(consumer="reports", wait_seconds=1)
def handler(tx, event: Submitted):
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

config = {"session.timeout.ms": 2500, "heartbeat.interval.ms": 300}
KafkaRunner(handler, dsn, bootstrap=bootstrap, topics=[topic], group=group, config=config).run()
print("drained")
"""


def test_processes_that_join_are_killed_and_leave_under_load_handle_each_operation_once_and_in_order(
    real_kafka: Kafka, domain18: Database, tmp_path: Path
) -> None:
    topic, group = real_kafka.topic(partitions=4), unique("group")

    def start() -> Child:
        return script(SOAK, [domain18.dsn, real_kafka.bootstrap, topic, group], tmp_path)

    sent = [[keyed(f"{p}.{n % 5}:{n:03}", f"{p}.{n % 5}") for n in range(300)] for p in range(4)]

    def send(first: int, last: int) -> None:
        for partition in range(4):
            # Each event twice: redelivery, as a relay does it after a lost confirm.
            produce(real_kafka, topic, [e for each in sent[partition][first:last] for e in (each, each)], partition)

    def done(number: int) -> Callable[[], bool]:
        return lambda: len(operations(domain18)) >= number

    with start() as first, start() as killed:
        send(0, 100)
        wait_for(done(100), DEADLINE_SECONDS, "a beginning")
        killed.kill()
        with start() as second:
            send(100, 300)
            wait_for(done(500), 2 * DEADLINE_SECONDS, "more")
            assert first.terminate(DEADLINE_SECONDS) == 0
            for partition in range(4):
                wait_for(
                    lambda p=partition: committed(real_kafka, group, topic, p) == 600,  # type: ignore[misc]
                    2 * DEADLINE_SECONDS,
                    "the end",
                )
            assert second.terminate(DEADLINE_SECONDS) == 0

    found = operations(domain18)
    assert sorted(found) == sorted(each.operation for of_partition in sent for each in of_partition)
    for key in {each.split(":")[0] for each in found}:
        of_key = [each for each in found if each.startswith(f"{key}:")]
        assert of_key == sorted(of_key)
    assert dead(domain18) == []


def test_a_broker_that_is_not_there_is_unreachable_after_the_deadline() -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None: ...

    runner = KafkaRunner(handler, "", bootstrap="127.0.0.1:1", topics=["t"], options=RunnerOptions(start_seconds=1))
    with pytest.raises(Unreachable) as refused:
        runner.run(threading.Event())
    assert "127.0.0.1:1" in str(refused.value)
