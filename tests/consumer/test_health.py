"""What a consumer says of itself: ready only while database, broker and membership are there, and counts that are right."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import Connection
from yarl import URL

from fencepost.consumer.health import serving
from fencepost.consumer.inbox import inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.consumer.standing import Standing
from fencepost.schemas.envelope import Envelope
from fencepost.schemas.errors import ConfigError
from fencepost.schemas.health import HealthAddress, HealthServer
from support.brokers import declare, delete, produce, publish
from support.database import Database
from support.deliveries import Submitted, envelope
from support.health import LOOPBACK, ask
from support.processes import wait_for
from support.proxy import Proxy
from support.services import Kafka, Rabbit, unique

HERE = HealthAddress(LOOPBACK, 0)
DEADLINE_SECONDS = 30.0
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.1, max_attempts=2, drain_seconds=10)
CANARY = "canary-payload"


@inbox(consumer="reports")
def handler(tx: Connection[Any], event: Submitted) -> None:
    tx.execute("INSERT INTO done (operation) VALUES (%s)", (event.operation,))
    if event.operation == "poison":
        raise ValueError(event.document)


@contextmanager
def served(runner: KafkaRunner | RabbitRunner, dsn: str) -> Generator[HealthServer]:
    """The runner at work in a thread with its health served; stopped and drained at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=runner.run, args=(stop,))
    with serving(runner.standing, dsn, HERE, look=0.1) as server:
        assert ask(server.port, "/readyz").status == 503
        thread.start()
        try:
            yield server
        finally:
            stop.set()
            thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def becomes(server: HealthServer, state: str) -> Any:
    """The document of `/readyz` once it tells this state."""

    def told() -> Any:
        document = ask(server.port, "/readyz").document
        return document if document["state"] == state else None

    return wait_for(told, DEADLINE_SECONDS, f"the state {state}")


def metric(server: HealthServer, name: str) -> float | None:
    for line in ask(server.port, "/metrics").text.splitlines():
        if line.rpartition(" ")[0] == f"fencepost_consumer_{name}":
            return float(line.rpartition(" ")[2])
    return None


def counts(server: HealthServer) -> dict[str, float | None]:
    return {
        name: metric(server, f'{name}_total{{consumer="reports"}}')
        for name in ("handled", "duplicates", "conflicts", "failures")
    }


SENT: list[Envelope | bytes] = [
    envelope(operation="op-1"),
    envelope(operation="op-1"),
    envelope(operation="op-1", document=CANARY),
    envelope(operation="poison", document=CANARY),
    b"\0" + CANARY.encode(),
]


def told_right(server: HealthServer) -> None:
    def settled() -> bool:
        return metric(server, 'dead_letters_total{consumer="reports",reason="handler_failed"}') == 1.0

    wait_for(settled, DEADLINE_SECONDS, "the poison")
    expected = {"handled": 1.0, "duplicates": 1.0, "conflicts": 1.0, "failures": 1.0}
    wait_for(lambda: counts(server) == expected, DEADLINE_SECONDS, "every count")
    for reason in ("conflict", "undecodable"):
        assert metric(server, f'dead_letters_total{{consumer="reports",reason="{reason}"}}') == 1.0

    def idle() -> Any:
        document = ask(server.port, "/readyz").document
        return document if (document["in_flight"], document["oldest_unhandled_seconds"]) == (0, None) else None

    document = wait_for(idle, DEADLINE_SECONDS, "nothing in hand")
    assert metric(server, 'ready{consumer="reports"}') == 1.0
    assert CANARY not in ask(server.port, "/metrics").text + str(document)


def test_kafka_consumer_is_ready_counts_and_tells_its_partitions_and_lag(kafka: Kafka, domain18: Database) -> None:
    topic = kafka.topic()
    config: dict[str, object] = {"session.timeout.ms": kafka.session_ms, "heartbeat.interval.ms": 300}
    runner = KafkaRunner(
        handler,
        domain18.dsn,
        bootstrap=kafka.bootstrap,
        topics=[topic],
        group=unique("group"),
        config=config,
        options=FAST,
    )
    produce(kafka, topic, SENT)
    with served(runner, domain18.dsn) as server:
        becomes(server, "ready")
        told_right(server)
        wait_for(lambda: ask(server.port, "/readyz").document["lag"] == 0, DEADLINE_SECONDS, "no lag")
        assert ask(server.port, "/readyz").document["assigned"] >= 1
        assert ask(server.port, "/livez").status == 200


def test_rabbitmq_consumer_is_ready_counts_and_tells_a_lost_broker(rabbitmq: Rabbit, domain18: Database) -> None:
    name = rabbitmq.name()
    declare(rabbitmq, name)
    publish(rabbitmq, "", name, SENT)
    with Proxy(URL(rabbitmq.url).port or 5672) as proxy:
        url = str(URL(rabbitmq.url).with_host(LOOPBACK).with_port(proxy.port))
        with served(RabbitRunner(handler, domain18.dsn, url=url, queue=name, options=FAST), domain18.dsn) as server:
            becomes(server, "ready")
            told_right(server)
            proxy.cut(refuse_new=True)
            assert becomes(server, "broker")["consuming"] is False
            assert ask(server.port, "/livez").status == 200
            proxy.heal()
            becomes(server, "ready")
            assert (metric(server, 'losses_total{consumer="reports"}') or 0) >= 1
    delete(rabbitmq, name)


def test_a_disarmed_or_silent_database_is_told_and_a_handler_in_hand_has_an_age(
    rabbitmq: Rabbit, domain18: Database
) -> None:
    go, inside = threading.Event(), threading.Event()

    @inbox(consumer="reports")
    def held(tx: Connection[Any], event: Submitted) -> None:
        inside.set()
        assert go.wait(DEADLINE_SECONDS)

    name = rabbitmq.name()
    declare(rabbitmq, name)
    runner = RabbitRunner(held, domain18.dsn, url=rabbitmq.url, queue=name, options=FAST)
    with served(runner, domain18.dsn) as server:
        publish(rabbitmq, "", name, [envelope()])
        assert inside.wait(DEADLINE_SECONDS)
        document = becomes(server, "ready")
        assert document["in_flight"] == 1 and document["oldest_unhandled_seconds"] > 0
        go.set()
        wait_for(lambda: ask(server.port, "/readyz").document["in_flight"] == 0, DEADLINE_SECONDS, "the end")
    with served(runner, "host=127.0.0.1 port=1 dbname=gone") as server:
        wait_for(lambda: runner.standing.consuming, DEADLINE_SECONDS, "consuming")
        wait_for(
            lambda: becomes(server, "database")["database"] == "unreachable",
            DEADLINE_SECONDS,
            "the database to be gone",
        )
    delete(rabbitmq, name)


def test_a_loop_that_stands_still_is_not_alive(domain18: Database) -> None:
    standing = Standing("reports", "kafka")
    with serving(standing, domain18.dsn, HERE, stalled=60) as server:
        assert ask(server.port, "/livez").status == 200
        standing.moved_at -= 61
        assert ask(server.port, "/livez").status == 503
        standing.moved()
        assert ask(server.port, "/livez").status == 200


def test_an_address_that_is_taken_is_refused_by_its_field(domain18: Database) -> None:
    standing = Standing("reports", "kafka")
    with (
        serving(standing, domain18.dsn, HERE) as server,
        pytest.raises(ConfigError) as refused,
        serving(standing, domain18.dsn, HealthAddress(LOOPBACK, server.port)),
    ):
        pass
    assert refused.value.field == "health_address"
