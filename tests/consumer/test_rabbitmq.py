"""A message leaves its queue only after the commit, whatever happens to channels and connections in between."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, Connection
from yarl import URL

from fencepost.consumer import rabbitmq as module
from fencepost.consumer.inbox import inbox
from fencepost.consumer.outcomes import Outcome
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.consumer.standing import BrokerState
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError, Unreachable
from support.brokers import channel_of, declare, delete, left, publish
from support.database import Database
from support.deliveries import Submitted, envelope
from support.processes import wait_for
from support.proxy import Proxy
from support.services import Rabbit

Tx = Connection[Any]
DEADLINE_SECONDS = 30.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2, max_attempts=3, drain_seconds=10)


@pytest.fixture
def queue(rabbitmq: Rabbit) -> Generator[str, None, None]:
    """A durable queue of this test."""
    name = rabbitmq.name()
    declare(rabbitmq, name)
    yield name
    delete(rabbitmq, name)


def operations(database: Database) -> list[str]:
    with database.connect() as conn:
        return [row[0] for row in conn.execute("SELECT operation FROM done ORDER BY n").fetchall()]


def dead(database: Database) -> list[tuple[Any, ...]]:
    with database.connect() as conn:
        found = "SELECT reason, operation, attempts FROM fencepost.dead_letter ORDER BY reason"
        return conn.execute(found).fetchall()


@inbox(consumer="reports")
def insert(tx: Tx, event: Submitted) -> None:
    tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


@inbox(consumer="reports")
async def insert_async(tx: AsyncConnection[Any], event: Submitted) -> None:
    await asyncio.sleep(0)
    await tx.execute("INSERT INTO done (tenant, operation) VALUES (%s, %s)", (event.tenant, event.operation))


@contextmanager
def running(runner: RabbitRunner) -> Generator[threading.Event, None, None]:
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


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_every_message_of_a_declared_queue_is_handled_once_and_the_queue_ends_empty(
    rabbitmq: Rabbit, domain18: Database, kind: str
) -> None:
    name, exchange = rabbitmq.name(), rabbitmq.name("exchange")
    runner = RabbitRunner(
        insert if kind == "sync" else insert_async,
        domain18.dsn,
        url=rabbitmq.url,
        queue=name,
        exchange=exchange,
        routing_keys=["test.#"],
        declare=True,
        options=FAST,
    )
    sent = [envelope(operation=f"op-{number}") for number in range(30)]
    with running(runner):
        pass  # Declares, and leaves the queue bound.
    publish(rabbitmq, exchange, "test.submitted", [*sent, *sent[:5]])
    with running(runner):
        wait_for(lambda: len(operations(domain18)) == 30, DEADLINE_SECONDS, "30 messages")
        told = runner.standing.outcome
        wait_for(lambda: told(Outcome.HANDLED) + told(Outcome.DUPLICATE) == 35, DEADLINE_SECONDS, "the copies")
        wait_for(lambda: left(rabbitmq, name) == 0, DEADLINE_SECONDS, "the queue to be empty")

    assert sorted(operations(domain18)) == sorted(each.operation for each in sent)
    assert (left(rabbitmq, name), left(rabbitmq, f"{name}.dead"), dead(domain18)) == (0, 0, [])
    with domain18.connect() as conn:
        text = conn.execute("SELECT coordinates FROM fencepost.delivery LIMIT 1").fetchall()[0][0]
    broker, cluster, vhost, where, _ = json.loads(text)
    assert (broker, vhost, where) == ("rabbitmq", "/", name)
    assert "@" in cluster
    delete(rabbitmq, name, f"{name}.dead")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_dead_letter_that_was_given_back_is_handled_in_idle_time_while_others_flow(
    rabbitmq: Rabbit, domain18: Database, queue: str, kind: str
) -> None:
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
        await insert_async(tx, event)

    runner = RabbitRunner(
        sync if kind == "sync" else async_,
        domain18.dsn,
        url=rabbitmq.url,
        queue=queue,
        options=replace(FAST, max_attempts=1, idle_seconds=0.05),
    )
    publish(rabbitmq, "", queue, [envelope(operation=f"op-{number}") for number in range(3)])
    with running(runner):
        wait_for(lambda: sorted(operations(domain18)) == ["op-0", "op-2"], DEADLINE_SECONDS, "the others")
        wait_for(lambda: dead(domain18) == [("handler_failed", "op-1", 1)], DEADLINE_SECONDS, "the dead letter")
        mended = True
        with domain18.connect() as conn:
            conn.execute(
                "SELECT fencepost.retry_dead_letter(d.id, false, 'ann', 'mended') FROM fencepost.dead_letter AS d"
            )
        wait_for(lambda: "op-1" in operations(domain18), DEADLINE_SECONDS, "the retry")
        publish(rabbitmq, "", queue, [envelope(operation="later")])
        wait_for(lambda: "later" in operations(domain18), DEADLINE_SECONDS, "what came later")
    assert dead(domain18) == []
    assert left(rabbitmq, queue) == 0


def test_a_message_beyond_its_delivery_limit_waits_in_the_dead_queue_and_can_be_handled_from_there(
    rabbitmq: Rabbit, domain18: Database
) -> None:
    name = rabbitmq.name()
    runner = RabbitRunner(
        insert, domain18.dsn, url=rabbitmq.url, queue=name, declare=True, delivery_limit=1, options=FAST
    )
    with running(runner):
        pass  # Declares.

    async def refuse() -> None:
        async with channel_of(rabbitmq) as channel:
            queue = await channel.declare_queue(name, passive=True)
            while (message := await queue.get(no_ack=False, fail=False, timeout=DEADLINE_SECONDS)) is not None:
                await message.nack(requeue=True)

    publish(rabbitmq, "", name, [envelope()])
    asyncio.run(refuse())
    wait_for(lambda: left(rabbitmq, f"{name}.dead") == 1, DEADLINE_SECONDS, "the dead queue")
    assert left(rabbitmq, name) == 0
    with running(RabbitRunner(insert, domain18.dsn, url=rabbitmq.url, queue=f"{name}.dead", options=FAST)):
        wait_for(lambda: operations(domain18) == ["op-1"], DEADLINE_SECONDS, "the message")
        wait_for(lambda: left(rabbitmq, f"{name}.dead") == 0, DEADLINE_SECONDS, "the dead queue to be empty")
    delete(rabbitmq, name, f"{name}.dead")


def test_a_connection_that_is_cut_while_handlers_run_costs_no_effect_and_acknowledges_nobody_elses_message(
    rabbitmq: Rabbit, domain18: Database, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    publish(rabbitmq, "", queue, [envelope(operation=f"op-{number}") for number in range(10)])
    inside, go = threading.Semaphore(0), threading.Event()

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        inside.release()
        assert go.wait(DEADLINE_SECONDS)

    with Proxy(URL(rabbitmq.url).port or 5672) as proxy:
        url = str(URL(rabbitmq.url).with_host("127.0.0.1").with_port(proxy.port))
        runner = RabbitRunner(handler, domain18.dsn, url=url, queue=queue, prefetch=5, options=FAST)
        with running(runner):
            for _ in range(3):
                assert inside.acquire(timeout=DEADLINE_SECONDS)
            proxy.cut()
            wait_for(lambda: caplog.text.count("consuming") == 2, DEADLINE_SECONDS, "the next session")
            go.set()
            wait_for(lambda: len(operations(domain18)) == 10, DEADLINE_SECONDS, "ten effects")
            wait_for(
                lambda: left(rabbitmq, queue) == 0 and runner.standing.oldest() is None,
                DEADLINE_SECONDS,
                "what came again",
            )

    assert sorted(operations(domain18)) == sorted(f"op-{number}" for number in range(10))
    assert left(rabbitmq, queue) == 0
    assert "acknowledgement dropped" in caplog.text
    assert dead(domain18) == []


def test_a_channel_that_the_broker_closes_is_replaced_and_effects_stay_single(
    rabbitmq: Rabbit, domain18: Database, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.2)
    publish(rabbitmq, "", queue, [envelope(operation=f"op-{number}") for number in range(3)])
    with running(RabbitRunner(insert, domain18.dsn, url=rabbitmq.url, queue=queue, options=FAST)):
        wait_for(lambda: len(operations(domain18)) == 3, DEADLINE_SECONDS, "three messages")
        delete(rabbitmq, queue)
        wait_for(lambda: "RabbitMQ lost" in caplog.text, DEADLINE_SECONDS, "the loss to be noticed")
        declare(rabbitmq, queue)
        publish(rabbitmq, "", queue, [envelope(operation=f"op-{number}") for number in range(2, 5)])
        wait_for(lambda: len(operations(domain18)) == 5, DEADLINE_SECONDS, "consuming to go on")

    assert sorted(operations(domain18)) == [f"op-{number}" for number in range(5)]
    assert left(rabbitmq, queue) == 0


def test_what_can_never_be_handled_is_set_aside_and_the_queue_goes_on(
    rabbitmq: Rabbit, domain18: Database, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "poison":
            raise ValueError(f"do-not-log {event.document}")

    publish(rabbitmq, "", queue, [envelope(operation="op-0")])
    runner = RabbitRunner(handler, domain18.dsn, url=rabbitmq.url, queue=queue, options=FAST)
    with running(runner):
        wait_for(lambda: operations(domain18) == ["op-0"], DEADLINE_SECONDS, "the first")
        publish(
            rabbitmq,
            "",
            queue,
            [
                envelope(operation="op-0", document="b"),
                b"\0do-not-log",
                b"\0do-not-log either",
                envelope(operation="poison"),
                envelope(operation="end"),
            ],
        )
        wait_for(lambda: len(dead(domain18)) == 4 and len(operations(domain18)) == 2, DEADLINE_SECONDS, "the end")

    assert operations(domain18) == ["op-0", "end"]
    assert dead(domain18) == [
        ("conflict", "op-0", 1),
        ("handler_failed", "poison", 3),
        ("undecodable", None, 1),
        ("undecodable", None, 1),
    ]
    assert left(rabbitmq, queue) == 0
    assert "do-not-log" not in caplog.text


def test_a_commit_that_was_a_rollback_is_never_acknowledged_as_done(
    rabbitmq: Rabbit, domain18: Database, queue: str
) -> None:
    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        insert(tx, event)
        if event.operation == "swallowed":
            with suppress(psycopg.Error):
                tx.execute("SELECT 1 / 0")

    publish(rabbitmq, "", queue, [envelope(operation="op-0"), envelope(operation="swallowed")])
    with running(RabbitRunner(handler, domain18.dsn, url=rabbitmq.url, queue=queue, options=FAST)):
        wait_for(lambda: dead(domain18) == [("handler_failed", "swallowed", 3)], DEADLINE_SECONDS, "the dead letter")
        wait_for(lambda: operations(domain18) == ["op-0"], DEADLINE_SECONDS, "the other")
    assert left(rabbitmq, queue) == 0


def test_a_stop_finishes_what_runs_and_gives_the_rest_back(rabbitmq: Rabbit, domain18: Database, queue: str) -> None:
    inside, go = threading.Semaphore(0), threading.Event()

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        inside.release()
        assert go.wait(DEADLINE_SECONDS)
        insert(tx, event)

    publish(rabbitmq, "", queue, [envelope(operation=f"op-{number}") for number in range(4)])
    options = RunnerOptions(concurrency=1)
    runner = RabbitRunner(handler, domain18.dsn, url=rabbitmq.url, queue=queue, options=options)
    with running(runner) as stop:
        assert inside.acquire(timeout=DEADLINE_SECONDS)
        stop.set()
        wait_for(lambda: runner.standing.draining, DEADLINE_SECONDS, "the drain")
        go.set()

    assert operations(domain18) == ["op-0"]
    wait_for(lambda: left(rabbitmq, queue) == 3, DEADLINE_SECONDS, "the rest to be given back")


def test_a_key_keeps_its_order_while_others_are_handled_beside_it(
    rabbitmq: Rabbit, domain18: Database, queue: str
) -> None:
    go = threading.Event()
    failures = 0

    @inbox(consumer="reports")
    def handler(tx: Tx, event: Submitted) -> None:
        nonlocal failures
        if event.operation == "a-0":
            assert go.wait(DEADLINE_SECONDS)
            failures += 1
            if failures < 3:
                raise ValueError
        insert(tx, event)

    def keyed(operation: str) -> Envelope:
        event = Submitted(tenant="acme", operation=operation, document="a", ordering_key=operation[0])
        return envelope(event)

    publish(rabbitmq, "", queue, [keyed(name) for name in ("a-0", "b-0", "a-1", "b-1", "a-2")])
    with running(RabbitRunner(handler, domain18.dsn, url=rabbitmq.url, queue=queue, options=FAST)):
        wait_for(lambda: operations(domain18) == ["b-0", "b-1"], DEADLINE_SECONDS, "the other key")
        go.set()
        wait_for(lambda: len(operations(domain18)) == 5, DEADLINE_SECONDS, "the first key")

    assert operations(domain18) == ["b-0", "b-1", "a-0", "a-1", "a-2"]
    assert left(rabbitmq, queue) == 0


def test_a_queue_that_could_drop_messages_is_told_once_and_one_that_could_not_is_not(
    rabbitmq: Rabbit, domain18: Database, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    def told(name: str) -> list[str]:
        caplog.clear()
        with running(RabbitRunner(insert, domain18.dsn, url=rabbitmq.url, queue=name, options=FAST)):
            publish(rabbitmq, "", name, [envelope(operation=name)])
            wait_for(lambda: name in operations(domain18), DEADLINE_SECONDS, "the message")
        return [record.getMessage() for record in caplog.records if "unless a policy" in record.getMessage()]

    safe, bare, hasty = rabbitmq.name(), rabbitmq.name(), rabbitmq.name()
    with running(RabbitRunner(insert, domain18.dsn, url=rabbitmq.url, queue=safe, declare=True, options=FAST)):
        pass
    quorum = {"x-queue-type": "quorum"}
    declare(rabbitmq, bare, arguments=quorum)
    declare(rabbitmq, hasty, arguments=quorum | {"x-dead-letter-exchange": "amq.direct"})

    assert told(safe) == []
    for name, words in ((queue, "classic"), (bare, "no dead-letter exchange"), (hasty, "at-least-once")):
        (line,) = told(name)
        assert name in line and words in line
    delete(rabbitmq, safe, f"{safe}.dead", bare, hasty)


def test_a_handler_beyond_the_ack_deadline_comes_back_on_a_new_channel_as_a_duplicate(
    rabbitmq: Rabbit, domain18: Database, caplog: pytest.LogCaptureFixture
) -> None:
    if rabbitmq.node is None:
        pytest.skip("this broker's limits are not ours to set")
    caplog.set_level(logging.INFO)
    name = rabbitmq.name()
    go = threading.Event()

    @inbox(consumer="reports", wait_seconds=0.3)
    def handler(tx: Tx, event: Submitted) -> None:
        if event.operation == "slow":
            assert go.wait(DEADLINE_SECONDS)
        insert(tx, event)

    def limits(timeout: int, tick: int) -> None:
        assert rabbitmq.node is not None
        for setting, value in (("consumer_timeout", timeout), ("channel_tick_interval", tick)):
            rabbitmq.node.rabbitmqctl("eval", f"application:set_env(rabbit, {setting}, {value}).")

    limits(1000, 500)  # Read by the broker when a channel begins.
    try:
        runner = RabbitRunner(
            handler, domain18.dsn, url=rabbitmq.url, queue=name, declare=True, delivery_limit=1000, options=FAST
        )
        with running(runner):
            wait_for(lambda: runner.standing.consuming, DEADLINE_SECONDS, "the queue")
            publish(
                rabbitmq, "", name, [envelope(operation="slow"), *(envelope(operation=f"op-{n}") for n in range(4))]
            )
            wait_for(lambda: caplog.text.count("consuming") >= 2, DEADLINE_SECONDS, "the next channel")
            limits(1_800_000, 60_000)
            go.set()
            wait_for(lambda: len(operations(domain18)) == 5, DEADLINE_SECONDS, "five effects")
            wait_for(lambda: left(rabbitmq, name) == 0, DEADLINE_SECONDS, "an empty queue")
    finally:
        limits(1_800_000, 60_000)

    assert "acknowledgement dropped" in caplog.text
    assert sorted(operations(domain18)) == ["op-0", "op-1", "op-2", "op-3", "slow"]
    assert (left(rabbitmq, name), left(rabbitmq, f"{name}.dead"), dead(domain18)) == (0, 0, [])
    delete(rabbitmq, name, f"{name}.dead")


def test_a_broker_that_restarts_costs_nothing_and_consuming_goes_on(rabbitmq: Rabbit, domain18: Database) -> None:
    if rabbitmq.node is None:
        pytest.skip("this broker is not ours to stop")
    name = rabbitmq.name()
    runner = RabbitRunner(insert, domain18.dsn, url=rabbitmq.url, queue=name, declare=True, options=FAST)
    with running(runner):
        wait_for(lambda: runner.standing.consuming, DEADLINE_SECONDS, "the queue")
        publish(rabbitmq, "", name, [envelope(operation="op-0")])
        wait_for(lambda: operations(domain18) == ["op-0"], DEADLINE_SECONDS, "the first")
        rabbitmq.node.stop()
        wait_for(lambda: not runner.standing.consuming, DEADLINE_SECONDS, "the loss")
        wait_for(lambda: runner.standing.broker is BrokerState.UNREACHABLE, DEADLINE_SECONDS, "the broker to be gone")
        rabbitmq.node.start()
        wait_for(lambda: runner.standing.consuming, DEADLINE_SECONDS, "the next session")
        publish(rabbitmq, "", name, [envelope(operation="op-0"), envelope(operation="op-1")])
        wait_for(lambda: operations(domain18) == ["op-0", "op-1"], DEADLINE_SECONDS, "the second")
    assert left(rabbitmq, name) == 0
    delete(rabbitmq, name, f"{name}.dead")


def test_credentials_in_the_clear_and_unverified_servers_are_refused_off_loopback() -> None:
    def made(url: str, *, insecure: bool = False, context: ssl.SSLContext | None = None) -> RabbitRunner:
        return RabbitRunner(insert, "", url=url, queue="q", insecure=insecure, context=context)

    loose = ssl.create_default_context()
    loose.check_hostname = False
    loose.verify_mode = ssl.CERT_NONE
    plain, unverified = "amqp://guest:hidden@mq.example/", "amqps://guest:hidden@mq.example/?no_verify_ssl=1"
    made("amqp://guest:hidden@127.0.0.1/")
    made("amqps://guest:hidden@mq.example/", context=ssl.create_default_context())
    for url in (plain, unverified):
        made(url, insecure=True)
        with pytest.raises(ConfigError) as refused:
            made(url)
        assert refused.value.field == "url"
        assert "hidden" not in repr(refused.value)
    with pytest.raises(ConfigError) as refused:
        made("amqps://mq.example/", context=loose)
    assert refused.value.field == "context"


def test_a_queue_that_is_missing_or_different_is_refused_by_name(
    rabbitmq: Rabbit, domain18: Database, queue: str
) -> None:
    options = RunnerOptions(start_seconds=0.3)

    def make(name: str, *, declare: bool = False) -> RabbitRunner:
        return RabbitRunner(insert, domain18.dsn, url=rabbitmq.url, queue=name, declare=declare, options=options)

    with running(make(queue)):
        pass

    with pytest.raises(ConfigError, match="does not exist") as missing:
        make(rabbitmq.name()).run(threading.Event())
    with pytest.raises(ConfigError, match="other properties") as different:
        make(queue, declare=True).run(threading.Event())
    assert [missing.value.field, different.value.field] == ["queue", "queue"]
    delete(rabbitmq, f"{queue}.dead")


def test_a_broker_that_is_not_there_is_unreachable_without_its_password() -> None:
    runner = RabbitRunner(
        insert, "", url="amqp://guest:hidden@127.0.0.1:1/", queue="q", options=RunnerOptions(start_seconds=0.5)
    )
    with pytest.raises(Unreachable) as refused:
        runner.run(threading.Event())
    assert "127.0.0.1:1" in str(refused.value)
    assert "hidden" not in str(refused.value)
