"""Logs: one line a record, for machines or people, and nothing in it that a driver, a server or a client has quoted."""

import json
import logging
import sys
from pathlib import Path

import psycopg
import pytest

from fencepost.operate.logs import LogFormat, Plain
from fencepost.relay import outbox
from fencepost.schemas.errors import Unreachable
from fencepost.schemas.event import Event
from stack.places import free_port
from stack.postgres import PostgresServer
from support.command_line import PASSWORD, Fencepost, running
from support.database import Database
from support.health import ask
from support.processes import wait_for
from support.services import Kafka, Rabbit, unique

CANARY = "canary-in-a-payload"
SASL = "canary-sasl-password"
RABBIT = "canary-rabbit-password"
PARKED = "SELECT count(*) FROM fencepost.parked"
ENDED = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = 'fencepost'"""


class Secretive(Event, type="operate.secretive", version=1):
    text: str


class Routeless(Event, type="elsewhere.secretive", version=1):
    text: str


def line(how: LogFormat, message: str, *arguments: object, name: str = "fencepost.test", **more: object) -> str:
    """One formatted record; `exc_info` and extras as given."""
    exc_info = more.pop("exc_info", None)
    record = logging.LogRecord(name, logging.ERROR, __file__, 1, message, arguments, exc_info)  # type: ignore[arg-type]
    record.__dict__.update(more)
    return Plain(how).format(record)


def fields(text: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(text)
    return found


def test_a_record_is_one_line_with_its_ids_and_nothing_else_that_was_attached() -> None:
    found = fields(line(LogFormat.JSON, "it\nis %s", "so", destination="reports", event_id=7, payload=CANARY))
    assert (found["level"], found["logger"], found["message"]) == ("error", "fencepost.test", "it is so")
    assert (found["destination"], found["event_id"]) == ("reports", "7")
    assert found["time"].endswith("Z")
    assert CANARY not in str(found)
    text = line(LogFormat.TEXT, "it\nis %s", "so", event_id=7, payload=CANARY)
    assert text.endswith(" error fencepost.test: it is so event_id=7") and "\n" not in text


@pytest.mark.parametrize("how", list(LogFormat))
def test_an_error_of_others_is_told_by_class_and_place_only(how: LogFormat, database18: Database) -> None:
    with database18.connect(autocommit=True) as conn:
        conn.execute("CREATE TABLE kept (value text UNIQUE)")
        conn.execute("INSERT INTO kept VALUES (%s)", [CANARY])
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            conn.execute("INSERT INTO kept VALUES (%s)", [CANARY])
    assert CANARY in str(caught.value)  # the control: the driver's own text holds the row's value

    text = line(how, "failed", exc_info=(caught.type, caught.value, caught.tb))

    assert "psycopg.errors.UniqueViolation" in text and ".py:" in text
    assert CANARY not in text and "\n" not in text


def test_an_error_of_ours_is_told_with_its_message() -> None:
    try:
        raise Unreachable("it is away", address="amqp://u:SECRET@h:1/")
    except Unreachable:
        found = fields(line(LogFormat.JSON, "failed", exc_info=sys.exc_info()))
    assert "it is away" in found["detail"] and "SECRET" not in str(found)


def test_lines_of_client_libraries_are_told_without_what_they_quote() -> None:
    told = fields(line(LogFormat.JSON, "error ignored in %s: %s", "rollback", CANARY, name="psycopg.pool"))
    assert told["message"] == "error ignored in %s: %s"
    formatted = fields(line(LogFormat.JSON, f"cannot parse {CANARY}", name="aiormq.connection"))
    assert CANARY not in str(formatted)


def test_nothing_that_the_relay_prints_or_serves_shows_a_secret_or_a_payload(
    database18: Database, kafka: Kafka, rabbitmq: Rabbit, tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "sasl").write_text(SASL + "\n")
    refused = f"amqp://app:{RABBIT}@{rabbitmq.url.rpartition('@')[2]}"
    tables = [
        {
            "name": "kafka",
            "kind": "kafka",
            "address": kafka.bootstrap,
            "routes": [{"match": "operate.*", "to": unique("missing")}],
            "options": {"sasl.username": "app", "sasl.password": {"file": "sasl"}},
        },
        {
            "name": "rabbit",
            "kind": "rabbitmq",
            "address": refused,
            "routes": [{"match": "operate.*", "to": "amq.topic"}],
        },
    ]
    with database18.connect() as conn:
        outbox.enqueue(conn, Secretive(tenant="acme", operation="a", text=CANARY))
        outbox.enqueue(conn, Routeless(tenant="acme", operation="b", text=CANARY))
    port = free_port()
    with (
        running(
            database18,
            *("--verbose", "--log-format", "json", "relay", "run"),
            folder=tmp_path,
            FENCEPOST_DESTINATIONS=json.dumps(tables),
            FENCEPOST_SECRETS_DIR=str(secrets),
            FENCEPOST_RELAY_HEALTH_ADDRESS=f"127.0.0.1:{port}",
            FENCEPOST_RELAY_CONFIRM="2",
        ) as relay,
        database18.connect(autocommit=True) as conn,
    ):

        def parked() -> bool:
            row = conn.execute(PARKED).fetchone()
            return row is not None and row[0] == 2

        wait_for(parked, 40, "both events to be parked")
        relay.says("RabbitMQ refuses the login", 30)
        conn.execute(ENDED)
        relay.says("destination kafka waits", 30)
        served = "".join(ask(port, path).text for path in ("/livez", "/readyz", "/metrics"))
        assert '"kafka"' in served and "fencepost_relay_parked_total" in served
        assert relay.terminate(30) == 0
        printed = relay.text
    for secret in (CANARY, SASL, RABBIT, PASSWORD):
        assert secret not in printed + served, secret
    lines = [fields(text) for text in printed.splitlines() if text.startswith("{")]
    assert len(lines) >= len(printed.splitlines()) - 1  # the summary is the only line that is no record
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert "kafka" in {found.get("destination") for found in lines}


def test_a_password_that_the_database_refuses_is_not_repeated(kafka: Kafka, fencepost: Fencepost) -> None:
    with PostgresServer("18") as server:
        access = server.data / "pg_hba.conf"
        access.write_text("host all locked 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute("CREATE ROLE locked LOGIN PASSWORD 'another'")
            conn.execute("SELECT pg_reload_conf()")
        destinations = [
            {"name": "a", "kind": "kafka", "address": kafka.bootstrap, "routes": [{"match": "*", "to": kafka.topic()}]}
        ]
        variables = {"FENCEPOST_DESTINATIONS": json.dumps(destinations), "FENCEPOST_RELAY_PATIENCE": "1"}
        base = f"127.0.0.1:{server.port}/postgres"

        def refused() -> bool:
            given = f"postgresql://locked:{PASSWORD}@{base}"
            done = fencepost(None, "--verbose", "relay", "run", "--once", FENCEPOST_DATABASE=given, **variables)
            return done.code == 3 and "PostgreSQL refuses the login" in done.err

        wait_for(refused, 20, "the server to refuse the password")
        right = fencepost(None, "relay", "check", FENCEPOST_DATABASE=f"postgresql://locked:another@{base}", **variables)
        assert "ok    database " in right.out and "another" not in right.out + right.err
