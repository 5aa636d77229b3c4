"""The scene: real services and real processes, each with a log, all of them ended and removed when the demo ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Protocol, Self, cast

import aio_pika
import psycopg
from aiormq.exceptions import AMQPError
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from psycopg import Connection, sql
from psycopg.conninfo import make_conninfo

from stack import places
from stack.obtain import Obtained, obtain_kafka, obtain_mock, obtain_postgres, obtain_rabbitmq
from stack.process import Process

from . import app, statements
from .narrator import DemoFailed, Narrator

__all__ = ["BROKERS", "DESTINATION", "Scene"]

BROKERS = ("embedded", "kafka", "rabbitmq")
DESTINATION = "reports"
EXAMPLES = Path(__file__).resolve().parents[1]
CLI = ("-m", "fencepost.operate.cli")
COMMAND_SECONDS = 30.0
RELAY_LEASE_SECONDS = 4.0
# A backend whose client was killed notices within this time, also while it waits for a lock.
NOTICE_DEAD_CLIENTS = "200ms"


class TopicAdmin(Protocol):
    """What we call of the admin client, whose own types leave the futures open."""

    def create_topics(self, new_topics: list[NewTopic], **options: float) -> dict[str, Any]: ...

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> object: ...


@dataclass(frozen=True, slots=True)
class Command:
    """What a command of ours printed, and its exit code."""

    code: int
    text: str


class Scene:
    """Services, one database of its own, and the processes of this run."""

    def __init__(self, broker: str, provider_port: int | None, narrator: Narrator) -> None:
        self._narrator = narrator
        self._opened = contextlib.ExitStack()
        self._children: dict[str, Process] = {}
        self._kind = "rabbitmq" if broker == "rabbitmq" else "kafka"
        self._broker_name = broker
        self._provider_port = provider_port
        self.folder = Path()
        self.dsn = ""
        self.provider_url = ""
        self._environment: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self._opened.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Asked all at once, so that they drain side by side.
        for child in self._children.values():
            if child.running:
                child.resume()
                os.kill(child.pid, signal.SIGTERM)
        self._opened.close()

    # -- services ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        # Below the folder of the services: it goes when they go, even when this process is killed.
        self.folder = Path(tempfile.mkdtemp(prefix="reports-", dir=places.run_folder()))
        postgres = obtain_postgres("18")
        self._opened.callback(postgres.close)
        broker = self._broker()
        self._opened.callback(broker.close)
        self._narrator.say(f"services: {postgres.label}; {broker.label}")
        self.dsn = self._database(postgres.address)
        self.provider_url = f"http://127.0.0.1:{self._provider_port or self._provider()}"
        routes = [{"match": "report.*", "to": app.TOPIC}]
        destination = {"name": DESTINATION, "kind": self._kind, "address": broker.address, "routes": routes}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FENCEPOST_")},
            "PYTHONUNBUFFERED": "1",
            "FENCEPOST_DATABASE": self.dsn,
            "FENCEPOST_STATE": str(self.folder / "witness"),
            "FENCEPOST_DESTINATIONS": json.dumps([destination]),
            "FENCEPOST_RELAY_LEASE": str(RELAY_LEASE_SECONDS),
            "FENCEPOST_RELAY_CONFIRM": "2",
            "FENCEPOST_RELAY_REFRESH": "1",
            "REPORTS_PROVIDER": self.provider_url,
            "REPORTS_BROKER": self._kind,
            "REPORTS_BROKER_ADDRESS": broker.address,
        }
        self._address = broker.address

    def _broker(self) -> Obtained[Any]:
        match self._broker_name:
            case "kafka":
                return obtain_kafka()
            case "rabbitmq":
                return obtain_rabbitmq()
            case _:
                return obtain_mock()

    def _database(self, server: str) -> str:
        """A database of this run: a server that was there before is left as it was found."""
        name = f"reports_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(server, autocommit=True, connect_timeout=5) as conn:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            conn.execute(
                sql.SQL("ALTER DATABASE {} SET client_connection_check_interval = {}").format(
                    sql.Identifier(name), NOTICE_DEAD_CLIENTS
                )
            )
        self._opened.callback(self._drop, server, name)
        return make_conninfo(server, dbname=name)

    @staticmethod
    def _drop(server: str, name: str) -> None:
        with contextlib.suppress(psycopg.Error), psycopg.connect(server, autocommit=True, connect_timeout=5) as conn:
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def _provider(self) -> int:
        argv = [
            sys.executable,
            str(EXAMPLES / "reports" / "provider.py"),
            "--ledger",
            str(self.folder / "ledger.jsonl"),
        ]
        child = self._child("provider", argv, dict(os.environ))
        child.wait_ready(lambda: "port " in child.log.read_text(), 10)
        return int(child.log.read_text().split("port ")[1].split()[0])

    @property
    def topic_first(self) -> bool:
        """A Kafka topic is made before anybody consumes it; a RabbitMQ queue is declared by its consumer."""
        return self._kind == "kafka"

    def prepare_broker(self) -> None:
        """Makes the topic, or waits until the consumer has declared exchange and queue."""
        if self._kind == "rabbitmq":
            self._narrator.until("the consumer has declared its queue", self._queue_is_served, 30)
            return
        admin = cast(TopicAdmin, AdminClient({"bootstrap.servers": self._address, "log_level": 0}))
        if self._broker_name == "kafka":
            admin.create_topics([NewTopic(app.TOPIC, 4, 1)], operation_timeout=15)[app.TOPIC].result(timeout=15)
        else:
            # The stand-in makes a topic when it is first named.
            admin.list_topics(app.TOPIC, timeout=10)

    def _queue_is_served(self) -> bool:
        async def look() -> bool:
            async with asyncio.timeout(5):
                connection = await aio_pika.connect(self._address)
                async with connection:
                    channel = await connection.channel()
                    queue = await channel.get_queue(app.CONSUMER, ensure=True)
                    return bool(queue.declaration_result.consumer_count)

        try:
            return asyncio.run(look())
        except (AMQPError, OSError):
            return False

    def at_broker(self, number: int) -> int | None:
        """How many messages the broker has, once these are at least `number`."""
        if self._kind == "rabbitmq":
            found = self.number(statements.DELIVERIES, consumer=app.CONSUMER)
        else:
            found = self._high_watermarks()
        return found if found >= number else None

    def _high_watermarks(self) -> int:
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": "director", "log_level": 0})
        try:
            topic = consumer.list_topics(app.TOPIC, timeout=5).topics[app.TOPIC]
            found = [consumer.get_watermark_offsets(TopicPartition(app.TOPIC, p), timeout=5) for p in topic.partitions]
            return sum(high for _, high in found)
        finally:
            consumer.close()

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str, *arguments: str) -> Process:
        """Starts a command of ours as a process of its own."""
        environment = {**self._environment, "REPORTS_WORKER": name}
        return self._child(name, [sys.executable, *CLI, *arguments], environment)

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would look; nobody is surprised that it is gone."""
        self._children.pop(name).kill()

    def process(self, name: str) -> Process:
        """A running process by name."""
        return self._children[name]

    def ended(self) -> str | None:
        """Which process ended although nobody asked it to, with the last lines of its log."""
        for name, child in self._children.items():
            if not child.running:
                return f"the process {name} ended by itself:\n{child.tail()}"
        return None

    def log(self, name: str) -> str:
        """Everything that a process has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def command(self, *arguments: str) -> Command:
        """Runs a command of ours to its end; DemoFailed when it hangs."""
        try:
            done = subprocess.run(
                [sys.executable, *CLI, *arguments],
                env=self._environment,
                cwd=EXAMPLES,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DemoFailed(
                f"`fencepost {' '.join(arguments[:2])}` did not end within {COMMAND_SECONDS:.0f} s"
            ) from None
        return Command(done.returncode, done.stdout.decode("utf-8", "replace"))

    def connect(self, *, autocommit: bool = True) -> Connection[tuple[Any, ...]]:
        """The director's own connection."""
        return psycopg.connect(self.dsn, autocommit=autocommit, connect_timeout=5)

    def number(self, statement: LiteralString, **parameters: object) -> int:
        """One number from the database."""
        with self.connect() as conn:
            row = conn.execute(statement, parameters).fetchone()
        return 0 if row is None or row[0] is None else int(row[0])

    def _child(self, name: str, argv: list[str], environment: dict[str, str]) -> Process:
        child = Process(name, argv, log=self.folder / f"{name}.log", env=environment, cwd=EXAMPLES)
        child.start()
        self._children[name] = child
        self._opened.callback(self._end, name, child)
        return child

    def _end(self, name: str, child: Process) -> None:
        self._children.pop(name, None)
        child.stop(within=5)
