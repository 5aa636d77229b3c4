"""A consumer's database restored while RabbitMQ is ahead: what is gone from the queue is sent again, and applied exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import Connection

from fencepost.consumer import acts
from fencepost.consumer import rabbitmq as module
from fencepost.consumer.inbox import inbox
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.relay import outbox
from fencepost.relay.backfill import Chosen, resolve, send
from fencepost.relay.destination import Destination
from fencepost.relay.pace import Pace
from fencepost.relay.publisher import Route
from fencepost.schemas import arming, migrate
from support.brokers import delete, left
from support.database import Database, Databases
from support.deliveries import Submitted
from support.processes import wait_for
from support.relaying import PACE
from support.relaying import made as publisher
from support.relays import relay_once
from support.restores import Restores, recovered, restores
from support.services import Rabbit

Tx = Connection[Any]
SECONDS = 30.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, drain_seconds=10, idle_seconds=0.05)
DOMAIN = "CREATE TABLE done (tenant text, operation text, n int GENERATED ALWAYS AS IDENTITY)"


@inbox(consumer="reports")
def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


@pytest.fixture
def made(databases18: Databases) -> Generator[Restores]:
    with restores(databases18) as found:
        with found.live.connect() as conn:
            conn.execute(DOMAIN)
        yield found


@pytest.fixture
def queue(rabbitmq: Rabbit) -> Generator[str]:
    name = rabbitmq.name()
    yield name
    delete(rabbitmq, name, f"{name}.dead")


@contextmanager
def running(rabbitmq: Rabbit, database: Database, queue: str) -> Generator[RabbitRunner]:
    """A runner in a thread, stopped and drained at the end; its error, if any, is the test's."""
    stop = threading.Event()
    errors: list[BaseException] = []
    runner = RabbitRunner(
        *(insert, database.dsn),
        url=rabbitmq.url,
        queue=queue,
        exchange=f"{queue}.events",
        declare=True,
        options=FAST,
    )

    def run() -> None:
        try:
            runner.run(stop)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield runner
    finally:
        stop.set()
        thread.join(SECONDS)
    assert not thread.is_alive()
    assert errors == []


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def letters(database: Database) -> list[int]:
    with database.connect() as conn:
        found = conn.execute("SELECT id FROM fencepost.dead_letter WHERE reason = 'old_epoch' ORDER BY operation")
        return [row[0] for row in found]


def accepted(database: Database, *operations: str) -> None:
    with database.connect() as conn:
        for operation in operations:
            outbox.enqueue(conn, Submitted(tenant="acme", operation=operation, document="a", ordering_key="one"))


def destination(rabbitmq: Rabbit, queue: str) -> Destination:
    routes = [Route("*", f"{queue}.events", "test.submitted")]
    return Destination("events", "rabbitmq", routes, lambda source: publisher("rabbitmq", rabbitmq.url, source))


def relayed(rabbitmq: Rabbit, database: Database, queue: str) -> None:
    """What a relay of that database does, once."""
    to = destination(rabbitmq, queue)
    try:
        relay_once(database, to, pace=Pace())
    finally:
        to.close(time.monotonic() + SECONDS)


def handled(rabbitmq: Rabbit, database: Database, queue: str, *expected: str) -> None:
    """A runner at work until these are applied and the queue is empty."""
    with running(rabbitmq, database, queue) as runner:
        wait_for(lambda: operations(database) == list(expected), SECONDS, f"{expected}")
        wait_for(
            lambda: left(rabbitmq, queue) == 0 and runner.standing.oldest() is None, SECONDS, "the copies behind them"
        )
    assert left(rabbitmq, queue) == 0


def backfilled(rabbitmq: Rabbit, producer: Database, queue: str, chosen: Chosen) -> int:
    """What `fencepost relay backfill` does at the producer."""
    to = destination(rabbitmq, queue)
    with producer.connect(autocommit=True) as conn:
        to.open(conn, time.monotonic() + SECONDS)
        try:
            *_, last = send(conn, resolve(conn, "events", chosen), to, pace=PACE, stop=threading.Event())
        finally:
            to.close(time.monotonic() + SECONDS)
    return last.sent


@pytest.mark.parametrize("foreign", [False, True], ids=["own events", "another installation's events"])
def test_a_database_restored_while_rabbitmq_is_ahead_is_sent_again_what_it_lost_and_applies_it_once(
    rabbitmq: Rabbit, made: Restores, queue: str, databases18: Databases, foreign: bool
) -> None:
    live = made.live
    producer = databases18.empty() if foreign else live
    try:
        if foreign:
            migrate.apply(producer.dsn, state=producer.state)  # A clone would be the same installation.
        with running(rabbitmq, live, queue) as first:
            wait_for(lambda: first.standing.consuming, SECONDS, "the queue")
        accepted(producer, "op-0", "op-1")
        relayed(rabbitmq, producer, queue)
        handled(rabbitmq, live, queue, "op-0", "op-1")
        accepted(producer, "op-2", "op-3")
        relayed(rabbitmq, producer, queue)
        backup = made.backup()
        handled(rabbitmq, live, queue, "op-0", "op-1", "op-2", "op-3")
        old = made.restored(backup)

        (told,) = recovered(old).consumers
        assert told.consumer == "reports" and told.handled_until is not None and told.backfill_from is not None
        assert told.backfill_from < told.handled_until
        source = producer if foreign else old
        relayed(rabbitmq, source, queue)
        accepted(source, "op-4")
        relayed(rabbitmq, source, queue)
        handled(rabbitmq, old, queue, "op-0", "op-1", "op-4")  # the control: without a backfill they stay lost

        assert backfilled(rabbitmq, source, queue, Chosen(told.backfill_from)) == 5
        if not foreign:
            # Accepted by the restored installation itself under the epoch that its recovery has ended.
            with running(rabbitmq, old, queue):
                wait_for(lambda: len(letters(old)) == 2, SECONDS, "what it lost, set aside")
            assert operations(old) == ["op-0", "op-1", "op-4"]
            with old.connect() as conn:
                for number in letters(old):
                    acts.release(conn, number, actor="ann", reason="not handled in what was restored")
        handled(rabbitmq, old, queue, "op-0", "op-1", "op-4", "op-2", "op-3")
    finally:
        if foreign:
            databases18.drop(producer)


def test_nothing_is_taken_from_the_queue_while_the_database_is_not_armed(
    rabbitmq: Rabbit, made: Restores, queue: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(module, "ARMED_SECONDS", 0.1)
    live = made.live
    with running(rabbitmq, live, queue) as runner:
        accepted(live, "op-0")
        wait_for(lambda: runner.standing.consuming, SECONDS, "the queue")
        relayed(rabbitmq, live, queue)
        wait_for(lambda: operations(live) == ["op-0"], SECONDS, "the control")
        accepted(live, "op-1")
        with live.connect() as conn:
            conn.execute("DELETE FROM fencepost.ticket")  # as after a restart
        wait_for(lambda: "nothing is handled for now: NotArmed" in caplog.text, SECONDS, "the reason")
        wait_for(lambda: not runner.standing.consuming, SECONDS, "it to leave the queue")
        assert operations(live) == ["op-0"]
        arming.ensure_armed(live.dsn, live.state)
        relayed(rabbitmq, live, queue)
        wait_for(lambda: operations(live) == ["op-0", "op-1"], SECONDS, "the rest")
