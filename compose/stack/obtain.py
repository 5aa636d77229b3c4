"""For each service the first that answers: an address from the environment, `stack up`, Docker, native.

An address that is set but does not answer is an error, never silently passed over: somebody meant that service.
"""

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from psycopg.conninfo import make_conninfo

from . import background, containers, kafka, mockkafka, pgbouncer, places, postgres, rabbitmq, s3
from .process import Unavailable

Node = TypeVar("Node")

POSTGRES = "FENCEPOST_TEST_POSTGRES"
RABBITMQ = "FENCEPOST_TEST_RABBITMQ"
KAFKA = "FENCEPOST_TEST_KAFKA"
PGBOUNCER = "FENCEPOST_TEST_PGBOUNCER"
S3 = "FENCEPOST_TEST_S3"


class Origin(enum.Enum):
    """Where a service comes from."""

    ADDRESS = "address"
    BACKGROUND = "stack up"
    DOCKER = "docker"
    NATIVE = "native"
    MOCK = "mock"


@dataclass(frozen=True, slots=True)
class Obtained(Generic[Node]):
    """A service that answered. `node` is there only when we may stop, pause and kill it (origin native or mock)."""

    name: str
    version: str
    origin: Origin
    address: str
    node: Node | None
    close: Callable[[], None]

    @property
    def label(self) -> str:
        """Name, version and whether it is the real thing, for summaries."""
        match self.origin:
            case Origin.NATIVE:
                return f"{self.name} {self.version}"
            case Origin.MOCK:
                return f"{self.name} (librdkafka mock cluster, not real)"
            case Origin.ADDRESS | Origin.BACKGROUND | Origin.DOCKER:
                return f"{self.name} {self.version} ({self.origin.value})"


def given() -> bool:
    """Whether services are there already, by address or from `stack up`: one set of them, whoever asks."""
    named = any(os.environ.get(name) for name in (POSTGRES, RABBITMQ, KAFKA, PGBOUNCER))
    return named or bool(background.address("kafka"))


def obtain_postgres(major: str) -> Obtained[postgres.PostgresServer]:
    """A PostgreSQL of this major version, with a superuser; raises Unavailable."""
    for origin, address in _given(POSTGRES, f"postgres{major}"):
        found = postgres.version(address)
        if found is None:
            raise _silent(POSTGRES, origin)
        if found.split(".")[0] == major:
            return Obtained("PostgreSQL", found, origin, address, None, _nothing)
    if containers.engine_answers():
        container, address = containers.start_postgres(major)
        found = postgres.version(address) or major
        return Obtained("PostgreSQL", found, Origin.DOCKER, address, None, container.close)
    server = postgres.PostgresServer(major)
    server.start()
    return Obtained("PostgreSQL", server.version, Origin.NATIVE, server.dsn, server, server.close)


def obtain_pgbouncer(target: str, *, pool_size: int = 4) -> Obtained[pgbouncer.PgBouncer]:
    """A transaction-mode pooler in front of `target`; raises Unavailable.

    An address from the environment is taken only when PostgreSQL itself was given by address too.
    """
    if os.environ.get(PGBOUNCER) and os.environ.get(POSTGRES) == target:
        address = os.environ[PGBOUNCER]
        if postgres.version(address) is None:
            raise _silent(PGBOUNCER, Origin.ADDRESS)
        return Obtained("PgBouncer", "", Origin.ADDRESS, address, None, _nothing)
    pooler = pgbouncer.PgBouncer(target, pool_size=pool_size)
    pooler.start()
    return Obtained("PgBouncer", pooler.version, Origin.NATIVE, pooler.dsn, pooler, pooler.close)


def in_front_of(pooler: Obtained[pgbouncer.PgBouncer], dsn: str) -> str:
    """The database of `dsn` through the pooler."""
    if pooler.node is not None:
        return pooler.node.in_front_of(dsn)
    through = urlsplit(pooler.address)
    return make_conninfo(dsn, host=through.hostname, port=through.port)


def obtain_rabbitmq() -> Obtained[rabbitmq.RabbitServer]:
    """A RabbitMQ whose account may declare queues and exchanges; raises Unavailable."""
    for origin, address in _given(RABBITMQ, "rabbitmq"):
        parts = urlsplit(address)
        found = rabbitmq.version(parts.hostname or "", parts.port or 5672)
        if found is None:
            raise _silent(RABBITMQ, origin)
        return Obtained("RabbitMQ", found, origin, address, None, _nothing)
    if containers.engine_answers():
        container, address = containers.start_rabbitmq()
        found = rabbitmq.version(urlsplit(address).hostname or "", container.port) or ""
        return Obtained("RabbitMQ", found, Origin.DOCKER, address, None, container.close)
    server = rabbitmq.RabbitServer()
    server.start()
    return Obtained("RabbitMQ", server.version, Origin.NATIVE, server.url, server, server.close)


def obtain_kafka() -> Obtained[kafka.KafkaServer]:
    """A real Apache Kafka; raises Unavailable. The stand-in is a separate choice: `obtain_mock`."""
    for origin, address in _given(KAFKA, "kafka"):
        if not kafka.answers(address):
            raise _silent(KAFKA, origin)
        return Obtained("Apache Kafka", "(real)", origin, address, None, _nothing)
    if containers.engine_answers():
        container, address = containers.start_kafka()
        found = containers.IMAGES["kafka"].rpartition(":")[2]
        return Obtained("Apache Kafka", f"{found} (real)", Origin.DOCKER, address, None, container.close)
    server = kafka.KafkaServer()
    server.start()
    return Obtained("Apache Kafka", f"{server.version} (real)", Origin.NATIVE, server.bootstrap, server, server.close)


def obtain_mock() -> Obtained[mockkafka.MockKafka]:
    """The embedded broker of the demo: speaks Kafka's protocol, keeps nothing, proves no durability."""
    cluster = mockkafka.MockKafka()
    cluster.start()
    return Obtained("Kafka", cluster.version, Origin.MOCK, cluster.bootstrap, cluster, cluster.close)


def obtain_s3() -> Obtained[s3.S3Server]:
    """A server of the S3 protocol whose account may make buckets; raises Unavailable. Not part of `stack up` or Docker."""
    address = os.environ.get(S3, "")
    if address:
        if not places.listens(urlsplit(address).port or 80):
            raise _silent(S3, Origin.ADDRESS)
        return Obtained("S3", "", Origin.ADDRESS, address, None, _nothing)
    server = s3.S3Server()
    server.start()
    return Obtained("S3Proxy", server.version, Origin.NATIVE, server.url, server, server.close)


def _given(variable: str, name: str) -> list[tuple[Origin, str]]:
    found = [(Origin.ADDRESS, os.environ.get(variable, "")), (Origin.BACKGROUND, background.address(name))]
    return [(origin, address) for origin, address in found if address]


def _silent(variable: str, origin: Origin) -> Unavailable:
    if origin is Origin.ADDRESS:
        return Unavailable(f"the service at ${variable} does not answer: start it or unset the variable")
    return Unavailable("a service of `make stack-up` does not answer: run `make stack-down`")


def _nothing() -> None:
    """What we did not start is not ours to end."""
