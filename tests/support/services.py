"""The services of one test process: started when first asked for, named in the summary, ended at its end."""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypedDict, TypeVar, cast

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from stack.kafka import KafkaServer
from stack.mockkafka import MockKafka
from stack.obtain import (
    Obtained,
    Origin,
    in_front_of,
    obtain_kafka,
    obtain_mock,
    obtain_pgbouncer,
    obtain_postgres,
    obtain_rabbitmq,
    obtain_s3,
)
from stack.pgbouncer import PgBouncer
from stack.postgres import PostgresServer
from stack.process import Unavailable
from stack.rabbitmq import RabbitServer
from stack.s3 import S3Server
from support.processes import wait_for

Node = TypeVar("Node")
TOPIC_SECONDS = 15.0


class _Metadata(Protocol):
    error: KafkaError | None


class _TopicMetadata(_Metadata, Protocol):
    partitions: dict[int, _Metadata]


class _ClusterMetadata(Protocol):
    topics: dict[str, _TopicMetadata]


class TopicAdmin(Protocol):
    """What we call of the admin client, whose own types leave the futures open."""

    def create_topics(self, new_topics: list[NewTopic], **options: float) -> dict[str, Future[None]]: ...

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> object: ...


def in_ci() -> bool:
    """Whether a missing service is a failure."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def missing(reason: str) -> NoReturn:
    """Fails in CI, skips elsewhere."""
    if in_ci():
        pytest.fail(f"in CI every service must be real and present: {reason}", pytrace=False)
    pytest.skip(reason)


def unique(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True)
class Rabbit:
    """RabbitMQ for one test; `node` is there when the test may stop, pause or kill it."""

    url: str
    version: str
    node: RabbitServer | None

    def name(self, prefix: str = "test") -> str:
        """A queue or exchange name that no other test uses."""
        return unique(prefix)


@dataclass(frozen=True, slots=True)
class Kafka:
    """Kafka for one test; `real` is false for the stand-in, `node` is there when the test may stop, pause or kill it."""

    bootstrap: str
    version: str
    real: bool
    node: KafkaServer | None

    @property
    def session_ms(self) -> int:
        """The session of a member that no stall of this machine ends; short where rebalances last as long as one."""
        return 30_000 if self.real else 2500

    def topic(self, partitions: int = 1, *, prefix: str = "test") -> str:
        """Creates a topic with a name of its own and returns the name."""
        name = unique(prefix)
        admin = cast(TopicAdmin, AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0}))
        if self.real:
            created = admin.create_topics([NewTopic(name, partitions, 1)], operation_timeout=TOPIC_SECONDS)
            created[name].result(timeout=TOPIC_SECONDS)
            wait_for(lambda: _is_there(admin, name, partitions), TOPIC_SECONDS, f"the broker to know the topic {name}")
        else:
            # The stand-in makes a topic when it is first named, with its own number of partitions.
            admin.list_topics(name, timeout=TOPIC_SECONDS)
        return name


def _is_there(admin: TopicAdmin, name: str, partitions: int) -> bool:
    found = cast(_ClusterMetadata, admin.list_topics(name, timeout=TOPIC_SECONDS)).topics.get(name)
    if found is None or found.error is not None or len(found.partitions) != partitions:
        return False
    return all(partition.error is None for partition in found.partitions.values())


@dataclass(frozen=True, slots=True)
class Pooler:
    """PgBouncer in transaction mode in front of the server of this test."""

    obtained: Obtained[PgBouncer]

    @property
    def node(self) -> PgBouncer | None:
        """The pooler itself, when the test may stop or pause it."""
        return self.obtained.node

    def dsn(self, direct: str) -> str:
        """The address of the same database through the pooler; no session state, no server-side statements."""
        return in_front_of(self.obtained, direct)


class Used(TypedDict):
    """Which services one process has used, in plain types: a worker sends it to its controller."""

    labels: list[str]
    refusals: dict[str, str]
    stand_in: bool


class Services:
    """Starts each service once, remembers a failure as well, and knows what was used."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self._found: dict[str, Obtained[Any]] = {}
        self._refused: dict[str, str] = {}
        self._labels: list[str] = []

    def postgres(self, major: str) -> Obtained[PostgresServer]:
        """PostgreSQL of this major version."""
        return self._once(f"postgres{major}", lambda: obtain_postgres(major))

    def pgbouncer(self, major: str, *, pool_size: int = 4) -> Pooler:
        """PgBouncer in front of that PostgreSQL."""
        target = self.postgres(major).address
        return Pooler(
            self._once(f"pgbouncer{major}/{pool_size}", lambda: obtain_pgbouncer(target, pool_size=pool_size))
        )

    def rabbitmq(self) -> Rabbit:
        """RabbitMQ."""
        found = self._once("rabbitmq", obtain_rabbitmq)
        return Rabbit(found.address, found.version, found.node)

    def kafka(self) -> Kafka:
        """Real Kafka, else the stand-in (in CI: a failure)."""
        if "kafka" not in self._found and "kafka" not in self._refused:
            with contextlib.suppress(Unavailable):
                self._open("kafka", obtain_kafka)
        if "kafka" in self._found:
            found = self._once("kafka", obtain_kafka)
            return Kafka(found.address, found.version, True, found.node)
        if in_ci():
            missing(self._refused["kafka"])
        stand_in: Obtained[MockKafka] = self._once("mockkafka", obtain_mock)
        return Kafka(stand_in.address, stand_in.version, False, None)

    def s3(self) -> Obtained[S3Server]:
        """A server of the S3 protocol; its address carries account and secret."""
        return self._once("s3", obtain_s3)

    def used(self) -> Used:
        """What was used up to now."""
        return Used(labels=list(self._labels), refusals=dict(self._refused), stand_in="mockkafka" in self._found)

    def close(self) -> None:
        """Ends what was started, last first."""
        self._opened.close()

    def _once(self, name: str, obtain: Callable[[], Obtained[Node]]) -> Obtained[Node]:
        if name in self._refused:
            missing(self._refused[name])
        if name not in self._found:
            try:
                return self._open(name, obtain)
            except Unavailable as error:
                missing(str(error))
        return self._found[name]

    def _open(self, name: str, obtain: Callable[[], Obtained[Node]]) -> Obtained[Node]:
        try:
            found = obtain()
        except Unavailable as error:
            self._refused[name] = str(error)
            raise
        self._opened.callback(found.close)
        self._found[name] = found
        self._labels.append(found.label)
        return found


def summary(sessions: Iterable[Used]) -> Iterator[str]:
    """The lines that say which services were really used, by one process or by several together."""
    together = list(sessions)
    labels = {label for used in together for label in used["labels"]}
    if labels:
        yield f"services: {', '.join(sorted(labels))}"
    for name, reason in sorted({refusal for used in together for refusal in used["refusals"].items()}):
        yield f"MISSING {name}: {reason}"
    if any(used["stand_in"] for used in together):
        yield "REAL KAFKA WAS NOT EXERCISED: librdkafka's mock cluster stood in for it"


__all__ = ["Kafka", "Origin", "Pooler", "Rabbit", "Services", "Used", "in_ci", "missing", "summary", "unique"]
