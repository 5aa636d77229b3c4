"""A consumer's database restored while Kafka is ahead: after the recovery every operation is applied exactly once."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg import AsyncConnection, Connection, sql
from psycopg.conninfo import conninfo_to_dict

from fencepost.consumer import kafka_offsets, positions
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.lanes import Lane
from fencepost.consumer.runner import RunnerOptions
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import NotArmed, StaleFence
from support.brokers import produce
from support.database import Database, Databases
from support.deliveries import Submitted, envelope
from support.processes import Child, wait_for
from support.restores import Restores, recovered, restores
from support.services import Kafka, unique

Tx = Connection[Any]
SECONDS = 30.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, drain_seconds=10)
DOMAIN = "CREATE TABLE done (tenant text, operation text, n int GENERATED ALWAYS AS IDENTITY)"
NOTE = "SELECT fencepost.note_positions('reports', 'c', 'g', %s, %s::text[], %s::text[], %s::integer[], %s::bigint[])"
PLACES = """SELECT topic, topic_id, partition, next FROM fencepost.consumer_position
WHERE consumer = 'reports' AND cluster = 'c' ORDER BY topic, topic_id, partition"""


@inbox(consumer="reports")
def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


@inbox(consumer="reports")
async def insert_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


@pytest.fixture
def made(databases18: Databases) -> Generator[Restores]:
    with restores(databases18) as found:
        with found.live.connect() as conn:
            conn.execute(DOMAIN)
        yield found


def membership(kafka: Kafka) -> dict[str, object]:
    return {"session.timeout.ms": kafka.session_ms, "heartbeat.interval.ms": 300}


def runner(
    kafka: Kafka, database: Database, topic: str, group: str, handler: Any = insert, **config: object
) -> KafkaRunner:
    settings = {**membership(kafka), **config}
    return KafkaRunner(
        handler, database.dsn, bootstrap=kafka.bootstrap, topics=[topic], group=group, config=settings, options=FAST
    )


@contextmanager
def running(made: KafkaRunner, name: str = "other") -> Generator[KafkaRunner]:
    """The runner in a thread, stopped and drained at the end; its error, if any, is the test's."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.run(stop)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert errors == []


def events(*operations: str) -> list[Envelope]:
    """Those whose names begin alike in their order."""
    made = [Submitted(tenant="acme", operation=each, document="a", ordering_key=each[0]) for each in operations]
    return [envelope(each) for each in made]


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def stored(database: Database) -> dict[int, int]:
    """The positions of its partitions."""
    with database.connect() as conn:
        return dict(conn.execute("SELECT partition, next FROM fencepost.consumer_position").fetchall())


@contextmanager
def member(kafka: Kafka, group: str) -> Generator[Consumer]:
    """Somebody else's client in that group."""
    other = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": group, "log_level": 0, "enable.auto.commit": False}
    )
    try:
        yield other
    finally:
        other.close()


def committed(kafka: Kafka, group: str, topic: str, partitions: int = 1) -> list[int]:
    """The offsets that the broker has for the group; -1001 where there is none."""
    with member(kafka, group) as other:
        asked = [TopicPartition(topic, partition) for partition in range(partitions)]
        return [each.offset for each in other.committed(asked, timeout=SECONDS)]


def handled(
    kafka: Kafka, database: Database, topic: str, group: str, ends: Sequence[int], handler: Any = insert
) -> None:
    """A runner at work until the database has stored these, and the broker them."""
    known = {partition: end for partition, end in enumerate(ends) if end >= 0}
    with running(runner(kafka, database, topic, group, handler)):
        wait_for(lambda: stored(database) == known, SECONDS, f"the positions {ends}")
        wait_for(lambda: committed(kafka, group, topic, len(ends)) == list(ends), SECONDS, f"the offsets {ends}")


@pytest.mark.parametrize("handler", [insert, insert_async], ids=["sync", "async"])
def test_a_database_restored_while_kafka_is_ahead_is_given_again_what_it_lost_and_applies_it_once(
    real_kafka: Kafka, made: Restores, handler: Any
) -> None:
    topic, group, other = real_kafka.topic(partitions=3), unique("group"), unique("group")
    produce(real_kafka, topic, events("a-0", "a-1", "a-2"), 0)
    produce(real_kafka, topic, events("b-0", "b-1"), 1)
    handled(real_kafka, made.live, topic, group, (3, 2, -1001), handler)
    control, backup = made.copy(), made.backup()
    produce(real_kafka, topic, events("a-3", "a-4"), 0)
    produce(real_kafka, topic, events("b-2"), 1)
    produce(real_kafka, topic, events("c-0", "c-1"), 2)  # the copy knows no position of this one
    handled(real_kafka, made.live, topic, group, (5, 3, 2), handler)
    whole = sorted(operations(made.live))
    assert len(whole) == 10
    with member(real_kafka, other) as outside:
        ends = [TopicPartition(topic, partition, end) for partition, end in enumerate((5, 3, 2))]
        outside.commit(offsets=ends, asynchronous=False)

    # The control: offsets that somebody else has set are followed, and what the copy does not know stays lost.
    lost = made.restored(control)
    recovered(lost)
    produce(real_kafka, topic, events("a-5"), 0)
    handled(real_kafka, lost, topic, other, (6, 3, 2), handler)
    assert sorted(operations(lost)) == sorted(["a-0", "a-1", "a-2", "b-0", "b-1", "a-5"])

    old = made.restored(backup)
    (told,) = recovered(old).consumers
    assert (told.consumer, told.positions) == ("reports", 2)
    handled(real_kafka, old, topic, group, (6, 3, 2), handler)
    assert sorted(operations(old)) == sorted([*whole, "a-5"])
    assert stored(old) == {0: 6, 1: 3, 2: 2}


def test_what_the_broker_keeps_no_more_is_told_and_the_rest_is_read_whatever_its_reset_policy(
    real_kafka: Kafka, made: Restores, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = real_kafka.topic(), unique("group")
    produce(real_kafka, topic, events("a-0"))
    handled(real_kafka, made.live, topic, group, (1,))
    backup = made.backup()
    produce(real_kafka, topic, events("a-1", "a-2", "a-3"))
    handled(real_kafka, made.live, topic, group, (4,))
    admin = cast(Any, AdminClient({"bootstrap.servers": real_kafka.bootstrap, "log_level": 0}))
    for future in admin.delete_records([TopicPartition(topic, 0, 3)]).values():
        future.result(timeout=SECONDS)
    old = made.restored(backup)
    recovered(old)

    with running(runner(real_kafka, old, topic, group, **{"auto.offset.reset": "latest"})):
        wait_for(lambda: operations(old) == ["a-0", "a-3"], SECONDS, "what is left")

    assert "begins at 3 only" in caplog.text and "fencepost relay backfill" in caplog.text


def test_a_runner_that_lives_through_a_restore_stands_still_until_the_recovery_and_then_goes_back(
    kafka: Kafka, made: Restores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_offsets, "LOOK_SECONDS", 0.2)
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events("a-0", "a-1"))
    with running(runner(kafka, made.live, topic, group)):
        wait_for(lambda: stored(made.live) == {0: 2}, SECONDS, "the first position")
        backup = made.backup()
        produce(kafka, topic, events("a-2", "a-3"))
        wait_for(lambda: stored(made.live) == {0: 4}, SECONDS, "the work that is lost")
        in_place_of(made, backup)
        wait_for(lambda: "nothing is handled for now: NotArmed" in caplog.text, SECONDS, "it to stand still")
        produce(kafka, topic, events("a-4"))
        wait_for(lambda: arrived(kafka, topic) == 5, SECONDS, "the broker to have it")
        assert operations(made.live) == ["a-0", "a-1"]
        with made.live.connect() as conn, pytest.raises(NotArmed):
            conn.execute(NOTE, (0, [], [], [], []))

        recovered(made.live)

        wait_for(lambda: len(operations(made.live)) == 5, SECONDS, "everything")
        wait_for(lambda: committed(kafka, group, topic) == [5], SECONDS, "the last offset")
    assert operations(made.live) == [f"a-{n}" for n in range(5)]
    assert stored(made.live) == {0: 5} and committed(kafka, group, topic) == [5]


def in_place_of(made: Restores, backup: str) -> None:
    """Puts the copy where the live database is, under the address that its users have."""
    name = str(conninfo_to_dict(made.live.dsn)["dbname"])
    lost = f"{name}_lost"
    with made.admin() as conn:
        conn.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
        conn.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (name,))
        for was, becomes in ((name, lost), (backup, name)):
            conn.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(was), sql.Identifier(becomes)))
    made.copies.append(lost)


def arrived(kafka: Kafka, topic: str) -> int:
    with member(kafka, unique("group")) as other:
        return int(other.get_watermark_offsets(TopicPartition(topic, 0), timeout=SECONDS)[1])


def test_nothing_is_read_before_the_recovery(kafka: Kafka, made: Restores, caplog: pytest.LogCaptureFixture) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events("a-0"))
    old = made.restored(made.backup())
    with running(runner(kafka, old, topic, group)) as waiting:
        wait_for(lambda: "nothing is handled for now: NotArmed" in caplog.text, SECONDS, "the reason")
        assert not waiting.standing.consuming and operations(old) == []
        recovered(old)
        wait_for(lambda: operations(old) == ["a-0"], SECONDS, "the event")


KILLED = """
import sys, threading
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.kafka_offsets import Offsets
from support.deliveries import Submitted

dsn, bootstrap, topic, group = sys.argv[1:]

@inbox(consumer="reports")
def handler(tx, event: Submitted):
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))

def stored(self, ends, *, asynchronous):
    if any(end == 3 for _, end in ends):
        print("stored, not committed", flush=True)
        threading.Event().wait(60)

Offsets._commit = stored
config = {"session.timeout.ms": 2500, "heartbeat.interval.ms": 300}
KafkaRunner(handler, dsn, bootstrap=bootstrap, topics=[topic], group=group, config=config).run()
"""


def test_a_kill_between_the_position_and_the_brokers_offset_repeats_nothing_before_and_after_a_restore(
    real_kafka: Kafka, made: Restores, tmp_path: Path
) -> None:
    topic, group = real_kafka.topic(), unique("group")
    produce(real_kafka, topic, events("a-0", "a-1", "a-2"))
    here = Path(__file__).parents[1]
    path = f"{here}:{here.parent / 'compose'}:{os.environ.get('PYTHONPATH', '')}"
    arguments = [made.live.dsn, real_kafka.bootstrap, topic, group]
    with Child.script(KILLED, folder=tmp_path, arguments=arguments, PYTHONPATH=path) as killed:
        killed.says("stored, not committed", SECONDS)
        killed.kill()
    assert stored(made.live) == {0: 3} and committed(real_kafka, group, topic) == [-1001]
    backup = made.backup()

    produce(real_kafka, topic, events("a-3"))
    handled(real_kafka, made.live, topic, group, (4,))
    assert operations(made.live) == [f"a-{n}" for n in range(4)]
    old = made.restored(backup)
    recovered(old)
    handled(real_kafka, old, topic, group, (4,))
    wait_for(lambda: stored(old) == {0: 4}, SECONDS, "the position")
    assert operations(old) == [f"a-{n}" for n in range(4)]


def test_no_position_of_a_partition_is_stored_by_a_member_that_lost_it(
    real_kafka: Kafka, made: Restores, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, group = real_kafka.topic(partitions=2), unique("group")
    for partition in (0, 1):
        produce(real_kafka, topic, events(*(f"{partition}-{n}" for n in range(3))), partition)
    inside, go = threading.Semaphore(0), threading.Event()
    told: list[tuple[str, int]] = []

    class Watched(KafkaRunner):
        def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
            super()._revoked(consumer, partitions)
            told.extend(("revoked", each.partition) for each in partitions)

    note = positions.Positions.note

    def noted(self: positions.Positions, ends: Sequence[tuple[Lane, int]]) -> Future[list[tuple[Any, ...]]]:
        told.extend((threading.current_thread().name, lane.partition) for lane, _ in ends)
        return note(self, ends)

    monkeypatch.setattr(positions.Positions, "note", noted)

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
        inside.release()
        assert go.wait(SECONDS)

    config = membership(real_kafka)
    first = Watched(
        handler, made.live.dsn, bootstrap=real_kafka.bootstrap, topics=[topic], group=group, config=config, options=FAST
    )
    with running(first, "first"):
        for _ in range(2):
            assert inside.acquire(timeout=SECONDS)
        with running(runner(real_kafka, made.live, topic, group, handler)):
            wait_for(lambda: any(what == "revoked" for what, _ in told), SECONDS, "a rebalance")
            revoked = next(partition for what, partition in told if what == "revoked")
            assert stored(made.live).get(revoked, 0) == 0
            go.set()
            wait_for(lambda: stored(made.live) == {0: 3, 1: 3}, SECONDS, "the end")
            after = told[told.index(("revoked", revoked)) :]
            assert ("first", revoked) not in after and ("first", 1 - revoked) in after
            assert ("other", revoked) in after
    assert sorted(operations(made.live)) == sorted(f"{p}-{n}" for p in (0, 1) for n in range(3))


def test_positions_only_grow_and_are_refused_where_the_database_was_recovered_since(database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute(NOTE, (0, ["t", "t"], ["x", "x"], [0, 1], [5, 7]))
        conn.execute(NOTE, (0, ["t", "t", "t"], ["x", "x", "y"], [0, 1, 0], [4, 8, 1]))
        found = [("t", "x", 0, 5), ("t", "x", 1, 8), ("t", "y", 0, 1)]
        assert conn.execute(PLACES).fetchall() == found
        with pytest.raises(StaleFence) as refused:
            conn.execute(NOTE, (1, ["t"], ["x"], [0], [9]))
        assert refused.value.field == "epoch"
        conn.execute("DELETE FROM fencepost.ticket")
        with pytest.raises(NotArmed):
            conn.execute(NOTE, (0, ["t"], ["x"], [0], [9]))
        assert conn.execute(PLACES).fetchall() == found


def test_a_single_connection_serves_handlers_and_positions_one_after_the_other(
    kafka: Kafka, made: Restores, caplog: pytest.LogCaptureFixture
) -> None:
    topic, group = kafka.topic(), unique("group")
    produce(kafka, topic, events(*(f"{key}-{n}" for n in range(40) for key in "abcd")))
    with made.live.connect(autocommit=True) as conn:
        config = membership(kafka)
        with running(
            KafkaRunner(
                insert, conn, bootstrap=kafka.bootstrap, topics=[topic], group=group, config=config, options=FAST
            )
        ):
            wait_for(lambda: committed(kafka, group, topic) == [160], SECONDS, "the end")
    assert len(operations(made.live)) == 160 and stored(made.live) == {0: 160}
    assert "not stored" not in caplog.text and "not handled" not in caplog.text
