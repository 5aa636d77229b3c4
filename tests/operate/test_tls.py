"""Servers that are verified and logins that are refused, on real servers with certificates of an authority of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from conformance.on_kafka import OnKafka
from conformance.on_rabbitmq import OnRabbit
from fencepost.consumer.inbox import Inbox, inbox
from fencepost.consumer.kafka import KafkaRunner
from fencepost.consumer.rabbitmq import RabbitRunner
from fencepost.consumer.runner import RunnerOptions
from fencepost.operate.publishers import tls_context
from fencepost.relay import outbox
from fencepost.schemas.connect import connect
from fencepost.schemas.errors import Unreachable
from fencepost.schemas.event import Event
from stack.kafka import KafkaServer
from stack.postgres import PostgresServer
from stack.process import Unavailable
from stack.rabbitmq import RabbitServer
from support.authority import Authority
from support.command_line import PASSWORD, Fencepost, Result
from support.database import Database, Databases
from support.processes import wait_for
from support.services import Kafka, Rabbit, missing

WRONG = "canary-wrong-password"
FAST = RunnerOptions(backoff_base=0.05, backoff_max=0.2)
IMPATIENT = replace(FAST, start_seconds=6)
# Kafka's client takes the whole time, whether the refusal has come by then or not.
SHORT_CONFIRM, LONG_CONFIRM = ({"FENCEPOST_RELAY_CONFIRM": seconds} for seconds in ("2", "10"))


class Sealed(Event, type="operate.sealed", version=1):
    """What these tests publish."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours") / "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, which signed nothing that our servers show."""
    return Authority(tmp_path_factory.mktemp("strange") / "authority")


@pytest.fixture(scope="module")
def postgres(authority: Authority) -> Iterator[PostgresServer]:
    try:
        server = PostgresServer("15", certificate=authority.server)
    except Unavailable as error:
        missing(str(error))
    with server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE ROLE app SUPERUSER LOGIN PASSWORD {}").format(PASSWORD))
        yield server


@pytest.fixture(scope="module")
def sealed_databases(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    made = Databases(postgres.dsn, tmp_path_factory.mktemp("witness"))
    yield made
    made.close()


@pytest.fixture
def sealed(sealed_databases: Databases, postgres: PostgresServer, authority: Authority) -> Iterator[Database]:
    """A database whose login must come by TLS; the server is verified in full."""
    made = sealed_databases.migrated()
    by_tls = make_conninfo(
        made.dsn,
        host="localhost",
        user="app",
        password=PASSWORD,
        sslmode="verify-full",
        sslrootcert=str(authority.path),
    )
    yield Database(by_tls, made.state)
    sealed_databases.drop(made)


@pytest.fixture(scope="module")
def kafka_node(authority: Authority) -> Iterator[KafkaServer]:
    try:
        server = KafkaServer(certificate=authority.server, users={"relay": PASSWORD})
    except Unavailable as error:
        missing(str(error))
    with server:
        yield server


@pytest.fixture(scope="module")
def rabbit_node(authority: Authority) -> Iterator[RabbitServer]:
    try:
        server = RabbitServer(certificate=authority.server)
    except Unavailable as error:
        missing(str(error))
    with server:
        yield server


@pytest.fixture
def on_kafka(kafka_node: KafkaServer) -> OnKafka:
    return OnKafka(Kafka(kafka_node.bootstrap, kafka_node.version, True, kafka_node))


@pytest.fixture
def on_rabbit(rabbit_node: RabbitServer) -> OnRabbit:
    return OnRabbit(Rabbit(rabbit_node.url, rabbit_node.version, rabbit_node))


def by_certificate(node: KafkaServer, authority: Authority) -> dict[str, Any]:
    """A destination on Kafka's TLS listener, as a settings table."""
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": str(authority.path),
        "ssl.certificate.location": str(authority.client.chain),
        "ssl.key.location": str(authority.client.key),
    }
    return {"name": "here", "kind": "kafka", "address": f"localhost:{node.tls_port}", "options": options}


def by_password(node: KafkaServer, authority: Authority, mechanism: str) -> dict[str, Any]:
    """A destination on Kafka's SASL_SSL listener."""
    options = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(authority.path),
        "sasl.mechanism": mechanism,
        "sasl.username": "relay",
        "sasl.password": PASSWORD,
    }
    return {"name": "here", "kind": "kafka", "address": f"localhost:{node.sasl_port}", "options": options}


def by_amqps(node: RabbitServer, authority: Authority) -> dict[str, Any]:
    """A destination on RabbitMQ's TLS listener."""
    options = {
        "tls_ca": str(authority.path),
        "tls_certificate": str(authority.client.chain),
        "tls_key": str(authority.client.key),
    }
    address = f"amqps://guest:guest@localhost:{node.tls_port}/"
    return {"name": "here", "kind": "rabbitmq", "address": address, "options": options}


def with_options(table: dict[str, Any], **options: str) -> dict[str, Any]:
    """The same destination with other options; "" takes one away."""
    named = {name.replace("__", "."): value for name, value in options.items()}
    return table | {"options": {n: v for n, v in (table["options"] | named).items() if v}}


def elsewhere(table: dict[str, Any]) -> dict[str, Any]:
    """The same server by a name that is not in its certificate."""
    return table | {"address": table["address"].replace("localhost", "127.0.0.1")}


def run(fencepost: Fencepost, database: Database, table: dict[str, Any], to: str, *command: str, **more: str) -> Result:
    destinations = json.dumps([table | {"routes": [{"match": "operate.*", "to": to}]}])
    return fencepost(database, *command, FENCEPOST_DESTINATIONS=destinations, **more)


def published(fencepost: Fencepost, database: Database, table: dict[str, Any], to: str) -> None:
    """One event goes from this database to this destination."""
    assert run(fencepost, database, table, to, "relay", "run", "--once").code == 0
    with connect(database.dsn) as conn, conn.transaction():
        outbox.enqueue(conn, Sealed(tenant="acme", operation="op-1"))
    done = run(fencepost, database, table, to, "relay", "run", "--once")
    assert done.code == 0, done.err
    assert done.out.startswith("published 1, parked 0, "), done.out


def refused(fencepost: Fencepost, database: Database, table: dict[str, Any], to: str, right: dict[str, Any]) -> str:
    """The only failing line of `relay check`, after the right table has passed."""
    assert run(fencepost, database, right, to, "relay", "check").code == 0
    done = run(fencepost, database, table, to, "relay", "check", **SHORT_CONFIRM)
    if "Kafka does not answer" in done.out:
        done = run(fencepost, database, table, to, "relay", "check", **LONG_CONFIRM)
    assert done.code == 1
    assert WRONG not in done.out + done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("fail ")]
    assert "broker here" in line
    return line


@pytest.mark.parametrize("mechanism", ["certificate", "PLAIN", "SCRAM-SHA-256"])
def test_events_reach_kafka_over_verified_tls_from_a_verified_database(
    fencepost: Fencepost,
    sealed: Database,
    kafka_node: KafkaServer,
    on_kafka: OnKafka,
    authority: Authority,
    mechanism: str,
) -> None:
    certified = mechanism == "certificate"
    table = by_certificate(kafka_node, authority) if certified else by_password(kafka_node, authority, mechanism)
    route = on_kafka.destination()
    published(fencepost, sealed, table, route.to)
    assert [one.envelope.operation for one in on_kafka.read(route, 1)] == ["op-1"]


def test_events_reach_rabbitmq_over_verified_tls_from_a_verified_database(
    fencepost: Fencepost, sealed: Database, rabbit_node: RabbitServer, on_rabbit: OnRabbit, authority: Authority
) -> None:
    route = on_rabbit.destination()
    published(fencepost, sealed, by_amqps(rabbit_node, authority), route.to)
    assert [one.envelope.operation for one in on_rabbit.read(route, 1)] == ["op-1"]


@pytest.mark.parametrize("fault", ["authority", "host", "password", "no certificate", "no file"])
def test_what_kafka_or_the_relay_cannot_trust_is_refused_by_field(
    fencepost: Fencepost,
    sealed: Database,
    kafka_node: KafkaServer,
    on_kafka: OnKafka,
    authority: Authority,
    stranger: Authority,
    fault: str,
) -> None:
    right = by_password(kafka_node, authority, "SCRAM-SHA-256")
    match fault:
        case "authority":
            table, field = with_options(right, ssl__ca__location=str(stranger.path)), "options.ssl.ca.location"
        case "host":
            table, field = elsewhere(right), "options.ssl.ca.location"
        case "password":
            table, field = with_options(right, sasl__password=WRONG), "options.sasl.password"
        case "no certificate":
            right = by_certificate(kafka_node, authority)
            table, field = with_options(right, ssl__certificate__location="", ssl__key__location=""), "certificate"
        case _:
            table, field = with_options(right, ssl__ca__location="nowhere.pem"), "options.ssl.ca.location"

    line = refused(fencepost, sealed, table, on_kafka.destination().to, right)

    assert field in line
    assert str(kafka_node.tls_port) in line or str(kafka_node.sasl_port) in line or fault == "no file"
    if fault == "host":
        assert "name of the certificate" in line


@pytest.mark.parametrize("fault", ["authority", "default authorities", "host", "password", "no certificate"])
def test_what_rabbitmq_or_the_relay_cannot_trust_is_refused_by_field(
    fencepost: Fencepost,
    sealed: Database,
    rabbit_node: RabbitServer,
    on_rabbit: OnRabbit,
    authority: Authority,
    stranger: Authority,
    fault: str,
) -> None:
    right = by_amqps(rabbit_node, authority)
    match fault:
        case "authority":
            table, told = with_options(right, tls_ca=str(stranger.path)), "[options.tls_ca]"
        case "default authorities":
            table, told = with_options(right, tls_ca="", tls_certificate="", tls_key=""), "[options.tls_ca]"
        case "host":
            table, told = elsewhere(right), "for another host [url]"
        case "password":
            address = right["address"].replace("guest:guest", f"guest:{WRONG}")
            table, told = right | {"address": address}, "refuses the login [url]"
        case _:
            table, told = with_options(right, tls_certificate="", tls_key=""), "give tls_certificate and tls_key"

    line = refused(fencepost, sealed, table, on_rabbit.destination().to, right)

    assert told in line
    assert str(rabbit_node.tls_port) in line and "guest" not in line


def test_a_file_that_the_client_cannot_use_ends_the_relay_with_its_field(
    fencepost: Fencepost, sealed: Database, kafka_node: KafkaServer, on_kafka: OnKafka, authority: Authority
) -> None:
    right = by_password(kafka_node, authority, "PLAIN")
    to = on_kafka.destination().to
    assert run(fencepost, sealed, right, to, "relay", "run", "--once").code == 0

    done = run(fencepost, sealed, with_options(right, ssl__ca__location="nowhere.pem"), to, "relay", "run", "--once")

    assert done.code == 2
    assert "[destinations.here.options.ssl.ca.location]" in done.line


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sslrootcert": "stranger"}, "sslrootcert must hold the authority"),
        ({"host": "127.0.0.1"}, "host must be a name in it"),
        ({"password": WRONG}, "refuses the login"),
        ({"sslmode": "disable"}, "no encryption"),
    ],
)
def test_a_database_that_is_not_verified_or_does_not_know_us_is_refused(
    sealed: Database, stranger: Authority, change: dict[str, str], told: str
) -> None:
    with connect(sealed.dsn) as conn:
        found = conn.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        assert found == (True,)  # the allowed control

    changed = {name: str(stranger.path) if value == "stranger" else value for name, value in change.items()}
    with pytest.raises(Unreachable) as caught:
        connect(make_conninfo(sealed.dsn, **changed))

    assert caught.value.field == "database"
    assert told in str(caught.value)
    assert WRONG not in str(caught.value) and PASSWORD not in str(caught.value)


@pytest.fixture
def handled(sealed: Database) -> Inbox[Sealed]:
    """Writes the operation of each event into a table."""
    with connect(sealed.dsn) as conn:
        conn.execute("CREATE TABLE done (operation text)")

    @inbox(consumer="sealed")
    def handler(tx: psycopg.Connection[Any], event: Sealed) -> None:
        tx.execute("INSERT INTO done VALUES (%(operation)s)", {"operation": event.operation})

    return handler


@contextmanager
def consuming(runner: KafkaRunner | RabbitRunner) -> Generator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


def arrives(database: Database) -> None:
    with connect(database.dsn, autocommit=True) as conn:
        wait_for(lambda: conn.execute("SELECT operation FROM done").fetchall() == [("op-1",)], 20, "the event")


def test_kafka_consumer_handles_what_came_over_verified_tls_and_refuses_a_wrong_password(
    fencepost: Fencepost,
    sealed: Database,
    kafka_node: KafkaServer,
    on_kafka: OnKafka,
    authority: Authority,
    stranger: Authority,
    handled: Inbox[Sealed],
) -> None:
    table = by_password(kafka_node, authority, "SCRAM-SHA-256")
    topic = on_kafka.destination().to
    published(fencepost, sealed, table, topic)

    def runner(options: RunnerOptions, **config: str) -> KafkaRunner:
        return KafkaRunner(
            handled,
            sealed.dsn,
            bootstrap=table["address"],
            topics=[topic],
            config=table["options"] | config,
            options=options,
        )

    with consuming(runner(FAST)):
        arrives(sealed)
    with pytest.raises(Unreachable) as caught:
        runner(IMPATIENT, **{"sasl.password": WRONG}).run(threading.Event())
    assert (caught.value.field, WRONG in str(caught.value)) == ("sasl.password", False)
    with pytest.raises(Unreachable) as caught:
        runner(IMPATIENT, **{"ssl.ca.location": str(stranger.path)}).run(threading.Event())
    assert caught.value.field == "ssl.ca.location"


def test_rabbitmq_consumer_handles_what_came_over_verified_tls_and_refuses_a_stranger(
    fencepost: Fencepost,
    sealed: Database,
    rabbit_node: RabbitServer,
    on_rabbit: OnRabbit,
    authority: Authority,
    stranger: Authority,
    handled: Inbox[Sealed],
) -> None:
    table = by_amqps(rabbit_node, authority)
    queue = on_rabbit.destination().to
    published(fencepost, sealed, table, queue)

    def runner(trusted: Authority, options: RunnerOptions) -> RabbitRunner:
        context = tls_context(
            {
                "tls_ca": str(trusted.path),
                "tls_certificate": str(authority.client.chain),
                "tls_key": str(authority.client.key),
            }
        )
        return RabbitRunner(handled, sealed.dsn, url=table["address"], queue=queue, options=options, context=context)

    with consuming(runner(authority, FAST)):
        arrives(sealed)
    with pytest.raises(Unreachable) as caught:
        runner(stranger, IMPATIENT).run(threading.Event())
    assert (caught.value.field, "guest" in str(caught.value)) == ("context", False)
